"""The records of quota keys are bounded, and those that something depends on are kept."""

import gc
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from protocol.check import Check, Subject
from protocol.limits.document import LimitsDocument, PolicyBundle
from protocol.limits.rates import Rate
from regional_agent.admission.check_cache import CheckCache
from regional_agent.admission.key_states import KeyStates
from regional_agent.admission.pending_check import PendingCheck
from regional_agent.admission.plan import CheckPlan, plan_request
from regional_agent.admission.policies import Policies
from regional_agent.admission.rules.slices import LIFETIME_MS, Slice
from regional_agent.leasing.rules.demand import HotKey
from regional_agent.shared_limits.rules import RateDemand
from regional_agent.shared_limits.shared_limit import SharedLimit
from regional_agent.store.types import RateCharge
from tests.simulation.test_slices import Agent
from tests.unit.regional_agent.admission.test_batching import live
from tests.unit.regional_agent.leasing.test_quotas import StandingClock

MOST = 4


@pytest.fixture
def states() -> KeyStates:
    return KeyStates(StandingClock(), MOST)


def known(states: KeyStates, count: int = 10) -> list[int]:
    return [number for number in range(count) if states.find(f"api:tenant={number}") is not None]


def test_the_record_that_was_not_used_for_longest_is_forgotten(states: KeyStates) -> None:
    first, *_ = [states.of(f"api:tenant={number}") for number in range(MOST)]
    states.count(first, 1, 1, first.window_ends_ms)  # used again, after the time in which it was made
    for number in range(MOST, MOST + 2):
        states.of(f"api:tenant={number}")
    assert (len(states), known(states)) == (MOST, [0, 3, 4, 5])
    assert states.of("api:tenant=0") is first


def test_a_record_that_is_needed_is_kept(states: KeyStates) -> None:
    sliced, reported, quiet = (states.of(f"api:tenant={number}") for number in range(3))
    sliced.slice = Slice(RateCharge("api:tenant=0", 1, 1_000, 100), now_ms=0)
    reported.shared = SharedLimit(reported.quota, Rate(1_000, 100), RateDemand(0), due_ms=1)
    quiet.shared = SharedLimit(quiet.quota, Rate(1_000, 100), RateDemand(0))
    for number in range(3, 10):
        states.of(f"api:tenant={number}")
    assert (len(states), known(states)) == (MOST, [0, 1, 8, 9])


def test_records_that_are_all_needed_are_kept_beyond_the_bound_until_they_are_not(states: KeyStates) -> None:
    kept = [states.of(f"api:tenant={number}") for number in range(MOST)]
    for each in kept:
        each.slice = Slice(RateCharge(each.quota, 1, 1_000, 100), now_ms=0)
    states.of("api:tenant=4")
    assert known(states) == [0, 1, 2, 3, 4]
    for each in kept:
        each.slice = None
    states.of("api:tenant=5")
    assert len(states) == MOST + 1


def test_a_forgotten_record_makes_plans_of_it_outdated(states: KeyStates) -> None:
    document = {
        "quotas": [{"name": "api", "kind": "rate", "limit": "5/second"}],
        "policies": [{"name": "search", "quota": "api", "by": ["tenant"]}],
    }
    bundle = PolicyBundle(
        version=1, document=msgspec.convert(document, LimitsDocument), subscriptions={}, weight=1, total_weight=1
    )
    policies = Policies(bundle, keys=states)

    def plan(tenant: str) -> CheckPlan:
        return plan_request(policies, Check(subject=Subject(tenant=tenant)), {"tenant": tenant}, 100)

    holder: Any = SimpleNamespace(policies=policies)
    cache: CheckCache[str, CheckPlan] = CheckCache(holder)
    first = plan("0")
    assert cache.find("0") is None
    cache.keep("0", first)
    assert cache.find("0") is first
    assert plan("0").policy_charges[0].state is first.policy_charges[0].state
    for number in range(1, MOST + 1):
        plan(str(number))
    assert cache.find("0") is None
    assert plan("0").policy_charges[0].state is not first.policy_charges[0].state


def test_units_and_checks_are_counted_in_windows_and_as_demand() -> None:
    clock = StandingClock()
    states = KeyStates(clock)
    state = states.of("api:tenant=0")
    states.count(state, 7, 2, clock.now_ms)
    states.count(state, 3, 1, clock.now_ms + LIFETIME_MS - 1)
    assert (state.units, state.checks) == (10, 3)
    states.count(state, 5, 1, clock.now_ms + LIFETIME_MS)
    assert (state.units, state.checks) == (5, 1)
    states.of("api:tenant=quiet")
    clock.now_ms += 1_000
    assert states.hottest(9) == [HotKey("api:tenant=0", state.demand.per_second_milli(clock.now_ms))]
    assert states.hottest(1)[0].demand_milli > 9_000


def test_a_decided_check_leaves_nothing_for_the_garbage_collector() -> None:
    """A cycle among what a call refers to would keep each of its checks until the collector finds it."""

    async def crowd(agent: Agent) -> None:
        check = Check(subject=Subject(tenant="acme"))
        await agent.admission.decide(check)  # the store knows the script now
        gc.collect()
        before = pending_checks()  # of other tests in this process
        gc.disable()
        try:
            for _ in range(5):
                await agent.admission.decide(check)
            await agent.rest(1)
            left = pending_checks().keys() - before.keys()
        finally:
            gc.enable()
        assert len(left) <= 1, "the last one may be joined by equal checks"

    live(crowd, limit="1000/second")


def pending_checks() -> dict[int, PendingCheck]:
    return {id(each): each for each in gc.get_objects() if isinstance(each, PendingCheck)}
