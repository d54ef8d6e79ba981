"""Read what people have to resolve: leases with units in suspense or in quarantine, and the evidence kept for them.

If the period of a lease is closed, its correction in an open period is listed instead.
"""

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Text,
    and_,
    any_,
    case,
    cast,
    exists,
    false,
    func,
    null,
    or_,
    select,
    tuple_,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from coordinator.access.token_names import with_token_names
from coordinator.database.compiled import CompiledStatement, compiled, constant, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import correction, lane, lease, quarantine, region_epoch, resolution
from coordinator.suspense.resolve import Resolution

MOST_EVIDENCE_BYTES = 4 * 1024 * 1024  # of one page
EVIDENCE_PREFETCH = 2


class SuspendedLease(msgspec.Struct, frozen=True):
    epoch: int
    region: str
    quota: str
    period: str
    state: str
    suspense: int  # or carried suspense
    estimated: int
    written_off: int
    region_consumed: int  # by the region's report; `consumed` is what is booked
    consumed: int
    reported_at: datetime
    waits_in: str  # the period that has the suspense: its own, or an open one if that is closed
    proposal: Resolution | None


class KeptEvidence(msgspec.Struct, frozen=True):
    epoch: int
    lane: int
    seq: int
    quota: str  # empty, like the period, for a whole batch: it shows that the ledger lost data
    period: str
    reason: str
    stored_bytes: int  # of the evidence, compressed in the database
    recorded_at: datetime
    is_open: bool  # the lease is still in quarantine, or the lane still behind
    proposal: Resolution | None  # of the lane, or of the lease
    evidence: Any = None  # the lease or the batch as it was reported, on request


class LeaseName(NamedTuple):
    period: str = ""
    quota: str = ""
    epoch: int = 0


class EvidenceName(NamedTuple):
    epoch: int = 0
    lane: int = 0
    seq: int = 0
    quota: str = ""
    period: str = ""


class SuspenseFilter(NamedTuple):
    """Which leases are wanted; without a condition all."""

    tenants: Sequence[str] = ()
    quotas: Sequence[str] = ()  # names or keys
    regions: Sequence[str] = ()
    epochs: Sequence[int] = ()
    periods: Sequence[str] = ()
    states: Sequence[str] = ()

    @property
    def arguments(self) -> list[list[Any] | None]:
        """Return the arguments $1 to $6 of a statement that begins with WAITING."""
        return [list(values) or None for values in self]


async def read_suspense(
    connection: Connection, only: SuspenseFilter, bulk: UUID | None, after: LeaseName, count: int
) -> list[SuspendedLease]:
    rows = await connection.fetch(_SUSPENSE, *only.arguments, *after, count, bulk)
    return await with_token_names(connection, [_suspended(dict(row)) for row in rows])


def _suspended(row: dict[str, Any]) -> SuspendedLease:
    proposal = row.pop("proposal")
    return SuspendedLease(**row, proposal=proposal and msgspec.json.decode(proposal, type=Resolution))


class QuarantinePage(NamedTuple):
    rows: Sequence[KeptEvidence]
    has_more: bool


class QuarantineFilter(NamedTuple):
    """Which evidence is wanted; without a condition all."""

    quotas: Sequence[str] = ()  # names or keys
    regions: Sequence[str] = ()
    epochs: Sequence[int] = ()
    reasons: Sequence[str] = ()


async def read_quarantine(
    connection: Connection, only: QuarantineFilter, after: EvidenceName, count: int
) -> QuarantinePage:
    """Read at most `count` rows without their evidence, which may be large."""
    rows = await connection.fetch(*_kept_after(only, after, count, with_evidence=False))
    kept = await with_token_names(connection, [_kept(dict(row)) for row in rows[:count]])
    return QuarantinePage(kept, len(rows) > count)


async def read_quarantine_with_evidence(
    connection: Connection, only: QuarantineFilter, after: EvidenceName, count: int
) -> QuarantinePage:
    """Read at most `count` rows with their evidence: MOST_EVIDENCE_BYTES in all at most, but at least one row.

    Call it in a transaction. Rows are fetched one by one, so that no more than the reply is in memory.
    """
    kept, size, has_more = list[KeptEvidence](), 0, False
    statement = _kept_after(only, after, count, with_evidence=True)
    async for row in connection.cursor(*statement, prefetch=EVIDENCE_PREFETCH):
        size += len(row["evidence"])
        has_more = len(kept) == count or (bool(kept) and size > MOST_EVIDENCE_BYTES)
        if has_more:
            break
        kept.append(_kept(dict(row)))
    return QuarantinePage(await with_token_names(connection, kept), has_more)


def _kept_after(only: QuarantineFilter, after: EvidenceName, count: int, *, with_evidence: bool) -> list[Any]:
    given = {name: list(values) for name, values in only._asdict().items() if values}
    statement = _quarantine(tuple(given), with_evidence=with_evidence)
    return statement.with_values(**after._asdict(), **given, count=count + 1)


def _kept(row: dict[str, Any]) -> KeptEvidence:
    evidence, proposal = row.pop("evidence"), row.pop("proposal")
    proposed = proposal and msgspec.json.decode(proposal, type=Resolution)
    return KeptEvidence(**row, evidence=evidence and msgspec.json.decode(evidence), proposal=proposed)


# All leases that wait for people, by the arguments of a SuspenseFilter.
WAITING = """
WITH every AS (
    SELECT epoch, region, quota, period, state, suspense, estimated, written_off, region_consumed, consumed,
        reported_at, period AS waits_in
    FROM lease WHERE suspense > 0 OR state = 'quarantined'
    UNION ALL
    SELECT late.epoch, late.region, late.quota, late.charge_period,
        CASE WHEN late.quarantined THEN 'quarantined' ELSE 'closed' END, late.suspense_carried, late.estimated,
        late.written_off, late.region_consumed, coalesce(lease.consumed, 0) + every.consumed,
        coalesce(lease.reported_at, closed.closed_at), late.period
    FROM correction AS late JOIN period AS closed ON closed.id = late.charge_period
    LEFT JOIN lease ON (lease.epoch, lease.quota, lease.period) = (late.epoch, late.quota, late.charge_period),
    LATERAL (SELECT sum(each.consumed) AS consumed, max(each.period) AS newest FROM correction AS each
        WHERE (each.epoch, each.quota, each.charge_period) = (late.epoch, late.quota, late.charge_period)) AS every
    WHERE (late.suspense_carried > 0 OR late.quarantined) AND late.period = every.newest
), waiting AS (
    SELECT every.* FROM every JOIN pool ON (pool.quota, pool.period) = (every.quota, every.waits_in)
    WHERE ($1::text[] IS NULL OR pool.tenant = ANY ($1))
        AND ($2::text[] IS NULL OR pool.name = ANY ($2) OR pool.quota = ANY ($2))
        AND ($3::text[] IS NULL OR every.region = ANY ($3))
        AND ($4::bigint[] IS NULL OR every.epoch = ANY ($4))
        AND ($5::text[] IS NULL OR every.period = ANY ($5))
        AND ($6::text[] IS NULL OR every.state = ANY ($6))
)
"""
_SUSPENSE = f"""{WAITING}
SELECT waiting.*, to_json(resolution)::text AS proposal
FROM waiting LEFT JOIN resolution ON (resolution.epoch, resolution.quota, resolution.period)
    = (waiting.epoch, waiting.quota, waiting.period) AND resolution.approved_at IS NULL
WHERE (waiting.period, waiting.quota, waiting.epoch) > ($7, $8, $9) AND ($11::uuid IS NULL OR resolution.bulk = $11)
ORDER BY waiting.period, waiting.quota, waiting.epoch LIMIT $10
"""  # noqa: S608 - all parts are constants
_END_WITHOUT_LEASE = [constant(reason) for reason in ("unknown_quota", "implausible_period", "over_budget")]


def _is_about(columns: ReadOnlyColumnCollection[str, Any], period: str = "period") -> ColumnElement[bool]:
    """Return the condition that a row is about the lease of a kept report."""
    kept = quarantine.c
    return and_(columns.epoch == kept.epoch, columns.quota == kept.quota, columns[period] == kept.period)


def _lane_is_behind() -> ColumnElement[bool]:
    its_lane = and_(lane.c.epoch == quarantine.c.epoch, lane.c.lane == quarantine.c.lane)
    return select(lane.c.last_seq < quarantine.c.seq).where(its_lane).scalar_subquery()


def _lease_is_open() -> ColumnElement[bool]:
    late = correction.alias("late")
    newest = select(late.c.quarantined).where(_is_about(late.c, "charge_period")).order_by(late.c.period.desc())
    ended = exists().where(_is_about(resolution.c), resolution.c.approved_at >= quarantine.c.recorded_at)
    return or_(
        and_(quarantine.c.reason.in_(_END_WITHOUT_LEASE), ~ended),
        exists().where(lease.c.state == constant("quarantined"), _is_about(lease.c)),
        func.coalesce(newest.limit(constant(1)).scalar_subquery(), false()),
    )


# A decision is open: the lane is behind, the lease is in quarantine, or the report has no lease.
IS_OPEN = case((quarantine.c.quota == constant(""), _lane_is_behind()), else_=_lease_is_open())


_CONDITIONS = {
    "quotas": or_(
        quarantine.c.quota == any_(parameter("quotas", ARRAY(Text))),
        func.split_part(quarantine.c.quota, constant(":"), constant(1)) == any_(parameter("quotas", ARRAY(Text))),
    ),
    "regions": quarantine.c.epoch.in_(
        select(region_epoch.c.epoch).where(region_epoch.c.region == any_(parameter("regions", ARRAY(Text))))
    ),
    "epochs": quarantine.c.epoch == any_(parameter("epochs", ARRAY(BigInteger))),
    "reasons": quarantine.c.reason == any_(parameter("reasons", ARRAY(Text))),
}


@cache
def _quarantine(conditions: tuple[str, ...], *, with_evidence: bool) -> CompiledStatement:
    kept = quarantine.c
    name = (kept.epoch, kept.lane, kept.seq, kept.quota, kept.period)
    of_lane = and_(resolution.c.lane == kept.lane, resolution.c.seq == kept.seq)
    of_lease = and_(resolution.c.quota == kept.quota, resolution.c.period == kept.period)
    proposal = (
        select(cast(func.to_json(resolution.table_valued()), Text))
        .where(resolution.c.approved_at.is_(None), resolution.c.epoch == kept.epoch, or_(of_lane, of_lease))
        .limit(constant(1))
    )
    evidence = cast(kept.evidence, Text) if with_evidence else null()
    after = tuple_(
        *(parameter("epoch", BigInteger), parameter("lane", Integer), parameter("seq", BigInteger)),
        *(parameter("quota", Text), parameter("period", Text)),
    )
    return compiled(
        select(
            *(*name, kept.reason, func.pg_column_size(kept.evidence).label("stored_bytes")),
            *(evidence.label("evidence"), kept.recorded_at, IS_OPEN.label("is_open")),
            proposal.scalar_subquery().label("proposal"),
        )
        .where(tuple_(*name) > after, *(_CONDITIONS[each] for each in conditions))
        .order_by(*name)
        .limit(parameter("count", BigInteger))
    )
