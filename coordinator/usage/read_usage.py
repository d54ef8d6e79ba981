"""Sum usage up, as finance asked. Wants a snapshot.

An answer is pinned to a ledger position, `as_of`: only reports up to it count, so that the pages of one answer add up
while usage goes on being booked. At a sealed position nothing can join any more (proof/seal.py), so that answer
stays the same for ever. What the coordinator booked by itself has no position: of it counts what the seal of the
position has, and in an answer that is not of a seal all there is.

Whole hours and days are read from their rollups, which the transfers' trigger keeps, and all else from the transfers. A
rollup is of now: for a page of an earlier position, what was booked since is taken off again, which is little.

Nothing, a gap and a zero are told apart by the coverage of the answer, which is as of the same position: whether the
books know what was asked for, and how many units regions hold of it that no report has accounted for yet.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg
from msgspec import Struct, field

from coordinator.database.connection import Connection
from coordinator.proof.seal import Sealed, find_sealed
from coordinator.usage.rules.usage import OF_LEASES, OF_POOLS, Dimension, Kept, UsageQuestion


class UsageRow(Struct, frozen=True):
    start: datetime = field(name="from")
    end: datetime = field(name="to")
    dimensions: Mapping[Dimension, str | None]  # None: it was booked without one
    units: int


class Coverage(Struct, frozen=True):
    """What the answer does not have. Of what is neither used nor unaccounted for, nothing was used."""

    is_known: bool  # false: the books have never had such a quota, tenant or period
    unaccounted: int  # leased, and not reported yet: so many units may still be found to be used


class UsagePage(NamedTuple):
    rows: list[UsageRow]
    as_of: int
    coverage: Coverage | None = None  # of the whole answer, told with its first page


async def read_usage_as_of(
    connection: Connection, question: UsageQuestion, as_of: int | datetime | None, begun_at: int, skip: int, count: int
) -> UsagePage | None:
    """None if what is asked for is not sealed. A page after the first goes on as of where that one began."""
    sealed = None if as_of is None else await find_sealed(connection, as_of)
    if as_of is not None and sealed is None:
        return None
    if skip:
        return await read_usage(connection, question, begun_at, skip, count, sealed and sealed.transfer)
    return await _first_page(connection, question, sealed, count)


async def _first_page(connection: Connection, question: UsageQuestion, sealed: Sealed | None, count: int) -> UsagePage:
    position, last = sealed or (None, None)
    page = await read_usage(connection, question, position, 0, count, last)
    unaccounted = await read_unaccounted(connection, question, position, last)
    is_used = any(row.units for row in page.rows)
    is_known = is_used or unaccounted > 0 or await connection.fetchval(*_known(question, position, last))
    return UsagePage(page.rows if is_known else [], page.as_of, Coverage(is_known, unaccounted))


async def read_usage(
    connection: Connection, question: UsageQuestion, as_of: int | None, skip: int, count: int, last: int | None = None
) -> UsagePage:
    """At most so many rows, as of a position or, without one, as of now. A piece without usage has no row, or a zero.

    `last`: the transfer up to which movements count that have no position.
    """
    await connection.execute(PLAN_FOR_WHAT_IS_ASKED)
    position: int = await connection.fetchval(_POSITION) if as_of is None else as_of
    sql = _usage(question, is_now=as_of is None)
    rows = await connection.fetch(sql, question.boundaries, position, count, skip, last, *question.filters.values())
    return UsagePage(_rows(question, rows), position)


async def read_unaccounted(
    connection: Connection, question: UsageQuestion, position: int | None, last: int | None
) -> int:
    """How many units regions hold of what is asked for, or held at that position, that no report accounts for."""
    units: int = await connection.fetchval(*_unaccounted(question, position, last))
    return units


def _rows(question: UsageQuestion, rows: Iterable[asyncpg.Record]) -> list[UsageRow]:
    """There may be very many, of few kinds: all of one kind share what tells it apart."""
    cuts, found = question.boundaries, list[UsageRow]()
    kinds: dict[tuple[str | None, ...], Mapping[Dimension, str | None]] = {}
    for row in rows:
        bucket, kind, units = row[0], row[1:-1], row[-1]
        dimensions = kinds.get(kind)
        if dimensions is None:
            dimensions = kinds[kind] = dict(zip(question.group_by, kind, strict=True))
        found.append(UsageRow(cuts[bucket - 1], cuts[bucket], dimensions, units))
    return found


# --- the statements: nothing of a caller becomes SQL, tables and columns are ours, values are parameters --------------


def _wanted(filters: Iterable[Dimension], first: int) -> str:
    return "".join(f" AND {name} = ANY (${number}::text[])" for number, name in enumerate(filters, first))


def _usage(question: UsageQuestion, *, is_now: bool) -> str:
    kept = question.read_from
    source = _BOOKED if kept is Kept.MINUTE else _ROLLED_UP[kept] + ("" if is_now else _BOOKED_SINCE)
    columns = "".join(f"{dimension}, " for dimension in question.group_by)
    groups = ", ".join(str(place) for place in range(1, len(question.group_by) + 2))
    # A rollup of now needs no position; $2 and $5 are named all the same, so that Postgres knows their types.
    return f"""
WITH pieces AS (
    SELECT width_bucket(at, $1::timestamptz[]) AS bucket, {columns}sum(units) AS units
    FROM ({source}) AS usage
    WHERE at >= ($1::timestamptz[])[1] AND at < ($1::timestamptz[])[cardinality($1::timestamptz[])]
        AND $2::bigint IS NOT NULL AND ($5::bigint IS NULL OR $5 >= 0){_wanted(question.filters, 6)}
    GROUP BY {groups} HAVING sum(units) <> 0
)
{_with_zeros(columns, groups) if question.zeros else f"SELECT * FROM pieces ORDER BY {groups}"} LIMIT $3 OFFSET $4
"""  # noqa: S608


def _with_zeros(columns: str, groups: str) -> str:
    """Each kind of usage that there is, in each piece. Without kinds there is one, even if nothing was used."""
    kinds = f"(SELECT DISTINCT {columns.rstrip(', ')} FROM pieces) AS kinds" if columns else "(SELECT) AS kinds"  # noqa: S608
    return f"""
SELECT bucket, {columns}sum(units) AS units FROM (
    SELECT * FROM pieces
    UNION ALL SELECT bucket, {columns}0 FROM {kinds}, generate_series(1, cardinality($1::timestamptz[]) - 1) AS bucket
) AS every_piece GROUP BY {groups} ORDER BY {groups}"""  # noqa: S608


def _unaccounted(question: UsageQuestion, position: int | None, last: int | None) -> list[Any]:
    """What regions hold, or held then: what they hold now, with what was moved since taken back."""
    held = _HELD if position is None else _HELD + _MOVED_SINCE
    sql = f"""
SELECT coalesce(sum(units), 0) FROM (
    SELECT pool.tenant, pool.name AS quota, quota AS quota_key, region, period, charge_period, units
    FROM ({held}) AS held JOIN pool USING (quota, period)
) AS held JOIN period AS its ON its.id = charge_period
WHERE its.starts_at < $2 AND its.ends_at > $1 AND ($3::bigint IS NULL OR $3 >= 0) AND ($4::bigint IS NULL OR $4 >= 0)
    {_wanted(_filters(question, OF_LEASES), 5)}"""  # noqa: S608
    return [sql, question.boundaries[0], question.boundaries[-1], position, last, *_values(question, OF_LEASES)]


def _known(question: UsageQuestion, position: int | None, last: int | None) -> list[Any]:
    sql = f"""
SELECT EXISTS (
    SELECT FROM (SELECT tenant, name AS quota, quota AS quota_key, period FROM pool) AS pool
    JOIN period AS its ON its.id = period
    WHERE its.starts_at < $2 AND its.ends_at > $1 {_wanted(_filters(question, OF_POOLS), 5)}
        AND ($3::bigint IS NULL OR EXISTS (
            SELECT FROM transfer LEFT JOIN report USING (epoch, lane, seq)
            WHERE transfer.quota = pool.quota_key AND transfer.period = pool.period
                AND (report.position <= $3 OR (transfer.seq IS NULL AND transfer.id <= $4::bigint)))))
"""  # noqa: S608
    return [sql, question.boundaries[0], question.boundaries[-1], position, last, *_values(question, OF_POOLS)]


def _filters(question: UsageQuestion, of: Collection[Dimension]) -> list[Dimension]:
    return [dimension for dimension in question.filters if dimension in of]


def _values(question: UsageQuestion, of: Collection[Dimension]) -> list[list[str]]:
    return [question.filters[dimension] for dimension in _filters(question, of)]


# A quota that is counted by tenant knows it; of others the usage line may tell.
_LINE = """
    transfer.window_at AS at, coalesce(pool.tenant, transfer.dimensions ->> 'tenant') AS tenant, pool.name AS quota,
    transfer.quota AS quota_key, transfer.region, transfer.dimensions ->> 'policy' AS policy,
    transfer.dimensions ->> 'route_class' AS route_class, transfer.dimensions ->> 'api_key' AS api_key,
    transfer.dimensions ->> 'degraded' AS degraded, transfer.period, transfer.charge_period,
    coalesce(transfer.dimensions ->> 'counted_as', 'included') AS counted_as,"""
_BOOKED = f"""
SELECT {_LINE} transfer.units
FROM transfer JOIN pool USING (quota, period) LEFT JOIN report USING (epoch, lane, seq)
WHERE transfer.dst = 'consumed'
    AND (report.position <= $2 OR (transfer.seq IS NULL AND ($5::bigint IS NULL OR transfer.id <= $5)))"""  # noqa: S608
_BOOKED_SINCE = f"""
UNION ALL SELECT {_LINE} -transfer.units
FROM report JOIN transfer USING (epoch, lane, seq) JOIN pool USING (quota, period)
WHERE transfer.dst = 'consumed' AND report.position > $2
UNION ALL SELECT {_LINE} -transfer.units FROM transfer JOIN pool USING (quota, period)
WHERE transfer.dst = 'consumed' AND transfer.seq IS NULL AND transfer.id > $5"""  # noqa: S608
_ROLLED_UP = {
    kept: f"""
SELECT begins_at AS at, tenant, name AS quota, quota AS quota_key, region, policy, route_class, api_key, degraded,
    period, charge_period, coalesce(counted_as, 'included') AS counted_as, units
FROM {table}"""  # noqa: S608
    for kept, table in ((Kept.HOUR, "usage_hour"), (Kept.DAY, "usage_day"))
}
# How little was booked since a seal shows in its number alone: a plan for any number reads every report.
PLAN_FOR_WHAT_IS_ASKED = "SET LOCAL plan_cache_mode = force_custom_plan"
_POSITION = "SELECT coalesce(max(position), 0) FROM report"
_HELD = """
SELECT quota, period, period AS charge_period, region, outstanding + suspense AS units FROM lease
UNION ALL SELECT quota, period, charge_period, region, suspense_carried FROM correction"""
_LESS = """
SELECT quota, period, charge_period, region,
    CASE WHEN src IN ('outstanding', 'suspense', 'suspense_carried') THEN units ELSE 0 END
    - CASE WHEN dst IN ('outstanding', 'suspense', 'suspense_carried') THEN units ELSE 0 END"""
_MOVED_SINCE = f"""
UNION ALL {_LESS} FROM report JOIN transfer USING (epoch, lane, seq) WHERE report.position > $3
UNION ALL {_LESS} FROM transfer WHERE seq IS NULL AND id > $4"""
