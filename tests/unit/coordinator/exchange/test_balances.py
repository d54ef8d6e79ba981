"""After every step, whatever regions report, both identities hold and the ledger equals the sum of its transfers."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.exchange.rules.allocation import PoolDemand, fund, grant, grant_units
from coordinator.exchange.rules.balances import Account, Cause, Key, Lease, Pool
from coordinator.exchange.rules.posting import (
    COUNTED_AS,
    DRAINED,
    OVERAGE,
    Entry,
    Line,
    Overdrawn,
    Report,
    Transfer,
    drain,
    drain_lines,
    movement,
    post,
    use,
)
from coordinator.exchange.rules.settlement import expire, judge_totals, settle
from protocol.lease import RETURNS_COUNT, LeaseEvent, LeaseState, after
from protocol.messages import FrozenBatch, FrozenLease, UsageLine
from protocol.outcomes import ExchangeOutcome
from protocol.units import MAX_UNITS
from tests.budget import examples

NOW = datetime(2026, 11, 18, 9, tzinfo=UTC)
KEY = Key("exports:tenant=acme", "2026-11")
REGIONS = ("us-east", "eu-west", "ap-south")
SHARED = ("overage", "outstanding", "suspense", "consumed", "estimated", "written_off", "suspense_carried_out")

regions = st.sampled_from(REGIONS)
amounts = st.integers(0, 60)


def new_lease(region: str, epoch: int, state: LeaseState = LeaseState.ACTIVE) -> Lease:
    return Lease(KEY, epoch, region, NOW, NOW, state)


class Store:
    """Build the lease as the region's store would freeze it."""

    def __init__(self) -> None:
        self.granted = self.overage = self.consumed = self.returned = self.reported = 0

    @property
    def available(self) -> int:
        return max(0, self.granted + self.overage - self.consumed - self.returned)


class Ledger(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(KEY)
        self.leases = {region: new_lease(region, epoch) for epoch, region in enumerate(REGIONS, start=1)}
        self.stores = {region: Store() for region in REGIONS}
        self.transfers: list[tuple[str | None, object]] = []
        self.funded = 0
        self.seq = 0

    def report(self, region: str) -> Report:
        self.seq += 1
        return Report(region, self.leases[region].epoch, 0, self.seq)

    def book(self, entry: Entry) -> None:
        self.transfers += [(entry.region, transfer) for transfer in entry.transfers]

    @rule(limit=st.integers(0, 300))
    def change_the_limit(self, limit: int) -> None:
        report = self.report(REGIONS[0])
        fund(report, self.pool, limit)
        self.book(report)
        assert self.pool.funded >= limit
        assert self.pool.funded == limit or self.pool.unallocated == 0

    @rule(region=regions, demand_milli=st.integers(0, 50_000), waiting=amounts)
    def want(self, region: str, demand_milli: int, waiting: int) -> None:
        lease = self.leases[region]
        if after(lease.state, LeaseEvent.GRANT) is None:
            return
        before, report = self.pool.grantable, self.report(region)
        ask = PoolDemand(demand_milli, waiting, lease.outstanding, lease.last_grant, 3 * demand_milli, 1, 3, 10_000)
        units = grant_units(before, self.pool.funded, ask)
        assert 0 <= units <= before
        grant(report, self.pool, lease, units)
        self.book(report)

    @rule(region=regions)
    def the_reply_arrives(self, region: str) -> None:
        lease, store = self.leases[region], self.stores[region]
        store.granted, store.overage = max(store.granted, lease.granted), max(store.overage, lease.overage)

    @rule(region=regions, units=amounts, beyond=st.integers(0, 5))
    def consume(self, region: str, units: int, beyond: int) -> None:
        """A commit may exceed the units that were held."""
        store = self.stores[region]
        store.consumed += min(units, store.available) + beyond

    @rule(region=regions, units=amounts)
    def give_back(self, region: str, units: int) -> None:
        store = self.stores[region]
        store.returned += min(units, store.available)

    @rule(region=regions, wrong_by=st.sampled_from([0, 0, 0, 0, 0, 1, 7]))
    def report_a_lease(self, region: str, wrong_by: int) -> None:
        lease, store, report = self.leases[region], self.stores[region], self.report(region)
        units = store.consumed - store.reported + wrong_by
        frozen = frozen_lease(store.granted, store.overage, store.consumed, store.returned, units)
        assert judge_totals(batch(frozen), {KEY: lease}) is ExchangeOutcome.APPLIED
        was = lease.state
        quarantined = settle(report, [frozen], {KEY: self.pool}, {KEY: lease})
        self.book(report)
        store.reported = store.consumed
        if after(was, LeaseEvent.REPORT):
            assert bool(quarantined) == (lease.state is LeaseState.QUARANTINED)
            assert lease.state is LeaseState.QUARANTINED or not wrong_by
        if was is LeaseState.EXPIRED and not wrong_by:
            assert (lease.state is LeaseState.ACTIVE) == (lease.unaccounted == 0)
        if lease.state is LeaseState.QUARANTINED:
            assert lease.outstanding == 0

    @rule(region=regions, late_s=st.sampled_from([-1, 0, 1]))
    def time_passes(self, region: str, late_s: int) -> None:
        """Expiry moves units to suspense and frees nothing."""
        lease, free = self.leases[region], self.pool.unallocated
        held, was = lease.outstanding, lease.state
        entry = expire(self.pool, lease, NOW + timedelta(seconds=late_s))
        assert (entry is None) == (late_s < 0 or not held or after(was, LeaseEvent.EXPIRE) is None)
        assert self.pool.unallocated == free
        if entry:
            self.book(entry)
            assert lease.outstanding == 0
            assert after(lease.state, LeaseEvent.GRANT) is None

    @rule(region=regions, share=st.integers(0, 100))
    def people_resolve_what_is_in_suspense(self, region: str, share: int) -> None:
        lease = self.leases[region]
        if lease.state is LeaseState.QUARANTINED:
            return
        entry, charged = movement(lease, "resolved", len(self.transfers)), lease.suspense * share // 100
        post(entry, self.pool, lease, Account.SUSPENSE, Account.ESTIMATED, charged, Cause.CHARGED)
        post(entry, self.pool, lease, Account.SUSPENSE, Account.WRITTEN_OFF, lease.suspense, Cause.WRITTEN_OFF)
        self.book(entry)

    @rule(region=regions, event=st.sampled_from([LeaseEvent.FENCE, LeaseEvent.LOSE]))
    def the_epoch_ends(self, region: str, event: LeaseEvent) -> None:
        lease = self.leases[region]
        state = after(lease.state, event)
        if state:
            lease.state = state

    @invariant()
    def identities_hold(self) -> None:
        assert self.pool.balances
        assert all(lease.balances for lease in self.leases.values())
        for column in SHARED:
            assert getattr(self.pool, column) == sum(getattr(lease, column) for lease in self.leases.values())

    @invariant()
    def nothing_is_oversold(self) -> None:
        """Leases admit at most what was granted; only usage beyond that is overage."""
        pool = self.pool
        spent = pool.consumed + pool.outstanding + pool.suspense + pool.estimated + pool.written_off
        assert spent <= pool.funded + pool.overage

    @invariant()
    def what_a_region_may_still_spend_is_nobody_elses(self) -> None:
        for region, lease in self.leases.items():
            if lease.state in RETURNS_COUNT:
                assert self.stores[region].available <= lease.unaccounted

    @invariant()
    def only_an_active_lease_is_granted_to(self) -> None:
        granted_to = {state for state in LeaseState if after(state, LeaseEvent.GRANT)}
        assert granted_to == {LeaseState.ACTIVE}
        for lease in self.leases.values():
            if lease.state is LeaseState.ACTIVE:
                assert lease.unaccounted == lease.outstanding or lease.suspense == 0

    @invariant()
    def what_was_used_is_booked_or_in_quarantine(self) -> None:
        for region, lease in self.leases.items():
            if lease.state is not LeaseState.QUARANTINED:
                assert lease.consumed == self.stores[region].reported

    @invariant()
    def books_are_their_transfers(self) -> None:
        balances: Counter[str] = Counter()
        for _, transfer in self.transfers:
            balances[transfer.src] -= transfer.units  # type: ignore[attr-defined]
            balances[transfer.dst] += transfer.units  # type: ignore[attr-defined]
        for column in ("unallocated", "outstanding", "consumed", "suspense", "estimated", "written_off"):
            assert balances[column] == getattr(self.pool, column)
        assert -balances["funding"] == self.pool.funded
        assert -balances["overage"] == self.pool.overage


def frozen_lease(granted: int, overage: int, consumed: int, returned: int, units: int) -> FrozenLease:
    lines = [UsageLine(minute=29_891_520, dimensions={"tenant": "acme"}, units=units)] if units else []
    return FrozenLease(
        quota=KEY.quota,
        period=KEY.period,
        granted=granted,
        overage=overage,
        consumed=consumed,
        returned=returned,
        lines=lines,
    )


def batch(*leases: FrozenLease) -> FrozenBatch:
    return FrozenBatch(epoch=1, lane=0, seq=1, leases=list(leases))


def test_a_line_that_drains_several_accounts_is_posted_in_parts() -> None:
    pool, lease = Pool(KEY, funded=10, outstanding=1, suspense=2, estimated=3, written_off=4), new_lease("us-east", 1)
    lease.granted, lease.outstanding, lease.suspense, lease.estimated, lease.written_off = 10, 1, 2, 3, 4
    report = Report("us-east", 1, 0, 1)
    drain(report, pool, lease, Account.CONSUMED, 2, Cause.USAGE)
    drain(report, pool, lease, Account.UNALLOCATED, 8, Cause.RETURNED)
    assert [(each.line, each.part, each.src, each.units) for each in report.transfers] == [
        (0, 0, Account.OUTSTANDING, 1),
        (0, 1, Account.SUSPENSE, 1),
        (1, 0, Account.SUSPENSE, 1),
        (1, 1, Account.ESTIMATED, 3),
        (1, 2, Account.WRITTEN_OFF, 4),
    ]
    with pytest.raises(Overdrawn):
        drain(report, pool, lease, Account.CONSUMED, 1, Cause.USAGE)
    assert (lease.unaccounted, lease.balances, pool.balances) == (0, True, True)


@given(lines=st.lists(st.integers(0, 9), max_size=12), gaps=st.lists(st.integers(0, 20), min_size=4, max_size=4))
def test_booking_many_lines_at_once_equals_booking_them_in_turn(lines: list[int], gaps: list[int]) -> None:
    def books() -> tuple[Report, Pool, Lease]:
        there = {src.value: units for src, units in zip(DRAINED, gaps, strict=True)}
        return (
            Report("us-east", 1, 0, 1),
            Pool(KEY, **there),
            Lease(KEY, 1, "us-east", NOW, NOW, LeaseState.ACTIVE, **there),
        )

    def at_once(report: Report, pool: Pool, lease: Lease) -> None:
        drain_lines(report, pool, lease, Account.CONSUMED, [Line(units, 7, {}) for units in lines], Cause.USAGE)

    together, singly = books(), books()
    if sum(lines) > sum(gaps):
        with pytest.raises(Overdrawn):
            at_once(*together)
    else:
        at_once(*together)
        for units in lines:
            drain(*singly, Account.CONSUMED, units, Cause.USAGE, 7, {})
    assert together == singly


def test_posting_the_same_movement_is_deterministic() -> None:
    lease = new_lease("us-east", 1)
    assert movement(lease, "expired", 5).movement_id == movement(lease, "expired", 5).movement_id
    assert movement(lease, "expired", 5).movement_id != movement(lease, "expired", 6).movement_id


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=examples(100), stateful_step_count=40)


def test_moving_more_than_there_is_fails_and_changes_nothing() -> None:
    pool, lease, report = Pool(KEY, funded=5, unallocated=5), new_lease("us-east", 1), Report("us-east", 1, 0, 1)
    with pytest.raises(Overdrawn):
        post(report, pool, lease, Account.UNALLOCATED, Account.OUTSTANDING, 6, Cause.GRANT)
    with pytest.raises(Overdrawn):
        post(report, pool, lease, Account.UNALLOCATED, Account.OUTSTANDING, -1, Cause.GRANT)
    assert (pool.unallocated, pool.outstanding, lease.granted, lease.outstanding) == (5, 0, 0, 0)
    assert report.transfers == []


def test_moving_nothing_leaves_no_trace() -> None:
    pool, report = Pool(KEY), Report("us-east", 1, 0, 1)
    post(report, pool, None, Account.FUNDING, Account.UNALLOCATED, 0, Cause.FUNDED)
    assert report.transfers == []


def test_transfers_are_numbered_as_they_are_posted() -> None:
    pool, lease, report = Pool(KEY), new_lease("us-east", 1), Report("us-east", 1, 0, 1)
    fund(report, pool, 10)
    grant(report, pool, lease, 4)
    assert [(each.line, each.cause, each.units) for each in report.transfers] == [
        (0, Cause.FUNDED, 10),
        (1, Cause.GRANT, 4),
    ]


@given(st.lists(st.lists(st.integers(1, 50), max_size=6), max_size=8), st.integers(1, 400))
def test_included_usage_of_all_reports_adds_up_to_the_limit(reports: list[list[int]], limit: int) -> None:
    pool, lease = Pool(KEY, funded=limit, unallocated=limit), new_lease("us-east", 1)
    booked: list[Transfer] = []
    for seq, units in enumerate(reports, 1):
        report = Report("us-east", 1, 0, seq)
        post(report, pool, lease, Account.OVERAGE, Account.OUTSTANDING, sum(units), Cause.OVERAGE)
        use(report, pool, lease, [Line(each, minute, {"policy": "p"}) for minute, each in enumerate(units)])
        booked += [each for each in report.transfers if each.dst is Account.CONSUMED]
        assert pool.balances
    total = sum(map(sum, reports))
    over = [each for each in booked if each.dimensions == {"policy": "p", COUNTED_AS: OVERAGE}]
    assert (pool.used, pool.overage_used, sum(each.units for each in over)) == (total, *[max(0, total - limit)] * 2)
    assert sum(each.units for each in booked if each.dimensions == {"policy": "p"}) == min(total, limit)


@pytest.mark.parametrize(
    ("pool", "left"),
    [
        (Pool(KEY), MAX_UNITS),  # no region has requested it yet, so its limit is unknown
        (Pool(KEY, funded=100, consumed=30), 70),
        (Pool(KEY, funded=100, credited=20, adjustment=20, consumed=30), 90),
        (
            Pool(KEY, funded=100, credited=-100, adjustment=-100, soft_cap_extension=26, consumed=5),
            0,
        ),  # all of it was debited
        (Pool(KEY, credited=-10, adjustment=-10, soft_cap_extension=26), 0),
        (Pool(KEY, soft_cap_extension=1), 0),  # its limit is 0, and its cap is soft
    ],
)
def test_usage_within_the_limit_ends_at_the_limit_as_soon_as_it_is_known(pool: Pool, left: int) -> None:
    assert pool.included_left == left
