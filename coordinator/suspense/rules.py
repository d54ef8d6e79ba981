"""Rules for resolutions: how people settle suspense and quarantine that no evidence has settled.

    write off      the units in suspense are given up and not billed
    charge         all of them are billed as an estimate
    estimate       a part is billed as an estimate, and the rest is given up
    unattributed   a quarantine ends: the region's totals are booked, as one usage line without a policy. The quarantine
                   of an implausible report may end by a write-off as well, if people do not believe the report
    rebase         a lane continues after its ledger lost data (epochs/rules/lost_ledger.py)

If the period of a lease is closed, its suspense is in a correction in an open period (periods/rules/closing.py). It is
settled there, and the closed period does not change.

An estimate is not consumption: late evidence is taken from it first. Evidence may also arrive between proposal and
approval. What it has taken meanwhile is subtracted from the estimate, so that both orders give the same balances.
"""

from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from coordinator.exchange.rules.balances import Account, Cause, Correction, Key, Lease, Pool
from coordinator.exchange.rules.posting import Line, Movement, drain, movement, post, use
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
    """The reasons why a resolution was not proposed, or not approved."""

    NO_SUCH_LEASE = "no_such_lease"
    NO_SUCH_PROPOSAL = "no_such_proposal"
    NOTHING_IN_SUSPENSE = "nothing_in_suspense"
    MORE_THAN_IN_SUSPENSE = "more_than_in_suspense"
    QUARANTINED = "quarantined"  # resolve the quarantine first
    NOT_QUARANTINED = "not_quarantined"
    NOT_REGRESSED = "not_regressed"  # no kept batch shows that the ledger is behind in this lane
    TOO_FAR_BEHIND = "too_far_behind"  # by too many sequence numbers: retire the epoch instead
    SAME_PERSON = "same_person"  # the person who proposes must not approve


class ResolutionTerms(NamedTuple):
    """The terms of a resolution: of `suspense` units, `charged` are billed as an estimate."""

    kind: ResolutionKind
    suspense: int
    charged: int


class EpochEnd(NamedTuple):
    """The state of the epoch of a lease whose quarantine ends."""

    state: EpochState
    lost_data: bool


def propose(
    book: Lease | Correction, kind: ResolutionKind, units: int, *, is_implausible: bool = False
) -> ResolutionTerms | ResolutionRefusal:
    """Return the terms. `units` is for an estimate; the other kinds follow from the lease or correction.

    `is_implausible`: the quarantine began with a report of more than a region may report without approval.
    """
    waiting = book.to_carry
    if kind is ResolutionKind.UNATTRIBUTED:
        return ResolutionTerms(kind, waiting, 0) if book.is_quarantined else ResolutionRefusal.NOT_QUARANTINED
    if book.is_quarantined:
        dismisses = is_implausible and kind is ResolutionKind.WRITE_OFF
        return ResolutionTerms(kind, waiting, 0) if dismisses else ResolutionRefusal.QUARANTINED
    if not waiting:
        return ResolutionRefusal.NOTHING_IN_SUSPENSE
    charged = {ResolutionKind.WRITE_OFF: 0, ResolutionKind.CHARGE: waiting}.get(kind, units)
    if charged > waiting:
        return ResolutionRefusal.MORE_THAN_IN_SUSPENSE
    return ResolutionTerms(kind, waiting, charged)


def propose_for_held(kind: ResolutionKind) -> ResolutionTerms | ResolutionRefusal:
    """Return the terms for a kept report without a lease: it can be booked whole, or dismissed."""
    if kind in (ResolutionKind.UNATTRIBUTED, ResolutionKind.WRITE_OFF):
        return ResolutionTerms(kind, 0, 0)
    return ResolutionRefusal.QUARANTINED


def resolve(
    pool: Pool,
    lease: Lease,
    terms: ResolutionTerms,
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
    late: Late, terms: ResolutionTerms, resolution: object, now: datetime, *, is_implausible: bool = False
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
    """End the quarantine of a report that people do not believe. Only what was booked before it remains.

    The region's next total of this lease disagrees with its lines again and goes into quarantine, until its store
    begins another epoch.
    """
    _leave_quarantine(lease, epoch)
    lease.region_consumed = lease.consumed


def _refusal(book: Lease | Correction, kind: ResolutionKind, *, is_implausible: bool) -> ResolutionRefusal | None:
    """Refuse the wrong kind: a quarantine ends as `unattributed`, and only implausible reports may be dismissed."""
    if book.is_quarantined == (kind is ResolutionKind.UNATTRIBUTED):
        return None
    if book.is_quarantined and is_implausible and kind is ResolutionKind.WRITE_OFF:
        return None
    return ResolutionRefusal.QUARANTINED if book.is_quarantined else ResolutionRefusal.NOT_QUARANTINED


def _end_suspense(entry: Movement, pool: Pool, book: Lease | Correction, terms: ResolutionTerms) -> None:
    waiting = book.to_carry
    drained, left = max(0, terms.suspense - waiting), min(terms.suspense, waiting)
    estimated = min(left, max(0, terms.charged - drained))
    cause = Cause.CHARGED if terms.kind is ResolutionKind.CHARGE else Cause.ESTIMATED
    post(entry, pool, book, book.waiting_account, Account.ESTIMATED, estimated, cause)
    post(entry, pool, book, book.waiting_account, Account.WRITTEN_OFF, left - estimated, Cause.WRITTEN_OFF)


def _end_quarantine(entry: Movement, pool: Pool, lease: Lease, epoch: EpochEnd, now: datetime) -> None:
    """Book the region's totals. The lease then continues like an expired one, which returns what is left first."""
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
    """Book the region's totals in the correction. Units that the region has returned are not expected any more."""
    book = late.book
    book.quarantined = False
    use_late(entry, late, [unattributed(late.lease.key, book.region_consumed - late.consumed, now)])
    if late.returns_count:
        return_late(entry, late, max(0, book.suspense_carried - late.left))


def book_unattributed(entry: Movement, pool: Pool, lease: Lease, consumed: int, now: datetime) -> None:
    cover(entry, pool, lease, consumed, at_most=pool.unallocated)
    use(entry, pool, lease, [unattributed(lease.key, consumed, now)] if consumed else [])


def unattributed(key: Key, units: int, now: datetime) -> Line:
    """Return a usage line without a policy, for usage of which only the total is known."""
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
    """Book returns. A return of more than was left is booked as overage as well, so that it frees no units."""
    returned = lease.region_returned - lease.returned
    excess = max(0, returned - lease.unaccounted)
    post(entry, pool, lease, Account.OVERAGE, Account.OUTSTANDING, excess, Cause.OVERAGE)
    drain(entry, pool, lease, Account.UNALLOCATED, returned, Cause.RETURNED)
