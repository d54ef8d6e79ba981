"""Check the formulas of grants and shares as properties and at their corner cases."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.exchange.rules.allocation import PoolDemand, decayed, grant_units
from coordinator.exchange.rules.balances import Key, Lease

units = st.integers(0, 2**53 - 1)
weights = st.integers(0, 1000)
NOW = datetime(2026, 11, 18, 9, tzinfo=UTC)


def ask(demand_milli: int = 0, waiting: int = 0, **other: int) -> PoolDemand:
    known = {"available": 0, "last_grant": 0, "total_demand_milli": demand_milli, "weight": 1, "total_weight": 3}
    return PoolDemand(demand_milli, waiting, **(known | {"horizon_ms": 10_000} | other))


def lease_of(demand_milli: int, outstanding: int = 0) -> Lease:
    lease = Lease(Key("exports", "2026-11"), 1, "eu", NOW, NOW, demand_milli=demand_milli)
    lease.granted = lease.outstanding = outstanding
    return lease


@given(units, units, st.builds(PoolDemand, units, units, units, units, units, weights, weights, st.integers(0, 10**9)))
def test_a_grant_is_between_nothing_and_what_is_grantable(grantable: int, limit: int, wanted: PoolDemand) -> None:
    assert 0 <= grant_units(grantable, limit, wanted) <= grantable


@given(units, units, units)
def test_waiting_requests_are_served_while_there_are_units(grantable: int, limit: int, waiting: int) -> None:
    assert grant_units(grantable, limit, ask(waiting=waiting)) >= min(grantable, waiting)


@pytest.mark.parametrize(
    ("grantable", "wanted", "granted"),
    [
        (1000, ask(demand_milli=100_000), 100),  # one second's worth, as a thousandth of the limit is less
        (1000, ask(demand_milli=1_000), 5),  # half a percent of the limit
        (
            1000,
            ask(demand_milli=1_000, horizon_ms=120_000),
            60,
        ),  # a longer horizon takes a proportionally larger part of the limit
        (1000, ask(demand_milli=100_000, horizon_ms=20_000), 200),
        (1000, ask(demand_milli=1_000, horizon_ms=1_000), 1),
        (1000, ask(), 1),  # nothing is known yet
        (100, ask(demand_milli=100_000), 50),  # never more than half of what is left
        (100, ask(demand_milli=100_000, total_demand_milli=400_000), 15),  # a part of its share, but 0.15 s at least
        (
            100,
            ask(demand_milli=100_000, total_demand_milli=400_000, weight=2, total_weight=4),
            25,
        ),  # waiting demand counts twice
        (1000, ask(demand_milli=1, weight=2, total_weight=4), 1),
        (8, ask(demand_milli=1_000, waiting=6), 6),
        (0, ask(demand_milli=1_000, waiting=6), 0),
        (1000, ask(demand_milli=100_000, available=60, last_grant=100), 0),  # far from its low water mark
        (1000, ask(demand_milli=100_000, available=50, last_grant=100), 100),
        (1000, ask(demand_milli=100_000, available=60, last_grant=100, waiting=1), 100),
    ],
)
def test_the_formula_at_a_limit_of_a_thousand(grantable: int, wanted: PoolDemand, granted: int) -> None:
    assert grant_units(grantable, 1000, wanted) == granted


def test_the_last_unit_goes_to_a_request_that_waits_for_it() -> None:
    pool, rounds = 1000, 0
    while pool:
        pool -= grant_units(pool, 1000, ask(demand_milli=100_000, waiting=1))
        rounds += 1
    assert rounds < 40


@given(st.integers(0, 2**53 - 1), st.integers(0, 100_000), st.integers(0, 100_000))
def test_demand_only_decays(demand_milli: int, first_ms: int, second_ms: int) -> None:
    lease = lease_of(demand_milli)
    earlier = decayed(lease, NOW + timedelta(milliseconds=first_ms))
    later = decayed(lease, NOW + timedelta(milliseconds=first_ms + second_ms))
    assert 0 <= later <= earlier <= demand_milli


def test_demand_halves_in_five_seconds() -> None:
    lease = lease_of(1000)
    assert [decayed(lease, NOW + timedelta(seconds=each)) for each in (0, 2.5, 5, 10)] == [1000, 750, 500, 250]
    assert decayed(lease, NOW - timedelta(seconds=9)) == 1000


def test_demand_is_kept_for_as_long_as_its_lease_lasts_but_no_longer_than_any_grant() -> None:
    lease, idle = lease_of(1000, outstanding=30), lease_of(1000, outstanding=10_000)
    assert [decayed(lease, NOW + timedelta(seconds=each)) for each in (30, 35, 40)] == [1000, 500, 250]
    assert [decayed(idle, NOW + timedelta(seconds=each)) for each in (120, 125)] == [1000, 500]
