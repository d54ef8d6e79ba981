"""Rules for closing a period: what must end first, what leaves the period, and how late evidence is booked.

    open      leases may be granted
    closing   nothing is granted any more; regions report or return what they hold, or it expires
    closed    final: the database refuses every change

Suspense leaves a period at its close as `suspense_carried_out` and waits in an open period, in `suspense_carried`,
where it is never granted. Late evidence is booked there as well, in a correction, so that the closed lease does not
change. Late usage is taken from the carried suspense first. Then it replaces what the closed period had estimated or
written off. The rest is a correction from outside, never a part of what the open period may spend. A late return frees
no units: the carried suspense, or the estimate, is written off.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from coordinator.exchange.rules.balances import Account, Cause, Correction, Key, Lease, Pool
from coordinator.exchange.rules.posting import Entry, Line, Movement, Report, Source, movement, post, split, take
from coordinator.exchange.rules.settlement import Quarantined, QuarantineReason, key_of, lines_disagree, lines_within
from coordinator.usage.rules.reconciliation import Finding
from protocol.lease import LeaseEvent, after
from protocol.messages import FrozenLease
from protocol.periods import Period, period_at, period_of
from protocol.units import MAX_UNITS

HOLD_WAIT = timedelta(hours=1)  # after the grace period: how long a close waits for open holds


def open_key(key: Key, now: datetime) -> Key:
    """Return the key that late evidence is booked under: the same quota in the current period."""
    return Key(key.quota, open_period(key.period, now))


def open_period(closed: str, now: datetime) -> str:
    """Return the current period; never the closed one itself, even if the clock is behind."""
    period = period_of(closed)
    return period_at(period.calendar, max(now, period.ends_at)).id


# --- what is missing ------------------------------------------------------------------------------------------------


class Obstacle(StrEnum):
    NOT_OVER = "not_over"  # the period has not ended
    GRACE = "grace"  # regions still have time to report
    OUTSTANDING = "outstanding"  # a region holds units, and its lease has not expired
    HELD = "held"  # open holds: the region has reported since the period ended, and kept the units
    QUARANTINE = "quarantine"
    PROPOSAL = "proposal"  # a resolution waits for approval
    SUSPENSE = "suspense"  # resolve it, or close with `carry_suspense`
    EARLIER = "earlier"  # an earlier period is open, and its unused units are carried over into this one
    UNBALANCED = "unbalanced"  # the reconciliation has findings


_ENDS_BY_ITSELF = (Obstacle.GRACE, Obstacle.OUTSTANDING, Obstacle.HELD)


class Missing(Struct, frozen=True, kw_only=True):
    """One obstacle to the close."""

    what: Obstacle
    reason: str
    quota: str | None = None
    region: str | None = None
    epoch: int | None = None
    charge_period: str | None = None  # the lease's own period, if that is closed already
    units: int | None = None
    until: datetime | None = None  # when the close stops waiting for open holds

    @property
    def is_for_people(self) -> bool:
        return self.what not in _ENDS_BY_ITSELF


class OpenLease(NamedTuple):
    """A lease or a correction that still has units or a decision outstanding."""

    quota: str
    region: str
    epoch: int
    charge_period: str
    outstanding: int
    suspense: int  # of a correction: its carried suspense
    is_quarantined: bool
    is_proposed: bool
    reported_at: datetime | None = None

    def is_held(self, period: Period) -> bool:
        """Return whether the outstanding units are in open holds.

        At the end of a period a store returns all units but those of open holds. So units that a region still has
        although it has reported since then are held.
        """
        return self.outstanding > 0 and self.reported_at is not None and self.reported_at >= period.ends_at


class OpenHoldTerms(NamedTuple):
    """The time until which a close waits for open holds."""

    until: datetime
    are_left: bool = False  # a person has consented to close without them


def missing_for_close(
    period: Period,
    leases: Iterable[OpenLease],
    findings: Iterable[Finding],
    grace_ends_at: datetime,
    now: datetime,
    holds: OpenHoldTerms,
    *,
    carries_suspense: bool,
) -> list[Missing]:
    if now < period.ends_at:
        return [Missing(what=Obstacle.NOT_OVER, reason=f"it ends at {_moment(period.ends_at)}")]
    return [
        *([Missing(what=Obstacle.GRACE, reason=f"until {_moment(grace_ends_at)}")] if now < grace_ends_at else ()),
        *(each for lease in leases for each in _missing_of(lease, period, holds, now, carries_suspense)),
        *(_missing_balance(finding) for finding in findings),
    ]


def _moment(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


def _missing_of(
    lease: OpenLease, period: Period, holds: OpenHoldTerms, now: datetime, carries_suspense: bool
) -> Iterator[Missing]:
    def missing(what: Obstacle, reason: str, units: int | None, until: datetime | None = None) -> Missing:
        return Missing(
            what=what,
            reason=reason,
            quota=lease.quota,
            region=lease.region,
            epoch=lease.epoch,
            charge_period=lease.charge_period,
            units=units,
            until=until,
        )

    if lease.is_held(period):
        if not holds.are_left and now < holds.until:
            yield missing(Obstacle.HELD, _HELD, lease.outstanding, holds.until)
    elif lease.outstanding:
        yield missing(
            Obstacle.OUTSTANDING, "the region has not reported or returned these units yet", lease.outstanding
        )
    if lease.is_quarantined:
        yield missing(Obstacle.QUARANTINE, "propose and approve `unattributed`", lease.suspense)
    if lease.is_proposed:
        yield missing(Obstacle.PROPOSAL, "approve the proposal, or propose something else", lease.suspense)
    if lease.suspense and not carries_suspense:
        yield missing(Obstacle.SUSPENSE, "resolve it, or close with `carry_suspense`", lease.suspense)


_HELD = "these units are in open holds; wait for the holds to end, or close with `holds: leave`"


def _missing_balance(finding: Finding) -> Missing:
    reason = f"{finding.kind.value}: {finding.reason}"
    return Missing(
        what=Obstacle.UNBALANCED, reason=reason, quota=finding.quota_key, region=finding.region, epoch=finding.epoch
    )


# --- what leaves the period -------------------------------------------------------------------------------------------


def carry(pool: Pool, part: Lease | Correction, open_pool: Pool, correction: Correction) -> Movement:
    """Carry suspense into the open period. Both sides are one movement."""
    entry = movement(part, "suspense_carried", open_pool.key.period)
    units = part.to_carry
    post(entry, pool, part, part.waiting_account, Account.SUSPENSE_CARRIED_OUT, units, Cause.SUSPENSE_CARRIED)
    post(
        entry,
        open_pool,
        correction,
        Account.SUSPENSE_CARRIED_IN,
        Account.SUSPENSE_CARRIED,
        units,
        Cause.SUSPENSE_CARRIED,
    )
    return entry


def correction_of(part: Lease | Correction, period: str) -> Correction:
    """Return a new correction in that period, which continues from the totals of the closed lease or correction."""
    return Correction(
        Key(part.key.quota, period),
        part.epoch,
        part.charge_period,
        part.region,
        region_consumed=part.region_consumed,
        region_returned=part.region_returned,
        quarantined=isinstance(part, Correction) and part.quarantined,
    )


def leave_holds(pool: Pool, lease: Lease) -> Movement:
    """Move the units of open holds into suspense, so that the period can be closed.

    They are carried with the other suspense. A hold that is committed later is late usage of the period.
    """
    entry = movement(lease, "held at the close")
    post(entry, pool, lease, Account.OUTSTANDING, Account.SUSPENSE, lease.outstanding, Cause.EXPIRED)
    lease.demand_milli = lease.waiting = 0
    return entry


def close_lease(lease: Lease) -> None:
    state = after(lease.state, LeaseEvent.CLOSE)
    assert state is not None
    assert not lease.outstanding
    lease.state = state


# --- late evidence --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Late:
    """A lease of a closed period, with the corrections that were made for it since."""

    lease: Lease  # does not change any more
    closed_at: datetime
    past: Sequence[Correction]  # in periods that are closed as well
    book: Correction  # in the open period
    pool: Pool  # of `book`
    closed: Pool  # of the lease
    returns_count: bool  # false for a store that lost data: returned units may have been spent as well
    has_changed: bool = False

    @property
    def consumed(self) -> int:
        """Units consumed, by the lease and all of its corrections."""
        return self.lease.consumed + self.book.consumed + sum(past.consumed for past in self.past)

    @property
    def left(self) -> int:
        """Units that the region may still spend or return, by its own report."""
        said = self.book.region_consumed + self.book.region_returned
        return max(0, self.lease.granted + self.lease.overage - said)

    @property
    def waiting(self) -> int:
        """Units whose usage is still expected: usage up to this number is no new overage."""
        return (
            self.book.suspense_carried + self.book.estimated + self.estimated + self.book.written_off + self.written_off
        )

    @property
    def estimated(self) -> int:
        """Units that were billed as an estimate and not replaced by reported usage yet."""
        estimated = self.lease.estimated + sum(past.estimated for past in self.past)
        return estimated - self.book.replaced - sum(past.replaced for past in self.past)

    @property
    def written_off(self) -> int:
        written_off = self.lease.written_off + sum(past.written_off for past in self.past)
        return written_off - self.book.recovered - sum(past.recovered for past in self.past)


def late_of(
    lease: Lease,
    closed_at: datetime,
    corrections: Sequence[Correction],
    open_pools: Mapping[Key, Pool],
    now: datetime,
    *,
    closed: Pool,
    returns_count: bool,
) -> Late:
    """Return the lease with its corrections, and the correction to book in.

    Carried suspense waits in the newest correction. As long as that one's period is open, late evidence is booked
    there; else the same units would be expected in one period and booked in another.

    The lease gets the region's newest totals from that correction, because reports are judged by the lease.
    """
    in_order = sorted(corrections, key=lambda each: each.key.period)
    newest: Lease | Correction = in_order[-1] if in_order else lease
    if isinstance(newest, Lease) or newest.key not in open_pools:
        book = correction_of(newest, open_period(lease.key.period, now))
    else:
        book = newest
    past = [each for each in in_order if each is not book]
    lease.region_consumed, lease.region_returned = book.region_consumed, book.region_returned
    return Late(lease, closed_at, past, book, open_pools[book.key], closed, returns_count)


def settle_late(
    report: Report,
    frozen_leases: Sequence[FrozenLease],
    lates: Mapping[Key, Late],
    late_days: int,
    now: datetime,
    overage_left: MutableMapping[Key, int] | None = None,
) -> list[Quarantined]:
    """Settle the leases of a batch that belong to closed periods. Return what goes into quarantine."""
    overage_left = {} if overage_left is None else overage_left
    quarantined = []
    for frozen in frozen_leases:
        late = lates[key_of(frozen)]
        key, corrected = late.lease.key, late.book.correction
        is_too_late, most = now - late.closed_at > timedelta(days=late_days), overage_left.get(key, MAX_UNITS)
        reason = _settle(report, frozen, late, most, is_too_late=is_too_late)
        overage_left[key] = most - (late.book.correction - corrected)
        late.lease.region_consumed, late.lease.region_returned = late.book.region_consumed, late.book.region_returned
        if reason:
            quarantined.append(Quarantined(late.lease.key, reason, frozen))
    return quarantined


def _settle(
    report: Report, frozen: FrozenLease, late: Late, most_overage: int, *, is_too_late: bool
) -> QuarantineReason | None:
    book = late.book
    consumed, returned = frozen.consumed - book.region_consumed, frozen.returned - book.region_returned
    if not (consumed or returned or frozen.lines):
        return None
    late.has_changed = True
    book.region_consumed, book.region_returned = frozen.consumed, frozen.returned
    reason = _reason(frozen, late, consumed, returned, is_too_late)
    if reason is None and consumed - late.waiting > most_overage:
        reason = QuarantineReason.IMPLAUSIBLE
    if reason:
        book.quarantined = True
        return reason
    use_late(report, late, lines_within(frozen))
    if late.returns_count:
        return_late(report, late, returned)
    return None


def _reason(
    frozen: FrozenLease, late: Late, consumed: int, returned: int, is_too_late: bool
) -> QuarantineReason | None:
    if late.book.quarantined:
        return QuarantineReason.QUARANTINED_BEFORE
    if is_too_late:
        return QuarantineReason.TOO_LATE
    if lines_disagree(frozen, consumed):
        return QuarantineReason.LINES_DISAGREE
    # A ledger that lost data may have forgotten what it gave, and cannot learn it again once the period is closed.
    given = max(late.lease.granted, frozen.granted) + max(late.lease.overage, frozen.overage)
    left = given - frozen.consumed - frozen.returned
    return QuarantineReason.RETURNED_TOO_MUCH if returned and left < 0 and late.returns_count else None


def use_late(entry: Entry, late: Late, lines: Sequence[Line]) -> None:
    """Book late usage. Usage for which nothing is left is a correction from outside.

    Whether it counts as overage is decided by the limit of its own period.
    """
    book = late.book
    units = sum(line.units for line in lines)
    included, overage = split(lines, late.closed.included_left)
    sources = (
        Source(Account.SUSPENSE_CARRIED, book.suspense_carried, Cause.USAGE),
        Source(Account.ESTIMATED, book.estimated, Cause.USAGE),
        Source(Account.CORRECTION, late.estimated, Cause.REPLACES_ESTIMATE),
        Source(Account.WRITTEN_OFF, book.written_off, Cause.USAGE),
        Source(Account.CORRECTION, late.written_off, Cause.REPLACES_WRITE_OFF),
        Source(Account.CORRECTION, units, Cause.USAGE),
    )
    _count(book, take(entry, late.pool, book, Account.CONSUMED, included, sources))
    book.overage_used += overage
    late.pool.late += units
    late.closed.late_included += units - overage


def return_late(entry: Entry, late: Late, units: int) -> None:
    """Book a late return. It frees no units, for the period that funded them is over: they are written off."""
    book = late.book
    sources = (
        Source(Account.SUSPENSE_CARRIED, book.suspense_carried, Cause.RETURNED),
        Source(Account.ESTIMATED, book.estimated, Cause.RETURNED),
        Source(Account.CORRECTION, late.estimated, Cause.REPLACES_ESTIMATE),
    )
    known = min(units, sum(source.units for source in sources))  # the rest was written off before
    _count(book, take(entry, late.pool, book, Account.WRITTEN_OFF, [Line(known)], sources))


def _count(book: Correction, causes: Mapping[Cause, int]) -> None:
    book.replaced += causes.get(Cause.REPLACES_ESTIMATE, 0)
    book.recovered += causes.get(Cause.REPLACES_WRITE_OFF, 0)
