"""Propose and approve a resolution of suspense, of a quarantine or of a lane: two people, two transactions.

A new proposal for a lease or a lane replaces the open one under a new id, so that people approve what they have read.
A lease is named by its own period. If that period is closed, its correction in an open period is resolved.
"""

from datetime import datetime
from typing import NamedTuple, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.access.token_names import TokenName
from coordinator.database.connection import Connection
from coordinator.epochs.lost_ledger import kept_seq, rebase_lane
from coordinator.exchange.book_entries import book_entries
from coordinator.exchange.late_usage import lock_late_usage
from coordinator.exchange.rules.balances import Key, Lease, Pool
from coordinator.exchange.rules.locked import LockedPool
from coordinator.exchange.rules.posting import Movement
from coordinator.exchange.rules.settlement import WITHOUT_LEASE, EpochState, Lane, QuarantineReason
from coordinator.exchange.statements.balances import insert_leases, write_balances, write_corrections
from coordinator.exchange.statements.lanes import lock_lane
from coordinator.exchange.statements.leases import read_leases
from coordinator.exchange.statements.pools import lock_pools
from coordinator.periods.rules.closing import Late, late_of
from coordinator.suspense.rules import (
    EpochEnd,
    ResolutionKind,
    ResolutionRefusal,
    ResolutionTerms,
    propose,
    propose_for_held,
    resolve,
    resolve_late,
)
from protocol.lease import LeaseState


class Resolution(msgspec.Struct, frozen=True):
    id: UUID
    epoch: int
    quota: str | None  # of a lease
    period: str | None
    lane: int | None  # of a lane, with the sequence number of the batch that it continues with
    seq: int | None
    kind: ResolutionKind
    suspense: int  # at the time of the proposal
    charged: int  # of these, billed as an estimate
    reason: str
    proposed_by: UUID
    proposed_at: datetime
    approved_by: UUID | None
    approved_at: datetime | None
    bulk: UUID | None = None  # the proposal of many that this is one of
    proposed_by_name: TokenName = msgspec.UNSET
    approved_by_name: TokenName = msgspec.UNSET


class Proposal(NamedTuple):
    epoch: int
    about: Key | int  # a lease, or a lane
    kind: ResolutionKind
    units: int
    reason: str


class LockedLease(NamedTuple):
    locked: LockedPool
    lease: Lease
    epoch: EpochEnd


class _About(NamedTuple):
    quota: str | None = None
    period: str | None = None
    lane: int | None = None
    seq: int | None = None


class HeldReport(NamedTuple):
    """A kept report without a lease: it names a quota or a period that it cannot be booked on."""

    key: Key
    epoch: int
    region: str
    end: EpochEnd
    consumed: int  # the largest total that the region reported


Found: TypeAlias = Lane | LockedLease | Late | HeldReport


async def propose_resolution(
    connection: Connection, proposal: Proposal, by: Actor, now: datetime
) -> Resolution | ResolutionRefusal:
    found = await _lock(connection, proposal.epoch, proposal.about, now)
    if found is None:
        return ResolutionRefusal.NO_SUCH_LEASE
    if isinstance(found, Lane):
        about = _About(lane=found.lane, seq=await kept_seq(connection, found))
        terms = ResolutionTerms(proposal.kind, 0, 0) if about.seq else ResolutionRefusal.NOT_REGRESSED
    elif isinstance(found, HeldReport):
        about, terms = _About(*found.key), propose_for_held(proposal.kind)
    else:
        about = _About(*found.lease.key)
        book = found.book if isinstance(found, Late) else found.lease
        is_implausible = await _is_implausible(connection, proposal.epoch, found.lease.key)
        terms = propose(book, proposal.kind, proposal.units, is_implausible=is_implausible)
    if isinstance(terms, ResolutionRefusal):
        return terms
    row = await connection.fetchrow(
        _PROPOSE, uuid4(), proposal.epoch, *about, *terms, proposal.reason, UUID(by.name), now
    )
    resolution = _resolution(row)
    await _record(connection, by, Action.RESOLUTION_PROPOSED, resolution, now)
    return resolution


async def approve_resolution(
    connection: Connection, id_: UUID, by: Actor, now: datetime
) -> Resolution | ResolutionRefusal:
    """Approve a resolution and carry it out. Approving it a second time changes nothing."""
    read = await connection.fetchrow(_READ, id_)
    if read is None:
        return ResolutionRefusal.NO_SUCH_PROPOSAL
    about = Key(read["quota"], read["period"]) if read["lane"] is None else read["lane"]
    found = await _lock(connection, read["epoch"], about, now)
    read = await connection.fetchrow(_READ, id_)  # read again under the lock: it may have been replaced or approved
    if found is None or read is None:
        return ResolutionRefusal.NO_SUCH_PROPOSAL
    if read["approved_at"] is not None:
        return _resolution(read)
    if read["proposed_by"] == UUID(by.name):
        return ResolutionRefusal.SAME_PERSON
    refusal = await _carry_out(connection, _resolution(read), found, now)
    if refusal:
        return refusal
    resolution = _resolution(await connection.fetchrow(_APPROVE, id_, UUID(by.name), now))
    await _record(connection, by, Action.RESOLUTION_APPROVED, resolution, now)
    return resolution


async def _carry_out(
    connection: Connection, resolution: Resolution, found: Found, now: datetime
) -> ResolutionRefusal | None:
    if isinstance(found, Lane):
        assert resolution.seq is not None
        return await rebase_lane(connection, found, resolution.seq, resolution.id, now)
    if isinstance(found, HeldReport):
        if resolution.kind is ResolutionKind.WRITE_OFF:
            return None  # nothing was booked
        found = await _create_balances(connection, found, now)
    if isinstance(found, Late):
        entry = await _resolve_late(connection, resolution, found, now)
    else:
        entry = await _resolve(connection, resolution, found, now)
    if isinstance(entry, ResolutionRefusal):
        return entry
    await book_entries(connection, [entry], now)
    return None


async def _resolve(
    connection: Connection, resolution: Resolution, found: LockedLease, now: datetime
) -> Movement | ResolutionRefusal:
    (pool, *_), lease, epoch = found
    state = lease.state
    is_implausible = await _is_implausible(connection, lease.epoch, lease.key)
    entry = resolve(pool, lease, _terms(resolution), epoch, resolution.id, now, is_implausible=is_implausible)
    if not isinstance(entry, ResolutionRefusal):
        await write_balances(connection, [pool], [lease], {(lease.epoch, lease.key): state})
    return entry


async def _resolve_late(
    connection: Connection, resolution: Resolution, found: Late, now: datetime
) -> Movement | ResolutionRefusal:
    is_implausible = await _is_implausible(connection, found.lease.epoch, found.lease.key)
    entry = resolve_late(found, _terms(resolution), resolution.id, now, is_implausible=is_implausible)
    if not isinstance(entry, ResolutionRefusal):
        await write_balances(connection, [found.pool], [], {})
        await write_corrections(connection, [found.book])
    return entry


def _terms(resolution: Resolution) -> ResolutionTerms:
    return ResolutionTerms(resolution.kind, resolution.suspense, resolution.charged)


async def _lock(connection: Connection, epoch: int, about: Key | int, now: datetime) -> Found | None:
    if isinstance(about, int):
        return await lock_lane(connection, epoch, about)
    return await _lock_lease(connection, epoch, about, now)


async def _is_implausible(connection: Connection, epoch: int, key: Key) -> bool:
    found: bool = await connection.fetchval(_IMPLAUSIBLE, epoch, *key, QuarantineReason.IMPLAUSIBLE.value)
    return found


async def _held_report(connection: Connection, epoch: int, key: Key, region: str, end: EpochEnd) -> HeldReport | None:
    consumed = await connection.fetchval(_HELD, epoch, *key, sorted(WITHOUT_LEASE))
    return None if consumed is None else HeldReport(key, epoch, region, end, consumed)


async def _create_balances(connection: Connection, held: HeldReport, now: datetime) -> LockedLease | Late:
    """Create what an approved report is booked on: its period, its pool and a lease in quarantine."""
    locked = (await lock_pools(connection, [held.key], [held.key]))[held.key]
    state = LeaseState.QUARANTINED
    lease = Lease(held.key, held.epoch, held.region, now, now, state, region_consumed=held.consumed)
    if not locked.closed_at:
        await insert_leases(connection, [lease], {(lease.epoch, lease.key): state})
        return LockedLease(locked, lease, held.end)
    pools, corrections = await lock_late_usage(connection, {lease.key: locked}, [lease.epoch], now)
    open_pools = {key: each.pool for key, each in pools.items() if not each.closed_at}
    known = lease, locked.closed_at, corrections, open_pools, now
    late = late_of(*known, closed=locked.pool, returns_count=not held.end.lost_data)
    late.book.quarantined, late.book.region_consumed = True, held.consumed
    return late


async def _lock_lease(
    connection: Connection, epoch: int, key: Key, now: datetime
) -> LockedLease | Late | HeldReport | None:
    """Lock in the ledger's order: the epoch shared, then the pool, which keeps its leases from changing."""
    row = await connection.fetchrow(_SHARE_EPOCH, epoch)
    if row is None:
        return None
    end = EpochEnd(EpochState(row["state"]), row["lost_data"])
    locked = (await lock_pools(connection, [key], [])).get(key)
    lease = await _lease(connection, epoch, key)
    closed_at = locked.closed_at if locked else await connection.fetchval(_CLOSED_AT, key.period)
    if closed_at:
        # Usage without a lease in a closed period has only a correction.
        lease = lease or Lease(key, epoch, row["region"], now, now)
        closed = locked or LockedPool(Pool(key), period_is_open=False, closed_at=closed_at)
        late = await _lock_late(connection, lease, closed, end, now)
        return late or await _held_report(connection, epoch, key, row["region"], end)
    if locked and lease:
        return LockedLease(locked, lease, end)
    return await _held_report(connection, epoch, key, row["region"], end)


async def _lock_late(
    connection: Connection, lease: Lease, closed: LockedPool, end: EpochEnd, now: datetime
) -> Late | None:
    assert closed.closed_at
    pools, corrections = await lock_late_usage(connection, {lease.key: closed}, [lease.epoch], now)
    if not corrections and not lease.granted:
        return None
    open_pools = {key: locked.pool for key, locked in pools.items() if not locked.closed_at}
    known = lease, closed.closed_at, corrections, open_pools, now
    return late_of(*known, closed=closed.pool, returns_count=not end.lost_data)


async def _lease(connection: Connection, epoch: int, key: Key) -> Lease | None:
    leases = await read_leases(connection, [key], [epoch])
    return next((each for each in leases if each.epoch == epoch), None)


def _resolution(row: asyncpg.Record | None) -> Resolution:
    assert row is not None
    return msgspec.convert(dict(row), Resolution)


async def _record(connection: Connection, by: Actor, action: Action, resolution: Resolution, now: datetime) -> None:
    await record(connection, by, action, str(resolution.id), msgspec.to_builtins(resolution), now)


_SHARE_EPOCH = "SELECT region, state, lost_data FROM region_epoch WHERE epoch = $1 FOR SHARE"
_IMPLAUSIBLE = """
SELECT EXISTS (SELECT FROM quarantine WHERE (epoch, quota, period, reason) = ($1, $2, $3, $4))
"""
_HELD = """
SELECT max((evidence ->> 'consumed')::numeric) FROM quarantine
WHERE (epoch, quota, period) = ($1, $2, $3) AND reason = ANY ($4::text[])
"""
_CLOSED_AT = "SELECT closed_at FROM period WHERE id = $1"
_PROPOSE = """
INSERT INTO resolution
    (id, epoch, quota, period, lane, seq, kind, suspense, charged, reason, proposed_by, proposed_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
ON CONFLICT (epoch, quota, period, lane) WHERE approved_at IS NULL
DO UPDATE SET id = excluded.id, seq = excluded.seq, kind = excluded.kind,
    suspense = excluded.suspense, charged = excluded.charged, reason = excluded.reason,
    proposed_by = excluded.proposed_by, proposed_at = excluded.proposed_at, bulk = NULL
RETURNING *
"""
_READ = "SELECT * FROM resolution WHERE id = $1"
_APPROVE = """
UPDATE resolution SET approved_by = $2, approved_at = $3 WHERE id = $1 AND approved_at IS NULL RETURNING *
"""
