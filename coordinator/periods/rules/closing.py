"""How a period ends: what must be over first, what leaves it, and what becomes of what comes later.

    open      may be granted in
    closing   nothing is granted any more; regions account for what they hold, or it expires
    closed    final: the database refuses every change

What is in suspense at the close leaves as `suspense_carried_out` and waits in an open period, in `suspense_carried`,
where it is never granted. Late evidence is booked there too, for truth is never refused: in a correction, so that the
closed lease stays as it is. Usage is taken from what was carried, then it replaces what closed books had estimated and
written off, and the rest is a correction from outside: never from what the open period has to spend. What is returned
late frees nothing: what was carried, and what was estimated, is written off.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from coordinator.exchange.rules.balances import (
    Account,
    Cause,
    Correction,
    Entry,
    Key,
    Lease,
    Line,
    Movement,
    Pool,
    Report,
    Source,
    movement,
    post,
    split,
    take,
)
from coordinator.exchange.rules.settlement import Quarantined, QuarantineReason, key_of, lines_disagree, lines_within
from coordinator.usage.rules.reconciliation import Finding
from protocol.lease import LeaseEvent, after
from protocol.messages import FrozenLease
from protocol.periods import Period, period_at, period_of
from protocol.units import MAX_UNITS

HOLD_WAIT = timedelta(hours=1)  # after the grace: so long a close waits for what services hold


def open_key(key: Key, now: datetime) -> Key:
    """Where what comes late for this one is booked: the same quota in the period that runs now."""
    return Key(key.quota, open_period(key.period, now))


def open_period(closed: str, now: datetime) -> str:
    """Never the closed one itself, whatever a clock that is behind says."""
    period = period_of(closed)
    return period_at(period.calendar, max(now, period.ends_at)).id


# --- may it be closed? ------------------------------------------------------------------------------------------------


class Obstacle(StrEnum):
    NOT_OVER = "not_over"  # the period has not ended
    GRACE = "grace"  # regions have some time yet to report
    OUTSTANDING = "outstanding"  # a region has units, and its lease has not expired
    HELD = "held"  # services hold the units: the region has reported since the period ended, and kept them
    QUARANTINE = "quarantine"
    PROPOSAL = "proposal"  # a resolution waits for its approval
    SUSPENSE = "suspense"  # resolve it, or close with `carry_suspense`
    EARLIER = "earlier"  # the period before is not closed, and what is left of it comes into this one
    UNBALANCED = "unbalanced"  # the reconciliation finds something


_ENDS_BY_ITSELF = (Obstacle.GRACE, Obstacle.OUTSTANDING, Obstacle.HELD)


class Missing(Struct, frozen=True, kw_only=True):
    """One thing that has to end first."""

    what: Obstacle
    reason: str
    quota: str | None = None
    region: str | None = None
    epoch: int | None = None
    charge_period: str | None = None  # the lease's own: another one than this if that is closed
    units: int | None = None
    until: datetime | None = None  # of what is held: then the close goes on without it

    @property
    def is_for_people(self) -> bool:
        return self.what not in _ENDS_BY_ITSELF


class OpenLease(NamedTuple):
    """A lease, or a correction, that is not over."""

    quota: str
    region: str
    epoch: int
    charge_period: str
    outstanding: int
    suspense: int  # a correction's: what is carried
    is_quarantined: bool
    is_proposed: bool
    reported_at: datetime | None = None

    def is_held(self, period: Period) -> bool:
        """When a period ends its store returns all but what services hold. So what a region still has, although it has
        reported since then, is held.
        """
        return self.outstanding > 0 and self.reported_at is not None and self.reported_at >= period.ends_at


class HoldTerms(NamedTuple):
    """How long a close waits for what services hold."""

    until: datetime
    are_left: bool = False  # people have said that it goes on without


def missing_for_close(
    period: Period,
    leases: Iterable[OpenLease],
    findings: Iterable[Finding],
    grace_ends_at: datetime,
    now: datetime,
    holds: HoldTerms,
    *,
    carries_suspense: bool,
) -> list[Missing]:
    if now < period.ends_at:
        return [Missing(what=Obstacle.NOT_OVER, reason=f"it ends at {period.ends_at.isoformat()}")]
    return [
        *([Missing(what=Obstacle.GRACE, reason=f"until {grace_ends_at.isoformat()}")] if now < grace_ends_at else ()),
        *(each for lease in leases for each in _missing_of(lease, period, holds, now, carries_suspense)),
        *(_missing_balance(finding) for finding in findings),
    ]


def _missing_of(
    lease: OpenLease, period: Period, holds: HoldTerms, now: datetime, carries_suspense: bool
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
        yield missing(Obstacle.OUTSTANDING, "the region has not accounted for it yet", lease.outstanding)
    if lease.is_quarantined:
        yield missing(Obstacle.QUARANTINE, "propose and approve `unattributed`", lease.suspense)
    if lease.is_proposed:
        yield missing(Obstacle.PROPOSAL, "somebody has to approve it, or propose something else", lease.suspense)
    if lease.suspense and not carries_suspense:
        yield missing(Obstacle.SUSPENSE, "resolve it, or close with `carry_suspense`", lease.suspense)


_HELD = "services hold these units; the close waits for their holds to end, or goes on without them: `holds: leave`"


def _missing_balance(finding: Finding) -> Missing:
    reason = f"{finding.word.value}: {finding.reason}"
    return Missing(
        what=Obstacle.UNBALANCED, reason=reason, quota=finding.quota_key, region=finding.region, epoch=finding.epoch
    )


# --- what leaves ------------------------------------------------------------------------------------------------------


def carry(pool: Pool, part: Lease | Correction, open_pool: Pool, correction: Correction) -> Movement:
    """What nobody has accounted for leaves the period and waits in the open one: both sides are one movement."""
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
    """A new one in that period, that goes on where the closed book stands."""
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
    """Set aside what services still hold of a lease, so that its period can be closed.

    It leaves the period with what is in suspense. A hold that is committed later is late usage of the period.
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


# --- what comes late --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Late:
    """A lease whose period is closed, and the books that were opened for it since."""

    lease: Lease  # as it stays
    closed_at: datetime
    past: Sequence[Correction]  # in periods that are closed as well
    book: Correction  # in the open one
    pool: Pool  # to which that belongs
    closed: Pool  # that of the lease
    returns_count: bool  # of a store that lost data, what was returned may have been spent as well
    has_changed: bool = False

    @property
    def consumed(self) -> int:
        """In all books."""
        return self.lease.consumed + self.book.consumed + sum(past.consumed for past in self.past)

    @property
    def left(self) -> int:
        """What may still be spent, or given back, by what the region says."""
        said = self.book.region_consumed + self.book.region_returned
        return max(0, self.lease.granted + self.lease.overage - said)

    @property
    def waiting(self) -> int:
        """What the books expect to be used yet: usage up to it makes no new overage."""
        return (
            self.book.suspense_carried + self.book.estimated + self.estimated + self.book.written_off + self.written_off
        )

    @property
    def estimated(self) -> int:
        """What closed books have billed as an estimate, and nothing has replaced yet."""
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
    """`corrections`: of this lease. What was carried waits in the newest, and as long as the period of that is not
    closed either, it is the book: else the same units would be waited for there and booked elsewhere.

    The lease is told what its region has said since, for that is judged by it.
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
    """Of a batch that was judged `applied`: what belongs to closed periods."""
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
    """What nothing is left for was used all the same: it is a correction from outside. Whether it is within the limit
    is judged by that of its own period.
    """
    book = late.book
    units = sum(line.units for line in lines)
    told, beyond = split(lines, late.closed.included_left)
    sources = (
        Source(Account.SUSPENSE_CARRIED, book.suspense_carried, Cause.USAGE),
        Source(Account.ESTIMATED, book.estimated, Cause.USAGE),
        Source(Account.CORRECTION, late.estimated, Cause.REPLACES_ESTIMATE),
        Source(Account.WRITTEN_OFF, book.written_off, Cause.USAGE),
        Source(Account.CORRECTION, late.written_off, Cause.REPLACES_WRITE_OFF),
        Source(Account.CORRECTION, units, Cause.USAGE),
    )
    _count(book, take(entry, late.pool, book, Account.CONSUMED, told, sources))
    book.overage_used += beyond
    late.pool.late += units
    late.closed.late_included += units - beyond


def return_late(entry: Entry, late: Late, units: int) -> None:
    """Nothing becomes free by it: the period that it was funded in is over. It is neither waited for nor billed."""
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
