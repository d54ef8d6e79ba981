"""Sum usage up, as finance asked. Wants a snapshot.

An answer is pinned to a ledger position, `as_of`: only reports up to it count, so that the pages of one answer add up
while usage goes on being booked. At a sealed position nothing can join any more (operations/seal.py), so that answer
stays the same for ever. What the coordinator booked by itself has no position: of it counts what the seal of the
position has, and in an answer that is not of a seal all there is.

Whole hours and days are read from their rollups, which the transfers' trigger keeps, and all else from the transfers. A
rollup is of now: for a page of an earlier position, what was booked since is taken off again, which is little.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import asyncpg
from msgspec import Struct, field

from coordinator.database.connection import Connection
from coordinator.domain.usage import Dimension, Kept, UsageQuestion
from coordinator.operations.seal import find_sealed


class UsageRow(Struct, frozen=True):
    start: datetime = field(name="from")
    end: datetime = field(name="to")
    dimensions: Mapping[Dimension, str | None]  # None: it was booked without one
    units: int


class UsagePage(NamedTuple):
    rows: list[UsageRow]
    as_of: int


async def read_usage_as_of(
    connection: Connection, question: UsageQuestion, as_of: int | datetime | None, begun_at: int, skip: int, count: int
) -> UsagePage | None:
    """None if what is asked for is not sealed. A page after the first goes on as of where that one began."""
    sealed = None if as_of is None else await find_sealed(connection, as_of)
    if as_of is not None and sealed is None:
        return None
    position, last = sealed or (None, None)
    return await read_usage(connection, question, begun_at if skip else position, skip, count, last)


async def read_usage(
    connection: Connection, question: UsageQuestion, as_of: int | None, skip: int, count: int, last: int | None = None
) -> UsagePage:
    """At most so many rows, as of a position or, without one, as of now. A piece without usage has no row.

    `last`: the transfer up to which movements count that have no position.
    """
    position: int = await connection.fetchval(_POSITION) if as_of is None else as_of
    sql = _usage(question, is_now=as_of is None)
    rows = await connection.fetch(sql, question.boundaries, position, count, skip, last, *question.filters.values())
    return UsagePage([_row(question, row) for row in rows], position)


def _row(question: UsageQuestion, row: asyncpg.Record) -> UsageRow:
    start, end = question.boundaries[row["bucket"] - 1 : row["bucket"] + 1]
    return UsageRow(start, end, {dimension: row[dimension] for dimension in question.group_by}, row["units"])


_FIRST_FILTER = 6


def _usage(question: UsageQuestion, *, is_now: bool) -> str:
    """Nothing of a caller becomes SQL: tables and columns are ours, values are parameters."""
    kept = question.read_from
    source = _BOOKED if kept is Kept.MINUTE else _ROLLED_UP[kept] + ("" if is_now else _BOOKED_SINCE)
    columns = "".join(f"{dimension}, " for dimension in question.group_by)
    groups = ", ".join(str(place) for place in range(1, len(question.group_by) + 2))
    wanted = "".join(
        f" AND {dimension} = ANY (${number}::text[])"
        for number, dimension in enumerate(question.filters, _FIRST_FILTER)
    )
    # A rollup of now needs no position; $2 and $5 are named all the same, so that Postgres knows their types.
    return f"""
SELECT width_bucket(at, $1::timestamptz[]) AS bucket, {columns}sum(units)::bigint AS units
FROM ({source}) AS usage
WHERE at >= ($1::timestamptz[])[1] AND at < ($1::timestamptz[])[cardinality($1::timestamptz[])]
    AND $2::bigint IS NOT NULL AND ($5::bigint IS NULL OR $5 >= 0){wanted}
GROUP BY {groups} HAVING sum(units) <> 0 ORDER BY {groups} LIMIT $3 OFFSET $4
"""  # noqa: S608


# A quota that is counted by tenant knows it; of others the usage line may tell.
_LINE = """
    transfer.window_at AS at, coalesce(pool.tenant, transfer.dimensions ->> 'tenant') AS tenant, pool.name AS quota,
    transfer.region, transfer.dimensions ->> 'policy' AS policy,"""
_BOOKED = f"""
SELECT {_LINE} transfer.dimensions ->> 'degraded' AS degraded, transfer.period, transfer.charge_period, transfer.units
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
    kept: f"SELECT begins_at AS at, tenant, name AS quota, region, policy, units FROM {table}"  # noqa: S608
    for kept, table in ((Kept.HOUR, "usage_hour"), (Kept.DAY, "usage_day"))
}
_POSITION = "SELECT coalesce(max(position), 0) FROM report"
