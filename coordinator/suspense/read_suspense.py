"""What waits for people: leases with units in suspense or in quarantine, and the evidence that was kept for them.

Of a lease whose period is closed its correction waits, in an open period.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from coordinator.database.connection import Connection
from coordinator.suspense.resolve import Resolution

MOST_EVIDENCE_BYTES = 4 * 1024 * 1024  # of one page
EVIDENCE_PREFETCH = 2


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
    stored_bytes: int  # of the evidence, as the database has it: compressed
    recorded_at: datetime
    is_open: bool  # the lease is still in quarantine, the lane is still behind
    proposal: Resolution | None  # of the lane, or of the lease
    evidence: Any = None  # the lease or the batch as it was reported, if it was asked for


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


class QuarantinePage(NamedTuple):
    rows: Sequence[KeptEvidence]
    has_more: bool


async def read_quarantine(connection: Connection, after: EvidenceName, count: int) -> QuarantinePage:
    """Read at most so many rows without their evidence, which may be large."""
    rows = await connection.fetch(_quarantine("NULL"), *after, count + 1)
    return QuarantinePage([_kept(dict(row)) for row in rows[:count]], len(rows) > count)


async def read_quarantine_with_evidence(connection: Connection, after: EvidenceName, count: int) -> QuarantinePage:
    """Read at most so many rows with their evidence: no more than MOST_EVIDENCE_BYTES in all, and at least one row.

    In a transaction: the rows come one after the other, so that no more of them is in memory than is returned.
    """
    kept, size = list[KeptEvidence](), 0
    async for row in connection.cursor(_quarantine("evidence::text"), *after, count + 1, prefetch=EVIDENCE_PREFETCH):
        size += len(row["evidence"])
        if len(kept) == count or (kept and size > MOST_EVIDENCE_BYTES):
            return QuarantinePage(kept, has_more=True)
        kept.append(_kept(dict(row)))
    return QuarantinePage(kept, has_more=False)


def _kept(row: dict[str, Any]) -> KeptEvidence:
    evidence, proposal = row.pop("evidence"), row.pop("proposal")
    proposed = proposal and msgspec.json.decode(proposal, type=Resolution)
    return KeptEvidence(**row, evidence=evidence and msgspec.json.decode(evidence), proposal=proposed)


_SUSPENSE = """
WITH waiting AS (
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


def _quarantine(evidence: str) -> str:
    return f"""
SELECT epoch, lane, seq, quota, period, reason, pg_column_size(evidence) AS stored_bytes, {evidence} AS evidence,
    recorded_at,
    {IS_OPEN} AS is_open,
    (SELECT to_json(resolution)::text FROM resolution
        WHERE approved_at IS NULL AND resolution.epoch = quarantine.epoch
            AND ((resolution.lane, resolution.seq) = (quarantine.lane, quarantine.seq)
                OR (resolution.quota, resolution.period) = (quarantine.quota, quarantine.period))
        LIMIT 1) AS proposal
FROM quarantine WHERE (epoch, lane, seq, quota, period) > ($1, $2, $3, $4, $5)
ORDER BY epoch, lane, seq, quota, period LIMIT $6
"""  # noqa: S608 - the expression is that above
