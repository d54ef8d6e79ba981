"""What waits for people: leases with units in suspense or in quarantine, and the evidence that was kept for them.

Of a lease whose period is closed its correction waits, in an open period.
"""

from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from coordinator.database.connection import Connection
from coordinator.operations.resolve_suspense import Resolution


class SuspendedLease(msgspec.Struct, frozen=True):
    epoch: int
    region: str
    quota: str
    period: str
    state: str
    suspense: int  # or carried
    estimated: int
    written_off: int
    region_consumed: int  # as the region says; beside it what is booked
    consumed: int
    reported_at: datetime
    waits_in: str  # the period in whose books: its own, or another one if that is closed
    proposal: Resolution | None


class KeptEvidence(msgspec.Struct, frozen=True):
    epoch: int
    lane: int
    seq: int
    quota: str  # empty, as the period: of a whole batch, which shows that the ledger lost data
    period: str
    reason: str
    evidence: Any
    recorded_at: datetime
    is_open: bool  # the lease is still in quarantine, the lane is still behind
    proposal: Resolution | None  # of the lane, or of the lease


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


async def read_suspense(connection: Connection, after: LeaseName, count: int) -> list[SuspendedLease]:
    rows = await connection.fetch(_SUSPENSE, *after, count)
    return [_suspended(dict(row)) for row in rows]


def _suspended(row: dict[str, Any]) -> SuspendedLease:
    proposal = row.pop("proposal")
    return SuspendedLease(**row, proposal=proposal and msgspec.json.decode(proposal, type=Resolution))


async def read_quarantine(connection: Connection, after: EvidenceName, count: int) -> list[KeptEvidence]:
    rows = await connection.fetch(_QUARANTINE, *after, count)
    return [_kept(dict(row)) for row in rows]


def _kept(row: dict[str, Any]) -> KeptEvidence:
    evidence, proposal = msgspec.json.decode(row.pop("evidence")), row.pop("proposal")
    proposed = proposal and msgspec.json.decode(proposal, type=Resolution)
    return KeptEvidence(**row, evidence=evidence, proposal=proposed)


_SUSPENSE = """
WITH waiting AS (
    SELECT epoch, region, quota, period, state, suspense, estimated, written_off, region_consumed, consumed,
        reported_at, period AS waits_in
    FROM lease WHERE suspense > 0 OR state = 'quarantined'
    UNION ALL
    SELECT late.epoch, late.region, late.quota, late.charge_period,
        CASE WHEN late.quarantined THEN 'quarantined' ELSE 'closed' END, late.carried, late.estimated,
        late.written_off, late.region_consumed, coalesce(lease.consumed, 0) + every.consumed,
        coalesce(lease.reported_at, closed.closed_at), late.period
    FROM correction AS late JOIN period AS closed ON closed.id = late.charge_period
    LEFT JOIN lease ON (lease.epoch, lease.quota, lease.period) = (late.epoch, late.quota, late.charge_period),
    LATERAL (SELECT sum(each.consumed) AS consumed, max(each.period) AS newest FROM correction AS each
        WHERE (each.epoch, each.quota, each.charge_period) = (late.epoch, late.quota, late.charge_period)) AS every
    WHERE (late.carried > 0 OR late.quarantined) AND late.period = every.newest
)
SELECT waiting.*, to_json(resolution)::text AS proposal
FROM waiting LEFT JOIN resolution ON (resolution.epoch, resolution.quota, resolution.period)
    = (waiting.epoch, waiting.quota, waiting.period) AND resolution.approved_at IS NULL
WHERE (waiting.period, waiting.quota, waiting.epoch) > ($1, $2, $3)
ORDER BY waiting.period, waiting.quota, waiting.epoch LIMIT $4
"""
IS_OPEN = """CASE quota WHEN '' THEN
        (SELECT last_seq < seq FROM lane WHERE (lane.epoch, lane.lane) = (quarantine.epoch, quarantine.lane))
    ELSE reason IN ('unknown_quota', 'implausible_period', 'over_budget') AND NOT EXISTS (
            SELECT FROM resolution AS ended WHERE (ended.epoch, ended.quota, ended.period)
                = (quarantine.epoch, quarantine.quota, quarantine.period) AND approved_at >= recorded_at)
        OR EXISTS (SELECT FROM lease WHERE state = 'quarantined'
            AND (lease.epoch, lease.quota, lease.period) = (quarantine.epoch, quarantine.quota, quarantine.period))
        OR coalesce((SELECT quarantined FROM correction AS late WHERE (late.epoch, late.quota, late.charge_period)
            = (quarantine.epoch, quarantine.quota, quarantine.period) ORDER BY late.period DESC LIMIT 1), false)
    END"""
_QUARANTINE = f"""
SELECT epoch, lane, seq, quota, period, reason, evidence::text AS evidence, recorded_at,
    {IS_OPEN} AS is_open,
    (SELECT to_json(resolution)::text FROM resolution
        WHERE approved_at IS NULL AND resolution.epoch = quarantine.epoch
            AND ((resolution.lane, resolution.seq) = (quarantine.lane, quarantine.seq)
                OR (resolution.quota, resolution.period) = (quarantine.quota, quarantine.period))
        LIMIT 1) AS proposal
FROM quarantine WHERE (epoch, lane, seq, quota, period) > ($1, $2, $3, $4, $5)
ORDER BY epoch, lane, seq, quota, period LIMIT $6
"""  # noqa: S608 - the expression is that above
