"""Check how much an agent requests, when it does, and when it stops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.units import MAX_UNITS
from regional_agent.leasing.quota import LeasedQuota
from regional_agent.leasing.rules.demand import Demand
from regional_agent.leasing.rules.refill import FIRST_PAUSE_MS, LONGEST_PAUSE_MS, low_water


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 1_000))
def test_the_low_water_mark_is_never_above_half_of_the_last_grant(grant: int, demand: int, round_trip: int) -> None:
    assert 0 <= low_water(grant, demand, round_trip) <= grant / 2


@pytest.mark.parametrize(
    ("grant", "demand_milli", "round_trip_ms", "expected"),
    [
        (100, 0, 0, 50),  # low demand: the grant lasts long, so half of it
        (120_000, 1_000_000, 100, 60_000),  # a month's grant: a minute is always left
        (30_000, 1_000_000, 100, 15_000),
        (29_999, 1_000_000, 100, 7_499),  # a grant for less than half a minute: a quarter
        (1000, 500_000, 100, 350),  # 500 a second for 0.7 s
        (100, 500_000, 100, 50),  # would be 350, but half is the maximum
        (0, 500_000, 100, 0),
    ],
)
def test_the_low_water_mark(grant: int, demand_milli: int, round_trip_ms: int, expected: int) -> None:
    assert low_water(grant, demand_milli, round_trip_ms) == expected


def test_pauses_between_requests_for_more_double_to_a_bound_until_something_comes() -> None:
    quota, now_ms, pauses = LeasedQuota("exports:tenant=acme", Demand(since_ms=0)), 0, []
    for _ in range(10):
        quota.back_off(now_ms)
        pauses.append(quota.backoff.pause)
        now_ms = int(quota.backoff.until)
    assert pauses == [500, 1000, 2000, 4000, 8000, 16000, *[LONGEST_PAUSE_MS] * 4]
    quota.backoff.succeeded()
    assert not quota.backoff.is_pausing(now_ms)


def test_a_second_failure_during_a_pause_does_not_prolong_the_pause() -> None:
    quota = LeasedQuota("exports:tenant=acme", Demand(since_ms=0))
    quota.back_off(0)
    quota.back_off(100)
    assert (quota.backoff.pause, quota.backoff.until) == (FIRST_PAUSE_MS, FIRST_PAUSE_MS)


def test_a_steady_demand_is_measured_as_it_is() -> None:
    demand = Demand(since_ms=0)
    for second in range(1, 40):
        demand.note(200)
        measured = demand.per_second_milli(second * 1000)
    assert measured == pytest.approx(200_000, rel=0.01)


def test_demand_rises_faster_than_it_falls() -> None:
    demand = Demand(since_ms=0)
    demand.note(1000)
    assert demand.per_second_milli(1000) > 600_000
    assert demand.per_second_milli(2000) > 100_000
    assert demand.per_second_milli(60_000) < 1_000


def test_reading_demand_twice_counts_nothing_twice() -> None:
    demand = Demand(since_ms=0)
    demand.note(100)
    assert demand.per_second_milli(1000) == demand.per_second_milli(1000)


@given(st.lists(st.tuples(st.integers(1, MAX_UNITS), st.integers(0, 10_000)), max_size=20))
def test_demand_never_exceeds_what_a_message_carries(requests: list[tuple[int, int]]) -> None:
    demand, now_ms = Demand(since_ms=0), 0
    for units, pause_ms in requests:
        demand.note(units)
        now_ms += pause_ms
        assert 0 <= demand.per_second_milli(now_ms) <= MAX_UNITS


def test_one_request_counts_as_demand_only_up_to_the_limit() -> None:
    demand, usual = Demand(since_ms=0), Demand(since_ms=0)
    demand.note(MAX_UNITS, limit=100)
    usual.note(100, limit=100)
    assert demand.per_second_milli(1_000) == usual.per_second_milli(1_000) > 0
