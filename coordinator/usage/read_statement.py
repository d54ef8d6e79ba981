"""Read a tenant's statement for a period, and the sources of each line. Needs a snapshot.

The statement of a closed period is complete. That of any other period is as of a seal, the newest one by default. So
the same statement can be requested again, and its lines keep their numbers.

Beside the lines it lists the limits that were in force (limits/read_limit_history.py).
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import msgspec
from msgspec import Struct
from sqlalchemy import BigInteger, Integer, Text, and_, func, null, select, tuple_, union_all
from sqlalchemy.dialects.postgresql import ARRAY

from coordinator.archives.lines import find_lines
from coordinator.archives.refusal import Archived
from coordinator.archives.rules import ArchivedTransfer
from coordinator.archives.statements import RecordedArchive, hold_archives, read_archive, read_archives
from coordinator.archives.store import ArchiveStore, ArchiveUnreadable
from coordinator.database import compiled as query
from coordinator.database.compiled import compiled, constant, json_text, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import pool, report, transfer
from coordinator.limits.read_limit_history import read_limit_history
from coordinator.limits.rules.history import LimitInForce, LimitKind
from coordinator.periods.read_periods import BookedPeriod, read_period
from coordinator.proof.seal import Sealed, find_sealed
from coordinator.usage.read_amounts import (
    HAS_NO_REPORT,
    IN_POOL,
    IN_REPORT,
    NEVER,
    UNITS_OF_KIND,
    Books,
    question_of,
    read_amounts,
)
from coordinator.usage.read_usage import read_unaccounted
from coordinator.usage.rules.statement import (
    LineKind,
    Statement,
    StatementId,
    StatementLine,
    lines_of,
    with_adjustments,
)
from protocol.identifiers import lane_of

MOST_LINES = 10_000  # a statement with more lines is refused, never cut


class NoStatement(StrEnum):
    NO_PERIOD = "Unknown period."
    NO_TENANT = "the books of this period have nothing of this tenant"
    NOT_SEALED = "no seal covers it (yet); GET /v1/seals/latest has the newest position"
    TOO_LONG = f"it has more than {MOST_LINES:,} lines, and none is left out: an export has all that it is from"


class _Asked(NamedTuple):
    of: StatementId
    period: BookedPeriod
    sealed: Sealed | None  # None: the period is closed and complete

    @property
    def books(self) -> Books:
        return Books([self.of.period], [self.of.tenant], self.sealed)


async def read_statement(
    connection: Connection, of: StatementId, as_of: int | datetime | None
) -> Statement | NoStatement | Archived:
    asked = await _asked(connection, of, as_of)
    return await _statement(connection, asked) if isinstance(asked, _Asked) else asked


async def _asked(
    connection: Connection, of: StatementId, as_of: int | datetime | None
) -> _Asked | NoStatement | Archived:
    await hold_archives(connection)
    period = await read_period(connection, of.period)
    if period is None:
        return NoStatement.NO_PERIOD
    sealed = await find_books_end(connection, as_of, [period.id], is_closed=period.state == "closed")
    return sealed if isinstance(sealed, NoStatement | Archived) else _Asked(of, period, sealed)


async def find_books_end(
    connection: Connection, as_of: int | datetime | None, periods: Sequence[str], *, is_closed: bool
) -> Sealed | NoStatement | Archived | None:
    """Return the seal up to which books are read: the newest by default. None: all of books that are closed."""
    if is_closed and as_of is None:
        return None
    if as_of is None:
        as_of = await connection.fetchval(_NEWEST) or 0
    sealed = Sealed(0, 0) if as_of == 0 else await find_sealed(connection, as_of)
    if sealed is None:
        return NoStatement.NOT_SEALED
    later = [each for each in await read_archives(connection) if each.last_position > sealed.position]
    archive = next((each for each in later if each.period in periods), None)
    return Archived(archive, _EARLIER) if archive else sealed


async def _statement(connection: Connection, asked: _Asked) -> Statement | NoStatement:
    of, period, sealed = asked
    booked = await read_amounts(connection, asked.books, MOST_LINES + 1)
    amounts = [each.amount for each in booked]
    if len(amounts) > MOST_LINES:
        return NoStatement.TOO_LONG
    if not amounts and not await connection.fetchval(_HAS_TENANT, *of):
        return NoStatement.NO_TENANT
    last = NEVER if sealed is None else await connection.fetchval(_AUDITED, sealed.position) or 0
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
        unaccounted=await read_unaccounted(connection, question_of(asked.books), *(sealed or (None, None))),
        lines=lines_of(of, amounts, sealed and sealed.position),
        limits=with_adjustments(
            [*limits, *await _carried_over(connection, asked)], amounts, period.starts_at, period.ends_at
        ),
    )


async def _carried_over(connection: Connection, asked: _Asked) -> list[LimitInForce]:
    """Return what was carried over from the previous period, from the time of its close on."""
    _, last = asked.sealed or (NEVER, NEVER)
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
    connection: Connection,
    store: ArchiveStore | None,
    of: StatementId,
    n: int,
    as_of: int | datetime | None,
    after: str,
    count: int,
) -> Sources | NoStatement | Archived | None:
    """Return at most `count` sources in the order of booking, movements last; None if there is no such line.

    The lines of an archived period are read from `store`, which may take a while.
    """
    asked = await _asked(connection, of, as_of)
    if not isinstance(asked, _Asked):
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
    sources = [(f"{row['part']}.{row['number']}", _source(row)) for row in rows]
    archive = await read_archive(connection, of.period)
    if archive is not None and not line.adjustment and part == 0:
        if store is None:
            return Archived(archive, UNREAD)
        try:
            await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            sources = [*await _archived(connection, store, archive, asked, line, number, count), *sources]
        except ArchiveUnreadable as error:
            return Archived(archive, str(error))
    return Sources(line, [source for _, source in sources[:count]], [name for name, _ in sources[:count]])


async def _archived(
    connection: Connection,
    store: ArchiveStore,
    archive: RecordedArchive,
    asked: _Asked,
    line: StatementLine,
    after: int,
    count: int,
) -> list[tuple[str, LineSource]]:
    """Return the reports of a line whose transfers are in an archive, each with its place in the list."""
    pools = await connection.fetch(_POOLS, asked.of.period, line.quota, asked.of.tenant)
    tenants = {row["quota"]: row["tenant"] for row in pools}
    found: dict[int, list[int]] = {}
    async for row in find_lines(store, archive, [*tenants], line.region, line.charge_period, after):
        tenant = tenants[row.quota] or msgspec.json.decode(row.dimensions or "{}").get("tenant")
        units = units_of_kind(line.kind, row) if tenant == asked.of.tenant else 0
        if units and row.position is not None:
            if len(found) == count and row.position not in found:
                break
            found.setdefault(row.position, []).append(units)
    return [
        (
            f"0.{row['position']}",
            _source(row, sum(found[row["position"]]), len(found[row["position"]])),
        )
        for row in await connection.fetch(_REPORTS, [*found])
    ]


def units_of_kind(kind: LineKind, row: ArchivedTransfer) -> int:
    """Return how many units of a transfer belong to a kind of line, as `_UNITS_OF_KIND` does in SQL."""
    is_overage = "counted_as" in msgspec.json.decode(row.dimensions or "{}")
    if kind is LineKind.ESTIMATED:
        return row.units * ((row.dst == "estimated") - (row.src == "estimated"))
    if kind is LineKind.REPLACED:
        return -row.units if row.cause == "replaces_estimate" else 0
    is_kind = is_overage == (kind in (LineKind.OVERAGE, LineKind.LATE_OVERAGE))
    return row.units if row.dst == "consumed" and is_kind else 0


async def _sources(
    connection: Connection, asked: _Asked, line: StatementLine, after: tuple[int, int], count: int
) -> list[asyncpg.Record]:
    """Read only the lanes that the line's quotas belong to."""
    names = asked.of.period, line.charge_period, line.region, line.quota, asked.of.tenant
    leases = await connection.fetch(_LEASES, *names)
    lanes = sorted({(row["epoch"], lane_of(row["quota"], row["lanes"])) for row in leases})
    position, last = asked.sealed or (NEVER, NEVER)
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


def _source(row: asyncpg.Record, units: int | None = None, transfers: int | None = None) -> LineSource:
    values: dict[str, Any] = {name: _shown(value) for name, value in row.items()}
    if units is not None:
        values |= {"units": units, "transfers": transfers, "movement_id": None}
    return LineSource(**{name: values[name] for name in LineSource.__struct_fields__})


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


# --- the statements ---------------------------------------------------------------------------------------------------

_EARLIER = "an answer as of an earlier position takes them. Leave `as_of` out, or name a position after the close."
UNREAD = "this coordinator has no archive to read (LEASEHOLD_COORDINATOR_ARCHIVE), or lacks pyarrow."
_POOLS = "SELECT quota, tenant FROM pool WHERE period = $1 AND name = $2 AND coalesce(tenant, $3) = $3"
_REPORTS = """
SELECT region, epoch, lane, seq, position, body_hash, head, recorded_at FROM report JOIN region_epoch USING (epoch)
WHERE position = ANY ($1::bigint[]) ORDER BY position
"""
_NEWEST = "SELECT position FROM seal ORDER BY number DESC LIMIT 1"
_AUDITED = "SELECT audit FROM seal WHERE position >= $1 ORDER BY number LIMIT 1"
_HAS_TENANT = "SELECT EXISTS (SELECT FROM pool WHERE period = $1 AND tenant = $2)"
# A movement is sealed as a whole. The movement of a debit may have funded the pool as well.
_CARRIED_OVER = """
SELECT quota, charge_period, units, movement_id, recorded_at FROM transfer JOIN pool USING (quota, period)
WHERE period = $1 AND tenant = $2 AND src = 'carried_over_in' AND transfer.id <= $3 ORDER BY quota, transfer.id
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


@cache
def _sources_of(kind: LineKind) -> query.CompiledStatement:
    """Select the reports that a line is from, with its units of each, and then the movements without a report."""
    units = UNITS_OF_KIND[kind]
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
        .select_from(its.join(report, in_lane).join(transfer, IN_REPORT).join(pool, IN_POOL))
        .where(of_line, report.c.position <= _POSITION, tuple_(constant(0), report.c.position) > after)
        .group_by(transfer.c.region, *named, report.c.recorded_at)
    )
    of_movements = (
        select(
            *(constant(1), transfer.c.id, transfer.c.region, transfer.c.epoch, *(null() for _ in named[1:])),
            *(transfer.c.movement_id, units, constant(1), transfer.c.recorded_at),
        )
        .join_from(transfer, pool, IN_POOL)
        .where(of_line, HAS_NO_REPORT, transfer.c.id <= _LAST, tuple_(constant(1), transfer.c.id) > after)
    )
    return compiled(union_all(of_reports, of_movements).order_by("part", "number").limit(_COUNT))
