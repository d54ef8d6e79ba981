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
    quota: str
    period: str
    reason: str
    evidence: Any
    recorded_at: datetime
    is_open: bool  # the lease is still in quarantine


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
    return [KeptEvidence(**dict(row) | {"evidence": msgspec.json.decode(row["evidence"])}) for row in rows]


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
    coalesce((SELECT state = 'quarantined' FROM lease
        WHERE (lease.epoch, lease.quota, lease.period) = (quarantine.epoch, quarantine.quota, quarantine.period)),
        false) AS is_open
FROM quarantine WHERE (epoch, lane, seq, quota, period) > ($1, $2, $3, $4, $5)
ORDER BY epoch, lane, seq, quota, period LIMIT $6
"""
