"""A regional limit is for its region alone, and a central quota grants only what requests wait for."""

from dataclasses import replace
from datetime import datetime, timedelta
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from coordinator.adjustments.rules import AdjustmentKind, adjust, entry_of
from coordinator.adjustments.rules import AdjustmentTerms as Adjusting
from coordinator.exchange.rules.allocation import fund
from coordinator.exchange.rules.balances import Account, Cause, Key, Pool
from coordinator.exchange.rules.granting import (
    FindEntitledPeriod,
    LeaseTerms,
    find_entitled_period,
    make_grant_requests,
    push_to_waiting,
)
from coordinator.exchange.rules.posting import Movement, post
from coordinator.exchange.rules.replies import lease_reply
from coordinator.exchange.rules.settlement import cover
from coordinator.exchange.rules.signals import recall_signals
from coordinator.limits.rules.entitlement import Catalogue, RegionShare
from coordinator.limits.rules.plan_change import change_limit
from coordinator.rebalancing.rules.division import (
    Division,
    RegionalPart,
    debitable,
    division_of,
    funded_for,
    grantable_to,
    spare_of,
)
from protocol.limits.document import AllowanceQuota, Mode, PeriodKind
from protocol.messages import LeaseDemand
from protocol.outcomes import GrantRefusal
from tests.unit.coordinator.rebalancing.test_division import KEY, NOW, REGIONS, Table, steps

TERMS = LeaseTerms(lease_ms=30_000)
PARTS = dict.fromkeys(REGIONS, RegionalPart())
own_limits = st.integers(0, 300)
taking_part = st.lists(st.tuples(st.sampled_from(REGIONS), own_limits, steps), max_size=6)


class OwnLimits(Table):
    """A table in which each region has a limit of its own."""

    def __init__(self, limit: int) -> None:
        super().__init__(Division(PARTS, mode=Mode.REGIONAL, each=limit), limit)
        self.most = dict.fromkeys(REGIONS, limit)  # the highest limit that each region ever had

    def change(self, limit: int, without: str | None) -> None:
        """Change the limit, perhaps while a region drains."""
        parts = {name: part for name, part in PARTS.items() if name != without}
        self.division, self.limit = Division(parts, mode=Mode.REGIONAL, each=limit), limit
        self.most |= {name: max(limit, self.most[name]) for name in parts}

    def overwork(self, region: str, units: int) -> None:
        """Report more usage than was granted."""
        lease, report = self.lease(region), self.report(self.lease(region))
        cover(report, self.pool, lease, lease.unaccounted + units, at_most=0)
        self.use(region, lease.outstanding)


@given(own_limits, taking_part)
def test_no_region_ever_has_more_than_its_own_limit(
    limit: int, changes: list[tuple[str, int, list[tuple[str, str, int]]]]
) -> None:
    table = OwnLimits(limit)
    for without, another, history in [("", limit, []), *changes]:
        table.change(another, without)
        for what, region, units in history:
            if what != "ask" or region in table.division.parts:  # a region that is drained is refused before
                table.ask(region, 1000 * (units % 7), units) if what == "ask" else getattr(table, what)(region, units)
            assert table.pool.balances
            assert all(table.taken(each) <= table.most[each] for each in REGIONS)


@given(own_limits, taking_part, st.integers(0, 40))
def test_a_region_has_its_whole_limit_whatever_others_used(
    limit: int, changes: list[tuple[str, int, list[tuple[str, str, int]]]], beyond: int
) -> None:
    """Other regions may have had more than a lowered limit, used more than it, or left."""
    table = OwnLimits(limit)
    for without, another, history in changes:
        table.change(another, without)
        for what, region, units in history:
            if what != "ask" or region in table.division.parts:
                table.ask(region, 0, units) if what == "ask" else getattr(table, what)(region, units)
    table.change(limit, None)
    table.overwork("us-east", beyond)
    for region in ("eu-west", "ap-south"):
        table.ask(region, waiting=limit)
        assert table.taken(region) >= limit
    assert table.taken("us-east") >= beyond
    table.ask("us-east", waiting=limit)
    assert table.taken("us-east") >= limit
    assert table.pool.grantable == 0


def test_a_pool_is_funded_with_current_limits_and_past_excess() -> None:
    table = OwnLimits(100)
    table.ask("us-east", waiting=60)
    assert table.pool.funded == 300
    table.change(50, without="eu-west")
    table.ask("ap-south", waiting=10)
    assert table.pool.funded == 60 + 50
    assert spare_of(table.lease("us-east"), table.pool, table.leases, table.division) == 10
    table.give_back("us-east", 60)
    table.ask("ap-south", waiting=10)
    assert table.pool.funded == 50 + 50
    assert funded_for(7, table.pool, table.leases, Division(PARTS)) == 7


def test_a_credit_goes_to_the_region_that_requests_it_first() -> None:
    table = OwnLimits(100)
    table.ask("us-east", waiting=100)
    entry = Movement(uuid4(), None, None)
    post(entry, table.pool, None, Account.ADJUSTMENT, Account.UNALLOCATED, 30, Cause.CREDITED)
    grantable = {region: grantable_to(region, table.pool, table.leases, table.division) for region in REGIONS}
    assert grantable == {"us-east": 30, "eu-west": 130, "ap-south": 130}


@given(st.lists(st.tuples(st.sampled_from(REGIONS), st.integers(1, 200)), max_size=12), st.integers(0, 100))
def test_a_credit_can_be_spent_once(asked: list[tuple[str, int]], credited: int) -> None:
    table = OwnLimits(100)
    entry = Movement(uuid4(), None, None)
    post(entry, table.pool, None, Account.ADJUSTMENT, Account.UNALLOCATED, credited, Cause.CREDITED)
    table.pool.credited += credited
    for region, units in [*asked, *((region, 500) for region in REGIONS)]:
        table.ask(region, waiting=units)
        assert table.pool.funded <= 300
        assert all(table.taken(each) <= 100 + credited for each in REGIONS)
    assert sum(map(table.taken, REGIONS)) == 300 + credited


@given(
    st.lists(st.tuples(st.sampled_from(REGIONS), st.integers(1, 200)), max_size=12),
    st.integers(0, 100),
    st.integers(1, 200),
    st.integers(0, 12),
)
def test_a_debit_is_not_funded_again(asked: list[tuple[str, int]], credited: int, debited: int, at: int) -> None:
    table = OwnLimits(100)
    table.ask(REGIONS[0], waiting=1)
    adjust(entry_of(uuid4()), table.pool, Adjusting(table.pool.key, AdjustmentKind.CREDIT, credited))
    for region, units in asked[:at]:
        table.ask(region, waiting=units)
    units = min(debited, debitable(table.pool, table.leases, table.division))
    adjust(entry_of(uuid4()), table.pool, Adjusting(table.pool.key, AdjustmentKind.DEBIT, units))
    for region, more in [*asked[at:], *((region, 500) for region in REGIONS)]:
        table.ask(region, waiting=more)
    assert sum(map(table.taken, REGIONS)) == 300 + credited - units


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 200), st.integers(0, 100))
def test_nothing_carried_over_is_debited(limit: int, left: int, debited: int, lowered: int) -> None:
    """This holds at once and also after the limit falls later."""
    pool = Pool(KEY)
    entry = Movement(uuid4(), None, None)
    fund(entry, pool, limit)
    post(entry, pool, None, Account.CARRIED_OVER_IN, Account.UNALLOCATED, left, Cause.CARRIED_OVER)
    units = min(debited, debitable(pool, (), Division(PARTS)))
    adjust(entry, pool, Adjusting(pool.key, AdjustmentKind.DEBIT, units))
    assert units == min(debited, limit)
    fund(entry, pool, lowered)
    assert pool.entitled >= 0
    assert pool.unallocated >= left


def test_regional_units_are_neither_recalled_nor_pushed_for_other_regions() -> None:
    table = OwnLimits(100)
    table.ask("us-east", waiting=90)
    table.ask("eu-west", waiting=100)
    assert table.ask("eu-west", waiting=5) is GrantRefusal.EXHAUSTED
    lease, shelf = table.lease("eu-west"), table.shelf("eu-west")
    assert recall_signals(lease, shelf, 300, NOW) == []
    lease.waiting = 5
    assert push_to_waiting(table.shelf("us-east"), 300, {lease.epoch}, ["a return"], NOW) == []
    reply = lease_reply(table.lease("us-east"), table.shelf("us-east"), TERMS, None, NOW)
    assert (shelf.division.own_of("eu-west"), reply.unallocated, reply.recall_keep) == (100, 10, None)


def test_returned_units_are_not_pushed_while_a_pool_has_more_than_its_limit() -> None:
    """The quota was regional and is now leased: returned units leave the pool until the limit is reached."""
    table = OwnLimits(100)
    for region in REGIONS:
        table.ask(region, waiting=100)
    table.division = Division(PARTS)
    waiting = table.lease("eu-west")
    waiting.waiting = 90

    def pushed_after(units: int) -> int:
        table.give_back("us-east", units)
        had = waiting.granted
        push_to_waiting(table.shelf("us-east"), 100, {waiting.epoch}, ["a return", units], NOW)
        return waiting.granted - had

    assert pushed_after(60) == 0
    assert table.pool.grantable == 60
    table.give_back("ap-south", 100)
    assert pushed_after(40) == 0
    table.give_back("eu-west", 30)
    assert pushed_after(0) == 30  # above the limit are 200, and 230 are there
    table.ask("us-east")
    assert table.pool.funded == 100


def test_a_regional_limit_is_not_divided_by_demand() -> None:
    alone, among = OwnLimits(1000), OwnLimits(1000)
    among.ask("eu-west", demand_milli=900_000)
    for table in (alone, among):
        table.ask("us-east", demand_milli=100_000)
    assert alone.taken("us-east") == among.taken("us-east") > 0


def test_a_lower_regional_limit_recalls_the_excess_of_that_region() -> None:
    table = OwnLimits(100)
    table.ask("us-east", waiting=80)
    table.ask("eu-west", waiting=20)
    division = replace(table.division, each=50)
    changed = change_limit(Movement(uuid4(), None, None), table.pool, table.leases, 50, division)
    assert (changed.effect.limit, changed.effect.over, table.pool.funded) == (150, 30, 180)
    assert [(each.region, each.signal.keep) for each in changed.notices] == [("us-east", 50)]


def catalogue(mode: str, limit: int = 100) -> Catalogue:
    spec = AllowanceQuota(name="exports", limit=limit, period=PeriodKind.MONTH, mode=Mode(mode))
    regions = {"us-east": RegionShare("active", 2), "eu-west": RegionShare("draining", 1)}
    return Catalogue(1, {"exports": spec}, None, {}, regions)


def test_only_active_regions_take_part() -> None:
    plain = Division(PARTS)
    division = division_of(catalogue("regional"), KEY, (), Division({"us-east": RegionalPart(2)}))
    assert [division.own_of(region) for region in ("us-east", "eu-west", "nowhere")] == [100, 0, 0]
    assert division_of(catalogue("leased"), KEY, (), plain) is plain
    unknown = division_of(catalogue("regional"), Key("others:", KEY.period), (), plain)
    assert unknown is plain


def offered(mode: str, now: datetime) -> FindEntitledPeriod:
    return lambda quota: find_entitled_period(catalogue(mode), quota, TERMS, now)


# --- central quotas ---------------------------------------------------------------------------------------------------


@given(steps)
def test_a_central_quota_grants_exactly_what_requests_wait_for(history: list[tuple[str, str, int]]) -> None:
    table = Table(Division(PARTS, mode=Mode.CENTRAL))
    for what, region, units in history:
        before, left = table.taken(region), table.pool.grantable
        if what != "ask":
            getattr(table, what)(region, units)
            continue
        table.ask(region, demand_milli=1000 * units, waiting=units)
        assert table.taken(region) - before == min(units, left)


def test_units_that_no_request_took_return_with_the_next_exchange() -> None:
    table = Table(Division(PARTS, mode=Mode.CENTRAL))
    table.ask("us-east", waiting=5)
    lease, shelf = table.lease("us-east"), table.shelf("us-east")
    assert lease_reply(lease, shelf, TERMS, None, NOW).recall_keep == 0
    table.use("us-east", 5)
    assert lease_reply(lease, shelf, TERMS, None, NOW).recall_keep is None


def test_a_central_quota_grants_nothing_of_the_next_period() -> None:
    want, at_the_end = (
        LeaseDemand(quota=KEY.quota, demand_milli=5_000, waiting=1),
        NOW.replace(day=30, hour=23, minute=59),
    )
    at_the_end += timedelta(seconds=50)
    periods = {
        mode: [each.key.period for each in make_grant_requests([want], offered(mode, at_the_end))[0]]
        for mode in ("leased", "central")
    }
    assert periods == {"leased": ["2026-11", "2026-12"], "central": ["2026-11"]}


def test_a_pool_above_its_limit_gives_the_excess_back() -> None:
    """Free units above the limit leave the pool at once when a quota turns from regional to leased."""
    table = OwnLimits(100)
    table.ask("us-east", waiting=80)
    fund(table.report(table.leases[0]), table.pool, 100)
    assert (table.pool.funded, table.pool.unallocated) == (100, 20)
