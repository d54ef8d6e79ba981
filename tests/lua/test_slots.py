"""Slots on a real store never exceed the limit, are never fewer than promised, and none is lost for long.

The oracle is a list of holders and the ends of their slots. The store runs the real scripts on the test's clock.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.identifiers import lane_of, quota_key
from protocol.messages import SlotShare
from protocol.outcomes import HoldOutcome
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.store import keys
from regional_agent.store.connection import Argument, OnReply, StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import (
    AgentSlotDemand,
    Charge,
    HoldState,
    Operation,
    PolicyDecision,
    RateCharge,
    RequestRun,
    SlotCharge,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
    hold_part,
)
from tests.budget import examples
from tests.conftest import Server
from tests.lua.script_helpers import QUOTA, RATE, ask_for_hold, available, charge_of, install, lease_reply
from tests.lua.test_algorithms import LIFE, Clocked, Straight
from tests.lua.wire import at_once

REPORTS = quota_key("reports", [("tenant", "acme")])
TTL_MS, REMEMBERED_MS = 60_000, 600_000


class Direct(Straight):
    def send(self, arguments: Sequence[Argument], on_reply: OnReply, durability: object = None) -> None:
        on_reply(at_once(self._ask(*arguments)))


class Slots(Clocked):
    """One quota's slots on a real store, at times that the test sets."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, "")
        self.scripts = Scripts(Direct(self.wire))
        self._operations = 0

    def hold(self, *charges: Charge, ttl_ms: int = TTL_MS) -> StoreDecision:
        self._operations += 1
        told: list[StoreDecision | Exception] = []
        hold = HoldTerms(HoldId.fresh(LIFE.epoch, LIFE.lanes, filter(None, map(hold_part, charges))), ttl_ms)
        request = StoreRequest("hold", charges, Operation(f"o-{self._operations}", "body", TTL_MS), hold)
        self.scripts.checks.send(LIFE, [RequestRun(request, 1, told.extend)], lambda _: None)
        assert isinstance(told[0], StoreDecision), told
        return told[0]

    def slot(self, units: int = 1, limit: int = 5, ttl_ms: int = TTL_MS) -> HoldId:
        held = self.hold(slots(units, limit), ttl_ms=ttl_ms).hold
        assert held is not None
        return held.id

    def tell(self, hold: HoldId, action: str, amount: int = 0) -> HoldState:
        return at_once(self.scripts.update_hold(LIFE.fingerprint, hold, action, amount))

    def look(self, limit: int = 5) -> PolicyDecision:
        return self.look_at(slots(1, limit))

    def look_at(self, charge: SlotCharge) -> PolicyDecision:
        return at_once(self.scripts.check(LIFE, "peek", [charge])).policies[0]

    def names(self) -> list[bytes]:
        found: list[bytes] = self.wire.ask("KEYS", "*:slot*")
        return found


def slots(units: int = 1, limit: int = 5, slot_ttl_ms: int = TTL_MS) -> SlotCharge:
    return SlotCharge(REPORTS, units, limit, slot_ttl_ms)


@pytest.fixture
def store_of_slots(store_server: Server) -> Iterator[Slots]:
    with closing(Slots(store_server)) as found:
        yield found


def share(units: int, number: int = 1, **other: int) -> SlotShare:
    told = {"after_units": 1, "expires_in_ms": 8_000, "slot_ttl_ms": TTL_MS} | other
    return SlotShare(quota=REPORTS, number=number, units=units, refresh_in_ms=1, contended=False, **told)


# --- the promise ------------------------------------------------------------------------------------------------------


class StoresClock:
    """Return what lua/parts/clock.lua makes of a machine's clock: after a jump back it may repeat the rest of a
    millisecond.
    """

    def __init__(self, machine_us: int) -> None:
        self._last_us = self._mono_us = machine_us

    def read(self, machine_us: int) -> int:
        elapsed_us = machine_us - self._last_us
        now_us = self._mono_us + max(0, elapsed_us)
        if not 0 <= elapsed_us < 1000:
            self._mono_us, self._last_us = now_us, machine_us
        return now_us


OVER = 0


@dataclass
class Taken:
    id: HoldId
    units: int
    until_us: int


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 4), st.sampled_from([1, 500, 2_000, TTL_MS, 10 * TTL_MS])),
        st.tuples(st.just("take"), st.integers(1, 4), st.just(TTL_MS)),
        st.tuples(st.sampled_from(["release", "commit", "extend"]), st.integers(0, 9), st.sampled_from([1, 5_000])),
        st.tuples(st.just("pass"), st.just(0), st.sampled_from([1, 999, 1_000, 500_000, 30_000_000, -60_000_000])),
        st.tuples(st.just("limit"), st.integers(0, 8), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(steps=steps)
def test_slots_are_taken_exactly_as_promised(store_server: Server, steps: list[tuple[str, int, int]]) -> None:
    with closing(Slots(store_server)) as store:
        taken: list[Taken] = []
        store.look()  # its clock begins
        clock, limit, now_us = StoresClock(store.now_us), 5, store.now_us
        for step, number, amount in steps:
            if step == "pass":
                store.advance(amount)
                now_us = clock.read(store.now_us)
            elif step == "limit":
                limit = number
            elif step == "take":
                _takes(store, taken, number, limit, now_us, amount)
            elif taken:
                _ends(store, taken[number % len(taken)], step, amount, now_us)
            for each in taken:
                each.until_us = each.until_us if each.until_us > now_us else OVER  # even if that moment occurs twice
            in_use = sum(each.units for each in taken if each.until_us != OVER)
            assert store.look(limit).remaining == max(0, limit - in_use)


def _takes(store: Slots, taken: list[Taken], units: int, limit: int, now_us: int, ttl_ms: int) -> None:
    there = sorted((each.until_us, each.units) for each in taken if each.until_us > now_us)
    in_use = sum(each for _, each in there)
    decision = store.hold(slots(units, limit), ttl_ms=ttl_ms)
    assert decision.allowed == (in_use + units <= limit)
    if decision.hold is not None and decision.allowed:
        assert decision.hold.ttl_ms == min(ttl_ms, TTL_MS)
        taken.append(Taken(decision.hold.id, units, now_us + decision.hold.ttl_ms * 1000))
    elif units <= limit:
        assert decision.policies[0].reason == "slots_taken"
        retry_us = now_us + decision.policies[0].retry_after_ms * 1000
        assert sum(each for until_us, each in there if until_us > retry_us) + units <= limit
        assert sum(each for until_us, each in there if until_us > retry_us - 1_000) + units > limit
    else:
        assert decision.policies[0].reason == "cost_above_limit"


def _ends(store: Slots, slot: Taken, word: str, amount: int, now_us: int) -> None:
    told = store.tell(slot.id, word, amount if word == "extend" else slot.units)
    if slot.until_us <= now_us:
        assert told.outcome in ("done", "ended")
        assert (word, told.outcome) != ("extend", "done"), "somebody else may have it by now"
    elif word == "extend":
        slot.until_us = max(slot.until_us, now_us + amount * 1000)
        assert (told.outcome, told.expires_in_ms) == ("done", -((now_us - slot.until_us) // 1000))
    else:
        assert told.outcome == "done"
        slot.until_us = now_us


@pytest.mark.anyio
async def test_of_200_clients_at_once_exactly_the_limit_takes_a_slot(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    asked = (ask_for_hold(scripts, incarnation, slots(1, 120), name=f"client-{number}") for number in range(200))
    decisions = await asyncio.gather(*asked)
    assert sum(decision.allowed for decision in decisions) == 120
    assert {decision.policies[0].reason for decision in decisions} == {"", "slots_taken"}


# --- the traps --------------------------------------------------------------------------------------------------------


def test_a_released_slot_is_free_and_a_second_release_changes_nothing(store_of_slots: Slots) -> None:
    first, second = store_of_slots.slot(3), store_of_slots.slot(2)
    assert not store_of_slots.hold(slots()).allowed
    for _ in range(3):
        assert store_of_slots.tell(first, "release").state == "released"
        assert store_of_slots.look().remaining == 3
    for _ in range(3):
        assert store_of_slots.tell(second, "commit", 2).outcome is HoldOutcome.DONE
        assert store_of_slots.look().remaining == 5
    assert store_of_slots.tell(second, "commit", 1).outcome is HoldOutcome.ENDED, "another commit"
    assert store_of_slots.tell(first, "commit", 1).outcome is HoldOutcome.ENDED, "it was released"


def test_an_absent_holder_loses_its_slot_exactly_after_its_ttl(store_of_slots: Slots) -> None:
    gone = store_of_slots.slot(5)
    store_of_slots.advance(TTL_MS * 1000 - 1)
    denied = store_of_slots.hold(slots())
    assert (denied.allowed, denied.policies[0].retry_after_ms, denied.policies[0].reset_ms) == (False, 1, 1)
    store_of_slots.advance(1)
    assert store_of_slots.hold(slots(5)).allowed
    assert store_of_slots.tell(gone, "extend", TTL_MS).outcome is HoldOutcome.ENDED
    assert store_of_slots.tell(gone, "look").state == "lapsed"
    assert store_of_slots.tell(gone, "release").outcome is HoldOutcome.DONE
    assert store_of_slots.look().remaining == 0, "what somebody else has is not given back"


def test_a_holder_that_extends_keeps_its_slot(store_of_slots: Slots) -> None:
    slot = store_of_slots.slot(5)
    for _ in range(20):
        store_of_slots.advance(TTL_MS * 1000 - 1)
        told = store_of_slots.tell(slot, "extend", 24 * 3_600_000)
        assert (told.outcome, told.expires_in_ms) == (HoldOutcome.DONE, TTL_MS), "its quota says how far"
    assert not store_of_slots.hold(slots()).allowed


def test_a_lowered_limit_revokes_no_slot_and_applies_to_the_next(store_of_slots: Slots) -> None:
    first, second = store_of_slots.slot(2), store_of_slots.slot(3)
    lowered = store_of_slots.hold(slots(1, 2))
    assert (lowered.allowed, lowered.policies[0].remaining) == (False, 0)
    store_of_slots.tell(second, "release")
    assert not store_of_slots.hold(slots(1, 2)).allowed, "two of two"
    assert store_of_slots.hold(slots(6, 8)).allowed, "raised"
    store_of_slots.tell(first, "release")
    assert store_of_slots.look(8).remaining == 2


def test_a_cost_above_the_limit_is_distinguished_from_a_denial(store_of_slots: Slots) -> None:
    for limit in (5, 0):
        decision = store_of_slots.hold(slots(6, limit))
        policy = decision.policies[0]
        assert (policy.reason, policy.remaining, policy.retry_after_ms) == ("cost_above_limit", limit, 0)


def test_a_clock_that_goes_back_frees_nothing_and_holds_nothing_longer(store_of_slots: Slots) -> None:
    store_of_slots.slot(5)
    store_of_slots.advance(-3_600_000_000)
    assert not store_of_slots.hold(slots()).allowed
    store_of_slots.advance(TTL_MS * 1000)
    assert store_of_slots.hold(slots()).allowed


def test_two_policies_of_one_request_share_the_slots_or_none_is_taken(store_of_slots: Slots) -> None:
    assert not store_of_slots.hold(slots(3), slots(3)).allowed
    assert store_of_slots.look().remaining == 5
    both = store_of_slots.hold(slots(3), slots(2))
    assert both.hold is not None
    assert [policy.remaining for policy in both.policies] == [0, 0]
    store_of_slots.tell(both.hold.id, "release")
    assert store_of_slots.look().remaining == 5


def test_peek_takes_nothing_and_leaves_nothing(store_of_slots: Slots) -> None:
    assert [store_of_slots.look().remaining for _ in range(2)] == [5, 5]
    assert store_of_slots.names() == []


def test_thousands_of_slots_that_expire_together_are_free_at_once(store_of_slots: Slots) -> None:
    for _ in range(300):
        store_of_slots.slot(10, 3_000)
    store_of_slots.advance(TTL_MS * 1000)
    assert store_of_slots.hold(slots(3_000, 3_000)).allowed


def test_all_is_forgotten_ten_minutes_after_the_last_slot(store_of_slots: Slots) -> None:
    slot = store_of_slots.slot()
    expected_ms = TTL_MS + REMEMBERED_MS + 1
    for _ in range(2):
        names = store_of_slots.names()
        assert len(names) > 1
        assert {store_of_slots.wire.forgets_in_ms(name) for name in names} == {expected_ms}
        store_of_slots.tell(slot, "release")
        expected_ms = REMEMBERED_MS + 1
    store_of_slots.advance(REMEMBERED_MS * 1000)
    assert store_of_slots.tell(slot, "look").outcome is HoldOutcome.UNKNOWN


def test_ended_slots_of_a_key_in_use_are_swept(store_of_slots: Slots) -> None:
    for _ in range(50):
        store_of_slots.tell(store_of_slots.slot(), "release")
    store_of_slots.advance(REMEMBERED_MS * 1000)
    store_of_slots.slot()
    assert store_of_slots.wire.ask("HLEN", keys.slots(lane_of(REPORTS, LIFE.lanes), REPORTS)) == 2, "it, and `used`"


# --- with other kinds of quotas ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_rate_allowance_and_slot_are_taken_together_or_not_at_all(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    rate, allowance = RateCharge(RATE, 1, 1_000, 3), charge_of(4)

    async def left() -> tuple[int, int, int]:
        peek = await scripts.check(incarnation, "peek", [rate, slots(1, 2)])
        return peek.policies[0].remaining, await available(scripts, incarnation), peek.policies[1].remaining

    first = await ask_for_hold(scripts, incarnation, rate, allowance, slots(1, 2), name="first")
    assert first.allowed
    assert await left() == (2, 6, 1)
    for name, charges in {
        "slots": (rate, allowance, slots(2, 2)),
        "allowance": (rate, charge_of(7), slots(1, 2)),
        "rate": (RateCharge(RATE, 3, 1_000, 3), allowance, slots(1, 2)),
    }.items():
        assert not (await ask_for_hold(scripts, incarnation, *charges, name=name)).allowed, name
        assert await left() == (2, 6, 1), name
    assert first.hold is not None
    told = await scripts.update_hold(incarnation.fingerprint, first.hold.id, "commit", 3)
    assert (told.outcome, told.units, told.committed) == (HoldOutcome.DONE, 4, 3)
    assert await left() == (2, 7, 2), "a rate is spent, of the allowance three were used, and the slot is back"


@pytest.mark.anyio
async def test_a_forgotten_slot_does_not_keep_usage_from_being_booked(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    decision = await ask_for_hold(scripts, incarnation, slots(), charge_of(4), name="first")
    assert decision.hold is not None
    lane = lane_of(REPORTS, incarnation.lanes)
    for name in (keys.slots(lane, REPORTS), keys.slot_deadlines(lane, REPORTS), keys.slot_retention(lane, REPORTS)):
        await connection.call("DEL", name)
    told = await scripts.update_hold(incarnation.fingerprint, decision.hold.id, "commit", 3)
    assert (told.outcome, told.state, told.committed) == (HoldOutcome.DONE, "committed", 3)
    assert await available(scripts, incarnation, QUOTA) == 7


# --- shared over regions ----------------------------------------------------------------------------------------------

SHARED = SlotCharge(REPORTS, 1, 9, TTL_MS, base_share=2)


def test_a_share_lasts_then_falls_back_and_then_is_the_safe_share(store_of_slots: Slots) -> None:
    def look() -> PolicyDecision:
        return store_of_slots.look_at(SHARED)

    assert look().limit == 2
    sent_us = at_once(store_of_slots.scripts.read_mono_us())
    assert at_once(store_of_slots.scripts.share_slots(LIFE, sent_us, [share(5)])) == 1
    assert look().limit == 5
    store_of_slots.advance(8_001_000)
    assert look().limit == 1
    store_of_slots.advance(32_000_000 + 1000 * TTL_MS)
    assert look().limit == 2


def test_a_slot_lasts_as_its_share_says_and_is_extended_only_within_it(
    store_of_slots: Slots,
) -> None:
    """The coordinator counts on the `slot_ttl` that was in force when the share was granted."""
    at_once(store_of_slots.scripts.share_slots(LIFE, 0, [share(2, slot_ttl_ms=10_000)]))
    held = [store_of_slots.hold(SHARED).hold for _ in range(2)]
    one, other = (each.id for each in held if each is not None)
    assert held[0] is not None
    assert held[0].ttl_ms == 10_000
    assert store_of_slots.tell(one, "extend", TTL_MS).expires_in_ms == 10_000
    store_of_slots.advance(8_001_000)
    refused = store_of_slots.tell(one, "extend", TTL_MS)
    assert (refused.outcome, refused.expires_in_ms) == (HoldOutcome.NOT_EXTENDED, 1_999)
    store_of_slots.tell(other, "release")
    assert store_of_slots.tell(one, "extend", TTL_MS).outcome is HoldOutcome.DONE


def test_a_cost_that_no_share_can_meet_is_distinguished_from_one_that_waits(store_of_slots: Slots) -> None:
    decision = store_of_slots.hold(replace(SHARED, cost=3))
    assert (decision.policies[0].reason, decision.policies[0].retry_after_ms) == ("slots_taken", 1_000)
    assert store_of_slots.hold(replace(SHARED, cost=10)).policies[0].reason == "cost_above_limit"


def test_a_report_has_the_number_of_the_share_and_slots_held_and_wanted(store_of_slots: Slots) -> None:
    def report(agent: str, waiting: int) -> tuple[int, int, int]:
        (told,) = at_once(store_of_slots.scripts.report_slots(LIFE, agent, [AgentSlotDemand(SHARED, waiting)])).reports
        return told.number, told.held, told.wanted

    store_of_slots.hold(SHARED)
    assert report("one", 0) == (0, 2, 1)
    assert report("two", 3) == (0, 2, 4)
    at_once(store_of_slots.scripts.share_slots(LIFE, 0, [share(0, number=7)]))
    assert report("one", 2) == (7, 1, 6), "one is in use yet"


def test_slots_of_a_formerly_shared_quota_are_extended_as_before(store_of_slots: Slots) -> None:
    at_once(store_of_slots.scripts.share_slots(LIFE, 0, [share(2)]))
    held = [store_of_slots.hold(charge).hold for charge in (SHARED, slots(limit=5))]
    store_of_slots.advance(8_001_000)
    assert held[0] is not None
    assert store_of_slots.tell(held[0].id, "extend", 1_000).outcome is HoldOutcome.DONE
