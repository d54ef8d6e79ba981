"""Judge a numbered batch, and book its usage.

A batch is judged in two steps, since a lane's number decides what is read and locked next: first the number and the
bytes, then the totals. Every answer has a name; nothing a region may send raises an exception here.
"""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from coordinator.exchange.rules.balances import Account, Cause, Key, Lease, Pool
from coordinator.exchange.rules.posting import Entry, Line, Movement, Report, drain, movement, post, use
from protocol.lease import RETURNS_COUNT, LeaseEvent, after
from protocol.messages import ExchangeFault, FrozenBatch, FrozenLease
from protocol.outcomes import ExchangeOutcome
from protocol.periods import period_of
from protocol.units import MAX_UNITS


class EpochState(StrEnum):
    CURRENT = "current"  # may be granted to
    FENCED = "fenced"  # its evidence is booked
    RETIRED = "retired"  # people decided that no more evidence counts


class Lane(NamedTuple):
    """A lane as the ledger has it, locked."""

    epoch: int
    lane: int
    last_seq: int
    last_hash: bytes | None
    head: bytes
    epoch_state: EpochState
    fingerprint: str
    lanes: int
    lost_data: bool = False  # its store did, so what it returned may have been spent


class SettlementVerdict(NamedTuple):
    outcome: ExchangeOutcome
    expected_seq: int | None = None
    is_kept: bool = False  # for people, now and for the first time: acknowledged, and nothing is booked
    fault: ExchangeFault | None = None  # of one that is refused

    @property
    def is_applied(self) -> bool:
        return self.outcome is ExchangeOutcome.APPLIED

    @property
    def is_booked(self) -> bool:
        """True if its number counts from now on."""
        return self.is_applied or self.is_kept

    @property
    def is_answered(self) -> bool:
        """True if the region is told the totals as they are now."""
        return self.outcome in (ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED)

    @property
    def is_acknowledged(self) -> bool:
        """True if the region gets a receipt, and may forget the batch."""
        return self.is_answered or self.outcome is ExchangeOutcome.RETIRED

    @property
    def shows_a_regressed_ledger(self) -> bool:
        """True if a number or totals had been given by the ledger and are unknown to it now."""
        return self.outcome in (ExchangeOutcome.GAP, ExchangeOutcome.LEDGER_REGRESSED)


class QuarantineReason(StrEnum):
    LINES_DISAGREE = "lines_disagree"  # the lines do not add up to what the total grew by
    RETURNED_TOO_MUCH = "returned_too_much"  # more than was left of the lease
    QUARANTINED_BEFORE = "quarantined_before"  # more evidence on a lease that people have yet to look at
    TOO_LATE = "too_late"  # its period was closed longer ago than the contract allows
    EPOCH_RETIRED = "epoch_retired"  # people decided that no more evidence counts, and here is some
    LEDGER_REGRESSED = "ledger_regressed"  # of a whole batch: the ledger had given what it does not know any more
    IMPLAUSIBLE = "implausible"  # more usage beyond its grants than one region may report without people's approval
    UNKNOWN_QUOTA = "unknown_quota"  # never granted, and no allowance of the limits document
    IMPLAUSIBLE_PERIOD = "implausible_period"  # never granted, and no period of the quota's calendar near now
    OVER_BUDGET = "over_budget"  # never granted, and the region has named too many new keys or periods in this minute


# Kept as rows of the quarantine table only: there is no lease, pool or period of such a report.
WITHOUT_LEASE = frozenset(
    {QuarantineReason.UNKNOWN_QUOTA, QuarantineReason.IMPLAUSIBLE_PERIOD, QuarantineReason.OVER_BUDGET}
)


class Quarantined(NamedTuple):
    key: Key
    reason: QuarantineReason
    evidence: FrozenLease


# --- judging ----------------------------------------------------------------------------------------------------------


def judge_number(lane: Lane | None, fingerprint: str, seq: int, body_hash: bytes) -> SettlementVerdict:
    """Return a verdict. `applied` means that the totals are judged next; every other outcome is final."""
    if lane is None:
        return SettlementVerdict(ExchangeOutcome.UNKNOWN_EPOCH)
    if lane.epoch_state is EpochState.RETIRED:
        return _judge_late(_judge_seq(lane, seq, body_hash))
    # A fenced epoch is reported by its region's next incarnation: evidence is never refused.
    if lane.epoch_state is EpochState.CURRENT and lane.fingerprint != fingerprint:
        return SettlementVerdict(ExchangeOutcome.WRONG_FINGERPRINT)
    return _judge_seq(lane, seq, body_hash)


def _judge_seq(lane: Lane, seq: int, body_hash: bytes) -> SettlementVerdict:
    if seq > lane.last_seq + 1:
        return SettlementVerdict(ExchangeOutcome.GAP, expected_seq=lane.last_seq + 1)
    if seq == lane.last_seq + 1:
        return SettlementVerdict(ExchangeOutcome.APPLIED)
    if seq < lane.last_seq:
        return SettlementVerdict(ExchangeOutcome.STALE)
    return SettlementVerdict(ExchangeOutcome.REPLAYED if body_hash == lane.last_hash else ExchangeOutcome.CONFLICT)


def _judge_late(verdict: SettlementVerdict) -> SettlementVerdict:
    """Return the verdict of a retired epoch: nothing is booked, evidence is kept once and acknowledged."""
    if verdict.outcome in (ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED):
        return SettlementVerdict(ExchangeOutcome.RETIRED, is_kept=verdict.outcome is ExchangeOutcome.APPLIED)
    return verdict


def judge_totals(
    batch: FrozenBatch, leases: Mapping[Key, Lease], closed: Collection[Key] = frozenset()
) -> ExchangeOutcome:
    """Tell whether the store has lost data, or the ledger has.

    `closed`: what the ledger lost of grants in a closed period is not restored, and usage of it is booked all the same.
    So their totals are no evidence.
    """
    outcomes = set()
    for frozen in batch.leases:
        key = key_of(frozen)
        outcomes.add(_judge_lease(frozen, leases.get(key), is_closed=key in closed))
    for evidence_of_loss in (ExchangeOutcome.STORE_REGRESSED, ExchangeOutcome.LEDGER_REGRESSED):
        if evidence_of_loss in outcomes:
            return evidence_of_loss
    return ExchangeOutcome.APPLIED


def _judge_lease(frozen: FrozenLease, lease: Lease | None, *, is_closed: bool = False) -> ExchangeOutcome:
    known = lease or _NOTHING
    if frozen.consumed < known.region_consumed or frozen.returned < known.region_returned:
        return ExchangeOutcome.STORE_REGRESSED
    if not is_closed and (frozen.granted > known.granted or frozen.overage > known.overage):
        return ExchangeOutcome.LEDGER_REGRESSED
    return ExchangeOutcome.APPLIED


class _Known(NamedTuple):
    granted: int
    overage: int
    region_consumed: int
    region_returned: int


_NOTHING = _Known(0, 0, 0, 0)


def key_of(frozen: FrozenLease) -> Key:
    return Key(frozen.quota, frozen.period)


def is_empty(frozen: FrozenLease) -> bool:
    """True for a lease on which nothing ever happened."""
    return not (frozen.consumed or frozen.returned or frozen.lines)


def quarantine_all(batch: FrozenBatch) -> list[Quarantined]:
    """Return evidence that came too late to count, for people to judge."""
    return [
        Quarantined(key_of(frozen), QuarantineReason.EPOCH_RETIRED, frozen)
        for frozen in batch.leases
        if not is_empty(frozen)
    ]


# --- booking ----------------------------------------------------------------------------------------------------------


def settle(
    report: Report,
    frozen_leases: Sequence[FrozenLease],
    pools: Mapping[Key, Pool],
    leases: Mapping[Key, Lease],
    own: Collection[Key] = (),
    overage_left: MutableMapping[Key, int] | None = None,
) -> list[Quarantined]:
    """Book a batch that was judged `applied`. One bad lease does not delay the others.

    `own`: of these pools each region has its own limit, so unallocated units may be another's, and cover nothing.
    `overage_left`: how much more the region may use beyond its grants before people must look at it; what is booked
    as overage is taken off.
    """
    overage_left = {} if overage_left is None else overage_left
    quarantined = []
    for frozen in frozen_leases:
        lease = leases.get(key_of(frozen))
        if lease is None:
            continue  # it was never granted to, and nothing happened on it
        overage = lease.overage
        most_overage = overage_left.get(lease.key, MAX_UNITS)
        reason = _settle_lease(report, frozen, pools[lease.key], lease, most_overage, may_cover=lease.key not in own)
        overage_left[lease.key] = most_overage - (lease.overage - overage)
        lease.region_consumed, lease.region_returned = frozen.consumed, frozen.returned
        if reason:
            quarantined.append(Quarantined(lease.key, reason, frozen))
    return quarantined


def _settle_lease(
    report: Report,
    frozen: FrozenLease,
    pool: Pool,
    lease: Lease,
    most_overage: int = MAX_UNITS,
    *,
    may_cover: bool = True,
) -> QuarantineReason | None:
    """Settle one lease: bring it to its reported totals, or put it into quarantine and return the reason."""
    consumed = frozen.consumed - lease.region_consumed
    # Of a lease whose returns did not count until now, all that it ever returned comes at once.
    returned = frozen.returned - (lease.returned if lease.state in RETURNS_COUNT else lease.region_returned)
    if after(lease.state, LeaseEvent.REPORT) is None:
        return QuarantineReason.QUARANTINED_BEFORE if consumed or returned or frozen.lines else None
    if not (consumed or returned or frozen.lines):
        renew(lease)  # nothing happened since
        return None
    reason = _disagreement(frozen, lease, consumed, returned)
    if reason is None and _overage_of(pool, lease, consumed, returned, may_cover=may_cover) > most_overage:
        reason = QuarantineReason.IMPLAUSIBLE
    if reason:
        _quarantine(report, pool, lease)
        return reason
    # Returned units come first: usage beyond the lease is covered from them.
    if lease.state in RETURNS_COUNT:
        drain(report, pool, lease, Account.UNALLOCATED, returned, Cause.RETURNED)
    cover(report, pool, lease, consumed, at_most=pool.unallocated if may_cover else 0)
    lease.overdrawn = max(lease.overdrawn, frozen.overdrawn)
    _book_lines(report, frozen, pool, lease)
    renew(lease)
    return None


def renew(lease: Lease) -> None:
    """Renew an expired lease once all of its units are accounted for."""
    renewed = after(lease.state, LeaseEvent.RENEW)
    if renewed and not lease.unaccounted:
        lease.state = renewed


def expire(pool: Pool, lease: Lease, now: datetime) -> Movement | None:
    """Set aside what a region has not accounted for when the lease's time and the margin are over.

    Spending has ended, but what was spent is not known, so no unit is freed. Return None if nothing is outstanding.
    """
    state = after(lease.state, LeaseEvent.EXPIRE)
    if state is None or not lease.outstanding or lease.expires_at > now:
        return None
    # A lane that is rebased may give an expired lease units again: each time more was granted than the time before.
    entry = movement(lease, "expired", lease.expires_at.isoformat(), lease.granted, lease.overage)
    post(entry, pool, lease, Account.OUTSTANDING, Account.SUSPENSE, lease.outstanding, Cause.EXPIRED)
    lease.state, lease.demand_milli, lease.waiting = state, 0, 0
    return entry


def may_become_overage(frozen: FrozenLease, lease: Lease) -> bool:
    """Tell whether a report says more than the lease was given: only then a bound for its overage must be known."""
    consumed = frozen.consumed - lease.region_consumed
    returned = frozen.returned - min(lease.returned, lease.region_returned)
    return consumed + returned > lease.unaccounted


def _overage_of(pool: Pool, lease: Lease, consumed: int, returned: int, *, may_cover: bool) -> int:
    """Return how much overage a report would book: what neither the lease nor unallocated units of its pool cover."""
    drained = returned if lease.state in RETURNS_COUNT else 0
    covered = pool.unallocated + drained if may_cover else 0
    return max(0, consumed + drained - lease.unaccounted - covered)


def _disagreement(frozen: FrozenLease, lease: Lease, consumed: int, returned: int) -> QuarantineReason | None:
    if lines_disagree(frozen, consumed):
        return QuarantineReason.LINES_DISAGREE
    # What was consumed since may be more than was left: usage without a grant is booked all the same.
    if returned > lease.unaccounted and lease.state in RETURNS_COUNT:
        return QuarantineReason.RETURNED_TOO_MUCH
    return None


def lines_disagree(frozen: FrozenLease, consumed: int) -> bool:
    return sum(line.units for line in frozen.lines) != consumed


def _quarantine(report: Report, pool: Pool, lease: Lease) -> None:
    """Put a lease into quarantine: nothing of it is available or billed until people have resolved it."""
    state = after(lease.state, LeaseEvent.QUARANTINE)
    assert state is not None
    lease.state = state
    lease.demand_milli = lease.waiting = 0
    post(report, pool, lease, Account.OUTSTANDING, Account.SUSPENSE, lease.outstanding, Cause.QUARANTINED)


def cover(entry: Entry, pool: Pool, lease: Lease, consumed: int, at_most: int) -> None:
    """Cover usage beyond the lease from unallocated units as far as they go, and the rest as overage."""
    short = max(0, consumed - lease.unaccounted)
    covered = min(short, at_most)
    post(entry, pool, lease, Account.UNALLOCATED, Account.OUTSTANDING, covered, Cause.COVERING)
    post(entry, pool, lease, Account.OVERAGE, Account.OUTSTANDING, short - covered, Cause.OVERAGE)


def _book_lines(report: Report, frozen: FrozenLease, pool: Pool, lease: Lease) -> None:
    use(report, pool, lease, lines_within(frozen))


def lines_within(frozen: FrozenLease) -> list[Line]:
    """Return the lines, their minutes clamped to the lease's period: a store's clock does not move usage out of it."""
    period = period_of(frozen.period)
    first, last = period.first_minute, period.last_minute
    return [Line(line.units, min(max(line.minute, first), last), line.dimensions) for line in frozen.lines]
