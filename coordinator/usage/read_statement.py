"""Read a tenant's statement for a period, and the sources of each line. Needs a snapshot.

The statement of a closed period is complete. That of any other period is as of a seal, the newest one by default. So
the same statement can be requested again, and its lines keep their numbers.

Beside the lines it lists the limits that were in force (limits/read_limit_history.py).

Usage is read from the rollups. Estimates and replacements are read from leases and corrections, less what was moved
since the seal. Each adjustment is read from its own row, if its movement is sealed.
"""

from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
from msgspec import Struct
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Text,
    and_,
    case,
    false,
    func,
    null,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY

from coordinator.adjustments.rules import AdjustmentKind
from coordinator.database import compiled as query
from coordinator.database.compiled import compiled, constant, json_text, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import correction, lease, pool, report, transfer
from coordinator.exchange.rules.posting import OVERAGE
from coordinator.limits.read_limit_history import read_limit_history
from coordinator.limits.rules.history import LimitInForce, LimitKind
from coordinator.periods.read_periods import BookedPeriod, read_period
from coordinator.proof.seal import Sealed, find_sealed
from coordinator.usage.read_usage import read_unaccounted, read_usage
from coordinator.usage.rules.statement import (
    Amount,
    LineAdjustment,
    LineKind,
    Statement,
    StatementId,
    StatementLine,
    adjusted,
    lines_of,
    with_adjustments,
)
from coordinator.usage.rules.usage import Dimension, UsageQuestion
from protocol.identifiers import lane_of

MOST_LINES = 10_000  # a statement with more lines is refused, never cut


class NoStatement(StrEnum):
    NO_PERIOD = "Unknown period."
    NO_TENANT = "the books of this period have nothing of this tenant"
    NOT_SEALED = "no seal covers it (yet); GET /v1/seals lists what is sealed"
    TOO_LONG = f"it has more than {MOST_LINES:,} lines, and none is left out: an export has all that it is from"


class _Asked(NamedTuple):
    of: StatementId
    period: BookedPeriod
    sealed: Sealed | None  # None: the period is closed and complete


async def read_statement(
    connection: Connection, of: StatementId, as_of: int | datetime | None
) -> Statement | NoStatement:
    asked = await _asked(connection, of, as_of)
    return asked if isinstance(asked, NoStatement) else await _statement(connection, asked)


async def _asked(connection: Connection, of: StatementId, as_of: int | datetime | None) -> _Asked | NoStatement:
    period = await read_period(connection, of.period)
    if period is None:
        return NoStatement.NO_PERIOD
    if period.state == "closed" and as_of is None:
        return _Asked(of, period, None)
    if as_of is None:
        as_of = await connection.fetchval(_NEWEST) or 0
    sealed = Sealed(0, 0) if as_of == 0 else await find_sealed(connection, as_of)
    return NoStatement.NOT_SEALED if sealed is None else _Asked(of, period, sealed)


async def _statement(connection: Connection, asked: _Asked) -> Statement | NoStatement:
    of, period, sealed = asked
    read = (_usage, _estimates, _adjustments)
    amounts = [amount for each in read for amount in await each(connection, asked)]
    if len(amounts) > MOST_LINES:
        return NoStatement.TOO_LONG
    if not amounts and not await connection.fetchval(_HAS_TENANT, *of):
        return NoStatement.NO_TENANT
    last = _NEVER if sealed is None else await connection.fetchval(_AUDITED, sealed.position) or 0
    limits = await read_limit_history(connection, of.tenant, {each.quota for each in amounts}, period, last)
    return Statement(
        id=str(of),
        period=period.id,
        starts_at=period.starts_at,
        ends_at=period.ends_at,
        tenant=of.tenant,
        is_final=sealed is None,
        as_of=(period.position or 0) if sealed is None else sealed.position,
        root=period.root if sealed is None else None,
        billed=sum(amount.units for amount in amounts),
        unaccounted=await read_unaccounted(connection, _question(of), *(sealed or (None, None))),
        lines=lines_of(of, amounts, sealed and sealed.position),
        limits=with_adjustments(
            [*limits, *await _carried_over(connection, asked)], amounts, period.starts_at, period.ends_at
        ),
    )


# Late usage was used before the period: only the period in which it is booked counts.
_EVER = [datetime(1900, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)]
_BY = [Dimension.QUOTA, Dimension.CHARGE_PERIOD, Dimension.REGION, Dimension.COUNTED_AS]


def _question(of: StatementId) -> UsageQuestion:
    return UsageQuestion(_EVER, _BY, {Dimension.PERIOD: [of.period], Dimension.TENANT: [of.tenant]})


async def _usage(connection: Connection, asked: _Asked) -> list[Amount]:
    position, last = asked.sealed or (None, None)
    page = await read_usage(connection, _question(asked.of), position, 0, MOST_LINES + 1, last)
    return [_amount(asked.of.period, *row.dimensions.values(), units=row.units) for row in page.rows]


def _amount(period: str, *names: str | None, units: int) -> Amount:
    quota, charge_period, region, counted_as = map(str, names)
    return Amount(_KINDS[counted_as == OVERAGE, charge_period != period], quota, charge_period, region, units)


# (is overage, is late)
_KINDS = {
    (False, False): LineKind.USAGE,
    (True, False): LineKind.OVERAGE,
    (False, True): LineKind.LATE_USAGE,
    (True, True): LineKind.LATE_OVERAGE,
}


async def _carried_over(connection: Connection, asked: _Asked) -> list[LimitInForce]:
    """Return what was carried over from the previous period, from the time of its close on."""
    _, last = asked.sealed or (_NEVER, _NEVER)
    period = asked.period
    return [
        LimitInForce(
            quota_key=row["quota"],
            kind=LimitKind.CARRY_OVER,
            units=row["units"],
            starts_at=min(max(period.starts_at, row["recorded_at"]), period.ends_at),
            ends_at=period.ends_at,
            id=row["movement_id"],
            reason=f"carried over from {row['charge_period']}",
        )
        for row in await connection.fetch(_CARRIED_OVER, *asked.of, last)
    ]


async def _estimates(connection: Connection, asked: _Asked) -> list[Amount]:
    position, last = asked.sealed or (_NEVER, _NEVER)
    named = {"period": asked.of.period, "tenant": asked.of.tenant}
    statement = _estimated().with_values(**named, position=position, last=last, count=MOST_LINES + 1)
    rows = await connection.fetch(*statement)
    return [Amount(LineKind(kind), *rest) for kind, *rest in rows]


async def _adjustments(connection: Connection, asked: _Asked) -> list[Amount]:
    """Return adjustments by the period in which they are booked, whatever period they are about."""
    _, last = asked.sealed or (_NEVER, _NEVER)
    rows = await connection.fetch(_ADJUSTMENTS, *asked.of, last, MOST_LINES + 1)
    return [_adjusted(row) for row in rows]


def _adjusted(row: asyncpg.Record) -> Amount:
    adjustment = LineAdjustment(
        id=row["id"],
        quota_key=row["quota"],
        units=row["units"],
        document=row["document"],
        reason=row["reason"],
        approved_at=row["approved_at"],
        path=f"/v1/adjustments/{row['id']}",
    )
    return adjusted(AdjustmentKind(row["kind"]), row["name"], row["period"], adjustment)


# --- sources of a line ------------------------------------------------------------------------------------------------


class LineSource(Struct, frozen=True, kw_only=True):
    """A report that a line comes from, with its place in the chain; or a movement of the coordinator."""

    region: str | None
    epoch: int | None
    lane: int | None
    seq: int | None
    position: int | None
    body_hash: str | None
    head: str | None  # of the lane's chain, including this report
    movement_id: UUID | None  # of a movement without a report; for an adjustment its id
    units: int  # of this line
    transfers: int  # number of transfers
    recorded_at: datetime


class Sources(NamedTuple):
    line: StatementLine
    sources: list[LineSource]
    numbers: list[str]  # the positions in the list


async def read_sources(
    connection: Connection, of: StatementId, n: int, as_of: int | datetime | None, after: str, count: int
) -> Sources | NoStatement | None:
    """Return at most `count` sources in the order of booking, movements last; None if there is no such line."""
    asked = await _asked(connection, of, as_of)
    if isinstance(asked, NoStatement):
        return asked
    found = await _statement(connection, asked)
    if isinstance(found, NoStatement):
        return found
    if not 1 <= n <= len(found.lines):
        return None
    line = found.lines[n - 1]
    part, number = map(int, (after or "0.0").split("."))
    if line.adjustment:
        names = of.period, line.adjustment.id, line.units
        rows = await connection.fetch(_MOVEMENT, *names, part, number, count)
    else:
        rows = await _sources(connection, asked, line, (part, number), count)
    return Sources(line, [_source(row) for row in rows], [f"{row['part']}.{row['number']}" for row in rows])


async def _sources(
    connection: Connection, asked: _Asked, line: StatementLine, after: tuple[int, int], count: int
) -> list[asyncpg.Record]:
    """Read only the lanes that the line's quotas belong to."""
    names = asked.of.period, line.charge_period, line.region, line.quota, asked.of.tenant
    leases = await connection.fetch(_LEASES, *names)
    lanes = sorted({(row["epoch"], lane_of(row["quota"], row["lanes"])) for row in leases})
    position, last = asked.sealed or (_NEVER, _NEVER)
    statement = _sources_of(line.kind).with_values(
        **dict(zip(("period", "charge_period", "region", "quota", "tenant"), names, strict=True)),
        epochs=[epoch for epoch, _ in lanes],
        lanes=[lane for _, lane in lanes],
        position=position,
        last=last,
        after_part=after[0],
        after_number=after[1],
        count=count,
    )
    return list(await connection.fetch(*statement))


def _source(row: asyncpg.Record) -> LineSource:
    values: dict[str, Any] = {name: _shown(value) for name, value in row.items()}
    return LineSource(**{name: values[name] for name in LineSource.__struct_fields__})


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


# --- the statements ---------------------------------------------------------------------------------------------------

_NEVER = 2**63 - 1
_NEWEST = "SELECT position FROM seal ORDER BY number DESC LIMIT 1"
_AUDITED = "SELECT audit FROM seal WHERE position >= $1 ORDER BY number LIMIT 1"
_HAS_TENANT = "SELECT EXISTS (SELECT FROM pool WHERE period = $1 AND tenant = $2)"
# A movement is sealed as a whole. The movement of a debit may have funded the pool as well.
_CARRIED_OVER = """
SELECT quota, charge_period, units, movement_id, recorded_at FROM transfer JOIN pool USING (quota, period)
WHERE period = $1 AND tenant = $2 AND src = 'carried_over_in' AND transfer.id <= $3 ORDER BY quota, transfer.id
"""
_ADJUSTMENTS = """
SELECT adjustment.*, pool.name FROM adjustment JOIN pool ON (pool.quota, pool.period) = (adjustment.quota, booked_in)
WHERE booked_in = $1 AND tenant = $2 AND EXISTS (
    SELECT FROM transfer WHERE movement_id = adjustment.id AND transfer.period = booked_in AND transfer.id <= $3)
ORDER BY adjustment.id LIMIT $4
"""
_MOVEMENT = """
SELECT 1 AS part, id AS number, region, epoch, lane, seq, NULL::bigint AS position, NULL AS body_hash, NULL AS head,
    movement_id, $3::bigint AS units, 1 AS transfers, recorded_at
FROM transfer WHERE period = $1 AND movement_id = $2 AND 'adjustment' IN (src, dst)
    AND (1, id) > ($4::int, $5::bigint)
ORDER BY id LIMIT $6
"""
_LEASES = """
SELECT DISTINCT epoch, quota, lanes FROM lease JOIN pool USING (quota, period) JOIN region_epoch USING (epoch)
WHERE period = $2 AND lease.region = $3 AND name = $4 AND coalesce(tenant, $5) = $5 AND $1::text IS NOT NULL
UNION
SELECT DISTINCT epoch, quota, lanes FROM correction JOIN pool USING (quota, period) JOIN region_epoch USING (epoch)
WHERE period = $1 AND charge_period = $2 AND correction.region = $3 AND name = $4 AND coalesce(tenant, $5) = $5
"""


# --- the composed statements ------------------------------------------------------------------------------------------

_PERIOD, _TENANT, _COUNT = parameter("period", Text), parameter("tenant", Text), parameter("count", BigInteger)
_POSITION, _LAST = parameter("position", BigInteger), parameter("last", BigInteger)
_IN_POOL = and_(pool.c.quota == transfer.c.quota, pool.c.period == transfer.c.period)
_IN_REPORT = and_(report.c.epoch == transfer.c.epoch, report.c.lane == transfer.c.lane, report.c.seq == transfer.c.seq)
_HAS_NO_REPORT = transfer.c.seq.is_(None)
_IS_OVERAGE = func.coalesce(transfer.c.dimensions.bool_op("?")(constant("counted_as")), false())


def _units_if(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return case((condition, transfer.c.units), else_=constant(0))


# How many units of a transfer belong to each kind of line.
_INCLUDED = _units_if(and_(transfer.c.dst == constant("consumed"), ~_IS_OVERAGE))
_BEYOND = _units_if(and_(transfer.c.dst == constant("consumed"), _IS_OVERAGE))
_UNITS_OF_KIND = {
    LineKind.USAGE: _INCLUDED,
    LineKind.OVERAGE: _BEYOND,
    LineKind.LATE_USAGE: _INCLUDED,
    LineKind.LATE_OVERAGE: _BEYOND,
    LineKind.ESTIMATED: _units_if(transfer.c.dst == constant("estimated"))
    - _units_if(transfer.c.src == constant("estimated")),
    LineKind.REPLACED: -_units_if(transfer.c.cause == constant("replaces_estimate")),
}


@cache
def _sources_of(kind: LineKind) -> query.CompiledStatement:
    """Select the reports that a line is from, with its units of each, and then the movements without a report."""
    units = _UNITS_OF_KIND[kind]
    of_line = and_(
        transfer.c.period == _PERIOD,
        transfer.c.charge_period == parameter("charge_period", Text),
        transfer.c.region == parameter("region", Text),
        pool.c.name == parameter("quota", Text),
        func.coalesce(pool.c.tenant, json_text(transfer.c.dimensions, "tenant")) == _TENANT,
        units != constant(0),
    )
    after = tuple_(parameter("after_part", Integer), parameter("after_number", BigInteger))
    named = (report.c.epoch, report.c.lane, report.c.seq, report.c.position, report.c.body_hash, report.c.head)
    lanes = func.unnest(parameter("epochs", ARRAY(BigInteger)), parameter("lanes", ARRAY(Integer)))
    its = lanes.table_valued("epoch", "lane", name="its").render_derived()
    in_lane = and_(report.c.epoch == its.c.epoch, report.c.lane == its.c.lane)
    of_reports = (
        select(
            *(constant(0).label("part"), report.c.position.label("number"), transfer.c.region, *named),
            *(null().label("movement_id"), func.sum(units).label("units")),
            *(func.count().label("transfers"), report.c.recorded_at),
        )
        .select_from(its.join(report, in_lane).join(transfer, _IN_REPORT).join(pool, _IN_POOL))
        .where(of_line, report.c.position <= _POSITION, tuple_(constant(0), report.c.position) > after)
        .group_by(transfer.c.region, *named, report.c.recorded_at)
    )
    of_movements = (
        select(
            *(constant(1), transfer.c.id, transfer.c.region, transfer.c.epoch, *(null() for _ in named[1:])),
            *(transfer.c.movement_id, units, constant(1), transfer.c.recorded_at),
        )
        .join_from(transfer, pool, _IN_POOL)
        .where(of_line, _HAS_NO_REPORT, transfer.c.id <= _LAST, tuple_(constant(1), transfer.c.id) > after)
    )
    return compiled(union_all(of_reports, of_movements).order_by("part", "number").limit(_COUNT))


@cache
def _estimated() -> query.CompiledStatement:
    """Select what was estimated and replaced by now, less what was moved since the position."""
    key = (pool.c.name, lease.c.period.label("charge_period"), lease.c.region)
    of_leases = (
        select(constant("estimated").label("kind"), *key, lease.c.estimated.label("units"))
        .join_from(pool, lease, and_(lease.c.quota == pool.c.quota, lease.c.period == pool.c.period))
        .where(pool.c.period == _PERIOD, pool.c.tenant == _TENANT)
    )
    late = correction.c
    of_corrections = [
        select(constant(kind), pool.c.name, late.charge_period, late.region, units)
        .join_from(pool, correction, and_(late.quota == pool.c.quota, late.period == pool.c.period))
        .where(pool.c.period == _PERIOD, pool.c.tenant == _TENANT)
        for kind, units in (("estimated", late.estimated), ("replaced", -late.replaced))
    ]
    moved_since = [
        select(constant(kind.value), pool.c.name, transfer.c.charge_period, transfer.c.region, -_UNITS_OF_KIND[kind])
        .select_from(moved.join(pool, _IN_POOL))
        .where(transfer.c.period == _PERIOD, pool.c.tenant == _TENANT, is_since)
        for kind in (LineKind.ESTIMATED, LineKind.REPLACED)
        for moved, is_since in (
            (report.join(transfer, _IN_REPORT), report.c.position > _POSITION),
            (transfer, and_(_HAS_NO_REPORT, transfer.c.id > _LAST)),
        )
    ]
    booked = union_all(of_leases, *of_corrections, *moved_since).subquery("booked").c
    line = (booked.kind, booked.name, booked.charge_period, booked.region)
    sums = select(*line, func.sum(booked.units)).group_by(*line).having(func.sum(booked.units) != constant(0))
    return compiled(sums.order_by(*line).limit(_COUNT))
