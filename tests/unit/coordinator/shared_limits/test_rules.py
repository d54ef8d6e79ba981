"""Shares of a rate are fair, and at any moment add up to no more than the worst case."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.allocation import shares as regional
from benchmarks.allocation.shares import StoredShare, share_of_grant
from coordinator.shared_limits.rules import (
    CARRIED,
    KEPT_MS,
    LATEST_REPLY_MS,
    LONGEST_MS,
    NANO_UNITS,
    PAID_BACK_IN_MS,
    DemandReport,
    Grant,
    Shared,
    SharingTerms,
    count,
    hear,
    share_out,
    terms_of,
)
from protocol.limits.fair_shares import Bound, Member, fair_shares, fill
from protocol.limits.rates import Sharing
from tests.budget import examples

LIMIT = 90_000_000
rates = st.integers(0, 10**13)
bounds = st.builds(lambda low, more, weight: Bound(low, low + more, weight), rates, rates, st.integers(0, 1000))
members = st.builds(lambda weight, floor, more: Member(weight, floor, floor + more), st.integers(1, 1000), rates, rates)


# --- fair shares ------------------------------------------------------------------------------------------------------


@given(rates, st.lists(bounds, min_size=1, max_size=8))
def test_filled_shares_add_up_to_the_limit_within_their_bounds(limit: int, asked: list[Bound]) -> None:
    filled = fill(limit, asked)
    assert sum(filled) <= max(limit, 0)
    if sum(each.low for each in asked) <= limit:
        assert all(each.low <= units <= each.high for each, units in zip(asked, filled, strict=True))
        weighty = [each.high if each.weight else each.low for each in asked]
        assert sum(filled) >= min(limit, sum(weighty)) - len(asked), "nothing is left but what was rounded"


@given(rates, st.lists(st.tuples(members, rates), min_size=1, max_size=8))
def test_no_region_is_short_while_another_of_its_weight_has_more(limit: int, asked: list[tuple[Member, int]]) -> None:
    """Check fairness: each region that is short stands at the common level, and none that wants more than it gets above
    it.
    """
    shares = fair_shares(limit, [member for member, _ in asked], [demand for _, demand in asked])
    for (member, demand), share in zip(asked, shares, strict=True):
        short = share < min(demand, member.ceiling_micro) - len(asked)
        for (other, other_demand), other_share in zip(asked, shares, strict=True):
            more = other_share > max(other.floor_micro, 0) + len(asked)
            if short and more and sum(each.floor_micro for each, _ in asked) <= limit:
                assert other_share * member.weight <= (share + len(asked)) * other.weight + member.weight * len(asked)
                assert other_share <= max(other_demand, other.floor_micro)


@given(rates, st.lists(st.tuples(st.integers(1, 1000), rates), min_size=1, max_size=8), st.data())
def test_higher_demand_gives_no_smaller_share_and_no_other_a_larger_one(
    limit: int, asked: list[tuple[int, int]], data: st.DataObject
) -> None:
    place, more = data.draw(st.integers(0, len(asked) - 1)), data.draw(rates)
    who, demands = [Member(weight, 0, 10**15) for weight, _ in asked], [demand for _, demand in asked]
    before = fair_shares(limit, who, demands)
    demands[place] += more
    after = fair_shares(limit, who, demands)
    slack = len(asked) * 1000
    assert after[place] >= before[place] - slack
    assert all(after[other] <= before[other] + slack for other in range(len(asked)) if other != place)


@pytest.mark.parametrize(
    ("demands", "shares"),
    [
        ([0, 0, 0], [30, 30, 30]),  # without demand each region has its base share
        ([90, 90, 90], [30, 30, 30]),
        ([10, 90, 90], [10, 40, 40]),  # units that one region does not want go to the others
        ([10, 20, 900], [10, 20, 60]),
        ([10, 20, 30], [30, 30, 30]),  # unwanted units are lent out as well, to the smallest share
        ([0, 0, 50], [20, 20, 50]),
    ],
)
def test_ninety_units_between_three_regions(demands: list[int], shares: list[int]) -> None:
    assert fair_shares(90, [Member(1)] * 3, demands) == shares


def test_floors_ceilings_and_weights() -> None:
    assert fair_shares(90, [Member(2), Member(1)], [90, 90]) == [60, 30]
    assert fair_shares(90, [Member(1, floor_micro=40), Member(1)], [0, 90]) == [40, 50]
    assert fair_shares(90, [Member(1, ceiling_micro=10), Member(1)], [90, 20]) == [10, 80]
    assert fair_shares(90, [Member(1, floor_micro=90), Member(1, floor_micro=90)], [0, 0]) == [45, 45]
    assert fair_shares(90, [Member(0), Member(1)], [90, 30]) == [0, 90]


# --- one decision -----------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")


def terms(sharing: Sharing = Sharing.STRICT, names: tuple[str, ...] = NAMES, limit: int = LIMIT) -> SharingTerms:
    return terms_of(limit, sharing, {name: Member(1) for name in names})


def say(
    shared: Shared, region: str, demand: int, now_ms: int, of: SharingTerms, number: int = 0, rate: int = 30
) -> Grant:
    return share_out(shared, DemandReport(region, demand * 1_000_000, number, rate * 1_000_000), of, now_ms).grant


def all_said(of: SharingTerms, *demands: int, shared: Shared | None = None) -> tuple[Shared, dict[str, Grant]]:
    shared = shared or Shared(0, 0)
    grants = {name: say(shared, name, demand, 0, of) for name, demand in zip(NAMES, demands, strict=True)}
    return shared, grants


def test_strict_waits_until_others_have_confirmed() -> None:
    of = terms()
    shared, grants = all_said(of, 0, 0, 90)
    assert grants["c"].rate_micro == 30_000_000, "the others were told of less, and have not confirmed it"
    assert grants["c"].refresh_in_ms == 250, "so it asks again soon"
    told = {name: say(shared, name, 0, 100, of, grants[name].number) for name in ("a", "b")}
    for name in ("a", "b"):
        say(shared, name, 0, 200, of, told[name].number, told[name].rate_micro // 1_000_000)
    assert say(shared, "c", 90, 300, of, grants["c"].number).rate_micro == 90_000_000


def test_adaptive_gives_at_once_and_for_a_second_only() -> None:
    of = terms(Sharing.ADAPTIVE)
    shared, grants = all_said(of, 0, 0, 90)
    assert grants["c"].rate_micro == 90_000_000
    assert (grants["c"].expires_in_ms, grants["c"].refresh_in_ms) == (1000, 250)
    assert grants["c"].after_micro == 30_000_000
    assert say(shared, "c", 90, 250, of, grants["c"].number, 90).rate_micro > 60_000_000


def test_a_region_with_spare_units_is_signalled_once() -> None:
    of, shared = terms(Sharing.ADAPTIVE), Shared(0, 0)
    of_c = DemandReport("c", LIMIT, 0, LIMIT // 3)
    assert share_out(shared, of_c, of, 1000).asked == ["a", "b"]
    assert share_out(shared, of_c, of, 1100).asked == []
    assert share_out(shared, of_c, of, 1500).asked == ["a", "b"]
    quiet = Shared(0, 0)
    assert share_out(quiet, of_c._replace(demand_micro=20_000_000), of, 1000).asked == [], "its base share is enough"


def test_no_share_grows_after_data_loss_until_all_regions_have_reported() -> None:
    of = terms()
    shared = Shared(0, 0)
    assert say(shared, "a", 0, 0, of, number=7, rate=0).rate_micro == 0, "what it had given up may be another's"
    assert say(shared, "b", 90, 10, of, number=8, rate=80).rate_micro <= 30_000_000
    assert say(shared, "a", 30, LONGEST_MS + 11, of, number=7, rate=0).rate_micro == 30_000_000, "it is over by now"


def test_a_debt_is_paid_back() -> None:
    of = terms(Sharing.ADAPTIVE)
    shared, told = all_said(of, 90, 90, 90)
    shared.debt = shared.balance = LIMIT * PAID_BACK_IN_MS // 10
    given, owed = [], [shared.debt]
    for second in range(1, 30):
        for name in NAMES:
            report = DemandReport(name, LIMIT, told[name].number, told[name].rate_micro, spent=100 * second)
            told[name] = share_out(shared, report, of, second * 1000).grant
        given.append(sum(grant.rate_micro for grant in told.values()))
        owed.append(shared.debt)
    assert given[0] < LIMIT - LIMIT // 11
    assert max(owed[2:]) < owed[1]
    assert owed[-1] < owed[1] // 100
    assert given[-1] > LIMIT - LIMIT // 100


def test_unused_units_are_no_debt() -> None:
    of = terms(Sharing.ADAPTIVE)
    shared, grants = all_said(of, 0, 0, 90)
    count(shared, of, 200)
    assert shared.debt == 60_000_000 * 200
    for name in ("a", "b"):
        share_out(shared, DemandReport(name, 0, grants[name].number, 30_000_000, spent=2), of, 200)
    assert shared.debt == 4 * NANO_UNITS, "two times two units were used, perhaps just then"
    count(shared, of, 400)
    owed = shared.debt
    share_out(shared, DemandReport("a", 0, grants["a"].number, 30_000_000, spent=2), of, 400)
    assert shared.debt == owed, "the same report again says nothing of what was used since"


def test_units_in_a_bucket_are_counted() -> None:
    """Units in a bucket that were used later used to be left out: a region with bursts owed next to nothing."""
    of = terms_of(LIMIT, Sharing.ADAPTIVE, dict.fromkeys(NAMES, Member(1)), burst=6)
    shared, grants = all_said(of, 0, 0, 90)
    told, spent = grants["a"], 0
    for turn, used in enumerate([4, 8, 4, 8], 1):
        spent += used
        told = share_out(shared, DemandReport("a", LIMIT, told.number, 30_000_000, spent), of, 200 * turn).grant
    assert spent == 4 * 6
    assert shared.debt == 4 * 60_000_000 * 200 - 2 * NANO_UNITS, "two were in the bucket before, and are of the burst"


def test_unused_capacity_is_kept_up_to_a_tenth_of_the_worst_case() -> None:
    of = terms(Sharing.ADAPTIVE)
    shared, told = all_said(of, 90, 90, 90)
    for name in NAMES:
        hear(shared, DemandReport(name, LIMIT, told[name].number, 20_000_000), of, 0)
    count(shared, of, 100)
    assert shared.balance == -30_000_000 * 100, "each has given up ten of thirty"
    count(shared, of, 2000)
    assert shared.balance == -of.worst // CARRIED


def test_unused_capacity_is_granted_later_but_never_under_strict() -> None:
    of = terms(Sharing.ADAPTIVE)
    shared, told = all_said(of, 90, 90, 90)
    shared.balance = -of.worst // CARRIED
    given = [say(shared, name, 90, 3, of, told[name].number, 30).rate_micro for name in NAMES]
    assert sum(given) > LIMIT
    count(shared, of, 503)
    assert -of.worst // CARRIED < shared.balance < 0, "so it becomes less"
    assert shared.debt <= of.worst // CARRIED
    strict = terms()
    shared, told = all_said(strict, 90, 90, 90)
    count(shared, strict, 60_000)
    assert shared.balance == 0, "strictly, nothing is ever carried over"


def test_a_region_that_could_take_spare_units_is_signalled() -> None:
    of = terms()
    shared, told = all_said(of, 30, 90, 90)
    given_up = DemandReport("a", 0, told["a"].number, 0)
    assert share_out(shared, given_up, of, 2000).asked == ["b", "c"]
    assert share_out(shared, given_up, of, 2001).asked == [], "they are coming"


def test_grants_ahead_fit_into_what_longer_grants_leave() -> None:
    """Unused capacity is granted for eight seconds; all that is granted meanwhile for a second is owed as well."""
    of = terms(Sharing.ADAPTIVE)
    world = agreed(Sharing.ADAPTIVE, a=900, b=900, c=0)
    world.shared.balance = -of.worst // CARRIED
    world.regions["c"].demand_micro = 2 * LIMIT
    for name in "ab":
        world.exchange(name, 1)
    for pause_ms in (1, 300, 900, 900, 900, 6_000):
        world.exchange("c", 1)
        world.pass_time(pause_ms)
        assert world.most_over <= of.worst
        assert world.shared.most_debt <= of.worst


# --- every moment, over a bad network ---------------------------------------------------------------------------------


@dataclass
class Region:
    """A region's store and the messages on their way to it and from it."""

    share: StoredShare = field(default_factory=StoredShare)
    demand_micro: int = 0
    is_contended: bool = False
    spent: int = 0  # since its last report, in nano-units
    told: int = 0  # units


@dataclass
class World:
    """A simulation with one time in ms, in which clocks of regions lag by the time that their requests took."""

    terms: SharingTerms
    shared: Shared = field(default_factory=lambda: Shared(0, 0))
    now_ms: int = 0
    regions: dict[str, Region] = field(default_factory=lambda: {name: Region() for name in NAMES})
    reports: list[tuple[DemandReport, int]] = field(default_factory=list)
    replies: list[tuple[str, Grant, int]] = field(default_factory=list)
    admitted_over: int = 0
    most_over: int = 0
    may_have_lost_a_share: bool = False  # by what the coordinator was told

    def rate_of(self, name: str) -> int:
        return self.regions[name].share.in_force_micro(self.now_ms * 1000, self.terms.base_share_micro(name))

    @property
    def in_force_micro(self) -> int:
        return sum(map(self.rate_of, self.regions))

    def pass_time(self, elapsed_ms: int) -> None:
        """Let all regions use what they want of what they may, and keep the excess over the limit that was never paid
        back.
        """
        end_ms = self.now_ms + elapsed_ms
        for edge_ms in [*self._edges(end_ms), end_ms]:
            lasted_ms, used_micro = edge_ms - self.now_ms, 0
            for name, region in self.regions.items():
                used_micro += min(region.demand_micro, self.rate_of(name))
                region.spent += min(region.demand_micro, self.rate_of(name)) * lasted_ms
            excess = used_micro - self.terms.limit_micro
            self.admitted_over = max(0, self.admitted_over + excess * lasted_ms)
            self.most_over = max(self.most_over, self.admitted_over)
            self.now_ms = edge_ms

    def _edges(self, end_ms: int) -> Iterator[int]:
        shares = [region.share for region in self.regions.values()]
        ends = {us // 1000 for share in shares for us in (share.until_us, share.kept_until_us)}
        yield from sorted(end for end in ends if self.now_ms < end < end_ms)

    def report(self, name: str) -> None:
        region = self.regions[name]
        rate = self.rate_of(name)
        kept = regional.kept_micro(region.demand_micro, rate, region.is_contended)
        if kept < rate and region.share.number_at(self.now_ms * 1000):
            region.share = region.share.lowered(kept)
        number = region.share.number_at(self.now_ms * 1000)
        region.told, region.spent = region.told - -region.spent // NANO_UNITS, 0  # whole units, rounded up
        self.reports.append(
            (DemandReport(name, region.demand_micro, number, self.rate_of(name), region.told), self.now_ms)
        )

    def decide(self, place: int, keep: bool) -> None:
        report, sent_ms = self.reports[place] if keep else self.reports.pop(place)
        known = self.shared.holdings.get(report.region)
        self.may_have_lost_a_share |= report.number == 0 and known is not None and known.perhaps[0].number > 0
        grant = share_out(self.shared, report, self.terms, self.now_ms).grant
        self.replies.append((report.region, grant, sent_ms))

    def hear(self, place: int, keep: bool) -> None:
        name, grant, sent_ms = self.replies[place] if keep else self.replies.pop(place)
        region, sent_us = self.regions[name], sent_ms * 1000
        told = share_of_grant(grant.number, grant.rate_micro, grant.after_micro, grant.expires_in_ms, sent_us)
        region.share = region.share.replaced_by(told, sent_us, self.now_ms * 1000)
        region.is_contended = grant.is_contended

    def exchange(self, name: str, there_ms: int) -> None:
        """Exchange without loss or delay."""
        self.report(name)
        self.pass_time(there_ms)
        self.decide(len(self.reports) - 1, keep=False)
        self.pass_time(there_ms)
        self.hear(len(self.replies) - 1, keep=False)


def agreed(sharing: Sharing, **demands: int) -> World:
    """Let all regions want that for long enough that their shares settle."""
    world = World(terms(sharing))
    for name, demand in demands.items():
        world.regions[name].demand_micro = demand * 1_000_000
    for _ in range(20):
        for name in NAMES:
            world.exchange(name, 1)
        world.pass_time(250)
    return world


@pytest.mark.parametrize("pause_ms", [60, 250, 700, 999])
@pytest.mark.parametrize("speaking", ["bc", "b"])
def test_the_worst_case_holds_whichever_region_falls_silent(speaking: str, pause_ms: int) -> None:
    world = agreed(Sharing.ADAPTIVE, a=900, b=0, c=0)
    assert world.rate_of("a") > LIMIT - LIMIT // 100
    world.most_over = world.admitted_over = 0
    for name in ("b", "c"):
        world.regions[name].demand_micro = 2 * LIMIT
    for step in range(12_000 // pause_ms):
        world.exchange(speaking[step % len(speaking)], 1)
        world.pass_time(pause_ms)
        assert world.most_over <= world.terms.worst, step
        assert world.shared.most_debt <= world.terms.worst, step
    assert world.most_over > world.terms.worst // 8, "or nothing was given ahead"


@pytest.mark.parametrize("there_ms", [1, 150, 300, 500])
def test_a_grant_ahead_counts_until_it_ends_even_if_another_follows(there_ms: int) -> None:
    world = World(terms(Sharing.ADAPTIVE))
    world.exchange("a", 1)
    world.exchange("c", 1)
    world.regions["b"].demand_micro = LIMIT
    for pause_ms in (1, 999, 1):
        world.exchange("b", there_ms)
        world.pass_time(pause_ms)
        assert world.shared.most_debt <= world.terms.worst


def test_a_late_report_does_not_renew_a_grant_that_ended() -> None:
    """The renewed margin used to exceed the worst case together with what was owed."""
    named = {name: Member(weight) for name, weight in zip(NAMES, (2, 5, 1), strict=True)}
    world = World(terms_of(LIMIT, Sharing.ADAPTIVE, named))
    for name, there_ms in (("b", 300), ("c", 300), ("c", 100)):
        world.exchange(name, there_ms)
        world.pass_time(41_000 if name == "b" else 0)
    world.regions["c"].demand_micro = 10 * LIMIT
    for name, there_ms in (("b", 300), ("c", 1), ("a", 300), ("c", 300), ("c", 300)):
        world.exchange(name, there_ms)
    world.report("c")
    world.pass_time(2000)
    world.decide(0, keep=False)
    world.pass_time(8000)
    world.exchange("c", 1)
    assert world.shared.most_debt <= world.terms.worst
    assert world.most_over <= world.terms.worst


@pytest.mark.parametrize("silent_from_s", [20, 30, 33, 34, 35, 39, 60])
def test_a_region_cut_off_gets_its_safe_share_back_and_no_other_has_it(silent_from_s: int) -> None:
    """This also holds if the borrower falls silent just before."""
    world = agreed(Sharing.STRICT, a=0, b=900, c=0)
    assert (world.rate_of("a"), world.rate_of("b")) == (0, LIMIT)
    world.regions["a"].demand_micro = LIMIT
    for second in range(120):
        for name in ("b", "c") if second < silent_from_s else ():
            world.exchange(name, 1)
        world.pass_time(1000)
        assert not world.most_over, second
    assert world.rate_of("a") == LIMIT // 3


def test_data_loss_does_not_create_debts() -> None:
    """One region's share and the safe shares of regions that have not reported yet add up to more than the limit."""
    world = agreed(Sharing.STRICT, a=40, b=0, c=0)
    world.report("a")
    world.shared = Shared(world.now_ms, world.now_ms)
    world.exchange("a", 1)
    world.decide(0, keep=False)
    world.exchange("b", 1)
    assert world.shared.most_debt == 0
    assert not world.most_over


class Sharings(RuleBasedStateMachine):
    """Reports and replies are lost, doubled and reordered, the coordinator loses its data, and demand varies freely."""

    sharing = Sharing.STRICT
    world: World

    @initialize(weights=st.lists(st.integers(1, 5), min_size=3, max_size=3))
    def begin(self, weights: list[int]) -> None:
        named = {name: Member(weight) for name, weight in zip(NAMES, weights, strict=True)}
        self.world = World(terms_of(LIMIT, self.sharing, named))

    @rule(name=st.sampled_from(NAMES), demand=st.sampled_from([0, 1, 10, 29, 40, 90, 900]))
    def want(self, name: str, demand: int) -> None:
        self.world.regions[name].demand_micro = demand * 1_000_000

    @rule(elapsed_ms=st.sampled_from([1, 80, 200, 250, 999, 2000, 8000, 20_000, 41_000]))
    def wait(self, elapsed_ms: int) -> None:
        self.world.pass_time(elapsed_ms)

    @rule(name=st.sampled_from(NAMES))
    def report(self, name: str) -> None:
        self.world.report(name)

    @rule(name=st.sampled_from(NAMES), there_ms=st.sampled_from([1, 100, 300]))
    def exchange(self, name: str, there_ms: int) -> None:
        self.world.exchange(name, there_ms)

    @precondition(lambda self: self.world.reports)
    @rule(place=st.integers(0, 99), keep=st.booleans())
    def decide(self, place: int, keep: bool) -> None:
        self.world.decide(place % len(self.world.reports), keep)

    @precondition(lambda self: self.world.replies)
    @rule(place=st.integers(0, 99), keep=st.booleans())
    def hear(self, place: int, keep: bool) -> None:
        self.world.hear(place % len(self.world.replies), keep)

    @precondition(lambda self: self.world.reports or self.world.replies)
    @rule()
    def lose_all(self) -> None:
        self.world.reports.clear()
        self.world.replies.clear()

    @precondition(lambda self: self.sharing is Sharing.STRICT)
    @rule()
    def forget(self) -> None:
        """Delete the coordinator's unlogged rows, and with them every reply in progress."""
        self.world.shared = Shared(self.world.now_ms, self.world.now_ms)
        self.world.replies.clear()

    @invariant()
    def never_more_than_the_bound(self) -> None:
        if not hasattr(self, "world"):
            return
        assert self.world.most_over <= self.world.terms.worst
        # A late report from before the first share looks like one of a store that lost its share, and so uses its base
        # share again, which is then counted as if it were in force. What is really in force stays within the limit.
        if self.sharing is Sharing.ADAPTIVE or not self.world.may_have_lost_a_share:
            assert self.world.shared.most_debt <= self.world.terms.worst
        if self.sharing is Sharing.STRICT:
            assert self.world.in_force_micro <= LIMIT


class AdaptiveSharings(Sharings):
    sharing = Sharing.ADAPTIVE


TestStrict = Sharings.TestCase
TestAdaptive = AdaptiveSharings.TestCase
# A failing history is short already, and shrinking one takes minutes.
TestStrict.settings = TestAdaptive.settings = settings(
    max_examples=examples(150), stateful_step_count=40, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


def test_coordinator_and_agent_have_the_same_constants() -> None:
    assert (KEPT_MS, LATEST_REPLY_MS) == (regional.KEPT_MS, regional.LATEST_REPLY_MS)
