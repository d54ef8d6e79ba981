"""Floors, ceilings, pins and moves are kept, for any pool and any demand."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.exchange.rules.allocation import fund
from coordinator.exchange.rules.balances import Account, Cause, Key, Lease, Pool
from coordinator.exchange.rules.granting import GrantRequest, PoolView, push_to_waiting, serve_request
from coordinator.exchange.rules.posting import Report, drain
from coordinator.exchange.rules.signals import ANSWERING, recall_signals
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, RegionShare
from coordinator.rebalancing.rules.division import (
    Division,
    Move,
    RegionalPart,
    division_of,
    grantable_to,
    kept_of_move,
    note_returned,
    spare_of,
    taken_by_region,
)
from coordinator.rebalancing.rules.region_settings import Setting, faults_of_settings
from protocol.limits.document import AllowanceQuota, Horizon, PeriodKind, Quota, RateQuota
from protocol.messages import LeaseDemand
from protocol.outcomes import GrantRefusal
from protocol.periods import Calendar

NOW = datetime(2026, 11, 18, 9, tzinfo=UTC)
REGIONS = ("ap-south", "eu-west", "us-east")
KEY = Key("exports:tenant=acme", "2026-11")
LIMIT = 1000
ID = UUID(int=1)

amounts = st.integers(0, 400)
parts = st.builds(
    lambda weight, floor, more: RegionalPart(weight, floor, None if more is None else floor + more),
    st.integers(0, 3),
    amounts,
    st.none() | amounts,
)
divisions = st.fixed_dictionaries(dict.fromkeys(REGIONS, parts)).map(Division)


class Table:
    """A pool with a lease in each region, for which transfers are posted."""

    def __init__(self, division: Division, limit: int = LIMIT) -> None:
        self.division, self.limit = division, limit
        self.pool = Pool(KEY)
        self.leases = [Lease(KEY, number, region, NOW, NOW) for number, region in enumerate(REGIONS, 1)]
        fund(self.report(self.leases[0]), self.pool, limit)

    @staticmethod
    def report(lease: Lease) -> Report:
        return Report(lease.region, lease.epoch, 0, 1)

    def lease(self, region: str) -> Lease:
        return self.leases[REGIONS.index(region)]

    def shelf(self, region: str) -> PoolView:
        demand_milli = sum(lease.demand_milli for lease in self.leases)
        return PoolView(self.pool, True, region, self.leases, self.division, demand_milli)

    def ask(self, region: str, demand_milli: int = 0, waiting: int = 0) -> GrantRefusal | None:
        want = LeaseDemand(quota=KEY.quota, demand_milli=demand_milli, waiting=waiting)
        wanted = GrantRequest(KEY, want, Entitlement(Calendar(PeriodKind.MONTH), self.limit, Horizon(10_000, 10_000)))
        lease = self.lease(region)
        return serve_request(self.report(lease), wanted, lease, self.shelf(region), NOW)

    def give_back(self, region: str, units: int) -> None:
        lease = self.lease(region)
        report = self.report(lease)
        drain(report, self.pool, lease, Account.UNALLOCATED, min(units, lease.outstanding), Cause.RETURNED)
        note_returned(report, KEY, region, self.division.moves)

    def use(self, region: str, units: int) -> None:
        lease = self.lease(region)
        drain(self.report(lease), self.pool, lease, Account.CONSUMED, min(units, lease.outstanding), Cause.USAGE)

    def taken(self, region: str) -> int:
        return taken_by_region(self.leases)[region]


steps = st.lists(
    st.tuples(st.sampled_from(("ask", "give_back", "use")), st.sampled_from(REGIONS), st.integers(0, 300)), max_size=40
)


def play(table: Table, history: list[tuple[str, str, int]]) -> None:
    for what, region, units in history:
        if what == "ask":
            table.ask(region, demand_milli=1000 * (units % 7), waiting=units)
        else:
            getattr(table, what)(region, units)
        assert table.pool.balances
        assert all(lease.balances for lease in table.leases)


@given(divisions, steps)
def test_a_ceiling_is_never_passed_and_weight_zero_gets_nothing(
    division: Division, history: list[tuple[str, str, int]]
) -> None:
    table = Table(division)
    play(table, history)
    for region, (weight, _, ceiling) in division.parts.items():
        assert table.taken(region) <= (ceiling if weight and ceiling is not None else LIMIT * bool(weight))


@given(divisions, steps)
def test_a_floor_is_kept_for_its_region_whatever_others_demand(
    division: Division, history: list[tuple[str, str, int]]
) -> None:
    table = Table(division)
    play(table, history)
    floors = division.floors(table.pool.funded)
    for region, floor in floors.items():
        if division.parts[region].weight:
            table.ask(region, waiting=LIMIT)
            assert table.taken(region) >= floor


@given(st.integers(0, LIMIT), steps)
def test_a_pin_is_kept_exactly(pin: int, history: list[tuple[str, str, int]]) -> None:
    table = Table(
        Division({"us-east": RegionalPart(1, pin, pin), "eu-west": RegionalPart(), "ap-south": RegionalPart()})
    )
    play(table, history)
    assert table.taken("us-east") <= pin
    table.ask("us-east", waiting=LIMIT)
    assert table.taken("us-east") == pin


@given(st.lists(amounts, min_size=3, max_size=3), st.integers(0, LIMIT))
def test_floors_never_add_up_to_more_than_the_pool(floors: list[int], funded: int) -> None:
    division = Division({region: RegionalPart(1, floor) for region, floor in zip(REGIONS, floors, strict=True)})
    kept = division.floors(funded)
    assert sum(kept.values()) <= max(funded, 0)
    assert all(kept.get(region, 0) <= floor for region, floor in zip(REGIONS, floors, strict=True))
    if sum(floors) <= funded:
        assert sum(kept.values()) == sum(floors)


def test_a_limit_below_the_floors_blocks_no_region() -> None:
    """Check that floors of other regions do not keep every region out."""
    table = Table(Division({region: RegionalPart(1, 400) for region in REGIONS}), limit=90)
    for region in REGIONS:
        table.ask(region, waiting=90)
    assert [table.taken(region) for region in REGIONS] == [30, 30, 30]


@given(steps)
def test_demand_alone_decides_without_settings(history: list[tuple[str, str, int]]) -> None:
    plain, weighed = (Table(Division({region: RegionalPart(weight) for region in REGIONS})) for weight in (1, 7))
    play(plain, history)
    play(weighed, history)
    assert plain.pool == weighed.pool
    assert plain.leases == weighed.leases


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_region_of_higher_weight_gets_more_of_a_scarce_pool(weight: int, more: int) -> None:
    assert granted_of_the_last(weight + more) >= granted_of_the_last(weight)
    assert granted_of_the_last(4) > granted_of_the_last(1) > 0


def granted_of_the_last(weight: int) -> int:
    """Divide 400 units among regions that want the same."""
    table = Table(Division({"us-east": RegionalPart(weight), "eu-west": RegionalPart(), "ap-south": RegionalPart()}))
    table.ask("eu-west", waiting=600)
    for lease in table.leases:
        lease.demand_milli = 200_000
    table.ask("us-east", demand_milli=200_000)
    return table.taken("us-east")


# --- refusals and recalls ---------------------------------------------------------------------------------------------


def test_a_region_at_its_ceiling_is_refused_and_nothing_is_recalled_for_it() -> None:
    table = Table(Division({"us-east": RegionalPart(1, 0, 50), "eu-west": RegionalPart(), "ap-south": RegionalPart()}))
    table.ask("eu-west", waiting=900)
    assert table.ask("us-east", waiting=60) is GrantRefusal.EXHAUSTED
    assert (table.taken("us-east"), table.lease("us-east").waiting) == (50, 0)
    assert recall_signals(table.lease("us-east"), table.shelf("us-east"), 100, NOW) == []


def test_units_of_a_floor_are_not_recalled_for_others() -> None:
    table = Table(Division({"us-east": RegionalPart(1, 300), "eu-west": RegionalPart(), "ap-south": RegionalPart()}))
    table.ask("us-east", waiting=320)
    table.ask("eu-west", waiting=680)
    assert table.pool.grantable == 0
    assert table.ask("ap-south", waiting=5) is None
    lease, shelf = table.lease("ap-south"), table.shelf("ap-south")
    asked = {notice.region: notice.signal.keep for notice in recall_signals(lease, shelf, 0, NOW)}
    assert asked == {"us-east": 300, "eu-west": 0}
    table.use("eu-west", 680)
    table.give_back("us-east", 20)
    assert table.ask("ap-south", waiting=20) is None
    assert table.ask("ap-south", waiting=5) is GrantRefusal.EXHAUSTED  # the floor is all that is left


@pytest.mark.parametrize(("holds", "keep"), [(2_000, 300), (400, 200), (7, 3), (1, 0)])
def test_a_region_keeps_what_it_needs_of_an_empty_pool_but_at_most_half(holds: int, keep: int) -> None:
    """Each region keeps at most half per recall, so repeated recalls of outdated demand leave it nothing."""
    table = Table(Division({region: RegionalPart() for region in REGIONS}), holds)
    table.ask("us-east", demand_milli=1_000_000, waiting=holds)
    table.ask("ap-south", waiting=5)
    (notice,) = recall_signals(table.lease("ap-south"), table.shelf("ap-south"), 0, NOW)
    assert (notice.region, notice.signal.keep) == ("us-east", keep)


def test_regions_that_start_to_wait_together_cause_one_recall() -> None:
    """Fifty regions that found nothing left used to recall the same units fifty times."""
    table = Table(Division({region: RegionalPart() for region in REGIONS}))
    table.ask("us-east", waiting=LIMIT)
    table.ask("ap-south", waiting=5)
    assert recall_signals(table.lease("ap-south"), table.shelf("ap-south"), 0, NOW)
    table.ask("eu-west", waiting=5)
    assert recall_signals(table.lease("eu-west"), table.shelf("eu-west"), 0, NOW) == []
    assert recall_signals(table.lease("eu-west"), table.shelf("eu-west"), 0, NOW + ANSWERING), (
        "they did not, or not enough"
    )


def test_used_units_count_towards_a_floor() -> None:
    table = Table(Division({"us-east": RegionalPart(1, 300), "eu-west": RegionalPart(), "ap-south": RegionalPart()}))
    table.ask("us-east", waiting=250)
    table.use("us-east", 200)
    lease = table.lease("us-east")
    assert spare_of(lease, table.pool, table.leases, table.division) == 0
    assert grantable_to("eu-west", table.pool, table.leases, table.division) == 700


@pytest.mark.parametrize("gone", [{}, {"us-east": RegionalPart(0)}])
def test_nothing_is_pushed_to_a_region_that_drains(gone: dict[str, RegionalPart]) -> None:
    """The region reported waiting requests, and began to drain before units became available."""
    table = Table(Division(dict.fromkeys(REGIONS, RegionalPart())))
    table.ask("eu-west", waiting=LIMIT)
    table.ask("us-east", waiting=20)
    table.division = Division({"eu-west": RegionalPart(), "ap-south": RegionalPart()} | gone)
    table.give_back("eu-west", 100)
    epochs = {lease.epoch for lease in table.leases}
    assert push_to_waiting(table.shelf("eu-west"), LIMIT, epochs, ["a return"], NOW) == []
    assert (table.taken("us-east"), table.pool.grantable) == (0, 100)


# --- moves ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 500), steps)
def test_units_that_are_being_moved_are_reserved_for_their_region(
    units: int, history: list[tuple[str, str, int]]
) -> None:
    move = Move(ID, 1, KEY, "us-east", "ap-south", units)
    table = Table(Division(dict.fromkeys(REGIONS, RegionalPart()), [move]))
    for what, region, number in history:
        before, travelling = table.taken("ap-south"), move.travelling
        play(table, [(what, region, number)])
        assert 0 <= move.regranted <= move.returned <= units
        assert table.pool.grantable >= move.travelling
        if what == "ask" and region == "ap-south":
            assert table.taken("ap-south") - before >= travelling
            assert not move.travelling


def test_a_move_takes_returned_units_up_to_its_amount() -> None:
    first, second = (Move(ID, number, KEY, "us-east", "ap-south", 30) for number in (1, 2))
    elsewhere = Move(ID, 3, KEY, "eu-west", None, 5)
    table = Table(Division(dict.fromkeys(REGIONS, RegionalPart()), [first, second, elsewhere]))
    table.ask("us-east", waiting=100)
    table.give_back("us-east", 40)
    assert [(each.returned, each.travelling) for each in (first, second, elsewhere)] == [(30, 30), (10, 10), (0, 0)]
    table.give_back("us-east", 60)
    assert (second.returned, table.pool.unallocated) == (30, 1000)
    table.ask("eu-west", waiting=1000)
    assert table.taken("eu-west") == 940
    table.ask("ap-south")
    assert (table.taken("ap-south"), first.is_complete, second.is_complete) == (60, True, True)
    table.give_back("eu-west", 9)
    assert (elsewhere.returned, elsewhere.travelling, elsewhere.is_complete) == (5, 0, True)


def test_a_region_keeps_what_it_needs_until_the_next_grant() -> None:
    lease = Lease(KEY, 1, "us-east", NOW, NOW, granted=100, outstanding=100, demand_milli=100_000)
    assert [kept_of_move(lease, units, NOW) for units in (0, 60, 90, 1000)] == [100, 40, 30, 30]
    assert kept_of_move(lease, 1000, NOW + timedelta(seconds=1 + 5)) == 15


# --- settings ---------------------------------------------------------------------------------------------------------

SHARES = {"us-east": RegionShare("active", 2), "eu-west": RegionShare("active", 1), "ap-south": RegionShare("down", 9)}


def test_the_narrowest_setting_counts_field_by_field() -> None:
    settings = {
        "exports:": {"us-east": Setting(weight=5, floor=10), "eu-west": Setting(ceiling=70)},
        "exports:tenant=acme": {"us-east": Setting(floor=20)},
        "exports:tenant=other": {"us-east": Setting(floor=30)},
        "mails:": {"us-east": Setting(weight=9)},
    }
    catalogue = Catalogue(1, {}, None, {}, SHARES, settings=settings)
    division = division_of(catalogue, KEY, (), Division({}))
    assert division.parts == {"us-east": RegionalPart(5, 20, None), "eu-west": RegionalPart(1, 0, 70)}


def test_the_setting_of_a_rate_does_not_affect_an_allowance() -> None:
    catalogue = Catalogue(
        1, {}, None, {}, SHARES, settings={"exports:": {"us-east": Setting(1, "5/second", "9/second")}}
    )
    assert division_of(catalogue, KEY, (), Division({})).parts["us-east"] == RegionalPart(1, 0, None)


ALLOWANCE = AllowanceQuota(name="exports", limit=100, period=PeriodKind.MONTH)
RATE = RateQuota(name="api", limit="100/second")


@pytest.mark.parametrize(
    ("spec", "limits", "settings", "faults"),
    [
        (ALLOWANCE, [100], {"us-east": Setting(1, 40, 60), "eu-west": Setting(0, 60, None)}, []),
        (ALLOWANCE, [100, 99], {"us-east": Setting(floor=40), "eu-west": Setting(floor=60)}, [("settings", "floors")]),
        (ALLOWANCE, [100], {"us-east": Setting(1, 61, 60)}, [("settings.us-east.floor", "ceiling")]),
        (ALLOWANCE, [100], {"us-east": Setting(1, "6/second")}, [("settings.us-east.floor", "units")]),
        (ALLOWANCE, [100], {"us-east": Setting(1, -1)}, [("settings.us-east.floor", "units")]),
        (RATE, ["100/second"], {"us-east": Setting(1, "40/second", "2400/minute")}, []),
        (
            RATE,
            ["100/second"],
            {"us-east": Setting(1, "41/second", "2400/minute")},
            [("settings.us-east.floor", "ceiling")],
        ),
        (RATE, ["100/second"], {"us-east": Setting(1, 5)}, [("settings.us-east.floor", "rate")]),
        (RATE, ["1/second"], {"us-east": Setting(1, "61/minute")}, [("settings", "floors")]),
        (RATE, ["unlimited"], {"us-east": Setting(1, "61/minute")}, []),
        (RATE, ["1/second"], {"us-east": Setting(1, None, "unlimited")}, [("settings.us-east.ceiling", "units")]),
    ],
)
def test_invalid_settings_are_named(
    spec: Quota, limits: list[int | str], settings: dict[str, Setting], faults: list[tuple[str, str]]
) -> None:
    assert [(fault.field, fault.rule) for fault in faults_of_settings(spec, limits, settings)] == faults
