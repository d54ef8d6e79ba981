"""Let a lane continue whose ledger was put back to an older state, once people have approved it."""

from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.database.connection import Connection
from coordinator.epochs.rules.lost_ledger import (
    empty_reports,
    is_too_far_behind,
    rebase_all,
    reported_leases,
    state_of_restored_lease,
)
from coordinator.exchange.book_entries import book_entries
from coordinator.exchange.late_usage import lock_late_usage
from coordinator.exchange.rules.balances import Key, Lease
from coordinator.exchange.rules.settlement import EpochState, Lane, key_of
from coordinator.exchange.statements.balances import insert_leases, write_balances, write_corrections
from coordinator.exchange.statements.lanes import fill_lane
from coordinator.exchange.statements.leases import read_leases
from coordinator.exchange.statements.pools import lock_pools
from coordinator.suspense.rules import ResolutionRefusal
from protocol.messages import FrozenBatch, FrozenLease


async def kept_seq(connection: Connection, lane: Lane) -> int | None:
    """Return the number of the batch that was kept last, if the lane has not got that far since."""
    seq: int | None = await connection.fetchval(_KEPT_SEQ, lane.epoch, lane.lane, lane.last_seq)
    return seq


async def rebase_lane(
    connection: Connection, lane: Lane, seq: int, resolution: UUID, now: datetime
) -> ResolutionRefusal | None:
    """Bring a lane to just before the kept batch of this number."""
    if seq <= lane.last_seq:
        return ResolutionRefusal.NOT_REGRESSED
    if is_too_far_behind(lane, seq):
        return ResolutionRefusal.TOO_FAR_BEHIND
    region: str = await connection.fetchval("SELECT region FROM region_epoch WHERE epoch = $1", lane.epoch)
    kept = await connection.fetchval(_KEPT, lane.epoch, lane.lane, seq)
    batch = msgspec.json.decode(kept, type=FrozenBatch)
    if lane.epoch_state is not EpochState.RETIRED:  # of which nothing is booked any more
        await _rebase_leases(connection, lane, region, reported_leases(batch), resolution, now)
    if missing := list(empty_reports(lane, region, seq, resolution, now)):
        await fill_lane(connection, lane, missing, now)
    return None


async def _rebase_leases(
    connection: Connection, lane: Lane, region: str, frozen: list[FrozenLease], resolution: UUID, now: datetime
) -> None:
    keys = [key_of(each) for each in frozen]
    pools = await lock_pools(connection, keys, keys)
    pools, corrections = await lock_late_usage(connection, pools, [lane.epoch], now)
    read = await read_leases(connection, keys, [lane.epoch])
    leases = {lease.key: lease for lease in read if lease.epoch == lane.epoch}
    new = [_forgotten(key, lane, region, now) for key in keys if key not in leases]
    leases |= {lease.key: lease for lease in new}
    states = {(lane.epoch, key): lease.state for key, lease in leases.items()}
    done = rebase_all(lane, frozen, leases, pools, corrections, resolution, now)
    await insert_leases(connection, [lease for lease in new if lease in done.leases], states)
    await write_balances(connection, done.pools, done.leases, states)
    await write_corrections(connection, done.corrections)
    await book_entries(connection, done.entries, now)


def _forgotten(key: Key, lane: Lane, region: str, now: datetime) -> Lease:
    return Lease(key, lane.epoch, region, now, now, state_of_restored_lease(lane))


_KEPT_SEQ = """
SELECT seq FROM quarantine WHERE epoch = $1 AND lane = $2 AND quota = '' AND seq > $3
ORDER BY recorded_at DESC, seq DESC LIMIT 1
"""
_KEPT = "SELECT evidence::text FROM quarantine WHERE epoch = $1 AND lane = $2 AND quota = '' AND seq = $3"
