"""A hold counts as a floor in its period alone, and a plan reckons when demand takes units back."""

from datetime import UTC, datetime, timedelta

import pytest

from coordinator.exchange.rules.balances import Key, Lease, Pool
from coordinator.limits.rules.entitlement import Catalogue, RegionShare
from coordinator.rebalancing.rules.division import Division, RegionalPart, by_weight, division_of
from coordinator.rebalancing.rules.plan import DividedPool, PlannedHold, PlannedMove, floors_with, plan_hold, taken_back
from coordinator.rebalancing.rules.region_settings import FloorHold, Setting

NOW = datetime(2026, 11, 18, 9, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
KEY = Key("exports:tenant=acme", "2026-11")
SHARES = {"us-east": RegionShare("active", 1), "ap-south": RegionShare("active", 1)}
MOVE = PlannedMove(*KEY, "us-east", "ap-south", 300)


def test_a_hold_is_a_floor_of_its_period_and_never_lowers_one() -> None:
    held = {KEY.quota: {"ap-south": FloorHold("2026-11", 310, LATER)}}
    catalogue = Catalogue(1, {}, None, {}, SHARES, holds=held)
    plain = by_weight(catalogue)
    assert division_of(catalogue, KEY, (), plain).floors(1000) == {"ap-south": 310}
    assert division_of(catalogue, Key(KEY.quota, "2026-12"), (), plain).floors(1000) == {}
    assert division_of(catalogue, Key("exports:tenant=initech", "2026-11"), (), plain).is_plain
    set_higher = catalogue._replace(settings={"exports:": {"ap-south": Setting(floor=400)}})
    assert division_of(set_higher, KEY, (), plain).floors(1000) == {"ap-south": 400}


def pool(unallocated: int, *, demand_milli: int = 0, floor: int = 0) -> DividedPool:
    """Return a pool of 1,000, of which each region was granted 100; only us-east has demand."""
    booked = Pool(KEY, funded=1000, unallocated=unallocated, outstanding=200, consumed=800 - unallocated)
    leases = [
        Lease(KEY, number, region, NOW, NOW, granted=100, outstanding=100, demand_milli=demand)
        for number, (region, demand) in enumerate([("us-east", demand_milli), ("ap-south", 0)], 1)
    ]
    parts = {"us-east": RegionalPart(), "ap-south": RegionalPart(floor=floor)}
    return DividedPool(booked, leases, Division(parts), set(parts))


@pytest.mark.parametrize(("floor", "units"), [(0, 400), (390, 400), (500, 500)])
def test_a_hold_keeps_what_was_granted_and_what_is_moved(floor: int, units: int) -> None:
    divided = pool(600, floor=floor)
    hold = plan_hold(divided, MOVE, LATER)
    assert hold == PlannedHold(*KEY, "ap-south", units, LATER)
    assert floors_with(divided, hold) == units


@pytest.mark.parametrize(
    ("unallocated", "demand_milli", "held", "after_ms"),
    [
        (600, 0, timedelta(), None),
        (600, 10_000, timedelta(), 35_000),  # from 600 to 250 at 10 a second
        (600, 10_000, timedelta(hours=1), 3_600_000),
        (100, 10_000, timedelta(), 3_800),  # to the next mark, 62
        (0, 10_000, timedelta(), 0),
    ],
)
def test_demand_takes_idle_units_back_when_what_is_left_falls_to_the_next_quarter(
    unallocated: int, demand_milli: int, held: timedelta, after_ms: int | None
) -> None:
    found = taken_back(pool(unallocated, demand_milli=demand_milli), MOVE, held, NOW)
    assert (None if found is None else found.after_ms) == after_ms
    assert found is None or (found.region, found.units) == ("ap-south", 400)
