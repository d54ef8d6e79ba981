"""Proxies divide a share fairly, and admit no more beyond it than the published bound, whatever happens to them."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.allocation.proxies import MAKES, SHAPES, Proxy, Quotas, Region, Usage, play
from benchmarks.allocation.traces import trace
from regional_agent.envoy.quota import rules
from regional_agent.envoy.quota.rules import NANO_UNITS, Assignment, Division, Share, bound_nano
from tests.budget import size

MICRO = 1_000_000
LIMIT, BURST = 90, 90
STEP_MS = 25
LATEST_MS = rules.DELIVERY_MS - STEP_MS
NAMES = 4


def divided(*demands: int, checks: int = 0, limit: int = LIMIT) -> list[int]:
    """Return the rates that proxies with these demands are assigned first."""
    share = Share(limit * MICRO, BURST, BURST * NANO_UNITS // 2)
    division: Division[int] = Division(share, 0, agent_micro=share.rate_micro, checks_micro=checks * MICRO)
    for proxy, demand in enumerate(demands):
        division.join(proxy, 0).demand_micro = demand * MICRO
    return [each.rate_micro // MICRO for each in division.divide(0).values()]


@pytest.mark.parametrize(
    ("demands", "checks", "rates"),
    [
        ([0, 0], 0, [30, 30]),  # checks are a member, too
        ([90, 90], 90, [30, 30]),
        ([10, 90], 0, [10, 80]),  # what checks do not want is lent
        ([10, 90], 90, [10, 40]),
    ],
)
def test_proxies_and_checks_share_by_demand(demands: list[int], checks: int, rates: list[int]) -> None:
    assert divided(*demands, checks=checks) == rates


class Fleet(RuleBasedStateMachine):
    """Proxies at one agent, with checks beside them, while the region's share moves and streams break."""

    names = NAMES
    delays_ms: tuple[int, ...] = (1, 20, LATEST_MS)

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_ms = 0
        self.region = Region(BURST, LIMIT * MICRO)
        self.proxies = [Proxy() for _ in range(self.names)]
        self.demand = [0] * self.names  # units a second
        self.report_ms = [0] * self.names
        self.checks = 0
        self.excess_nano = self.most_nano = 0  # beyond what the share brings
        self.on_the_way: list[tuple[int, Callable[[], None]]] = []

    @rule(proxy=st.integers(0, NAMES - 1), demand=st.sampled_from([0, 1, 20, 60, 300]))
    def request(self, proxy: int, demand: int) -> None:
        self.demand[proxy] = demand

    @rule(checks=st.sampled_from([0, 30, 300]))
    def request_checks(self, checks: int) -> None:
        self.checks = checks

    @rule(share=st.sampled_from([0, 10, 45, LIMIT]))
    def move_share(self, share: int) -> None:
        self.region.fill(self.now_ms)
        self.region.share_micro = share * MICRO

    @rule(proxy=st.integers(0, NAMES - 1), back_in_ms=st.sampled_from([100, 2_000, 60_000]))
    def end_stream(self, proxy: int, back_in_ms: int) -> None:
        """End a stream. The proxy admits what it may, and connects again."""
        self.region.division.leave(proxy, self.now_ms)
        self.proxies[proxy].stream += 1
        self.report_ms[proxy] = self.now_ms + back_in_ms

    @rule(steps=st.sampled_from([1, 10, 40, 120]))
    def pass_time(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.now_ms += STEP_MS
        due = [what for at_ms, what in self.on_the_way if at_ms <= self.now_ms]
        self.on_the_way = [each for each in self.on_the_way if each[0] > self.now_ms]
        for what in due:
            what()
        admitted = sum(
            proxy.request(self._drawn(demand), self.now_ms)
            for proxy, demand in zip(self.proxies, self.demand, strict=True)
        )
        admitted += self.region.check(self._drawn(self.checks), self.now_ms)
        self.excess_nano += admitted * NANO_UNITS - self.region.share_micro * STEP_MS
        self.excess_nano = max(0, self.excess_nano)
        self.most_nano = max(self.most_nano, self.excess_nano)
        for number, proxy in enumerate(self.proxies):
            if self.now_ms >= self.report_ms[number]:
                self.report_ms[number] = self.now_ms + 1_000
                self._send(number, self._report(number, proxy.report(self.now_ms)))
        if self.now_ms % rules.TICK_MS == 0:
            for number, assignment in self.region.turn(self.now_ms).items():
                self._send(number, self._receive(number, assignment))
            self.region.pay(self.now_ms)

    def _drawn(self, per_second: int) -> int:
        units, rest = divmod(per_second * STEP_MS, 1000)
        return units + (self.chance.random() * 1000 < rest)

    def _report(self, number: int, usage: Usage) -> Callable[[], None]:
        return lambda: self.region.division.report(number, *usage, self.now_ms)

    def _receive(self, number: int, assignment: Assignment) -> Callable[[], None]:
        return lambda: self.proxies[number].receive(assignment, rules.TIME_TO_LIVE_MS, self.now_ms)

    def _send(self, number: int, what: Callable[[], None]) -> None:
        """Deliver in time, in order, or not at all where the stream has ended."""
        stream, proxy = self.proxies[number].stream, self.proxies[number]
        at_ms = self.now_ms + self.chance.choice(self.delays_ms)
        self.on_the_way.append((at_ms, lambda: what() if proxy.stream == stream else None))

    @invariant()
    def no_more_is_admitted_than_published(self) -> None:
        if hasattr(self, "most_nano"):
            assert self.most_nano <= self.published_nano

    @property
    def published_nano(self) -> int:
        return BURST * NANO_UNITS + bound_nano(LIMIT * MICRO, BURST, self.names)


FEW = settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)
TestFleet = Fleet.TestCase
TestFleet.settings = FEW


def forget(division: Division[int], proxy: int, _now_ms: int) -> None:
    """Take a proxy's part back as soon as its stream ends."""
    division.parts.pop(proxy, None)


def count_only(
    division: Division[int], now_ms: int, pay: Callable[[Division[int], int], int] = Division.payment
) -> int:
    """Take nothing from the bucket."""
    return 0 * pay(division, now_ms)


MUTANTS = {
    "the part of a silent proxy is free at once": ("Division.leave", forget),
    "what is assigned is not taken from the bucket": ("Division.payment", count_only),
}


def play_worst(fleet: Fleet) -> None:
    """Let one proxy have all, and fall silent as the share is taken away; then one after the other; then all beside
    checks.
    """
    fleet.names = 24
    fleet.begin(seed=1)
    fleet.report_ms = [1_000_000] * fleet.names
    fleet.demand[0], fleet.report_ms[0] = 300, 0
    fleet.pass_time(400)
    fleet.delays_ms, fleet.report_ms[0] = (LATEST_MS,), 1_000_000
    while fleet.region.sent[0][1] != fleet.now_ms:
        fleet.step()
    fleet.delays_ms = (1,)
    fleet.move_share(0)
    fleet.region.division.leave(0, fleet.now_ms)  # and the last refresh arrives yet
    fleet.pass_time(200)
    fleet.move_share(LIMIT)
    fleet.pass_time(400)
    for proxy in range(1, fleet.names):
        fleet.demand[proxy], fleet.report_ms[proxy] = 300, fleet.now_ms
        fleet.pass_time(4 * rules.TICK_MS // STEP_MS)
        fleet.end_stream(proxy, back_in_ms=10_000)
    fleet.request_checks(300)
    fleet.pass_time(1200)


def test_the_worst_case_is_more_than_half_of_the_bound() -> None:
    fleet = Fleet()
    play_worst(fleet)
    fleet.no_more_is_admitted_than_published()
    assert fleet.most_nano > fleet.published_nano // 2


@pytest.mark.parametrize("name", MUTANTS)
def test_the_bound_catches_a_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, mutant = MUTANTS[name]
    monkeypatch.setattr(f"regional_agent.envoy.quota.rules.{where}", mutant)
    fleet = Fleet()
    play_worst(fleet)
    with pytest.raises(AssertionError):
        fleet.no_more_is_admitted_than_published()


@pytest.mark.parametrize("name", SHAPES)
def test_three_proxies_admit_more_than_equal_parts_and_no_more_than_the_limit(name: str) -> None:
    made = trace(name, SHAPES[name]._replace(length_s=24), 1)
    found = {limiter: play(made, makes(made)) for limiter, makes in MAKES.items()}
    ours, equal = found["Leasehold"], found["static: an equal part for each"]
    assert ours.conforming > equal.conforming
    assert ours.overshoot_s < 0.25 < found["static: the whole limit for each"].overshoot_s
    assert ours.messages_a_second < 2.5


def test_the_whole_share_may_be_used_by_one_proxy() -> None:
    made = trace("rotating", SHAPES["rotating"]._replace(length_s=9), 1)
    fleet = Quotas(made)
    play(made, fleet)
    rates = sorted(part.assigned.rate_micro for part in fleet.regions[0].division.parts.values())
    assert rates[-1] > 0.9 * made.limit * MICRO


GATEWAYS, SECONDS = map(int, size("LEASEHOLD_QUOTA_GATEWAYS", "30x12", short="30x6").split("x"))


@pytest.mark.parametrize("name", SHAPES)
def test_gateways_on_three_regions_stay_within_the_bound_with_few_messages(name: str) -> None:
    """Play many gateways; LEASEHOLD_QUOTA_GATEWAYS=200x60 plays 200 for a minute."""
    made = trace(name, SHAPES[name]._replace(regions=GATEWAYS, length_s=SECONDS), 1)
    fleet = Quotas(made, regions=3)
    found = play(made, fleet)
    assert found.overshoot_s * made.limit <= fleet.bound_units
    assert found.overshoot_s < 0.5
    assert found.conforming > 0.5
    assert name != "uneven (Zipf)" or found.jain > 0.9
    assert found.messages_a_second < 2.2
