"""The allowances that an agent follows: what is due, what is forgotten, and that no turn looks at all of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.limits.rates import Rate
from regional_agent.leasing import demands as wants_module
from regional_agent.leasing.demands import Want
from regional_agent.leasing.quotas import Leasing
from regional_agent.shared_limits import share_loop as share_loop_module
from regional_agent.shared_limits.share_loop import ShareLoop
from regional_agent.store.types import PolicyDecision
from tests.unit.regional_agent.leasing.test_quotas import QUOTA, StandingClock, spent

NO_LEASE = PolicyDecision(1, 1000, 0, 0, 0, 0, 0, 0)
FAR_MS = 10**9


def keys(count: int) -> list[str]:
    return [f"exports:tenant=t{number}" for number in range(count)]


def lease_all(leasing: Leasing, quotas: list[str]) -> None:
    for quota in quotas:
        leasing.note(quota, 1, NO_LEASE)
        leasing.granted(quota, 10)
        leasing.leased(quota, FAR_MS)


def test_a_new_allowance_is_asked_for_however_many_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound it was forgotten the moment it was new: it was the only one that was idle."""
    monkeypatch.setattr(wants_module, "MOST_KEPT", 20)
    leasing = Leasing(StandingClock())
    lease_all(leasing, keys(30))
    leasing.note(QUOTA, 1, NO_LEASE)
    leasing.waits(QUOTA, 1)
    assert leasing.due() == [QUOTA]
    assert leasing.want_of(QUOTA).waiting == 1
    leasing.waits_no_more(QUOTA, 1)
    assert leasing.want_of(QUOTA).waiting == 0


def test_what_has_been_idle_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wants_module, "MOST_KEPT", 10)
    leasing = Leasing(StandingClock())
    for quota in keys(30):
        leasing.note(quota, 1, spent(available=100))
    assert [want.quota for want in leasing._wants] == keys(30)[-10:]


def test_beyond_a_bound_nothing_new_is_followed_and_it_may_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wants_module, "MOST_KEPT", 10)
    monkeypatch.setattr(wants_module, "MOST_FOLLOWED", 20)
    leasing = Leasing(StandingClock())
    lease_all(leasing, keys(20))
    leasing.note(QUOTA, 1, NO_LEASE)
    assert not leasing.may_wait(QUOTA)
    assert leasing.turned_away > 0
    assert (leasing.due(), len(leasing._wants)) == ([], 20)
    leasing.leased(keys(1)[0], None)
    leasing.note(QUOTA, 1, NO_LEASE)
    assert leasing.may_wait(QUOTA)
    assert leasing.due() == [QUOTA]


def test_no_turn_looks_at_what_is_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
    leasing, looks = Leasing(StandingClock()), [0]
    lease_all(leasing, keys(2_000))
    real: Any = Want.due_at_ms

    def counted(want: Want) -> int | None:
        looks[0] += 1
        moment: int | None = real.fget(want)
        return moment

    monkeypatch.setattr(Want, "due_at_ms", property(counted))
    leasing.note(QUOTA, 1, NO_LEASE)
    for turn in (leasing.next_due_in_ms, leasing.due, leasing.to_give_back, leasing.central):
        turn()
    leasing.granted(QUOTA, 10)
    leasing.leased(QUOTA, FAR_MS)
    leasing.hint(None)
    leasing.follow(frozenset())
    leasing.cut_off()
    leasing.reached()
    assert looks[0] < 20


OPERATIONS: dict[str, Callable[[Leasing, str, int], object]] = {
    "note": lambda leasing, quota, _: leasing.note(quota, 1, NO_LEASE),
    "hold": lambda leasing, quota, units: leasing.held(quota, units % 2),
    "wait": lambda leasing, quota, _: leasing.waits(quota, 1),
    "leave": lambda leasing, quota, _: leasing.waits_no_more(quota, 1),
    "grant": lambda leasing, quota, units: leasing.granted(quota, units % 3),
    "lease": lambda leasing, quota, units: leasing.leased(quota, units * 100 if units % 4 else None),
    "refuse": lambda leasing, quota, units: leasing.refused(quota, units * 50),
    "postpone": lambda leasing, quota, units: leasing.postpone(quota, units * 10),
    "hint": lambda leasing, quota, units: leasing.hint(quota if units % 2 else None),
    "fetch": lambda leasing, quota, _: leasing.fetch(quota),
    "follow": lambda leasing, _, units: leasing.follow(frozenset({"central"} if units % 2 else ())),
}


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 7), st.integers(0, 40), st.integers(0, 300)),
        max_size=60,
    )
)
def test_what_is_due_is_what_a_look_at_all_would_find(steps: list[tuple[str, int, int, int]]) -> None:
    clock = StandingClock()
    leasing = Leasing(clock)
    for name, number, units, pause_ms in steps:
        quota = f"{'central' if number % 3 == 0 else 'exports'}:tenant=t{number}"
        OPERATIONS[name](leasing, quota, units)
        clock.now_ms += pause_ms
        due = {want.quota: want.due_at_ms for want in leasing._wants if want.due_at_ms is not None}
        found = leasing.due(100)
        assert len(found) == len(set(found))
        assert set(found) == {quota for quota, moment in due.items() if moment <= clock.now_ms}
        expected = max(0, min(due.values()) - clock.now_ms) if due else None
        assert leasing.next_due_in_ms() == expected
        assert set(leasing._wants.waiting) == {want.quota for want in leasing._wants if want.waiting}


def test_rates_beyond_the_bound_take_the_place_of_those_that_are_not_spoken_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(share_loop_module, "MOST_KEYS", 10)
    nobody: Any = SimpleNamespace()
    sharing = ShareLoop("an agent", nobody, nobody, nobody, nobody, nobody, StandingClock())
    for number in range(10):
        key = sharing._new(f"api:tenant=t{number}", Rate(1_000_000, 10), 0)
        if number != 4:
            sharing._speak_of(key, 1)
    sharing._new("api:tenant=new", Rate(1_000_000, 10), 0)
    assert "api:tenant=t4" not in sharing._keys
    sharing._speak_of(sharing._keys["api:tenant=new"], 1)
    sharing._new("api:tenant=newer", Rate(1_000_000, 10), 0)
    assert len(sharing._keys) == 10
    assert "api:tenant=t0" not in sharing._keys
