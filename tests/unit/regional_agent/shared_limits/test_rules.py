"""Check what a region may use of a shared rate, and when it reports."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.allocation.shares import StoredShare, kept_micro, share_of_grant
from regional_agent.shared_limits.rules import (
    RateDemand,
    has_fallen,
    is_urgent,
    needs_confirmation,
    needs_no_report,
    requested_micro,
)

PARTS = 1_000_000_000
SECOND_US = 1_000_000
GIVEN = share_of_grant(number=5, rate_micro=80, after_micro=20, expires_in_ms=8_000, sent_us=0)


def test_a_share_lasts_then_falls_and_then_is_the_safe_share() -> None:
    ages_s = (0, 7.999, 8, 39.999, 40)
    assert [GIVEN.in_force_micro(int(age * SECOND_US), 30) for age in ages_s] == [80, 80, 20, 20, 30]
    assert [GIVEN.number_at(int(age * SECOND_US)) for age in (39.999, 40)] == [5, 0]
    assert StoredShare().in_force_micro(0, 30) == 30


def test_only_a_newer_share_is_accepted_and_none_that_is_late() -> None:
    newer = share_of_grant(6, 90, 20, 8_000, sent_us=SECOND_US)
    assert GIVEN.replaced_by(newer, SECOND_US, 6 * SECOND_US) == newer
    assert GIVEN.replaced_by(newer, SECOND_US, 6 * SECOND_US + 1) == GIVEN
    assert newer.replaced_by(GIVEN, 0, SECOND_US) == newer
    assert GIVEN.replaced_by(GIVEN._replace(rate_micro=99), 0, 1) == GIVEN
    assert newer.replaced_by(GIVEN, 41 * SECOND_US, 41 * SECOND_US) == GIVEN, "what is over is forgotten"


@given(st.integers(0, 10**13), st.integers(0, 10**13), st.integers(0, 10**13), st.integers(0, 50_000_000))
def test_a_region_that_gives_up_units_has_less_at_every_moment(rate: int, after: int, to: int, age_us: int) -> None:
    share = StoredShare(1, max(rate, after), min(rate, after), 8_000_000, 40_000_000)
    lowered = share.lowered(to)
    assert lowered.in_force_micro(age_us, 7) == (
        7 if age_us >= 40_000_000 else min(to, share.in_force_micro(age_us, 7))
    )


def test_when_a_region_reports() -> None:
    assert needs_no_report(49, 100, nano_units=0)
    assert not needs_no_report(50, 100, nano_units=0)
    assert needs_no_report(1_000_000, 100, nano_units=5 * PARTS + 1), "the bucket has the demand of five seconds"
    assert not needs_no_report(1_000_000, 100, nano_units=5 * PARTS)
    assert is_urgent(29 * PARTS, 100, demand_micro=121, share_micro=100)
    assert not is_urgent(30 * PARTS, 100, demand_micro=121, share_micro=100)
    assert not is_urgent(0, 100, demand_micro=120, share_micro=100)


@pytest.mark.parametrize(("told", "rate", "fallen"), [(100, 100, 80), (100, 50, 40), (50, 100, 40)])
def test_a_fall_by_a_fifth_is_reported_at_once(told: int, rate: int, fallen: int) -> None:
    assert not has_fallen(fallen, told, rate)
    assert has_fallen(fallen - 1, told, rate)


def test_a_share_lowered_by_more_than_a_trifle_is_confirmed() -> None:
    assert needs_confirmation(6400, 6299, is_contended=True)
    assert not needs_confirmation(6400, 6300, is_contended=True)
    assert not needs_confirmation(6400, 0, is_contended=False)
    assert not needs_confirmation(0, 6400, is_contended=True)


def test_a_region_keeps_only_its_demand_while_others_want_more() -> None:
    assert kept_micro(79, 100, is_contended=True) == 79
    assert kept_micro(101, 100, is_contended=True) == 100
    assert kept_micro(79, 100, is_contended=False) == 100


@pytest.mark.parametrize(
    ("units", "wanted"),
    [(50, 80), (60, 75), (100, 55), (48, 81), (20, 90), (0, 90)],  # a half is 50, to be reached in two seconds
)
def test_units_in_the_bucket_are_used_before_other_regions_lack_them(units: int, wanted: int) -> None:
    asked = requested_micro(80_000_000, units * PARTS, 100, is_contended=True)
    assert asked == wanted * 1_000_000
    assert requested_micro(80_000_000, units * PARTS, 100, is_contended=False) == 80_000_000


def test_a_bucket_that_lasts_long_demands_nothing_and_fills_gradually() -> None:
    assert requested_micro(80_000_000, 10**6 * PARTS, 10**6, is_contended=True) == 0
    assert requested_micro(80_000_000, 0, 10**6, is_contended=True) == 90_000_000
    assert requested_micro(0, 0, 10**6, is_contended=True) == 0


# --- demand -----------------------------------------------------------------------------------------------------------


def poisson(demand: RateDemand, per_second: int, from_ms: int, to_ms: int, seed: int) -> int:
    """Return the demand that is measured for independent arrivals."""
    at_ms, chance = float(from_ms), random.Random(seed)
    while (at_ms := at_ms + chance.expovariate(per_second / 1000)) < to_ms:
        demand.note(1, int(at_ms), 1)
    return demand.per_second_micro(to_ms) // 1_000_000


@given(st.integers(0, 10**6), st.sampled_from([20, 200, 2000]))
def test_random_arrivals_are_not_taken_for_a_change_of_demand(seed: int, per_second: int) -> None:
    """The slow average of a steady demand deviates by the root of a sixth of the demand, not by six times that."""
    measured = poisson(RateDemand(0), per_second, 0, 20_000, seed)
    assert abs(measured - per_second) <= 6 * (per_second / 6) ** 0.5 + 1


def test_a_jump_and_a_fall_are_measured_within_a_third_of_a_second() -> None:
    demand = RateDemand(0)
    poisson(demand, 100, 0, 10_000, seed=1)
    assert poisson(demand, 2000, 10_000, 10_300, seed=2) > 1500
    demand = RateDemand(0)
    poisson(demand, 2000, 0, 10_000, seed=3)
    assert demand.per_second_micro(10_300) < 200_000_000


def test_bursts_are_spread_over_the_time_since_the_last_one() -> None:
    demand = RateDemand(0)
    for at_ms in range(100, 10_000, 100):
        demand.note(1000, at_ms, 1)
    assert 9_000_000_000 < demand.per_second_micro(9_990) < 11_000_000_000


def test_one_request_after_a_pause_is_not_high_demand() -> None:
    demand = RateDemand(0)
    demand.note(1, 60_000, 1)
    assert demand.per_second_micro(60_000) < 1_000_000
