"""A shadow policy on a real store is counted as if it were enforced, and changes no outcome."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from protocol.identifiers import quota_key
from protocol.outcomes import HoldOutcome
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Charge, Operation, RateCharge, SlotCharge, StoreDecision, StoreIncarnation
from tests.conftest import Server
from tests.lua.script_helpers import QUOTA, RATE, ask_for_hold, available, charge_of, install, lease_reply
from tests.lua.test_slots import TTL_MS, Slots, slots

TRIAL = quota_key("trial", [("tenant", "acme")])
ENFORCED = RateCharge(RATE, 1, 1_000, 10)


def tried(cost: int = 1, burst: int = 3) -> RateCharge:
    return RateCharge(TRIAL, cost, 1_000, burst, is_shadow=True)


def tried_slot(units: int = 1, limit: int = 2, slot_ttl_ms: int = TTL_MS) -> SlotCharge:
    return SlotCharge(TRIAL, units, limit, slot_ttl_ms, is_shadow=True)


async def check(
    scripts: Scripts, incarnation: StoreIncarnation, *charges: Charge, mode: str = "enforce"
) -> list[tuple[str, int]]:
    """Return what each policy of an admitted request reports."""
    decision = await scripts.check(incarnation, mode, charges)
    assert decision.allowed
    return said(decision)


def said(decision: StoreDecision) -> list[tuple[str, int]]:
    return [(policy.reason, policy.remaining) for policy in decision.policies]


@pytest.mark.anyio
async def test_a_shadow_counts_until_it_would_refuse_and_then_takes_nothing(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    told = [(await check(scripts, incarnation, ENFORCED, tried()))[1] for _ in range(5)]
    assert told == [("", 2), ("", 1), ("", 0), ("rate_exceeded", 0), ("rate_exceeded", 0)]
    assert await check(scripts, incarnation, ENFORCED, mode="peek") == [("", 5)], "the other counted all of them"
    assert (await check(scripts, incarnation, tried(9)))[0] == ("cost_above_limit", 0)


@pytest.mark.anyio
async def test_a_denied_request_takes_nothing_of_a_shadow(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    decision = await scripts.check(incarnation, "enforce", [tried(), RateCharge(RATE, 11, 1_000, 10)])
    assert (decision.allowed, said(decision)) == (False, [("", 3), ("cost_above_limit", 10)])
    assert await check(scripts, incarnation, tried(), mode="peek") == [("", 3)]


@pytest.mark.anyio
async def test_enforcement_continues_from_the_count_of_a_shadow(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    for _ in range(3):
        await check(scripts, incarnation, tried())
    decision = await scripts.check(incarnation, "enforce", [replace(tried(), is_shadow=False)])
    assert (decision.allowed, said(decision)) == (False, [("rate_exceeded", 0)])


@pytest.mark.anyio
async def test_a_replayed_operation_has_the_outcome_of_its_shadow(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    once = Operation("once", "body", 60_000)
    first, again = [await scripts.check(incarnation, "enforce", [ENFORCED, tried(4)], once) for _ in range(2)]
    assert (again.allowed, again.replayed, said(again)) == (True, True, said(first))
    assert said(first)[1] == ("cost_above_limit", 3)


@pytest.mark.anyio
async def test_a_check_takes_no_slot_of_a_shadow_and_gets_the_reason(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    for mode, left in (("enforce", 9), ("adjust", 8)):
        assert await check(scripts, incarnation, ENFORCED, tried_slot(), mode=mode) == [("", left), ("hold_needed", 2)]
    assert await check(scripts, incarnation, tried_slot(), mode="peek") == [("", 2)]


# --- holds ------------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_hold_is_granted_and_ended_whatever_its_shadows_decide(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    holds = [await ask_for_hold(scripts, incarnation, tried_slot(), charge_of(10), name=f"h-{n}") for n in range(3)]
    assert [hold.policies[0].reason for hold in holds] == ["", "", "slots_taken"]
    assert await available(scripts, incarnation, QUOTA) == 70
    for hold in holds:
        assert hold.hold is not None
        told = await scripts.update_hold(incarnation.fingerprint, hold.hold.id, "commit", 4)
        assert (told.outcome, told.state, told.committed) == (HoldOutcome.DONE, "committed", 4)
    assert await available(scripts, incarnation, QUOTA) == 88
    assert await check(scripts, incarnation, tried_slot(), mode="peek") == [("", 2)], "both slots are back"


@pytest.fixture
def clocked(store_server: Server) -> Iterator[Slots]:
    with closing(Slots(store_server)) as found:
        yield found


def free(clocked: Slots) -> int:
    return clocked.look_at(tried_slot()).remaining


def test_a_shadow_neither_shortens_a_hold_nor_ends_it(clocked: Slots) -> None:
    decision = clocked.hold(slots(), tried_slot(slot_ttl_ms=1_000))
    assert decision.hold is not None
    assert (decision.hold.ttl_ms, free(clocked)) == (TTL_MS, 1)
    clocked.advance(1_000_000)
    assert free(clocked) == 2, "it ran out by its own quota"
    told = clocked.tell(decision.hold.id, "extend", TTL_MS)
    assert (told.outcome, told.expires_in_ms) == (HoldOutcome.DONE, TTL_MS)
    assert clocked.tell(decision.hold.id, "release").state == "released"
    assert clocked.look().remaining == 5


def test_every_operation_on_a_hold_of_shadows_only_succeeds(clocked: Slots) -> None:
    held = [clocked.hold(tried_slot()) for _ in range(3)]
    assert [each.policies[0].reason for each in held] == ["", "", "slots_taken"]
    for each, left in zip(held, (1, 2, 2), strict=True):
        assert each.hold is not None
        for action in ("extend", "look", "commit", "commit", "release"):
            told = clocked.tell(each.hold.id, action, 7)
            assert (told.outcome, told.state) == (HoldOutcome.DONE, "nothing_held"), action
        assert free(clocked) == left


def test_an_extension_keeps_the_slot_of_a_shadow_for_the_ttl_of_its_quota(clocked: Slots) -> None:
    decision = clocked.hold(tried_slot(), ttl_ms=10 * TTL_MS)
    assert decision.hold is not None
    for _ in range(5):
        clocked.advance(TTL_MS * 1000 - 1)
        clocked.tell(decision.hold.id, "extend", 10 * TTL_MS)
        assert free(clocked) == 1
    clocked.advance(TTL_MS * 1000)
    assert free(clocked) == 2
