"""How people end what no evidence has ended, and what becomes of the units then.

    write off      what is in suspense is given up: nobody is billed
    charge         all of it is billed as an estimate
    estimate       a part is billed as an estimate, the rest is given up
    unattributed   a quarantine ends: what the region's totals say is booked, as one line that names no policy
                   A quarantine of an implausible report may end by a write-off as well: people do not believe it
    rebase         a lane goes on whose ledger lost data (rebasing.py)

Of a lease whose period is closed, what waits is in a correction of an open one (closing.py): there it is ended, and
the closed books stay as they are.

An estimate is no consumption: late evidence drains it first (books.DRAINED). Evidence may also come between proposal
and approval; what it drained meanwhile is taken off the estimate, so that both orders end with the same books.
"""

from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from coordinator.exchange.rules.balances import (
    Account,
    Cause,
    Correction,
    Key,
    Lease,
    Line,
    Movement,
    Pool,
    drain,
    movement,
    post,
    use,
)
from coordinator.exchange.rules.settlement import EpochState, cover, renew
from coordinator.limits.rules.entitlement import tenant_of
from coordinator.periods.rules.closing import Late, return_late, use_late
from protocol.lease import RETURNS_COUNT, LeaseEvent, after
from protocol.periods import minute_of, period_of


class ResolutionKind(StrEnum):
    WRITE_OFF = "write_off"
    CHARGE = "charge"
    ESTIMATE = "estimate"
    UNATTRIBUTED = "unattributed"
    REBASE = "rebase"


class ResolutionRefusal(StrEnum):
    """Why a resolution was not proposed, or not approved."""

    NO_SUCH_LEASE = "no_such_lease"
    NO_SUCH_PROPOSAL = "no_such_proposal"
    NOTHING_IN_SUSPENSE = "nothing_in_suspense"
    MORE_THAN_IN_SUSPENSE = "more_than_in_suspense"
    QUARANTINED = "quarantined"  # its totals come first
    NOT_QUARANTINED = "not_quarantined"
    NOT_REGRESSED = "not_regressed"  # nothing is kept that shows the ledger to be behind in this lane
    TOO_FAR_BEHIND = "too_far_behind"  # in numbers: the epoch is to be retired
    SAME_PERSON = "same_person"  # who proposes does not approve


class Terms(NamedTuple):
    """What is to be done: of so many units in suspense, so many are billed as an estimate."""

    kind: ResolutionKind
    suspense: int
    charged: int


class EpochEnd(NamedTuple):
    """How it stands with the epoch of a lease whose quarantine ends."""

    state: EpochState
    lost_data: bool


def propose(
    book: Lease | Correction, kind: ResolutionKind, units: int, *, is_implausible: bool = False
) -> Terms | ResolutionRefusal:
    """`units` of an estimate; of the others, what they are follows from the book.

    `is_implausible`: its quarantine began with a report of more than a region may report without people's approval.
    """
    waiting = book.to_carry
    if kind is ResolutionKind.UNATTRIBUTED:
        return Terms(kind, waiting, 0) if book.is_quarantined else ResolutionRefusal.NOT_QUARANTINED
    if book.is_quarantined:
        dismisses = is_implausible and kind is ResolutionKind.WRITE_OFF
        return Terms(kind, waiting, 0) if dismisses else ResolutionRefusal.QUARANTINED
    if not waiting:
        return ResolutionRefusal.NOTHING_IN_SUSPENSE
    charged = {ResolutionKind.WRITE_OFF: 0, ResolutionKind.CHARGE: waiting}.get(kind, units)
    if charged > waiting:
        return ResolutionRefusal.MORE_THAN_IN_SUSPENSE
    return Terms(kind, waiting, charged)


def propose_for_held(kind: ResolutionKind) -> Terms | ResolutionRefusal:
    """Propose how a report ends that is kept without a lease: booked whole, or dismissed."""
    if kind in (ResolutionKind.UNATTRIBUTED, ResolutionKind.WRITE_OFF):
        return Terms(kind, 0, 0)
    return ResolutionRefusal.QUARANTINED


def resolve(
    pool: Pool,
    lease: Lease,
    terms: Terms,
    epoch: EpochEnd,
    resolution: object,
    now: datetime,
    *,
    is_implausible: bool = False,
) -> Movement | ResolutionRefusal:
    if refusal := _refusal(lease, terms.kind, is_implausible=is_implausible):
        return refusal
    entry = movement(lease, "resolved", resolution)
    if terms.kind is ResolutionKind.UNATTRIBUTED:
        _end_quarantine(entry, pool, lease, epoch, now)
        return entry
    if lease.is_quarantined:
        _dismiss_report(lease, epoch)
    _end_suspense(entry, pool, lease, terms)
    return entry


def resolve_late(
    late: Late, terms: Terms, resolution: object, now: datetime, *, is_implausible: bool = False
) -> Movement | ResolutionRefusal:
    if refusal := _refusal(late.book, terms.kind, is_implausible=is_implausible):
        return refusal
    entry = movement(late.book, "resolved", resolution)
    if terms.kind is ResolutionKind.UNATTRIBUTED:
        _end_late_quarantine(entry, late, now)
        return entry
    if late.book.quarantined:
        late.book.quarantined, late.book.region_consumed = False, late.consumed
    _end_suspense(entry, late.pool, late.book, terms)
    return entry


def _dismiss_report(lease: Lease, epoch: EpochEnd) -> None:
    """End the quarantine of a report that people do not believe: what was booked before it stands, and nothing more.

    The region's next total of this lease disagrees with its lines again, and is quarantined: its store has to begin
    another epoch first.
    """
    _leave_quarantine(lease, epoch)
    lease.region_consumed = lease.consumed


def _refusal(book: Lease | Correction, kind: ResolutionKind, *, is_implausible: bool) -> ResolutionRefusal | None:
    """A quarantine ends by what the totals say; only an implausible report may be dismissed."""
    if book.is_quarantined == (kind is ResolutionKind.UNATTRIBUTED):
        return None
    if book.is_quarantined and is_implausible and kind is ResolutionKind.WRITE_OFF:
        return None
    return ResolutionRefusal.QUARANTINED if book.is_quarantined else ResolutionRefusal.NOT_QUARANTINED


def _end_suspense(entry: Movement, pool: Pool, book: Lease | Correction, terms: Terms) -> None:
    waiting = book.to_carry
    drained, left = max(0, terms.suspense - waiting), min(terms.suspense, waiting)
    estimated = min(left, max(0, terms.charged - drained))
    cause = Cause.CHARGED if terms.kind is ResolutionKind.CHARGE else Cause.ESTIMATED
    post(entry, pool, book, book.waiting_account, Account.ESTIMATED, estimated, cause)
    post(entry, pool, book, book.waiting_account, Account.WRITTEN_OFF, left - estimated, Cause.WRITTEN_OFF)


def _end_quarantine(entry: Movement, pool: Pool, lease: Lease, epoch: EpochEnd, now: datetime) -> None:
    """The region's totals count from here on. The lease is like one that expired: it returns first what is left."""
    _leave_quarantine(lease, epoch)
    book_unattributed(entry, pool, lease, lease.region_consumed - lease.consumed, now)
    if lease.state in RETURNS_COUNT:
        _rebase_returns(entry, pool, lease)
    renew(lease)


def _leave_quarantine(lease: Lease, epoch: EpochEnd) -> None:
    for event in (LeaseEvent.RESOLVE, *_ends(epoch)):
        state = after(lease.state, event)
        assert state is not None
        lease.state = state


def _end_late_quarantine(entry: Movement, late: Late, now: datetime) -> None:
    """Likewise. What the region says it has given back is not waited for any more."""
    book = late.book
    book.quarantined = False
    use_late(entry, late, [unattributed(late.lease.key, book.region_consumed - late.consumed, now)])
    if late.returns_count:
        return_late(entry, late, max(0, book.suspense_carried - late.left))


def book_unattributed(entry: Movement, pool: Pool, lease: Lease, consumed: int, now: datetime) -> None:
    cover(entry, pool, lease, consumed, at_most=pool.unallocated)
    use(entry, pool, lease, [unattributed(lease.key, consumed, now)] if consumed else [])


def unattributed(key: Key, units: int, now: datetime) -> Line:
    """One line that names no policy: of this usage only the total is known."""
    period, tenant = period_of(key.period), tenant_of(key.quota)
    minute = min(max(minute_of(now), period.first_minute), period.last_minute)
    return Line(units, minute, {"policy": "unattributed"} | ({"tenant": tenant} if tenant is not None else {}))


def _ends(epoch: EpochEnd) -> tuple[LeaseEvent, ...]:
    if epoch.state is EpochState.CURRENT:
        return ()
    if epoch.state is EpochState.RETIRED:
        return (LeaseEvent.RETIRE,)
    return (LeaseEvent.LOSE if epoch.lost_data else LeaseEvent.FENCE,)


def _rebase_returns(entry: Movement, pool: Pool, lease: Lease) -> None:
    """More than there was can only be returned as overage: both totals rise alike, and nothing becomes grantable."""
    returned = lease.region_returned - lease.returned
    beyond = max(0, returned - lease.unaccounted)
    post(entry, pool, lease, Account.OVERAGE, Account.OUTSTANDING, beyond, Cause.OVERAGE)
    drain(entry, pool, lease, Account.UNALLOCATED, returned, Cause.RETURNED)
