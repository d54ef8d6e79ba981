"""Slots that three regions share: what a coordinator decides, over stores (modelled) that lose all, and a bad network.

The oracle is who works, and until when: also of a store that has forgotten it. Reports and replies are lost, doubled
and late in any order. Never more run at once than the limit, and what nobody uses reaches whoever asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from coordinator.shared_limits.rules import KEPT_MS, LONGEST_MS, Shared, terms_of_slots
from coordinator.shared_limits.share_rates import decide
from protocol.limits.fair_shares import Member
from protocol.limits.rates import base_slots
from protocol.messages import SharesRequest, SlotReport, SlotShare
from protocol.outcomes import HoldOutcome
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.store.connection import Argument, OnReply
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import (
    AgentSlotDemand,
    HoldState,
    Operation,
    PolicyDecision,
    RequestRun,
    SlotCharge,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
    hold_part,
)
from tests.budget import examples
from tests.lua.wire import at_once
from tests.simulation.simulated.scripted_store import LocalConnection, ScriptedStore

NAMES = ("a", "b", "c")
QUOTA = "reports:tenant=acme"
LIMIT, TTL_MS = 6, 60_000
BEGIN_US = 1_000_000_000_000_000


class Direct(LocalConnection):
    def __init__(self, store: ScriptedStore) -> None:
        super().__init__(store)
        self.fingerprint = "direct"

    async def _ask(self, *arguments: Argument) -> Any:
        return self.store.execute(*arguments)

    def send(self, arguments: Sequence[Argument], on_reply: OnReply, durability: object = None) -> None:
        on_reply(at_once(self._ask(*arguments)))


@dataclass
class Worker:
    hold: HoldId
    units: int
    until_ms: int


@dataclass
class Region:
    base_share: int
    store: ScriptedStore = field(default_factory=ScriptedStore)
    epoch: int = 0
    workers: list[Worker] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.begin(self.store, is_whole=True)

    @property
    def incarnation(self) -> StoreIncarnation:
        return StoreIncarnation(f"life-{self.epoch}", self.epoch, 1)

    @property
    def slots(self) -> SlotCharge:
        return SlotCharge(QUOTA, 1, LIMIT, TTL_MS, base_share=self.base_share)

    def begin(self, store: ScriptedStore, *, is_whole: bool) -> None:
        """Another epoch: in a store that has forgotten what was taken, or in one that has not."""
        self.epoch += 1
        store.now_us = self.store.now_us
        self.store, self.scripts = store, Scripts(Direct(store))
        at_once(self.scripts.begin_incarnation(self.incarnation.fingerprint, f"nonce-{self.epoch}"))
        names = (self.incarnation.fingerprint, f"nonce-{self.epoch}", self.epoch, 1)
        at_once(self.scripts.adopt_epoch(*names, is_whole=is_whole))

    def take(self, units: int = 1) -> StoreDecision:
        self.asked += 1
        charge = replace(self.slots, cost=units)
        part = hold_part(charge)
        assert part is not None
        hold = HoldTerms(HoldId.fresh(self.epoch, 1, [part]), 10 * TTL_MS)
        request = StoreRequest("hold", [charge], Operation(f"o-{self.asked}", "body", 60_000), hold)
        told: list[StoreDecision | Exception] = []
        self.scripts.checks.send(self.incarnation, [RequestRun(request, 1, told.extend)], lambda _: None)
        assert isinstance(told[0], StoreDecision), told
        return told[0]

    def tell(self, worker: Worker, action: str, amount: int = 0) -> HoldState:
        return at_once(self.scripts.update_hold(self.incarnation.fingerprint, worker.hold, action, amount))

    def look(self) -> PolicyDecision:
        return at_once(self.scripts.check(self.incarnation, "peek", [self.slots])).policies[0]


@dataclass
class World:
    weights: tuple[int, int, int] = (1, 1, 1)
    now_ms: int = 0
    shared: Shared = field(default_factory=lambda: Shared(0, 0))
    reports: list[tuple[str, SlotReport, int]] = field(default_factory=list)
    replies: list[tuple[str, SlotShare, int, StoreIncarnation]] = field(default_factory=list)

    def __post_init__(self) -> None:
        weights = dict(zip(NAMES, self.weights, strict=True))
        self.terms = terms_of_slots(LIMIT, TTL_MS, {name: Member(weight) for name, weight in weights.items()})
        total = sum(self.weights)
        self.regions = {name: Region(base_slots(LIMIT, weight, total)) for name, weight in weights.items()}
        self.pass_time(1)

    @property
    def working(self) -> int:
        workers = [worker for region in self.regions.values() for worker in region.workers]
        return sum(worker.units for worker in workers if worker.until_ms > self.now_ms)

    def pass_time(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        for region in self.regions.values():
            region.store.now_us = BEGIN_US + self.now_ms * 1000

    def take(self, name: str, units: int = 1) -> bool:
        decision = self.regions[name].take(units)
        if decision.hold is not None:
            until_ms = self.now_ms + decision.hold.ttl_ms
            self.regions[name].workers.append(Worker(decision.hold.id, units, until_ms))
        return decision.allowed

    def extend(self, name: str, place: int) -> HoldOutcome:
        worker = self.regions[name].workers[place % len(self.regions[name].workers)]
        told = self.regions[name].tell(worker, "extend", TTL_MS)
        if told.outcome is HoldOutcome.DONE:
            worker.until_ms = self.now_ms + told.expires_in_ms
        return told.outcome

    def release(self, name: str, place: int) -> None:
        worker = self.regions[name].workers.pop(place % len(self.regions[name].workers))
        self.regions[name].tell(worker, "release")

    def report(self, name: str, waiting: int = 0) -> None:
        region = self.regions[name]
        told = at_once(
            region.scripts.report_slots(region.incarnation, "agent", [AgentSlotDemand(region.slots, waiting)])
        )
        self.reports.append((name, told.reports[0], told.mono_us))

    def decide(self, place: int, *, keep: bool = False) -> None:
        name, report, mono_us = self.reports[place] if keep else self.reports.pop(place)
        request, shares = SharesRequest(slots=[report]), {QUOTA: self.shared}
        response, _ = decide(name, request, {QUOTA: self.terms}, shares, self.now_ms)
        incarnation = self.regions[name].incarnation._replace(fingerprint=f"life-{report.epoch}", epoch=report.epoch)
        self.replies.append((name, response.slots[0], mono_us, incarnation))

    def hear(self, place: int, *, keep: bool = False) -> int:
        """Return the number of new shares. A store of another incarnation answers that it is fenced."""
        name, share, mono_us, incarnation = self.replies[place] if keep else self.replies.pop(place)
        if incarnation != self.regions[name].incarnation:
            return 0
        return at_once(self.regions[name].scripts.share_slots(incarnation, mono_us, [share]))

    def talk(self, name: str, waiting: int = 0, there_ms: int = 1) -> None:
        """Run an exchange without faults."""
        self.report(name, waiting)
        self.pass_time(there_ms)
        self.decide(len(self.reports) - 1)
        self.pass_time(there_ms)
        self.hear(len(self.replies) - 1)

    def talk_all(self, seconds: int = 1, **waiting: int) -> None:
        for _ in range(seconds):
            for name in NAMES:
                self.talk(name, waiting.get(name, 0))
            self.pass_time(1000)

    def take_all(self, name: str) -> int:
        taken = 0
        while self.take(name):
            taken += 1
        return taken

    def limits(self) -> list[int]:
        return [self.regions[name].look().limit for name in NAMES]


# --- by example -------------------------------------------------------------------------------------------------------


def test_a_quiet_region_has_its_safe_share_and_says_nothing() -> None:
    world = World()
    assert world.limits() == [2, 2, 2]
    assert [world.take_all(name) for name in NAMES] == [2, 2, 2]


def test_slots_go_where_they_are_asked_for_and_come_back() -> None:
    world = World()
    world.talk_all(4, a=6)
    assert world.take_all("a") == LIMIT
    assert not world.take("b")
    for _ in range(8):
        world.talk_all(1, b=6, c=6)
        assert world.limits()[1:] == [0, 0], "all of them are in use"
    world.release("a", 0)
    world.talk_all(3, b=1)
    assert world.take("b")
    assert world.working == LIMIT


def test_nothing_is_given_before_it_came_back() -> None:
    world = World()
    assert world.take_all("b") == world.take_all("c") == 2
    world.talk_all(4, a=6)
    assert world.limits()[0] == 2
    for _ in range(2):
        world.release("b", 0)
    world.talk_all(3, a=6)
    assert world.limits()[0] == 4


def test_a_region_that_is_cut_off_has_its_safe_share_again_once_no_other_can_use_it() -> None:
    world = World()
    world.talk_all(4, a=6)
    assert world.take_all("a") == LIMIT
    cut_off_at_ms = world.now_ms
    while not world.take("b"):  # b is cut off; a works on
        world.talk("a", 6)
        world.talk("c")
        for place in range(LIMIT):
            world.extend("a", place)
        world.pass_time(1000)
        assert world.working <= LIMIT
    assert KEPT_MS + TTL_MS - 2000 < world.now_ms - cut_off_at_ms <= KEPT_MS + TTL_MS
    assert world.working <= LIMIT


def test_a_cut_off_borrower_uses_and_extends_no_more_than_its_safe_share() -> None:
    world = World()
    world.talk_all(4, a=6)
    assert world.take_all("a") == LIMIT
    world.pass_time(LONGEST_MS)
    assert world.limits()[0] <= 2
    assert world.extend("a", 0) is HoldOutcome.NOT_EXTENDED
    for _ in range(4):
        world.release("a", 0)
    assert world.extend("a", 0) is HoldOutcome.DONE


def test_what_a_lost_store_had_in_use_stays_reserved_until_all_of_it_ran_out() -> None:
    world = World()
    world.talk_all(4, a=6)
    assert world.take_all("a") == LIMIT
    world.regions["a"].begin(ScriptedStore(), is_whole=False)
    for _ in range(TTL_MS // 1000 - 20):
        world.talk_all(1, a=6, b=6, c=6)
        assert world.limits() == [0, 0, 0]
    world.talk_all(40, a=6, b=6, c=6)
    assert sum(world.limits()) == LIMIT


def test_a_lost_store_alone_gets_its_safe_share_once_no_other_can_have_it() -> None:
    world = World()
    assert world.take_all("b") == 2
    world.regions["b"].begin(ScriptedStore(), is_whole=False)
    assert world.limits() == [2, 0, 2]
    world.pass_time(KEPT_MS + TTL_MS)
    assert world.limits() == [2, 2, 2]


def test_a_store_that_kept_its_data_keeps_its_share() -> None:
    world = World()
    world.talk_all(4, a=6)
    region = world.regions["b"]
    region.begin(region.store, is_whole=True)
    assert world.limits() == [6, 0, 0]


def test_what_a_silent_borrower_had_in_use_stays_reserved_until_it_ran_out() -> None:
    world = World()
    world.talk_all(4, a=6)
    assert world.take_all("a") == LIMIT
    ended_ms = world.now_ms + TTL_MS
    while world.now_ms < ended_ms + LONGEST_MS:
        for name in ("b", "c"):
            world.talk(name, 6)
            world.take_all(name)
        world.pass_time(1000)
        assert world.working <= LIMIT
    assert world.working > 0


def test_what_was_forgotten_with_another_lost_store_is_not_taken_for_known() -> None:
    """The lost store's slots beyond its share are forgotten."""
    world = World()
    world.talk_all(4, a=6)
    assert world.take_all("a") == LIMIT
    world.shared = Shared(world.now_ms, world.now_ms)
    world.regions["a"].begin(ScriptedStore(), is_whole=False)
    for _ in range(TTL_MS // 1000):
        world.talk_all(1, a=6, b=6, c=6)
        for name in NAMES:
            world.take_all(name)
        assert world.working <= LIMIT


def test_a_reply_that_is_doubled_or_late_gives_nothing() -> None:
    world = World()
    world.talk_all(4, a=6)
    world.report("a", 6)
    world.decide(0)
    world.hear(0, keep=True)
    assert world.limits()[0] == LIMIT
    world.talk_all(3, b=6, c=6)
    assert world.limits()[0] < LIMIT
    assert world.hear(0) == 0
    for pause_ms, new in ((5000, 1), (5001, 0)):
        world.report("a", 6)
        world.pass_time(pause_ms)
        world.decide(0)
        assert world.hear(0) == new, pause_ms


def test_a_report_of_an_epoch_before_says_nothing() -> None:
    world = World()
    world.report("a", 6)
    world.regions["a"].begin(world.regions["a"].store, is_whole=True)
    world.talk("a")
    world.decide(0)
    assert world.shared.holdings["a"].demand_micro == 0


def test_where_the_limit_was_lowered_nobody_takes_before_enough_came_back() -> None:
    world = World()
    assert [world.take_all(name) for name in ("a", "b")] == [2, 2]
    world.terms = terms_of_slots(3, TTL_MS, {name: Member(1) for name in NAMES})
    for region in world.regions.values():
        region.base_share = 1
    for _ in range(8):
        world.talk_all(1, c=3)
        assert world.limits()[2] == 0
    world.release("a", 0)
    world.release("b", 0)
    world.talk_all(4, c=3)
    assert world.take_all("c") == 1


def test_odd_slots_go_round() -> None:
    """Seven are not divided by three evenly: whoever has the odd one, it is not always the same."""
    world = World()
    world.terms = terms_of_slots(LIMIT + 1, TTL_MS, {name: Member(1) for name in NAMES})
    most = set()
    for _ in range(40):
        world.talk_all(1, a=3, b=3, c=3)
        assert sum(world.limits()) <= LIMIT + 1
        most |= {name for name, limit in zip(NAMES, world.limits(), strict=True) if limit == 3}
    assert most == set(NAMES)


# --- at every moment --------------------------------------------------------------------------------------------------


class SharedSlots(RuleBasedStateMachine):
    world: World

    @initialize(weights=st.tuples(*[st.integers(1, 3)] * 3))
    def begin(self, weights: tuple[int, int, int]) -> None:
        self.world = World(weights)

    names = st.sampled_from(NAMES)
    places = st.integers(0, 99)

    @rule(name=names, units=st.sampled_from([1, 1, 2, 6]))
    def take(self, name: str, units: int) -> None:
        self.world.take(name, units)

    @rule(name=names)
    def take_all(self, name: str) -> None:
        self.world.take_all(name)

    @rule(name=names, place=places, is_extended=st.booleans())
    def tell(self, name: str, place: int, is_extended: bool) -> None:
        if self.world.regions[name].workers:
            self.world.extend(name, place) if is_extended else self.world.release(name, place)

    @rule(elapsed_ms=st.sampled_from([1, 200, 1000, 2000, 8000, 20_000, 35_000, 59_000, 61_000, 101_000]))
    def wait(self, elapsed_ms: int) -> None:
        self.world.pass_time(elapsed_ms)

    @rule(elapsed_ms=st.sampled_from([8000, 20_000, 59_000]))
    def work_on(self, elapsed_ms: int) -> None:
        """All holders extend as often as possible."""
        for _ in range(elapsed_ms // 4000):
            self.world.pass_time(4000)
            for name in NAMES:
                for place in range(len(self.world.regions[name].workers)):
                    self.world.extend(name, place)

    @rule(name=names, waiting=st.integers(0, 6))
    def report(self, name: str, waiting: int) -> None:
        self.world.report(name, waiting)

    @rule(name=names, waiting=st.integers(0, 6), there_ms=st.sampled_from([1, 300, 2000]), times=st.integers(1, 3))
    def talk(self, name: str, waiting: int, there_ms: int, times: int) -> None:
        for _ in range(times):
            self.world.talk(name, waiting, there_ms)

    @rule(waiting=st.tuples(*[st.integers(0, 6)] * 3))
    def talk_all(self, waiting: tuple[int, int, int]) -> None:
        self.world.talk_all(4, **dict(zip(NAMES, waiting, strict=True)))

    @precondition(lambda self: self.world.reports)
    @rule(place=places, keep=st.booleans())
    def decide(self, place: int, keep: bool) -> None:
        self.world.decide(place % len(self.world.reports), keep=keep)

    @precondition(lambda self: self.world.replies)
    @rule(place=places, keep=st.booleans())
    def hear(self, place: int, keep: bool) -> None:
        self.world.hear(place % len(self.world.replies), keep=keep)

    @rule(name=names, is_whole=st.booleans())
    def another_incarnation(self, name: str, is_whole: bool) -> None:
        region = self.world.regions[name]
        region.begin(region.store if is_whole else ScriptedStore(), is_whole=is_whole)

    @rule(name=names)
    def older_state(self, name: str) -> None:
        """A store that goes back to what it was a little before."""
        region = self.world.regions[name]
        snapshot = region.store.snapshot()
        self.world.pass_time(1000)
        self.world.talk(name, 6)
        self.world.take_all(name)
        region.store.restore(snapshot)
        region.begin(region.store, is_whole=False)

    @rule()
    def forget(self) -> None:
        """The database lost what is no ledger, and with it whoever was about to answer."""
        self.world.shared = Shared(self.world.now_ms, self.world.now_ms)
        self.world.replies.clear()

    @invariant()
    def never_more_than_the_limit(self) -> None:
        if hasattr(self, "world"):
            assert self.world.working <= LIMIT


TestSharedSlots = SharedSlots.TestCase
TestSharedSlots.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
