"""Sum up usage by the dimensions of a question. Needs a snapshot.

An answer is pinned to a ledger position, `as_of`: only reports up to it count, so that the pages of one answer add up
while booking goes on. Nothing is added below a sealed position (proof/seal.py), so an answer as of a seal never
changes. Movements of the coordinator have no position: an answer as of a seal counts those that the seal covers, and
any other answer counts all.

Whole hours and days are read from their rollups, which a trigger on the transfers maintains, and the rest from the
transfers. A rollup is current: for an earlier position, the little that was booked since is subtracted.

A question that names labels reads the hourly usage by labels as well, and subtracts it from what the other rollup has
of the same usage without its labels.

The coverage of an answer, as of the same position, tells an unknown quota from one without usage, and says how many
units regions hold that no report has accounted for yet.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import asyncpg
from msgspec import Struct, field
from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    SelectBase,
    Table,
    Text,
    and_,
    any_,
    case,
    exists,
    func,
    null,
    or_,
    select,
    true,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from coordinator.archives.refusal import Archived
from coordinator.archives.statements import RecordedArchive, find_archive_needed, hold_archives
from coordinator.database.compiled import CompiledStatement, compiled, constant, json_text, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import (
    Timestamp,
    archive,
    correction,
    labelled_usage,
    lease,
    period,
    pool,
    report,
    transfer,
    usage_day,
    usage_hour,
)
from coordinator.proof.seal import Sealed, find_sealed
from coordinator.usage.rules.usage import OF_LEASES, OF_POOLS, Dimension, StoredUsage, UsageQuestion
from protocol.limits.document import LABEL_PREFIX, is_label
from protocol.limits.usage_labels import LABELS, OTHER_LABELS, decode_label, encode_label


class UsageRow(Struct, frozen=True):
    start: datetime = field(name="from")
    end: datetime = field(name="to")
    dimensions: Mapping[str, str | None]  # None: booked without this dimension or label
    units: int


class Coverage(Struct, frozen=True):
    """The parts that the answer does not contain."""

    is_known: bool  # false: the ledger never had such a quota, tenant, period or API key
    unaccounted: int  # leased but not reported: usage may still grow by as many units


class UsagePage(NamedTuple):
    rows: list[UsageRow]
    as_of: int
    coverage: Coverage | None = None  # of the whole answer; only on its first page


async def read_usage_as_of(
    connection: Connection, question: UsageQuestion, as_of: int | datetime | None, begun_at: int, skip: int, count: int
) -> UsagePage | Archived | None:
    """Return usage as of a position, or None if that is not sealed. Later pages keep the first page's position."""
    await hold_archives(connection)
    sealed = None if as_of is None else await find_sealed(connection, as_of)
    if as_of is not None and sealed is None:
        return None
    position = sealed.position if sealed else skip and begun_at
    if needed := await _archive_needed(connection, question, position):
        return Archived(needed, _SUMS_ONLY)
    if skip:
        return await read_usage(connection, question, begun_at, skip, count, sealed and sealed.transfer)
    return await _first_page(connection, question, sealed, count)


async def _archive_needed(
    connection: Connection, question: UsageQuestion, position: int | None
) -> RecordedArchive | None:
    """Return an archive with lines that the answer takes. Hours and days as of now, or of the close, take none."""
    takes_minutes = question.read_from is StoredUsage.MINUTE
    if not takes_minutes and not position:
        return None
    bounds = question.boundaries[0], question.boundaries[-1]
    periods = question.filters.get(Dimension.PERIOD)
    return await find_archive_needed(connection, *bounds, periods, None if takes_minutes else position)


async def _first_page(connection: Connection, question: UsageQuestion, sealed: Sealed | None, count: int) -> UsagePage:
    position, last = sealed or (None, None)
    page = await read_usage(connection, question, position, 0, count, last)
    unaccounted = await read_unaccounted(connection, question, position, last)
    is_used = any(row.units for row in page.rows)
    # No list says which API keys and labels there are, so what they used is known only from usage.
    is_known = is_used or unaccounted > 0
    if not is_known and Dimension.API_KEY not in question.filters and not _labels_in(question.filters):
        is_known = await _is_known_by_ledger(connection, question, position, last)
    return UsagePage(page.rows if is_known else [], page.as_of, Coverage(is_known, unaccounted))


async def read_usage(
    connection: Connection, question: UsageQuestion, as_of: int | None, skip: int, count: int, last: int | None = None
) -> UsagePage:
    """Return at most `count` rows, as of a position or as of now. A bucket without usage has no row, or a zero.

    `last` is the last transfer up to which movements without a position count.
    """
    await connection.execute(PLAN_FOR_EACH_QUESTION)
    cuts = question.boundaries
    statement = _usage(
        question.read_from,
        tuple(question.group_by),
        tuple(question.filters),
        is_now=as_of is None,
        zeros=question.zeros,
    )
    position: int = await connection.fetchval(_POSITION) if as_of is None else as_of
    named = {"boundaries": cuts, "start": cuts[0], "end": cuts[-1], "pieces": len(cuts) - 1}
    paged = {"position": position, "last": last, "count": count, "skip": skip}
    rows = await connection.fetch(*statement.with_values(**named, **paged, **_filter_values(question)))
    return UsagePage(_rows(question, rows), position)


async def read_unaccounted(
    connection: Connection, question: UsageQuestion, position: int | None, last: int | None
) -> int:
    """Return how many units regions hold, or held at that position, that no report accounts for."""
    statement = _unaccounted(_filters(question, OF_LEASES), is_now=position is None)
    units: int = await connection.fetchval(*statement.with_values(**_values(question, position, last)))
    return units


async def _is_known_by_ledger(
    connection: Connection, question: UsageQuestion, position: int | None, last: int | None
) -> bool:
    """Return whether the ledger has, or had at that position, a pool that the question is about."""
    statement = _is_known(_filters(question, OF_POOLS), is_now=position is None)
    return bool(await connection.fetchval(*statement.with_values(**_values(question, position, last))))


def _filters(question: UsageQuestion, of: Collection[Dimension]) -> tuple[Dimension, ...]:
    return tuple(dimension for dimension in of if dimension in question.filters)


def _values(question: UsageQuestion, position: int | None, last: int | None) -> dict[str, Any]:
    start, end = question.boundaries[0], question.boundaries[-1]
    return {"start": start, "end": end, "position": position, "last": last, **_filter_values(question)}


def _filter_values(question: UsageQuestion) -> dict[str, list[str]]:
    """Return the values of the filters by the names of their parameters."""
    return {
        _parameter_name(name): [encode_label(value) for value in wanted] if is_label(name) else list(wanted)
        for name, wanted in question.filters.items()
    }


def _rows(question: UsageQuestion, rows: Iterable[asyncpg.Record]) -> list[UsageRow]:
    """Build the rows. There may be very many, of few kinds: rows of one kind share their dimensions."""
    cuts, found = question.boundaries, list[UsageRow]()
    kinds: dict[tuple[str | None, ...], Mapping[str, str | None]] = {}
    for row in rows:
        bucket, kind, units = row[0], row[1:-1], row[-1]
        dimensions = kinds.get(kind)
        if dimensions is None:
            named = zip(question.group_by, kind, strict=True)
            dimensions = kinds[kind] = {name: _shown(name, value) for name, value in named}
        found.append(UsageRow(cuts[bucket - 1], cuts[bucket], dimensions, units))
    return found


def _shown(name: str, value: str | None) -> str | None:
    return decode_label(value) if value and is_label(name) else value


def _labels_in(names: Iterable[str]) -> list[str]:
    return [name for name in names if is_label(name)]


# --- the statements ---------------------------------------------------------------------------------------------------

# With a custom plan the planner sees how little was booked since a seal; a generic plan reads every report.
PLAN_FOR_EACH_QUESTION = "SET LOCAL plan_cache_mode = force_custom_plan"

_SUMS_ONLY = "minutes, and sums as of a position before its close, take them. Ask for whole hours without `as_of`."
POSITION, LAST = parameter("position", BigInteger), parameter("last", BigInteger)
START, END = parameter("start", Timestamp), parameter("end", Timestamp)
_IN_POOL = and_(transfer.c.quota == pool.c.quota, transfer.c.period == pool.c.period)
_IN_REPORT = and_(transfer.c.epoch == report.c.epoch, transfer.c.lane == report.c.lane, transfer.c.seq == report.c.seq)
_IS_USAGE = transfer.c.dst == constant("consumed")
_HAS_NO_REPORT = transfer.c.seq.is_(None)


def _filtered(columns: ReadOnlyColumnCollection[str, Any], filters: Iterable[str]) -> list[ColumnElement[bool]]:
    return [_column(columns, name) == any_(parameter(_parameter_name(name), ARRAY(Text))) for name in filters]


def _column(columns: ReadOnlyColumnCollection[str, Any], name: str) -> ColumnElement[Any]:
    """Return the column of a dimension, or the value of a label within the text of all labels."""
    if not is_label(name):
        column: ColumnElement[Any] = columns[name]
        return column
    value = func.substring(columns[LABELS], constant(f"(?:^|,){name.removeprefix(LABEL_PREFIX)}=([^,]*)"))
    is_other = columns[LABELS] == constant(OTHER_LABELS)
    return case((is_other, constant(OTHER_LABELS)), else_=value).label(name)


def _parameter_name(name: str) -> str:
    return name.replace(".", "_")


@lru_cache(maxsize=256)
def _usage(
    kept: StoredUsage, group_by: tuple[str, ...], filters: tuple[str, ...], *, is_now: bool, zeros: bool
) -> CompiledStatement:
    has_labels = bool(_labels_in((*group_by, *filters)))
    usage = _usage_lines(kept, is_now=is_now, has_labels=has_labels).subquery("usage")
    bucket = func.width_bucket(usage.c.at, parameter("boundaries", ARRAY(Timestamp))).label("bucket")
    kinds = [_column(usage.c, name) for name in group_by]
    pieces = (
        select(bucket, *kinds, func.sum(usage.c.units).label("units"))
        .where(usage.c.at >= START, usage.c.at < END, *_filtered(usage.c, filters))
        .group_by("bucket", *kinds)
        .having(func.sum(usage.c.units) != constant(0))
        .cte("pieces")
    )
    rows = _with_zeros(pieces, group_by) if zeros else select(pieces)
    in_order = rows.order_by("bucket", *group_by)
    return compiled(in_order.limit(parameter("count", BigInteger)).offset(parameter("skip", BigInteger)))


def _usage_lines(kept: StoredUsage, *, is_now: bool, has_labels: bool) -> SelectBase:
    """Select usage with its dimensions, from the transfers or from rollups, which are current."""
    if kept is StoredUsage.MINUTE:
        return _booked()
    rolled_up = [_rolled_up(usage_day if kept is StoredUsage.DAY else usage_hour)]
    if has_labels:
        table = labelled_usage
        rolled_up += [_rolled_up(table, table.c.units, table.c.labels), _rolled_up(table, -table.c.units)]
    return union_all(*rolled_up, *([] if is_now else _booked_since()))


def _with_zeros(pieces: CTE, group_by: Iterable[str]) -> Select[Any]:
    """Select each kind of usage in each bucket. Without kinds there is one row, even if nothing was used."""
    kinds = select(*(pieces.c[dimension] for dimension in group_by)).distinct().subquery("kinds")
    numbers = (
        func.generate_series(constant(1), parameter("pieces", Integer))
        .table_valued("bucket", name="numbers")
        .render_derived()
    )
    zeros = select(numbers.c.bucket, *kinds.c, constant(0).label("units"))
    each_kind = zeros.join_from(numbers, kinds, true()) if kinds.c else zeros
    every_piece = union_all(select(pieces), each_kind).subquery("every_piece")
    columns = [every_piece.c[name] for name in ("bucket", *group_by)]
    return select(*columns, func.sum(every_piece.c.units).label("units")).group_by(*columns)


def _booked() -> Select[Any]:
    counts = or_(LAST.is_(None), transfer.c.id <= LAST)
    return (
        _lines(transfer.c.units)
        .select_from(transfer.join(pool, _IN_POOL).outerjoin(report, _IN_REPORT))
        .where(_IS_USAGE, or_(report.c.position <= POSITION, and_(_HAS_NO_REPORT, counts)))
    )


def _booked_since() -> list[Select[Any]]:
    """Select what was booked after the position with its sign changed, to subtract it from a rollup."""
    less = _lines(-transfer.c.units).where(_IS_USAGE)
    return [
        less.select_from(report.join(transfer, _IN_REPORT).join(pool, _IN_POOL)).where(report.c.position > POSITION),
        less.select_from(transfer.join(pool, _IN_POOL)).where(_HAS_NO_REPORT, transfer.c.id > LAST),
    ]


def _lines(units: ColumnElement[int]) -> Select[Any]:
    """Select transfers by dimensions. The tenant is that of the quota key, or else that of the usage line."""

    def said(name: str) -> ColumnElement[str]:
        return json_text(transfer.c.dimensions, name)

    return select(
        transfer.c.window_at.label("at"),
        func.coalesce(pool.c.tenant, said("tenant")).label("tenant"),
        pool.c.name.label("quota"),
        transfer.c.quota.label("quota_key"),
        transfer.c.region,
        *(said(name).label(name) for name in ("policy", "route_class", "api_key", "degraded")),
        transfer.c.period,
        transfer.c.charge_period,
        func.coalesce(said("counted_as"), constant("included")).label("counted_as"),
        said(LABELS).label(LABELS),
        units.label("units"),
    )


def _rolled_up(
    table: Table, units: ColumnElement[int] | None = None, labels: ColumnElement[str] | None = None
) -> Select[Any]:
    return select(
        table.c.begins_at.label("at"),
        table.c.tenant,
        table.c.name.label("quota"),
        table.c.quota.label("quota_key"),
        *(table.c[name] for name in ("region", "policy", "route_class", "api_key", "degraded")),
        table.c.period,
        table.c.charge_period,
        func.coalesce(table.c.counted_as, constant("included")).label("counted_as"),
        (null() if labels is None else labels).label(LABELS),
        (table.c.units if units is None else units).label("units"),
    )


@lru_cache(maxsize=64)
def _unaccounted(filters: tuple[Dimension, ...], *, is_now: bool) -> CompiledStatement:
    """Select what regions hold now, less what was moved since the position."""
    held = union_all(*_held(), *([] if is_now else _moved_since())).subquery("held")
    of_pools = (
        select(
            *(pool.c.tenant, pool.c.name.label("quota"), pool.c.quota.label("quota_key")),
            *(held.c.region, pool.c.period, held.c.charge_period, held.c.units),
        )
        .join(held, and_(held.c.quota == pool.c.quota, held.c.period == pool.c.period))
        .subquery("of_pools")
    )
    return compiled(
        select(func.coalesce(func.sum(of_pools.c.units), constant(0)))
        .join(period, period.c.id == of_pools.c.charge_period)
        .where(period.c.starts_at < END, period.c.ends_at > START, *_filtered(of_pools.c, filters))
    )


def _held() -> list[Select[Any]]:
    of_leases = select(
        *(lease.c.quota, lease.c.period, lease.c.period.label("charge_period"), lease.c.region),
        (lease.c.outstanding + lease.c.suspense).label("units"),
    )
    late = correction.c
    return [of_leases, select(late.quota, late.period, late.charge_period, late.region, late.suspense_carried)]


def _moved_since() -> list[Select[Any]]:
    def is_held(account: ColumnElement[str]) -> ColumnElement[bool]:
        return account.in_([constant(name) for name in ("outstanding", "suspense", "suspense_carried")])

    left, came = (
        case((is_held(account), transfer.c.units), else_=constant(0)) for account in (transfer.c.src, transfer.c.dst)
    )
    moved = select(
        *(transfer.c.quota, transfer.c.period, transfer.c.charge_period, transfer.c.region),
        (left - came).label("units"),
    )
    return [
        moved.select_from(report.join(transfer, _IN_REPORT)).where(report.c.position > POSITION),
        moved.where(_HAS_NO_REPORT, transfer.c.id > LAST),
    ]


@lru_cache(maxsize=64)
def _is_known(filters: tuple[Dimension, ...], *, is_now: bool) -> CompiledStatement:
    of_pools = select(pool.c.tenant, pool.c.name.label("quota"), pool.c.quota.label("quota_key"), pool.c.period)
    known = of_pools.subquery("known")
    booked = (
        exists()
        .select_from(transfer.outerjoin(report, _IN_REPORT))
        .where(
            transfer.c.quota == known.c.quota_key,
            transfer.c.period == known.c.period,
            or_(report.c.position <= POSITION, and_(_HAS_NO_REPORT, transfer.c.id <= LAST)),
        )
    )
    is_archived = exists().where(archive.c.period == known.c.period, archive.c.archived_at.is_not(None))
    found = (
        exists()
        .select_from(known.join(period, period.c.id == known.c.period))
        .where(period.c.starts_at < END, period.c.ends_at > START, *_filtered(known.c, filters))
        .where(*([] if is_now else [or_(booked, is_archived)]))
    )
    return compiled(select(found))


_POSITION = "SELECT coalesce(max(position), 0) FROM report"
