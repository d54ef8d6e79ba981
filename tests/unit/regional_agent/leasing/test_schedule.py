"""An agent tracks allowances by due time, forgets idle ones, and never scans all of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.limits.rates import Rate
from regional_agent.admission.key_states import KeyStates
from regional_agent.leasing import schedule as schedule_module
from regional_agent.leasing.quota import Quota
from regional_agent.leasing.quotas import Quotas
from regional_agent.shared_limits import share_loop as share_loop_module
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.types import PolicyDecision
from tests.budget import examples
from tests.unit.regional_agent.leasing.test_quotas import QUOTA, StandingClock, spent

NO_LEASE = PolicyDecision(1, 1000, 0, 0, 0, 0, 0, 0)
FAR_MS = 10**9


def keys(count: int) -> list[str]:
    return [f"exports:tenant=t{number}" for number in range(count)]


def lease_all(quotas: Quotas, names: list[str]) -> None:
    for quota in names:
        quotas.record_demand(quota, 1, NO_LEASE)
        quotas.on_grant(quota, 10)
        quotas.schedule_renewal(quota, FAR_MS)


def test_a_new_allowance_is_requested_however_many_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a new allowance used to be forgotten at once, because it was the only idle one."""
    monkeypatch.setattr(schedule_module, "MOST_KEPT", 20)
    quotas = Quotas(StandingClock())
    lease_all(quotas, keys(30))
    quotas.record_demand(QUOTA, 1, NO_LEASE)
    quotas.start_waiting(QUOTA, 1)
    assert quotas.due() == [QUOTA]
    assert quotas.grant_request(QUOTA).waiting == 1
    quotas.stop_waiting(QUOTA, 1)
    assert quotas.grant_request(QUOTA).waiting == 0


def test_the_longest_idle_allowance_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "MOST_KEPT", 10)
    quotas = Quotas(StandingClock())
    for quota in keys(30):
        quotas.record_demand(quota, 1, spent(available=100))
    assert [each.name for each in quotas._schedule] == keys(30)[-10:]


def test_beyond_a_bound_no_new_allowance_is_tracked_and_requests_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "MOST_KEPT", 10)
    monkeypatch.setattr(schedule_module, "MOST_FOLLOWED", 20)
    quotas = Quotas(StandingClock())
    lease_all(quotas, keys(20))
    quotas.record_demand(QUOTA, 1, NO_LEASE)
    assert not quotas.may_wait(QUOTA)
    assert quotas.turned_away > 0
    assert (quotas.due(), len(quotas._schedule)) == ([], 20)
    quotas.schedule_renewal(keys(1)[0], None)
    quotas.record_demand(QUOTA, 1, NO_LEASE)
    assert quotas.may_wait(QUOTA)
    assert quotas.due() == [QUOTA]


def test_no_turn_visits_an_allowance_that_is_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
    quotas, looks = Quotas(StandingClock()), [0]
    lease_all(quotas, keys(2_000))
    real: Any = Quota.due_at_ms

    def counted(quota: Quota) -> int | None:
        looks[0] += 1
        moment: int | None = real.fget(quota)
        return moment

    monkeypatch.setattr(Quota, "due_at_ms", property(counted))
    quotas.record_demand(QUOTA, 1, NO_LEASE)
    for turn in (quotas.next_due_in_ms, quotas.due, quotas.take_surplus, quotas.central_quotas):
        turn()
    quotas.on_grant(QUOTA, 10)
    quotas.schedule_renewal(QUOTA, FAR_MS)
    quotas.retry_all()
    quotas.set_central(frozenset())
    quotas.on_coordinator_lost()
    quotas.on_coordinator_reached()
    assert looks[0] < 20


OPERATIONS: dict[str, Callable[[Quotas, str, int], object]] = {
    "note": lambda quotas, quota, _: quotas.record_demand(quota, 1, NO_LEASE),
    "hold": lambda quotas, quota, units: quotas.set_held(quota, units % 2),
    "wait": lambda quotas, quota, _: quotas.start_waiting(quota, 1),
    "leave": lambda quotas, quota, _: quotas.stop_waiting(quota, 1),
    "grant": lambda quotas, quota, units: quotas.on_grant(quota, units % 3),
    "lease": lambda quotas, quota, units: quotas.schedule_renewal(quota, units * 100 if units % 4 else None),
    "refuse": lambda quotas, quota, units: quotas.on_refusal(quota, units * 50),
    "postpone": lambda quotas, quota, units: quotas.postpone(quota, units * 10),
    "hint": lambda quotas, quota, units: quotas.retry(quota) if units % 2 else quotas.retry_all(),
    "fetch": lambda quotas, quota, _: quotas.fetch(quota),
    "follow": lambda quotas, _, units: quotas.set_central(frozenset({"central"} if units % 2 else ())),
}


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 7), st.integers(0, 40), st.integers(0, 300)),
        max_size=60,
    )
)
def test_due_allowances_equal_those_of_a_full_scan(steps: list[tuple[str, int, int, int]]) -> None:
    clock = StandingClock()
    quotas = Quotas(clock)
    for name, number, units, pause_ms in steps:
        quota = f"{'central' if number % 3 == 0 else 'exports'}:tenant=t{number}"
        OPERATIONS[name](quotas, quota, units)
        clock.now_ms += pause_ms
        due = {each.name: each.due_at_ms for each in quotas._schedule if each.due_at_ms is not None}
        found = quotas.due(100)
        assert len(found) == len(set(found))
        assert set(found) == {quota for quota, moment in due.items() if moment <= clock.now_ms}
        expected = max(0, min(due.values()) - clock.now_ms) if due else None
        assert quotas.next_due_in_ms() == expected
        assert set(quotas._schedule.waiting) == {each.name for each in quotas._schedule if each.waiting}


def test_of_too_many_reported_rates_the_one_that_began_first_is_reported_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(share_loop_module, "MOST_REPORTED", 10)
    nobody: Any = SimpleNamespace()
    clock = StandingClock()
    states = KeyStates(clock)
    sharing = ShareLoop("an agent", nobody, nobody, states, nobody, nobody, clock)
    limits = [sharing._follow(states.of(f"api:tenant=t{number}"), Rate(1_000_000, 10), 0) for number in range(11)]
    for limit in limits:
        sharing._report_at(limit, 1)
    assert sharing.reported_limits() == limits[1:]
    assert limits[0].due_ms is None
