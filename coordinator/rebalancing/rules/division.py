"""How people divide an allowance over regions, and what may be granted to each.

    weight    multiplies a region's demand; with weight 0 it is granted nothing
    floor     so many units of the period are kept for the region until it was granted them
    ceiling   the region is granted no more than that of the period
    move      idle units of one region go to another; from their return until they are regranted they are kept for it

All of this only bounds grants: units move as they always do, and at worst a request waits. Usage is booked whatever a
ceiling says.

In the mode `regional` nothing is divided: each region has the whole limit for itself, or less by its ceiling. So what
is funded depends on which regions take part, and what one region has not spent is never granted to another.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

from coordinator.exchange.rules.allocation import LAST_KEPT_MS, demand_milli_of, units_in
from coordinator.exchange.rules.balances import Account, Cause, Key, Lease, Pool
from coordinator.exchange.rules.posting import Entry
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, entitlement
from coordinator.notice import Notice
from coordinator.rebalancing.rules.region_settings import NOTHING_SET
from protocol.lease import LeaseState
from protocol.limits.document import LimitValue, Mode
from protocol.messages import Signal


class RegionalPart(NamedTuple):
    """The weight, floor and ceiling of one region in a pool."""

    weight: int = 1
    floor: int = 0
    ceiling: int | None = None


@dataclass(slots=True)
class Move:
    """Units that move from one region to another, or without a target to where no region holds them."""

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
        """Return the units that the source has yet to return."""
        return self.units - self.returned

    @property
    def travelling(self) -> int:
        """Return the units that were returned, and not yet regranted to the target."""
        return self.returned - self.regranted if self.target else 0

    @property
    def is_complete(self) -> bool:
        return not self.missing and not self.travelling


@dataclass(frozen=True)
class Division:
    """The division of one pool."""

    parts: Mapping[str, RegionalPart]  # by active region
    moves: Sequence[Move] = ()
    mode: Mode = Mode.LEASED
    each: int = 0  # in the mode `regional`, the limit of each region

    @cached_property
    def is_plain(self) -> bool:
        """Return whether demand alone decides: no floors, ceilings or moves, and every region has a weight."""
        undivided = not self.is_regional and not self.moves
        return undivided and all(part.weight and part[1:] == (0, None) for part in self.parts.values())

    @property
    def is_regional(self) -> bool:
        return self.mode is Mode.REGIONAL

    @property
    def is_central(self) -> bool:
        """Return whether only units that a request waits for are leased."""
        return self.mode is Mode.CENTRAL

    def own_of(self, region: str) -> int:
        """Return a region's own limit in the mode `regional`. A region that is not active has none."""
        part = self.parts.get(region)
        if not self.is_regional or part is None or not part.weight:
            return 0
        return self.each if part.ceiling is None else min(self.each, part.ceiling)

    @cached_property
    def is_even(self) -> bool:
        """Return whether all weights are equal."""
        return len({part.weight for part in self.parts.values()}) <= 1

    @cached_property
    def total_weight(self) -> int:
        return sum(part.weight for part in self.parts.values())

    def weight_of(self, region: str) -> int:
        """Return a region's weight. It is 0 for one that is not active, so that units are not pushed to it."""
        return self.parts[region].weight if region in self.parts else 0

    def part_of(self, units: int, region: str) -> int:
        """Return a region's part of units by weight. The parts add up to all units; the remainder goes by name."""
        if not self.weight_of(region):
            return 0
        before = sum(part.weight for name, part in self.parts.items() if name < region)
        return units * (before + self.weight_of(region)) // self.total_weight - units * before // self.total_weight

    def travelling_to(self, region: str) -> int:
        return sum(move.travelling for move in self.moves if move.target == region)

    def missing_from(self, region: str) -> int:
        return sum(move.missing for move in self.moves if move.source == region)

    def floors(self, funded: int) -> dict[str, int]:
        """Return the floors, scaled down to what is funded if the limit was lowered below them.

        Where each region has its own limit there are none.
        """
        if self.is_regional:
            return {}
        floors = {region: part.floor for region, part in self.parts.items() if part.floor}
        total = sum(floors.values())
        return floors if total <= funded else {region: floor * funded // total for region, floor in floors.items()}


def by_weight(catalogue: Catalogue) -> Division:
    """Return the division of an allowance without settings: by the weights of the regions."""
    return Division(
        {name: RegionalPart(region.weight) for name, region in catalogue.regions.items() if region.is_active}
    )


def division_of(catalogue: Catalogue, key: Key, moves: Sequence[Move], unless_set: Division) -> Division:
    settings, mode = catalogue.settings_of(key.quota), catalogue.mode_of(key.quota)
    each = _each(catalogue, key) if mode is Mode.REGIONAL else 0
    if not settings and key.quota not in catalogue.holds:
        return unless_set if mode is Mode.LEASED and not moves else Division(unless_set.parts, moves, mode, each)
    parts = {}
    for region, weight in catalogue.weights_of(key.quota).items():
        _, floor, ceiling = settings.get(region, NOTHING_SET)
        hold = catalogue.hold_of(key.quota, key.period, region)
        parts[region] = RegionalPart(weight, max(_units(floor) or 0, hold.units if hold else 0), _units(ceiling))
    return Division(parts, moves, mode, each)


def _each(catalogue: Catalogue, key: Key) -> int:
    found = entitlement(catalogue, key.quota)
    return found.limit if isinstance(found, Entitlement) else 0


def _units(value: LimitValue | None) -> int | None:
    """Return units. The text of a rate, from when the quota was one, does not apply to an allowance."""
    return value if isinstance(value, int) else None


# --- what may be granted ----------------------------------------------------------------------------------------------


def taken_by_region(leases: Iterable[Lease]) -> Counter[str]:
    """Return what each region was granted of the period, spent or not, in all of its epochs."""
    taken = Counter[str]()
    for lease in leases:
        taken[lease.region] += lease.granted + lease.overage - lease.returned
    return taken


def funded_for(limit: int, pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """Return what a limit funds in a pool. `leases` are all of the pool's, where regions have limits of their own.

    There it is the sum of these limits, plus what regions hold above theirs: a region that leaves, or that has more
    than a lowered limit, takes nothing from the others. Credits and carry-over pay for what is above first, for funded
    as well they would be granted twice.
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
    """Return what a debit may take: what could still be granted of the limit and of credits.

    The extension of a soft cap and the carry-over are left out. Where each region has a limit of its own, a credit that
    one of them was granted pays for what it holds above its limit. If the debit took it from the others instead, it
    would be funded again, and the next report of any region would undo the debit.
    """
    most = min(pool.grantable, pool.entitled)
    above = _above_own(leases, division) if division.is_regional else 0
    credited = max(0, pool.credited + pool.carried_over_in)
    return min(most, max(0, credited - above)) if above and credited else most


def _grantable_of_own(region: str, pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """Return what is left of a region's own limit, and of credits, which any region may be granted."""
    taken = taken_by_region(leases)
    left = {each: max(0, division.own_of(each) - taken[each]) for each in division.parts}
    credited = max(0, pool.grantable - sum(left.values())) if division.own_of(region) else 0
    return min(pool.unallocated, left.get(region, 0) + credited)


def grantable_to(region: str, pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """Return what may be granted to a region: neither kept for others nor above its ceiling. `leases` are all."""
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
    """Return whether the region can be granted nothing, whatever others return."""
    if division.is_regional:
        return not grantable_to(region, pool, leases, division)
    return not division.is_plain and not room_below_ceiling(region, taken_by_region(leases), division)


def spare_of(lease: Lease, pool: Pool, leases: Iterable[Lease], division: Division) -> int:
    """Return what a lease could give to others.

    What the region's floor keeps would only wait for the region. Of its own limit nothing is for others.
    """
    floor = 0 if division.is_plain else division.floors(pool.funded).get(lease.region, 0)
    if division.is_regional:
        floor = division.own_of(lease.region)
    if not floor:
        return lease.outstanding
    return max(0, min(lease.outstanding, taken_by_region(leases)[lease.region] - floor))


def kept_of_move(lease: Lease, units: int, now: datetime) -> int:
    """Return what a lease keeps of a recall of units: at least what it needs until a grant could arrive."""
    return min(lease.outstanding, max(lease.outstanding - units, units_in(demand_milli_of(lease, now), LAST_KEPT_MS)))


# --- progress of moves ------------------------------------------------------------------------------------------------


def note_returned(entry: Entry, key: Key, region: str, moves: Iterable[Move]) -> None:
    """Count what a region returned of a pool towards its moves."""
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


def note_regranted(units: int, region: str, moves: Iterable[Move]) -> None:
    """Count what a region was granted towards the moves that it is the target of."""
    for move in moves:
        if move.target == region:
            taken = min(units, move.travelling)
            move.regranted += taken
            units -= taken


def fetch_notice(move: Move) -> Notice | None:
    """Return a notice to the target that units are ready for it, if there are any."""
    return Notice(Signal(kind="fetch", quota=move.key.quota), move.target) if move.travelling else None


def recall_notice(move: Move, leases: Iterable[Lease], now: datetime) -> Notice | None:
    """Return a notice to the source to return idle units, if it has any. Notices may be lost, and are repeated."""
    for lease in leases:
        if lease.region == move.source and lease.state is LeaseState.ACTIVE:
            keep = kept_of_move(lease, move.missing, now)
            if keep < lease.outstanding:
                return Notice(Signal(kind="recall", quota=move.key.quota, keep=keep), move.source)
    return None
