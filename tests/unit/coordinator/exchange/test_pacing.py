"""Check how long grants last and when usage is reported, as properties and at their corner cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.exchange.rules.pacing import (
    FOREVER_MS,
    LONGEST_DEFAULT_MS,
    SHORTEST_DEFAULT_MS,
    horizon_ms,
    report_at,
    report_within_ms,
    rest_lasts_ms,
)
from coordinator.webhooks.rules import PoolUsage
from protocol.limits.document import DEFAULT_THRESHOLDS, Horizon, Portion
from protocol.units import MAX_UNITS

units = st.integers(0, 2**53 - 1)
durations = st.integers(0, FOREVER_MS)
leases = st.integers(1_000, 86_400_000)
portions = st.builds(Portion, units=st.integers(1, 2_000)) | st.builds(Portion, percent=st.integers(1, 300))


@given(units, units, units)
def test_more_units_last_longer_and_more_demand_makes_them_end_sooner(grantable: int, demand: int, more: int) -> None:
    assert rest_lasts_ms(grantable + more, demand) >= rest_lasts_ms(grantable, demand)
    if demand:
        assert rest_lasts_ms(grantable, demand + more) <= rest_lasts_ms(grantable, demand)


@given(st.integers(0, 10**6), st.integers(0, 10**6), durations)
def test_a_horizon_stays_within_its_bounds_and_takes_a_thirtieth_of_the_rest(one: int, other: int, rest: int) -> None:
    horizon = Horizon(min(one, other), max(one, other))
    found = horizon_ms(horizon, rest)
    assert horizon.shortest_ms <= found <= horizon.longest_ms
    assert found == horizon.shortest_ms or 30 * found <= rest


@given(st.none() | st.integers(100, 3_600_000), durations, leases)
def test_no_report_waits_until_its_lease_expires(set_ms: int | None, rest_ms: int, lease_ms: int) -> None:
    found = report_within_ms(set_ms, rest_ms, lease_ms)
    assert 2 * found <= lease_ms
    assert set_ms is None or found <= set_ms


@given(durations, durations)
def test_the_less_is_left_the_sooner_usage_is_reported(rest_ms: int, less_ms: int) -> None:
    found = report_within_ms(None, rest_ms, 10**9)
    assert report_within_ms(None, min(less_ms, rest_ms), 10**9) <= found <= LONGEST_DEFAULT_MS
    assert found >= SHORTEST_DEFAULT_MS or not rest_ms


@pytest.mark.parametrize(
    ("set_ms", "rest_ms", "expected_ms"),
    [
        (None, FOREVER_MS, 60_000),
        (None, 30 * 60_000, 60_000),
        (None, 15 * 60_000, 30_000),
        (None, 1, 1_000),
        (None, 0, 0),
        (5_000, 0, 5_000),
        (3_600_000, FOREVER_MS, 60_000),  # half of the lease
    ],
)
def test_how_long_usage_of_a_lease_of_two_minutes_waits(set_ms: int | None, rest_ms: int, expected_ms: int) -> None:
    assert report_within_ms(set_ms, rest_ms, 120_000) == expected_ms


@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=8), st.integers(0, 2_000), st.lists(portions, max_size=5))
def test_no_threshold_is_reached_before_a_region_has_used_its_part(
    used: list[int], spendable: int, thresholds: list[Portion]
) -> None:
    before = PoolUsage(consumed=7, spendable=spendable)
    mark = report_at(0, before, thresholds, regions=len(used))
    after = before._replace(consumed=before.consumed + sum(used))
    if any(after.reaches(each) and not before.reaches(each) for each in thresholds):
        assert mark > 0
        assert max(used) >= mark


@given(units, units, units, st.integers(1, 64))
def test_a_mark_fits_into_a_message(consumed: int, used: int, spendable: int, regions: int) -> None:
    assert 0 <= report_at(consumed, PoolUsage(used, spendable), DEFAULT_THRESHOLDS, regions) <= MAX_UNITS


def test_the_mark_counts_from_what_the_region_has_reported() -> None:
    usage = PoolUsage(consumed=40, spendable=100)
    assert report_at(25, usage, DEFAULT_THRESHOLDS, regions=3) == 29
    assert report_at(25, usage._replace(consumed=99), DEFAULT_THRESHOLDS, regions=3) == 26
    assert report_at(25, usage._replace(consumed=100), DEFAULT_THRESHOLDS, regions=3) == 0
