"""Check every outcome of a numbered batch, and what settling a lease moves."""

from datetime import timedelta

import pytest

from coordinator.exchange.rules.balances import Account, Cause, Lease, Pool
from coordinator.exchange.rules.granting import refusal_of
from coordinator.exchange.rules.posting import Report, movement, post
from coordinator.exchange.rules.settlement import (
    EpochState,
    Lane,
    QuarantineReason,
    SettlementVerdict,
    expire,
    judge_number,
    judge_totals,
    settle,
)
from protocol.lease import LeaseState
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from tests.unit.coordinator.exchange.test_balances import KEY, NOW, batch, frozen_lease, new_lease

LAST, OTHER = b"last", b"other"


def lane(state: EpochState = EpochState.CURRENT) -> Lane:
    return Lane(1, 0, last_seq=4, last_hash=LAST, head=b"", epoch_state=state, fingerprint="f1", lanes=4)


@pytest.mark.parametrize(
    ("seq", "body_hash", "outcome", "expected"),
    [
        (5, OTHER, ExchangeOutcome.APPLIED, None),
        (4, LAST, ExchangeOutcome.REPLAYED, None),
        (4, OTHER, ExchangeOutcome.CONFLICT, None),
        (3, LAST, ExchangeOutcome.STALE, None),
        (6, OTHER, ExchangeOutcome.GAP, 5),
    ],
)
def test_the_sequence_number_decides(
    seq: int, body_hash: bytes, outcome: ExchangeOutcome, expected: int | None
) -> None:
    assert judge_number(lane(), "f1", seq, body_hash) == SettlementVerdict(outcome, expected)


@pytest.mark.parametrize(
    ("state", "fingerprint", "outcome"),
    [
        (EpochState.CURRENT, "f2", ExchangeOutcome.WRONG_FINGERPRINT),
        (EpochState.FENCED, "f2", ExchangeOutcome.APPLIED),  # evidence is never refused
        (EpochState.RETIRED, "f1", ExchangeOutcome.RETIRED),
    ],
)
def test_an_epoch_decides_before_the_number(state: EpochState, fingerprint: str, outcome: ExchangeOutcome) -> None:
    assert judge_number(lane(state), fingerprint, 5, OTHER).outcome is outcome


def test_an_epoch_that_was_never_issued_is_unknown() -> None:
    assert judge_number(None, "f1", 1, OTHER).outcome is ExchangeOutcome.UNKNOWN_EPOCH


def leased(**columns: int) -> Lease:
    lease = new_lease("us-east", 1)
    for column, units in columns.items():
        setattr(lease, column, units)
    return lease


@pytest.mark.parametrize(
    ("granted", "overage", "consumed", "returned", "outcome"),
    [
        (100, 0, 7, 3, ExchangeOutcome.APPLIED),
        (40, 0, 7, 3, ExchangeOutcome.APPLIED),  # a reply was lost
        (100, 0, 6, 3, ExchangeOutcome.STORE_REGRESSED),
        (100, 0, 7, 2, ExchangeOutcome.STORE_REGRESSED),
        (101, 0, 7, 3, ExchangeOutcome.LEDGER_REGRESSED),
        (100, 1, 7, 3, ExchangeOutcome.LEDGER_REGRESSED),
    ],
)
def test_totals_show_which_side_lost_data(
    granted: int, overage: int, consumed: int, returned: int, outcome: ExchangeOutcome
) -> None:
    lease = leased(granted=100, region_consumed=7, region_returned=3)
    assert judge_totals(batch(frozen_lease(granted, overage, consumed, returned, 0)), {KEY: lease}) is outcome


def test_a_lease_that_the_ledger_does_not_know() -> None:
    assert judge_totals(batch(frozen_lease(0, 0, 0, 0, 0)), {}) is ExchangeOutcome.APPLIED
    assert judge_totals(batch(frozen_lease(1, 0, 0, 0, 0)), {}) is ExchangeOutcome.LEDGER_REGRESSED


def settled(pool: Pool, lease: Lease, *totals: int) -> tuple[list[tuple[Cause, int]], list[QuarantineReason]]:
    report = Report("us-east", 1, 0, 1)
    bad = settle(report, [frozen_lease(*totals)], {KEY: pool}, {KEY: lease})
    assert pool.balances
    assert lease.balances
    return [(each.cause, each.units) for each in report.transfers], [each.reason for each in bad]


def funded_pool(unallocated: int, outstanding: int) -> Pool:
    return Pool(KEY, funded=unallocated + outstanding, unallocated=unallocated, outstanding=outstanding)


def test_usage_beyond_the_lease_is_covered_before_it_is_overage() -> None:
    pool, lease = funded_pool(3, 10), leased(granted=10, outstanding=10)
    moved, _ = settled(pool, lease, 10, 0, 15, 0, 15)
    assert moved == [(Cause.COVERING, 3), (Cause.OVERAGE, 2), (Cause.USAGE, 13), (Cause.USAGE, 2)]
    assert (lease.granted, lease.overage, lease.consumed, pool.grantable) == (13, 2, 15, 0)


def test_returns_become_grantable_again_after_overage_is_made_up() -> None:
    pool, lease = funded_pool(5, 10), leased(granted=10, outstanding=10)
    pool.overage = pool.consumed = 3
    moved, _ = settled(pool, lease, 10, 0, 4, 6, 4)
    assert moved == [(Cause.RETURNED, 6), (Cause.USAGE, 4)]
    assert (pool.unallocated, pool.grantable) == (11, 8)


def test_returns_of_an_epoch_with_data_loss_go_to_suspense() -> None:
    pool, lease = funded_pool(0, 10), leased(granted=10, outstanding=10)
    lease.state = LeaseState.LOST
    moved, reasons = settled(pool, lease, 10, 0, 4, 6, 4)
    assert moved == [(Cause.USAGE, 4)]
    assert (lease.outstanding, lease.returned, lease.region_returned, reasons) == (6, 0, 6, [])


def test_returns_of_a_fenced_epoch_without_data_loss_are_free_at_once() -> None:
    """Free what is left except the units that are still held in the region, which stay reserved."""
    pool, lease = funded_pool(0, 10), leased(granted=10, outstanding=10)
    lease.state = LeaseState.FENCED
    moved, _ = settled(pool, lease, 10, 0, 4, 5, 4)
    assert moved == [(Cause.RETURNED, 5), (Cause.USAGE, 4)]
    assert (pool.grantable, lease.outstanding, lease.state) == (5, 1, LeaseState.FENCED)


def set_aside(pool: Pool, lease: Lease) -> None:
    assert expire(pool, lease, NOW)
    assert (lease.state, lease.outstanding, lease.suspense) == (LeaseState.EXPIRED, 0, 10)


def test_a_lease_that_expired_is_settled_to_the_unit_by_its_next_report() -> None:
    pool, lease = funded_pool(3, 10), leased(granted=10, outstanding=10)
    set_aside(pool, lease)
    assert settled(pool, lease, 10, 0, 7, 0, 7) == ([(Cause.USAGE, 7)], [])
    assert (lease.state, lease.suspense, pool.grantable) == (LeaseState.EXPIRED, 3, 3)
    assert refusal_of(lease) is GrantRefusal.LEASE_EXPIRED
    assert settled(pool, lease, 10, 0, 7, 3, 0) == ([(Cause.RETURNED, 3)], [])
    assert (lease.state, lease.suspense, pool.grantable) == (LeaseState.ACTIVE, 0, 6)


def test_late_usage_drains_suspense_estimate_and_write_off_before_it_is_overage() -> None:
    pool, lease = funded_pool(2, 10), leased(granted=10, outstanding=10)
    set_aside(pool, lease)
    entry = movement(lease, "resolved")
    post(entry, pool, lease, Account.SUSPENSE, Account.ESTIMATED, 4, Cause.ESTIMATED)
    post(entry, pool, lease, Account.SUSPENSE, Account.WRITTEN_OFF, 3, Cause.WRITTEN_OFF)
    pool.unallocated = pool.funded = 0
    pool.funded = 10
    settled(pool, lease, 10, 0, 5, 0, 5)
    assert (lease.suspense, lease.estimated, lease.written_off) == (0, 2, 3)
    settled(pool, lease, 10, 0, 12, 0, 7)
    assert (lease.estimated, lease.written_off, lease.consumed, lease.overage) == (0, 0, 12, 2)
    assert lease.consumed + lease.estimated == 12  # billed usage is what was reported, once


def test_a_return_reduces_the_estimate() -> None:
    pool, lease = funded_pool(0, 10), leased(granted=10, outstanding=10)
    set_aside(pool, lease)
    post(movement(lease, "resolved"), pool, lease, Account.SUSPENSE, Account.ESTIMATED, 10, Cause.CHARGED)
    settled(pool, lease, 10, 0, 4, 6, 4)
    assert (lease.consumed, lease.estimated, pool.unallocated, lease.state) == (4, 0, 6, LeaseState.ACTIVE)


def test_expiry_frees_nothing_and_counts_once() -> None:
    pool, lease = funded_pool(0, 10), leased(granted=10, outstanding=10)
    assert expire(pool, lease, NOW - timedelta(milliseconds=1)) is None
    set_aside(pool, lease)
    assert pool.unallocated == 0
    assert expire(pool, lease, NOW) is None


def test_units_that_an_expired_lease_gets_again_expire_as_another_movement() -> None:
    """A lane that is rebased leaves such a lease; the same id would stop every expiry from then on."""
    pool, lease = funded_pool(10, 10), leased(granted=10, outstanding=10)
    first = expire(pool, lease, NOW)
    post(movement(lease, "rebased"), pool, lease, Account.UNALLOCATED, Account.OUTSTANDING, 10, Cause.REBASED)
    again = expire(pool, lease, NOW)
    assert first is not None
    assert again is not None
    assert first.movement_id != again.movement_id


def test_lines_that_do_not_add_up_quarantine_their_lease() -> None:
    pool, lease = funded_pool(0, 10), leased(granted=10, outstanding=10)
    moved, reasons = settled(pool, lease, 10, 0, 4, 0, 5)
    assert moved == [(Cause.QUARANTINED, 10)]
    assert reasons == [QuarantineReason.LINES_DISAGREE]
    assert (lease.state, lease.suspense, lease.region_consumed) == (LeaseState.QUARANTINED, 10, 4)


def test_returning_more_than_was_granted_quarantines_the_lease() -> None:
    pool, lease = funded_pool(0, 10), leased(granted=10, outstanding=10)
    _, reasons = settled(pool, lease, 10, 0, 0, 11, 0)
    assert reasons == [QuarantineReason.RETURNED_TOO_MUCH]


def test_earlier_returns_cover_later_excess_usage() -> None:
    """The idle 7 of 10 units were returned, and then 12 units of work reported that were never reserved."""
    pool, lease = funded_pool(0, 10), leased(granted=10, outstanding=10)
    moved, reasons = settled(pool, lease, 10, 0, 12, 7, 12)
    assert moved == [(Cause.RETURNED, 7), (Cause.COVERING, 7), (Cause.OVERAGE, 2), (Cause.USAGE, 10), (Cause.USAGE, 2)]
    assert (reasons, lease.returned, lease.overage, pool.unallocated) == ([], 7, 2, 0)


def test_later_evidence_of_a_quarantined_lease_is_kept() -> None:
    pool, lease = funded_pool(0, 10), leased(granted=10, outstanding=10)
    settled(pool, lease, 10, 0, 4, 0, 5)
    assert settled(pool, lease, 10, 0, 6, 0, 2) == ([], [QuarantineReason.QUARANTINED_BEFORE])
    assert settled(pool, lease, 10, 0, 6, 0, 0) == ([], [])


@pytest.mark.parametrize(("minute", "booked"), [(0, 29_891_520), (29_900_000, 29_900_000), (29_934_720, 29_934_719)])
def test_a_unit_belongs_to_the_period_of_its_lease(minute: int, booked: int) -> None:
    pool, lease, report = funded_pool(0, 10), leased(granted=10, outstanding=10), Report("us-east", 1, 0, 1)
    frozen = frozen_lease(10, 0, 1, 0, 0)
    line = type(frozen_lease(0, 0, 1, 0, 1).lines[0])(minute=minute, dimensions={}, units=1)
    frozen.lines.append(line)
    settle(report, [frozen], {KEY: pool}, {KEY: lease})
    assert [transfer.minute for transfer in report.transfers] == [booked]
