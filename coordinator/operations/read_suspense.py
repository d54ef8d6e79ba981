"""What waits for people: leases with units in suspense or in quarantine, and the evidence that was kept for them."""

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
    suspense: int
    estimated: int
    written_off: int
    region_consumed: int  # as the region says; beside it what is booked
    consumed: int
    reported_at: datetime
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
    proposal: Resolution | None  # of a lane


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
SELECT lease.epoch, lease.region, lease.quota, lease.period, lease.state, lease.suspense, lease.estimated,
    lease.written_off, lease.region_consumed, lease.consumed, lease.reported_at, to_json(resolution)::text AS proposal
FROM lease LEFT JOIN resolution ON (resolution.epoch, resolution.quota, resolution.period)
    = (lease.epoch, lease.quota, lease.period) AND resolution.approved_at IS NULL
WHERE (lease.suspense > 0 OR lease.state = 'quarantined') AND (lease.period, lease.quota, lease.epoch) > ($1, $2, $3)
ORDER BY lease.period, lease.quota, lease.epoch LIMIT $4
"""
_QUARANTINE = """
SELECT epoch, lane, seq, quota, period, reason, evidence::text AS evidence, recorded_at,
    CASE quota WHEN '' THEN
        (SELECT last_seq < seq FROM lane WHERE (lane.epoch, lane.lane) = (quarantine.epoch, quarantine.lane))
    ELSE coalesce((SELECT state = 'quarantined' FROM lease
        WHERE (lease.epoch, lease.quota, lease.period) = (quarantine.epoch, quarantine.quota, quarantine.period)),
        false) END AS is_open,
    (SELECT to_json(resolution)::text FROM resolution
        WHERE (resolution.epoch, resolution.lane, resolution.seq)
            = (quarantine.epoch, quarantine.lane, quarantine.seq) AND approved_at IS NULL) AS proposal
FROM quarantine WHERE (epoch, lane, seq, quota, period) > ($1, $2, $3, $4, $5)
ORDER BY epoch, lane, seq, quota, period LIMIT $6
"""
