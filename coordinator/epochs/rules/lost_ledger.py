"""Rebase a lane whose ledger was put back to an older state, by the totals that its region reports.

The region sends the batch that the ledger refused again and again. A rebase brings the ledger to where it stood just
before that batch, as far as the batch shows; then the batch is booked like any other, with all its lines.

    given       what the ledger had granted and lost is granted once more, from unallocated units. If that is not
                enough, the rest is funded beyond the limit, and goes as units come back: the region has them
    consumed    what had been booked before the batch, as one line that names no policy
    returned    comes with the batch: it tells of all returns
    numbers     those that were lost are filled with reports of nothing, so that the chain has no gap

Of a lease in quarantine, or of a retired epoch, what was consumed waits for people as it did before. Where the period
is closed by now, nothing is given again: what was consumed is booked like all that comes late.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from coordinator.exchange.rules.balances import Account, Cause, Correction, Key, Lease, Pool
from coordinator.exchange.rules.decision import BookedReport
from coordinator.exchange.rules.locked import LockedPool, lates_of
from coordinator.exchange.rules.posting import Movement, Report, movement, post
from coordinator.exchange.rules.settlement import EpochState, Lane, key_of
from coordinator.periods.rules.closing import Late, use_late
from coordinator.proof.rules import next_head
from coordinator.suspense.rules import book_unattributed, unattributed
from protocol.backoff import Backoff
from protocol.lease import LeaseEvent, LeaseState, after
from protocol.messages import FrozenBatch, FrozenLease

MOST_NUMBERS = 250_000  # of a lane in one resolution: more than a day of two exchanges a second
KEPT_AT_ONCE = 4
KEPT_AGAIN = timedelta(seconds=30)  # a store offers its batch as often
LONGEST_PAUSE_S = 30 * 2**20  # a year
KEPT_BACKOFF_S = Backoff(KEPT_AGAIN.total_seconds(), LONGEST_PAUSE_S)


def is_too_far_behind(lane: Lane, seq: int) -> bool:
    return seq - lane.last_seq - 1 > MOST_NUMBERS


def may_keep_another(kept: Collection[datetime], now: datetime) -> bool:
    """Tell whether another batch of a lane is kept. `kept`: when those were that the lane has not got to.

    A store sends one batch until it is acknowledged: there is one, or a few if the store was put back as well. If there
    are more, each waits twice as long after the last as the one before it. A batch that a store keeps sending is kept
    in the end, so that people can resolve it, and no region fills the table.
    """
    beyond = len(kept) - KEPT_AT_ONCE
    return beyond < 0 or now >= max(kept) + timedelta(seconds=KEPT_BACKOFF_S.pause_after(beyond + 1))


def reported_leases(batch: FrozenBatch) -> list[FrozenLease]:
    """Return the leases on which something was granted or happened."""
    return [each for each in batch.leases if each.granted or each.overage or each.consumed or each.returned]


def state_of_restored_lease(lane: Lane) -> LeaseState:
    """Return the state of a lease that the ledger has to make anew."""
    if lane.epoch_state is EpochState.CURRENT:
        return LeaseState.ACTIVE
    return LeaseState.LOST if lane.lost_data else LeaseState.FENCED


class Rebased(NamedTuple):
    """The rows to write."""

    pools: Sequence[Pool]
    leases: Sequence[Lease]
    corrections: Sequence[Correction]
    entries: Sequence[Movement]


def rebase_all(
    lane: Lane,
    frozen_leases: Sequence[FrozenLease],
    leases: Mapping[Key, Lease],
    pools: Mapping[Key, LockedPool],
    corrections: Sequence[Correction],
    resolution: object,
    now: datetime,
) -> Rebased:
    lates = {late.lease.key: late for late in lates_of(lane, leases.values(), pools, corrections, now)}
    entries = [
        rebase_late(lates[key], frozen, resolution, now)
        if (key := key_of(frozen)) in lates
        else rebase(pools[key].pool, leases[key], frozen, resolution, now)
        for frozen in frozen_leases
    ]
    moved = {transfer.key: None for entry in entries for transfer in entry.transfers}
    return Rebased(
        [pools[key].pool for key in moved],
        [lease for key, lease in leases.items() if key not in lates],
        [late.book for late in lates.values()],
        entries,
    )


def rebase(pool: Pool, lease: Lease, frozen: FrozenLease, resolution: object, now: datetime) -> Movement:
    entry = movement(lease, "rebased", resolution)
    given = max(0, frozen.granted - lease.granted)
    post(entry, pool, None, Account.FUNDING, Account.UNALLOCATED, max(0, given - pool.unallocated), Cause.REBASED)
    post(entry, pool, lease, Account.UNALLOCATED, Account.OUTSTANDING, given, Cause.REBASED)
    beyond = max(0, frozen.overage - lease.overage)
    post(entry, pool, lease, Account.OVERAGE, Account.OUTSTANDING, beyond, Cause.REBASED)
    if after(lease.state, LeaseEvent.REPORT):
        _consume(entry, pool, lease, frozen, now)
    return entry


def rebase_late(late: Late, frozen: FrozenLease, resolution: object, now: datetime) -> Movement:
    entry, book = movement(late.book, "rebased", resolution), late.book
    lost = _booked_before(frozen, book.region_consumed)
    if lost and not book.quarantined:
        use_late(entry, late, [unattributed(late.lease.key, lost, now)])
        book.region_consumed += lost
    return entry


def _consume(entry: Movement, pool: Pool, lease: Lease, frozen: FrozenLease, now: datetime) -> None:
    lost = _booked_before(frozen, lease.region_consumed)
    book_unattributed(entry, pool, lease, lost, now)
    lease.region_consumed += lost


def _booked_before(frozen: FrozenLease, known: int) -> int:
    """Return what was booked before the batch: the total without the lines of the batch."""
    return max(0, frozen.consumed - sum(line.units for line in frozen.lines) - known)


def empty_reports(lane: Lane, region: str, before: int, resolution: object, now: datetime) -> Iterator[BookedReport]:
    """Yield empty reports for the numbers up to the one `before`. Their hash names the resolution."""
    head, body_hash = lane.head, hashlib.sha256(f"rebase {resolution}".encode()).digest()
    for seq in range(lane.last_seq + 1, before):
        report = Report(region, lane.epoch, lane.lane, seq)
        head = next_head(head, report, body_hash, now)
        yield BookedReport(report, body_hash, head, ())
