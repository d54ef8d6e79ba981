"""Plan moves of an allowance's units between regions, and decide when a move ends.

A move goes from one region to another, or to where no region holds the units. It takes only units that lie idle in a
region and that it does not need before a grant could arrive. It never takes what a floor keeps, and never passes a
ceiling. What cannot be moved is reported with the reason, and the rest is moved.

    recalled    the source was notified: it sets the units aside, and reports them as returned
    returned    the return is booked; from here on the units are kept for the target
    regranted   the target was notified, has requested the units, and was granted them

A move that cannot proceed ends with a reason. What it had returned by then may be granted to any region.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field

from coordinator.exchange.rules.allocation import demand_milli_of, units_in
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
    """The reasons why units cannot be moved, or why a move ended incomplete."""

    SPENT = "spent"  # the source does not hold them, or not any more
    NEEDED = "needed"  # the source spends them before a grant could arrive
    FLOOR = "floor"  # the source's floor keeps them
    CEILING = "ceiling"  # the target's ceiling keeps them out
    NOT_ACTIVE = "not_active"  # the target is draining or down, or has never opened an epoch
    PERIOD_OVER = "period_over"
    GONE = "gone"  # returned units were taken by a lower limit, or by overage


_REASONS = {
    Hindrance.SPENT: "The region does not hold them: they are spent, or were never granted to it.",
    Hindrance.NEEDED: "The region will have spent them before a grant could arrive.",
    Hindrance.FLOOR: "The region's floor keeps them.",
    Hindrance.CEILING: "The region's ceiling keeps them out.",
    Hindrance.NOT_ACTIVE: "The region is not active, or has no epoch.",
    Hindrance.PERIOD_OVER: "The period is over.",
    Hindrance.GONE: "A lower limit or overage took the units that were returned.",
}


class Cannot(Struct, frozen=True):
    """Units that cannot be moved, and why."""

    what: Hindrance
    quota: str
    region: str
    units: int
    reason: str


class RegionHolding(Struct, frozen=True):
    """One region's part of a pool."""

    region: str
    taken: int  # granted in the period, spent or not
    outstanding: int  # of that, what it has not accounted for: idle, as far as is known


class PoolSpread(Struct, frozen=True):
    """The division of a pool over the regions."""

    quota: str
    period: str
    unallocated: int
    regions: list[RegionHolding]


class PlannedMove(Struct, frozen=True):
    """A move of a plan."""

    quota: str
    period: str
    source: str = field(name="from")
    target: str | None = field(name="to")  # null: to where no region holds it
    units: int

    @property
    def key(self) -> Key:
        return Key(self.quota, self.period)


class RegionSetting(Struct, frozen=True):
    weight: int | None
    floor: LimitValue | None
    ceiling: LimitValue | None


class TakenBack(Struct, frozen=True):
    """When idle units that were moved may be recalled again, at the demand of now."""

    quota: str
    region: str
    units: int  # of what the region will hold then, what its own demand does not need
    after_ms: int  # from now; 0: with the next exchange
    reason: str


class PlannedHold(Struct, frozen=True):
    """Units that are kept for the target of a move, like a floor, until a time."""

    quota: str
    period: str
    region: str
    units: int  # of the period, those that are spent included
    until: datetime


class Plan(Struct, frozen=True):
    before: list[PoolSpread]
    after: list[PoolSpread]  # when all moves are complete, if nothing is spent meanwhile
    cannot: list[Cannot]
    moves: list[PlannedMove]
    recalled: int = 0  # units of a drain
    settings_before: dict[str, RegionSetting] = {}
    settings_after: dict[str, RegionSetting] = {}
    taken_back: list[TakenBack] = []
    holds: list[PlannedHold] = []


class DividedPool(NamedTuple):
    """A pool with all its leases and its division."""

    pool: Pool
    leases: Sequence[Lease]
    division: Division
    regions: Collection[str]  # that may be granted units: they are active and have an epoch

    @property
    def key(self) -> Key:
        return self.pool.key

    def outstanding_in(self, region: str) -> int:
        return sum(lease.outstanding for lease in self.active_in(region))

    def active_in(self, region: str) -> list[Lease]:
        return [each for each in self.leases if each.region == region and each.state is LeaseState.ACTIVE]

    def idle_in(self, region: str, now: datetime) -> int:
        """Return the units that neither the region's floor nor its demand needs."""
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


Moves = tuple[list[PlannedMove], list[Cannot]]


# --- plans ------------------------------------------------------------------------------------------------------------


def plan_move(pool: DividedPool, source: str, target: str, units: int, now: datetime) -> Moves:
    """Plan to move units as far as the source can spare them and the target may have them."""
    bounds = (
        (Hindrance.NOT_ACTIVE, target, EVERYTHING if target in pool.regions else 0),
        (Hindrance.CEILING, target, pool.room_in(target)),
        (Hindrance.SPENT, source, pool.outstanding_in(source)),
        (Hindrance.FLOOR, source, pool.spare_in(source)),
        (Hindrance.NEEDED, source, pool.idle_in(source, now)),
    )
    cannot = []
    for what, region, bound in bounds:
        if bound < units:
            cannot.append(Cannot(what, pool.key.quota, region, units - bound, _REASONS[what]))
            units = bound
    return [PlannedMove(*pool.key, source, target, units)] if units else [], cannot


def plan_even_out(pool: DividedPool, now: datetime) -> Moves:
    """Plan to divide idle units by demand and weight. Without any demand, divide them by weight."""
    regions = sorted(pool.regions)
    idle = {region: pool.idle_in(region, now) for region in regions}
    shares = {region: _weighed_demand(pool, region, now) for region in regions}
    if not any(shares.values()):
        shares = {region: pool.division.weight_of(region) for region in regions}
    wanted = apportioned(sum(idle.values()), shares)
    gives = {region: idle[region] - wanted[region] for region in regions}
    takes = {region: min(-units, pool.room_in(region)) for region, units in gives.items() if units < 0}
    return list(_matched(pool.key, gives, takes)), []


def _weighed_demand(pool: DividedPool, region: str, now: datetime) -> int:
    return pool.division.weight_of(region) * pool.demand_milli_of(region, now)


def apportioned(units: int, shares: Mapping[str, int]) -> dict[str, int]:
    """Divide all units by shares. The remainder goes to those whose quotient was rounded down most."""
    total = sum(shares.values())
    if not total:
        return dict.fromkeys(shares, 0)
    given = {name: units * share // total for name, share in shares.items()}
    lacking = sorted(shares, key=lambda name: (-(units * shares[name] % total), name))
    for name in lacking[: units - sum(given.values())]:
        given[name] += 1
    return given


def plan_division(pool: DividedPool, now: datetime) -> Moves:
    """Plan moves after a change of settings: units above a ceiling are returned, and floors are filled."""
    above = {region: -(pool.division.parts[region].ceiling or 0) + taken for region, taken in _capped(pool)}
    back = {region: min(units, pool.idle_in(region, now)) for region, units in above.items() if units > 0}
    recalls = [PlannedMove(*pool.key, region, None, units) for region, units in sorted(back.items()) if units]
    taken = taken_by_region(pool.leases)
    floors = pool.division.floors(pool.pool.funded)
    takes = {region: floor - taken[region] for region, floor in floors.items() if floor > taken[region]}
    takes = _uncovered(takes, pool.pool.grantable + sum(back.values()))
    gives = {region: pool.idle_in(region, now) for region in pool.regions if region not in {*takes, *back}}
    fills = list(_matched(pool.key, gives, takes))
    filled = {region: sum(each.units for each in fills if each.target == region) for region in takes}
    lacking = [
        Cannot(Hindrance.SPENT, pool.key.quota, region, units - filled[region], "No region holds enough idle units.")
        for region, units in takes.items()
        if units > filled[region]
    ]
    return [*recalls, *fills], lacking


def _capped(pool: DividedPool) -> Iterator[tuple[str, int]]:
    taken = taken_by_region(pool.leases)
    return ((region, taken[region]) for region, part in pool.division.parts.items() if part.ceiling is not None)


def _uncovered(takes: Mapping[str, int], unallocated: int) -> dict[str, int]:
    """Return what remains to be moved, after units that no region holds have covered a part."""
    left = {}
    for region, units in sorted(takes.items()):
        covered = min(units, unallocated)
        unallocated -= covered
        if units > covered:
            left[region] = units - covered
    return left


def _matched(key: Key, gives: Mapping[str, int], takes: Mapping[str, int]) -> Iterator[PlannedMove]:
    """Match the largest givers with the largest takers, so that there are few moves."""
    gives, takes = dict(gives), dict(takes)
    for source in sorted(gives, key=lambda each: (-gives[each], each)):
        for target in sorted(takes, key=lambda each: (-takes[each], each)):
            units = min(gives[source], takes[target])
            if units > 0:
                yield PlannedMove(*key, source, target, units)
                gives[source] -= units
                takes[target] -= units


# --- how units are spread ---------------------------------------------------------------------------------------------


def spread_of(pool: DividedPool, moves: Iterable[PlannedMove] = ()) -> PoolSpread:
    """Return how a pool is divided now, or after these moves."""
    moves = [move for move in moves if move.key == pool.key]
    taken = taken_by_region(pool.leases)
    regions = sorted({*pool.regions, *(lease.region for lease in pool.leases)})
    held = [
        RegionHolding(region, taken[region] + came, pool.outstanding_in(region) + came)
        for region, came in ((region, _came(region, moves)) for region in regions)
    ]
    back = sum(move.units for move in moves if move.target is None)
    return PoolSpread(pool.key.quota, pool.key.period, pool.pool.unallocated + back, held)


def _came(region: str, moves: Iterable[PlannedMove]) -> int:
    return sum(move.units * ((move.target == region) - (move.source == region)) for move in moves)


# --- what becomes of moved units --------------------------------------------------------------------------------------


def plan_hold(pool: DividedPool, move: PlannedMove, until: datetime) -> PlannedHold:
    """Return the floor that keeps what a region will have been granted with the move, or its present hold if more."""
    assert move.target is not None
    taken = taken_by_region(pool.leases)[move.target] + move.units
    return PlannedHold(*move.key, move.target, max(taken, pool.division.parts[move.target].floor), until)


def floors_with(pool: DividedPool, hold: PlannedHold) -> int:
    """Return what all floors of a pool add up to, with this one."""
    floors = {region: part.floor for region, part in pool.division.parts.items()}
    return sum((floors | {hold.region: hold.units}).values())


def taken_back(pool: DividedPool, move: PlannedMove, held: timedelta, now: datetime) -> TakenBack | None:
    """Return when units of a move may be recalled again, or None if demand does not reach that.

    Idle units are recalled each time that what no region holds falls through a quarter of the limit, or a quarter of
    that, and so on (exchange/rules/signals.py).
    """
    assert move.target is not None
    demand_milli = sum(pool.demand_milli_of(region, now) for region in pool.regions)
    if not demand_milli:
        return None
    left, mark = pool.pool.grantable, pool.pool.funded // 4
    while mark > left:
        mark //= 4
    after_ms = max(held // timedelta(milliseconds=1), (left - mark) * 1_000_000 // demand_milli)
    holds = pool.outstanding_in(move.target) + move.units
    idle = holds - units_in(pool.demand_milli_of(move.target, now), after_ms)
    if idle <= 0:
        return None
    reason = f"Demand of {demand_milli / 1000:g} a second uses up what no region holds."
    return TakenBack(move.quota, move.target, idle, after_ms, reason)


Planner = Callable[[DividedPool, datetime], Moves]


def plan_of(pools: Iterable[DividedPool], planner: Planner, now: datetime) -> Plan:
    """Return the plan for these pools. Pools of which nothing is moved, or cannot be moved, are left out."""
    plan = Plan([], [], [], [])
    for pool in pools:
        planned, cannot = planner(pool, now)
        plan.moves.extend(planned)
        plan.cannot.extend(cannot)
        if planned or cannot:
            plan.before.append(spread_of(pool))
            plan.after.append(spread_of(pool, planned))
    return plan


# --- how a move ends --------------------------------------------------------------------------------------------------


class MoveEnd(NamedTuple):
    """The end of a move: complete, or for a reason."""

    reason: Hindrance | None


def end_of_move(
    move: Move, pool: DividedPool, begun_at: datetime, now: datetime, *, period_is_open: bool
) -> MoveEnd | None:
    """Return how a move ends, or None if it goes on.

    While a region does not report, its moves go on until the period ends. People see which region they wait for.
    """
    if move.is_complete:
        return MoveEnd(None)
    if not period_is_open or is_over(move.key.period, now):
        return MoveEnd(Hindrance.PERIOD_OVER)
    if move.target is not None and move.target not in pool.regions:
        return MoveEnd(Hindrance.NOT_ACTIVE)
    if move.target is not None and move.travelling:
        return _end_on_the_way(pool, move.target)
    reason = _why_source_is_done(move.source, pool, begun_at, now)
    return MoveEnd(reason) if reason else None


def _end_on_the_way(pool: DividedPool, target: str) -> MoveEnd | None:
    if not pool.pool.grantable:
        return MoveEnd(Hindrance.GONE)
    return None if pool.room_in(target) else MoveEnd(Hindrance.CEILING)


def _why_source_is_done(source: str, pool: DividedPool, begun_at: datetime, now: datetime) -> Hindrance | None:
    """Return why the source has nothing more to return, if it has reported since the move began."""
    leases = [each for each in pool.leases if each.region == source and each.state in RETURNS_COUNT]
    if not any(each.outstanding or each.suspense for each in leases):
        return Hindrance.SPENT
    has_answered = all(each.state is LeaseState.ACTIVE and each.reported_at > begun_at for each in leases)
    return Hindrance.NEEDED if has_answered and not pool.idle_in(source, now) else None
