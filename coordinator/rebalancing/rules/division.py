"""How an allowance is divided over the regions by people, and what that leaves to each.

    weight    how often a region's demand counts; without any it is given nothing
    floor     so many units of the period are kept for it, as long as it has not had them
    ceiling   it is granted no more than that of the period
    move      units that lie idle in one region are brought to another; from the moment at which they are back until the
              other one has them they are nobody else's

All this says only what may be granted to whom: units move as they always do, and the worst it can do is make somebody
wait. Work that was done is booked whatever a ceiling says.

In the mode `regional` nothing is divided: each region has the whole limit for itself (less, if its ceiling says so). So
what is funded follows the regions that take part, and what one of them has not spent is never another's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

from coordinator.exchange.rules.allocation import LAST_KEPT_MS, demand_milli_of, units_in
from coordinator.exchange.rules.balances import Account, Cause, Entry, Key, Lease, Pool
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, entitlement
from coordinator.notice import Notice
from coordinator.rebalancing.rules.region_settings import NOTHING_SET
from protocol.lease import LeaseState
from protocol.limits.document import LimitValue, Mode
from protocol.messages import Signal


class Part(NamedTuple):
    """What people want one region to have of a pool."""

    weight: int = 1
    floor: int = 0
    ceiling: int | None = None


@dataclass(slots=True)
class Move:
    """Units on their way from one region to another; without a target, back to where no region holds them."""

    rebalance: UUID
    number: int
    key: Key
    source: str
    target: str | None
    units: int
    returned: int = 0
    regranted: int = 0

    @property
    def name(self) -> tuple[UUID, int]:
        return self.rebalance, self.number

    @property
    def missing(self) -> int:
        """What the source has yet to give back."""
        return self.units - self.returned

    @property
    def travelling(self) -> int:
        """Back, and not yet where it belongs."""
        return self.returned - self.regranted if self.target else 0

    @property
    def is_complete(self) -> bool:
        return not self.missing and not self.travelling


@dataclass(frozen=True)
class Division:
    """Of one pool."""

    parts: Mapping[str, Part]  # of the active regions
    moves: Sequence[Move] = ()
    mode: Mode = Mode.LEASED
    each: int = 0  # regional: so many units are each region's own, and no other's

    @cached_property
    def is_plain(self) -> bool:
        """Nothing is kept for anybody, or from anybody: demand alone decides."""
        undivided = not self.is_regional and not self.moves
        return undivided and all(part.weight and part[1:] == (0, None) for part in self.parts.values())

    @property
    def is_regional(self) -> bool:
        return self.mode is Mode.REGIONAL

    @property
    def is_central(self) -> bool:
        """Nothing is leased that no request waits for."""
        return self.mode is Mode.CENTRAL

    def own_of(self, region: str) -> int:
        """What a region may have of the period where it has a limit of its own. One that is not active has none."""
        part = self.parts.get(region)
        if not self.is_regional or part is None or not part.weight:
            return 0
        return self.each if part.ceiling is None else min(self.each, part.ceiling)

    @cached_property
    def is_even(self) -> bool:
        """Everybody's demand counts alike."""
        return len({part.weight for part in self.parts.values()}) <= 1

    @cached_property
    def total_weight(self) -> int:
        return sum(part.weight for part in self.parts.values())

    def weight_of(self, region: str) -> int:
        """0 for a region that is not active: what comes free is not pushed to one that drains."""
        return self.parts[region].weight if region in self.parts else 0

    def part_of(self, units: int, region: str) -> int:
        """By weight, to the unit: all parts together are all of it. What does not come out even goes by name."""
        if not self.weight_of(region):
            return 0
        before = sum(part.weight for name, part in self.parts.items() if name < region)
        return units * (before + self.weight_of(region)) // self.total_weight - units * before // self.total_weight

    def travelling_to(self, region: str) -> int:
        return sum(move.travelling for move in self.moves if move.target == region)

    def missing_from(self, region: str) -> int:
        return sum(move.missing for move in self.moves if move.source == region)

    def floors(self, funded: int) -> dict[str, int]:
        """Never more together than there is: if the limit was lowered below them, all give way alike. Where each region
        has its own limit, nothing is kept from it.
        """
        if self.is_regional:
            return {}
        floors = {region: part.floor for region, part in self.parts.items() if part.floor}
        total = sum(floors.values())
        return floors if total <= funded else {region: floor * funded // total for region, floor in floors.items()}


def by_weight(catalogue: Catalogue) -> Division:
    """Of every allowance of which nobody said more."""
    return Division({name: Part(region.weight) for name, region in catalogue.regions.items() if region.is_active})


def division_of(catalogue: Catalogue, key: Key, moves: Sequence[Move], unless_set: Division) -> Division:
    settings, mode = catalogue.settings_of(key.quota), catalogue.mode_of(key.quota)
    each = _each(catalogue, key) if mode is Mode.REGIONAL else 0
    if not settings:
        return unless_set if mode is Mode.LEASED and not moves else Division(unless_set.parts, moves, mode, each)
    parts = {}
    for region, weight in catalogue.weights_of(key.quota).items():
        _, floor, ceiling = settings.get(region, NOTHING_SET)
        parts[region] = Part(weight, _units(floor) or 0, _units(ceiling))
    return Division(parts, moves, mode, each)


def _each(catalogue: Catalogue, key: Key) -> int:
    found = entitlement(catalogue, key.quota)
    return found.limit if isinstance(found, Entitlement) else 0


def _units(value: LimitValue | None) -> int | None:
    """A rate's, from when the quota was one, says nothing of an allowance."""
    return value if isinstance(value, int) else None


# --- what may be granted ----------------------------------------------------------------------------------------------


def taken_by_region(leases: Iterable[Lease]) -> Counter[str]:
    """What each region has had of the period, spent or not, in all of its epochs."""
    taken = Counter[str]()
    for lease in leases:
        taken[lease.region] += lease.granted + lease.overage - lease.returned
    return taken


def funded_for(limit: int, pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """What a limit comes to in a pool. `leases`: all of it, where regions have limits of their own.

    Then it is what all of them may have, and what any of them has already: whoever leaves, or has more than a limit
    that was lowered, takes nothing from the others. What was credited, or left of the period before, pays for what is
    above: funded as well, it would be there again for whoever took it.
    """
    if not division.is_regional:
        return limit
    own = sum(map(division.own_of, division.parts))
    return own + max(0, _above_own(leases, division) - max(0, pool.credited + pool.carried_over_in))


def _above_own(leases: Iterable[Lease], division: Division) -> int:
    granted = Counter[str]()
    for lease in leases:
        granted[lease.region] += lease.granted - lease.returned
    return sum(max(0, units - division.own_of(region)) for region, units in granted.items())


def debitable(pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """What people may take away: what could still be granted of the limit and of credits. Not what a soft cap lends,
    which is nobody's, nor what was left of the period before: it was paid for with that.

    Where each region has a limit of its own, a credit that one of them took pays for what it has above that. Taken from
    the others instead, that would be funded for it, and so the debit be undone by the next word of any region.
    """
    most = min(pool.grantable, pool.entitled)
    above = _above_own(leases, division) if division.is_regional else 0
    credited = max(0, pool.credited + pool.carried_over_in)
    return min(most, max(0, credited - above)) if above and credited else most


def _grantable_of_own(region: str, pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """What is left of its own limit; and of what people credited, which is for whoever asks."""
    taken = taken_by_region(leases)
    left = {each: max(0, division.own_of(each) - taken[each]) for each in division.parts}
    credited = max(0, pool.grantable - sum(left.values())) if division.own_of(region) else 0
    return min(pool.unallocated, left.get(region, 0) + credited)


def grantable_to(region: str, pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """Neither kept for others nor above its ceiling; nothing for one that has no weight. `leases`: all of the pool."""
    if division.is_plain and region in division.parts:
        return pool.grantable
    if division.is_regional:
        return _grantable_of_own(region, pool, leases, division)
    taken = taken_by_region(leases)
    free = pool.grantable - _kept_for_others(region, taken, division, pool.funded)
    return max(0, min(free, room_below_ceiling(region, taken, division)))


def _kept_for_others(region: str, taken: Counter[str], division: Division, funded: int) -> int:
    floors = division.floors(funded)
    travelling = {move.target: division.travelling_to(move.target) for move in division.moves if move.target}
    others = (floors.keys() | travelling.keys()) - {region}
    return sum(max(floors.get(each, 0) - taken[each], travelling.get(each, 0), 0) for each in others)


def room_below_ceiling(region: str, taken: Counter[str], division: Division) -> int:
    if not division.weight_of(region):
        return 0
    part = division.parts[region]
    return _BOUNDLESS if part.ceiling is None else max(0, part.ceiling - taken[region])


_BOUNDLESS = 2**63


def is_capped(region: str, pool: Pool, leases: Sequence[Lease], division: Division) -> bool:
    """For it nothing is left, whatever others hold."""
    if division.is_regional:
        return not grantable_to(region, pool, leases, division)
    return not division.is_plain and not room_below_ceiling(region, taken_by_region(leases), division)


def spare_of(lease: Lease, pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """What the lease could give to others: what its region's floor keeps for it would only wait for it. Of its own
    limit nothing is for others; above it, it has what is to come back.
    """
    floor = 0 if division.is_plain else division.floors(pool.funded).get(lease.region, 0)
    if division.is_regional:
        floor = division.own_of(lease.region)
    if not floor:
        return lease.outstanding
    return max(0, min(lease.outstanding, taken_by_region(leases)[lease.region] - floor))


def kept_of_move(lease: Lease, units: int, now: datetime) -> int:
    """What the lease keeps when so many units of it are asked for: at least what it needs before a grant could come."""
    return min(lease.outstanding, max(lease.outstanding - units, units_in(demand_milli_of(lease, now), LAST_KEPT_MS)))


# --- what becomes of moves --------------------------------------------------------------------------------------------


def came_back(entry: Entry, key: Key, region: str, moves: Iterable[Move]) -> None:
    """What the region gave back of the pool belongs to its moves first."""
    returned = sum(
        each.units
        for each in entry.transfers
        if each.key == key and each.cause is Cause.RETURNED and each.dst is Account.UNALLOCATED
    )
    for move in moves:
        if move.source == region:
            units = min(returned, move.missing)
            move.returned += units
            returned -= units


def arrived(units: int, region: str, moves: Iterable[Move]) -> None:
    """What the region is granted is first of all what was on its way to it."""
    for move in moves:
        if move.target == region:
            taken = min(units, move.travelling)
            move.regranted += taken
            units -= taken


def fetched_by(move: Move) -> Notice | None:
    """Units of it are there for the target, which hears of it and asks."""
    return Notice(Signal(kind="fetch", quota=move.key.quota), move.target) if move.travelling else None


def recalled_by(move: Move, leases: Iterable[Lease], now: datetime) -> Notice | None:
    """Units of it lie idle in the source, which is asked for them; again and again, for a hint may be lost."""
    for lease in leases:
        if lease.region == move.source and lease.state is LeaseState.ACTIVE:
            keep = kept_of_move(lease, move.missing, now)
            if keep < lease.outstanding:
                return Notice(Signal(kind="recall", quota=move.key.quota, keep=keep), move.source)
    return None
