"""What people want of an allowance that is spread over regions: the plan first, and then what becomes of it.

A plan is made of moves, each from one region to another, or to where no region holds the units. It takes only what lies
idle in a region and is not needed there before a grant could come, and never what a floor keeps or what a ceiling
forbids: what cannot be done is told with the reason, and the rest is done.

    recalled    the source is asked, again and again: it puts units out of reach first, and then tells
    returned    that is booked; from here on they are the target's, wherever they lie
    regranted   the target, which hears of it and asks, was granted them

A move that can come no further ends with a reason. What had come back of it by then is for whoever asks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field

from coordinator.exchange.rules.allocation import demand_milli_of
from coordinator.exchange.rules.balances import Key, Lease, Pool
from coordinator.rebalancing.rules.division import (
    Division,
    Move,
    kept_of_move,
    room_below_ceiling,
    spare_of,
    taken_by_region,
)
from protocol.lease import RETURNS_COUNT, LeaseState
from protocol.limits.document import LimitValue
from protocol.periods import is_over

EVERYTHING = 2**63


class Hindrance(StrEnum):
    """Why units cannot be moved, or have come no further."""

    SPENT = "spent"  # the source does not hold them (any more)
    NEEDED = "needed"  # it spends them before a grant could come
    FLOOR = "floor"  # the source's keeps them there
    CEILING = "ceiling"  # the target's keeps them out
    NOT_ACTIVE = "not_active"  # the target is draining or down, or has never opened an epoch
    PERIOD_OVER = "period_over"
    GONE = "gone"  # what had come back was taken by a lower limit, or by work that was done without a lease


_REASONS = {
    Hindrance.SPENT: "it does not hold them: they are spent, or nobody granted them to it",
    Hindrance.NEEDED: "it will have spent them before a grant could come",
    Hindrance.FLOOR: "its floor keeps them there",
    Hindrance.CEILING: "its ceiling keeps them out",
    Hindrance.NOT_ACTIVE: "it is not active, or has no epoch",
    Hindrance.PERIOD_OVER: "the period is over",
    Hindrance.GONE: "a lower limit, or work that was done without a lease, took what had come back",
}


class Cannot(Struct, frozen=True):
    """A part of a plan that cannot be done."""

    what: Hindrance
    quota: str
    region: str
    units: int
    reason: str


class Held(Struct, frozen=True):
    """What one region has of a pool."""

    region: str
    taken: int  # of the period, spent or not
    outstanding: int  # of that, what it has not accounted for: idle, as far as it was told


class Spread(Struct, frozen=True):
    """How a pool is spread over the regions."""

    quota: str
    period: str
    unallocated: int
    regions: list[Held]


class Planned(Struct, frozen=True):
    """A move that is to be."""

    quota: str
    period: str
    source: str = field(name="from")
    target: str | None = field(name="to")  # none: to where no region holds it
    units: int

    @property
    def key(self) -> Key:
        return Key(self.quota, self.period)


class SettingTold(Struct, frozen=True):
    weight: int | None
    floor: LimitValue | None
    ceiling: LimitValue | None


class Plan(Struct, frozen=True):
    before: list[Spread]
    after: list[Spread]  # as soon as all of it is done, if nobody spends anything meanwhile
    cannot: list[Cannot]
    moves: list[Planned]
    recalled: int = 0  # of a drain
    settings_before: dict[str, SettingTold] = {}
    settings_after: dict[str, SettingTold] = {}


class Table(NamedTuple):
    """A pool with all its leases, and how it is divided."""

    pool: Pool
    leases: Sequence[Lease]
    division: Division
    regions: Collection[str]  # that may be granted to: they are active, and have an epoch

    @property
    def key(self) -> Key:
        return self.pool.key

    def outstanding_in(self, region: str) -> int:
        return sum(lease.outstanding for lease in self.active_in(region))

    def active_in(self, region: str) -> list[Lease]:
        return [each for each in self.leases if each.region == region and each.state is LeaseState.ACTIVE]

    def idle_in(self, region: str, now: datetime) -> int:
        """What it can do without: neither its floor nor its requests need it."""
        return min(
            (self.spare_in(region), *(self._unneeded(lease, now) for lease in self.active_in(region))), default=0
        )

    def spare_in(self, region: str) -> int:
        return sum(spare_of(lease, self.pool, self.leases, self.division) for lease in self.active_in(region))

    @staticmethod
    def _unneeded(lease: Lease, now: datetime) -> int:
        return lease.outstanding - kept_of_move(lease, EVERYTHING, now)

    def room_in(self, region: str) -> int:
        return room_below_ceiling(region, taken_by_region(self.leases), self.division)

    def demand_milli_of(self, region: str, now: datetime) -> int:
        return sum(demand_milli_of(lease, now) for lease in self.active_in(region))


Moves = tuple[list[Planned], list[Cannot]]


# --- plans ------------------------------------------------------------------------------------------------------------


def plan_move(table: Table, source: str, target: str, units: int, now: datetime) -> Moves:
    """So many units, as far as they are there and may go."""
    bounds = (
        (Hindrance.NOT_ACTIVE, target, EVERYTHING if target in table.regions else 0),
        (Hindrance.CEILING, target, table.room_in(target)),
        (Hindrance.SPENT, source, table.outstanding_in(source)),
        (Hindrance.FLOOR, source, table.spare_in(source)),
        (Hindrance.NEEDED, source, table.idle_in(source, now)),
    )
    cannot = []
    for what, region, bound in bounds:
        if bound < units:
            cannot.append(Cannot(what, table.key.quota, region, units - bound, _REASONS[what]))
            units = bound
    return [Planned(*table.key, source, target, units)] if units else [], cannot


def plan_even_out(table: Table, now: datetime) -> Moves:
    """Idle units to where the demand is, each as often as it weighs; without any demand, by weight alone."""
    regions = sorted(table.regions)
    idle = {region: table.idle_in(region, now) for region in regions}
    shares = {region: _weighed_demand(table, region, now) for region in regions}
    if not any(shares.values()):
        shares = {region: table.division.weight_of(region) for region in regions}
    wanted = apportioned(sum(idle.values()), shares)
    gives = {region: idle[region] - wanted[region] for region in regions}
    takes = {region: min(-units, table.room_in(region)) for region, units in gives.items() if units < 0}
    return list(_matched(table.key, gives, takes)), []


def _weighed_demand(table: Table, region: str, now: datetime) -> int:
    return table.division.weight_of(region) * table.demand_milli_of(region, now)


def apportioned(units: int, shares: Mapping[str, int]) -> dict[str, int]:
    """All of the units, to each by its share; what does not come out even to those who lack most."""
    total = sum(shares.values())
    if not total:
        return dict.fromkeys(shares, 0)
    given = {name: units * share // total for name, share in shares.items()}
    lacking = sorted(shares, key=lambda name: (-(units * shares[name] % total), name))
    for name in lacking[: units - sum(given.values())]:
        given[name] += 1
    return given


def plan_division(table: Table, now: datetime) -> Moves:
    """After people set floors and ceilings: what is above a ceiling comes back, and floors are filled."""
    above = {region: -(table.division.parts[region].ceiling or 0) + taken for region, taken in _capped(table)}
    back = {region: min(units, table.idle_in(region, now)) for region, units in above.items() if units > 0}
    recalls = [Planned(*table.key, region, None, units) for region, units in sorted(back.items()) if units]
    taken = taken_by_region(table.leases)
    floors = table.division.floors(table.pool.funded)
    takes = {region: floor - taken[region] for region, floor in floors.items() if floor > taken[region]}
    takes = _less(takes, table.pool.grantable + sum(back.values()))
    gives = {region: table.idle_in(region, now) for region in table.regions if region not in {*takes, *back}}
    fills = list(_matched(table.key, gives, takes))
    filled = {region: sum(each.units for each in fills if each.target == region) for region in takes}
    lacking = [
        Cannot(
            Hindrance.SPENT, table.key.quota, region, units - filled[region], "no region holds so many that are idle"
        )
        for region, units in takes.items()
        if units > filled[region]
    ]
    return [*recalls, *fills], lacking


def _capped(table: Table) -> Iterator[tuple[str, int]]:
    taken = taken_by_region(table.leases)
    return ((region, taken[region]) for region, part in table.division.parts.items() if part.ceiling is not None)


def _less(takes: Mapping[str, int], there: int) -> dict[str, int]:
    """What nobody holds fills a part of it without any move."""
    left = {}
    for region, units in sorted(takes.items()):
        covered = min(units, there)
        there -= covered
        if units > covered:
            left[region] = units - covered
    return left


def _matched(key: Key, gives: Mapping[str, int], takes: Mapping[str, int]) -> Iterator[Planned]:
    """From whoever has most to whoever lacks most: so there are few moves."""
    gives, takes = dict(gives), dict(takes)
    for source in sorted(gives, key=lambda each: (-gives[each], each)):
        for target in sorted(takes, key=lambda each: (-takes[each], each)):
            units = min(gives[source], takes[target])
            if units > 0:
                yield Planned(*key, source, target, units)
                gives[source] -= units
                takes[target] -= units


# --- how it is told ---------------------------------------------------------------------------------------------------


def spread_of(table: Table, moves: Iterable[Planned] = ()) -> Spread:
    """As it is, or as it will be after these moves."""
    moves = [move for move in moves if move.key == table.key]
    taken = taken_by_region(table.leases)
    there = sorted({*table.regions, *(lease.region for lease in table.leases)})
    held = [
        Held(region, taken[region] + came, table.outstanding_in(region) + came)
        for region, came in ((region, _came(region, moves)) for region in there)
    ]
    back = sum(move.units for move in moves if move.target is None)
    return Spread(table.key.quota, table.key.period, table.pool.unallocated + back, held)


def _came(region: str, moves: Iterable[Planned]) -> int:
    return sum(move.units * ((move.target == region) - (move.source == region)) for move in moves)


Planner = Callable[[Table, datetime], Moves]


def plan_of(tables: Iterable[Table], planner: Planner, now: datetime) -> Plan:
    """Of all pools that are concerned, those of which something is to be moved or cannot be."""
    plan = Plan([], [], [], [])
    for table in tables:
        planned, cannot = planner(table, now)
        plan.moves.extend(planned)
        plan.cannot.extend(cannot)
        if planned or cannot:
            plan.before.append(spread_of(table))
            plan.after.append(spread_of(table, planned))
    return plan


# --- what becomes of a move -------------------------------------------------------------------------------------------


class Fate(NamedTuple):
    """A move that has ended: complete, or for a reason."""

    why: Hindrance | None


def fate_of(move: Move, table: Table, begun_at: datetime, now: datetime, *, period_is_open: bool) -> Fate | None:
    """None: it goes on. Without anybody's answer it goes on for as long as the period lasts, and people see for whom
    it waits.
    """
    if move.is_complete:
        return Fate(None)
    if not period_is_open or is_over(move.key.period, now):
        return Fate(Hindrance.PERIOD_OVER)
    if move.target is not None and move.target not in table.regions:
        return Fate(Hindrance.NOT_ACTIVE)
    if move.target is not None and move.travelling:
        return _fate_on_the_way(table, move.target)
    why = _why_no_more(move.source, table, begun_at, now)
    return Fate(why) if why else None


def _fate_on_the_way(table: Table, target: str) -> Fate | None:
    if not table.pool.grantable:
        return Fate(Hindrance.GONE)
    return None if table.room_in(target) else Fate(Hindrance.CEILING)


def _why_no_more(source: str, table: Table, begun_at: datetime, now: datetime) -> Hindrance | None:
    """Whether the source, which has been heard since, has any more to give back."""
    leases = [each for each in table.leases if each.region == source and each.state in RETURNS_COUNT]
    if not any(each.outstanding or each.suspense for each in leases):
        return Hindrance.SPENT
    has_answered = all(each.state is LeaseState.ACTIVE and each.reported_at > begun_at for each in leases)
    return Hindrance.NEEDED if has_answered and not table.idle_in(source, now) else None
