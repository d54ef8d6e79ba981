"""Whatever regions do, say and get wrong: after every step both identities hold and the books are their transfers."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.domain.allocation import Ask, fund, grant, grant_units
from coordinator.domain.books import Account, Cause, Key, Lease, Overdrawn, Pool, Report, post
from coordinator.domain.settlement import judge_totals, settle
from protocol.lease import LeaseState
from protocol.messages import FrozenBatch, FrozenLease, UsageLine
from protocol.outcomes import ExchangeOutcome

NOW = datetime(2026, 11, 18, 9, tzinfo=UTC)
KEY = Key("exports:tenant=acme", "2026-11")
REGIONS = ("us-east", "eu-west", "ap-south")
SHARED = ("overage", "outstanding", "suspense", "consumed", "estimated", "written_off", "carried_out")

regions = st.sampled_from(REGIONS)
amounts = st.integers(0, 60)


def new_lease(region: str, epoch: int, state: LeaseState = LeaseState.ACTIVE) -> Lease:
    return Lease(KEY, epoch, region, NOW, NOW, state)


class Store:
    """A region's own truth: what its store would freeze."""

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
        self.transfers: list[tuple[str, object]] = []
        self.funded = 0
        self.seq = 0

    def report(self, region: str) -> Report:
        self.seq += 1
        return Report(region, self.leases[region].epoch, 0, self.seq)

    def book(self, report: Report) -> None:
        self.transfers += [(report.region, transfer) for transfer in report.transfers]

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
        if lease.state is not LeaseState.ACTIVE:
            return
        before, report = self.pool.grantable, self.report(region)
        ask = Ask(demand_milli, waiting, lease.outstanding, lease.last_grant, 3 * demand_milli, 3, 10_000)
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
        """A commit may be above what was held."""
        store = self.stores[region]
        store.consumed += min(units, store.available) + beyond

    @rule(region=regions, units=amounts)
    def give_back(self, region: str, units: int) -> None:
        store = self.stores[region]
        store.returned += min(units, store.available)

    @rule(region=regions, wrong_by=st.sampled_from([0, 0, 0, 0, 0, 1, 7]))
    def tell(self, region: str, wrong_by: int) -> None:
        lease, store, report = self.leases[region], self.stores[region], self.report(region)
        units = store.consumed - store.reported + wrong_by
        frozen = frozen_lease(store.granted, store.overage, store.consumed, store.returned, units)
        assert judge_totals(batch(frozen), {KEY: lease}) is ExchangeOutcome.APPLIED
        was = lease.state
        quarantined = settle(report, [frozen], {KEY: self.pool}, {KEY: lease})
        self.book(report)
        store.reported = store.consumed
        if was is not LeaseState.QUARANTINED:
            assert bool(quarantined) == (lease.state is LeaseState.QUARANTINED)
        if wrong_by:
            assert lease.state is LeaseState.QUARANTINED
            assert lease.outstanding == 0

    @precondition(lambda self: any(lease.state is LeaseState.ACTIVE for lease in self.leases.values()))
    @rule(region=regions)
    def fence(self, region: str) -> None:
        if self.leases[region].state is LeaseState.ACTIVE:
            self.leases[region].state = LeaseState.FENCED

    @invariant()
    def identities_hold(self) -> None:
        assert self.pool.balances
        assert all(lease.balances for lease in self.leases.values())
        for column in SHARED:
            assert getattr(self.pool, column) == sum(getattr(lease, column) for lease in self.leases.values())

    @invariant()
    def nothing_is_oversold(self) -> None:
        """What leases admitted is what was granted; only what was done beyond that is overage."""
        pool = self.pool
        assert pool.consumed + pool.outstanding + pool.suspense <= pool.funded + pool.overage

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
        for column in ("unallocated", "outstanding", "consumed", "suspense"):
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


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=30, deadline=timedelta(seconds=2))


def test_what_is_not_there_is_not_moved_and_nothing_changes() -> None:
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
