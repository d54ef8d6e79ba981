"""Check every committed transaction: what people set for regions (floors, ceilings, moves, modes).

The checks compare rows before and after a transaction, not the product's own rules. A transaction that also books usage
beyond its grants, or a lower limit, proves nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from coordinator.adjustments.rules import AdjustmentKind
from coordinator.exchange.rules.balances import Account, Cause, Key
from coordinator.exchange.rules.posting import Movement, Transfer
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, entitlement
from coordinator.rebalancing.rules.division import Move
from coordinator.rebalancing.rules.region_settings import NOTHING_SET
from protocol.clock import Clock
from protocol.limits.document import LimitValue, Mode
from tests.simulation.simulated.ledger_model import LedgerModel, Name, Transaction

HARMLESS = {Cause.GRANT, Cause.RETURNED, Cause.USAGE, Cause.FUNDED}
ToRegion = Counter[tuple[Key, str]]


class Before(NamedTuple):
    move: Move
    returned: int
    regranted: int


class Divided:
    """Violations that were found, by the name of the invariant."""

    def __init__(self, ledger: LedgerModel, clock: Clock) -> None:
        self.broken: defaultdict[str, list[str]] = defaultdict(list)
        self._ledger, self._clock = ledger, clock

    def look(self, transaction: Transaction, before: Mapping[Name, Any]) -> None:
        booked = [(entry.region, each) for entry in transaction.entries for each in entry.transfers]
        granted = _units(booked, Cause.GRANT, Account.OUTSTANDING)
        returned = _units(booked, Cause.RETURNED, Account.UNALLOCATED)
        moves = self._moves(transaction, before)
        self._look_at_modes(transaction, granted, booked)
        self.broken["a_move_is_of_units_that_came_back"] += _not_of_units(moves, granted, returned)
        if self._ledger.rows["setting"] or any(self._ledger.rows["move"].values()):
            for key, region in _only_harmless(granted, booked):
                self.broken["a_ceiling_is_kept"] += self._above_its_ceiling(key, region)
                self.broken["a_floor_is_kept"] += self._not_kept_from(key, region)

    def _moves(self, transaction: Transaction, before: Mapping[Name, Any]) -> list[Before]:
        """Return the open moves with their progress."""
        found = []
        for name, move in self._ledger.rows["move"].items():
            row = Name("move", name)
            was = before.get(row) if row in transaction.writes else move
            if move is not None:
                found.append(Before(move, was.returned if was else 0, was.regranted if was else 0))
        return found

    def _look_at_modes(
        self, transaction: Transaction, granted: ToRegion, booked: list[tuple[str | None, Transfer]]
    ) -> None:
        """Check every grant against the mode of its quota, by the document and overrides in force."""
        harmless = _only_harmless(granted, booked)
        reported = [entry for entry in transaction.entries if not isinstance(entry, Movement)]
        by_report = _units(
            [(entry.region, each) for entry in reported for each in entry.transfers], Cause.GRANT, Account.OUTSTANDING
        )
        for key, region in granted:
            catalogue = self._ledger.catalogue([key.quota], self._clock.now())
            mode = catalogue.mode_of(key.quota)
            found = entitlement(catalogue, key.quota)
            if mode is Mode.REGIONAL and (key, region) in harmless and isinstance(found, Entitlement):
                self.broken["each_region_has_its_own_limit"] += self._not_its_own(catalogue, key, region, found.limit)
            if mode is Mode.CENTRAL and by_report[key, region] > transaction.asked[key, region] + self._came(
                key, region
            ):
                self.broken["nothing_is_granted_ahead_of_a_request"].append(
                    f"{region} was granted {by_report[key, region]} of {key}, and asked for "
                    f"{transaction.asked[key, region]}"
                )

    def _came(self, key: Key, region: str) -> int:
        """Return the units that are on their way to a region by a move, if the quota was leased then."""
        moves = (move for move in self._ledger.rows["move"].values() if move is not None and move.key == key)
        return sum(move.regranted for move in moves if move.target == region)

    def _not_its_own(self, catalogue: Catalogue, key: Key, region: str, limit: int) -> Iterator[str]:
        """Find grants of more than the region's own limit, or of units that other regions may still need. Credits and
        carry-over are for every region, and a debit may have taken from any.
        """
        settings, weights = catalogue.settings_of(key.quota), catalogue.weights_of(key.quota)
        own = {
            name: _lower(limit, settings.get(name, NOTHING_SET).ceiling) for name, weight in weights.items() if weight
        }
        credited, debited = self._adjusted(key)
        if self._taken(key, region) > own.get(region, 0) + credited:
            yield f"{region} was granted of {key} up to {self._taken(key, region)}, of {own}"
        lacks = {name: max(0, units - self._taken(key, name)) for name, units in own.items() if name != region}
        if self._ledger.pools[key].unallocated < sum(lacks.values()) - debited:
            yield f"{region} was granted of {key}: {self._ledger.pools[key].unallocated} are left, others lack {lacks}"

    def _adjusted(self, key: Key) -> tuple[int, int]:
        """Return what was credited or carried over into the pool, and what was debited."""
        units = Counter[AdjustmentKind]()
        for each in self._ledger.adjustments.values():
            if (each.terms.key.quota, each.booked_in) == key:
                units[each.terms.kind] += each.terms.units
        return units[AdjustmentKind.CREDIT] + self._ledger.pools[key].carried_over_in, units[AdjustmentKind.DEBIT]

    def _above_its_ceiling(self, key: Key, region: str) -> Iterator[str]:
        catalogue = self._ledger.catalogue([key.quota], self._clock.now())
        ceiling = catalogue.settings_of(key.quota).get(region, NOTHING_SET).ceiling
        if not catalogue.weights_of(key.quota).get(region, 0):
            yield f"{region} was granted of {key}, and has no weight"
        if isinstance(ceiling, int) and self._taken(key, region) > ceiling:
            yield f"{region} was granted of {key} up to {self._taken(key, region)}, above {ceiling}"

    def _not_kept_from(self, key: Key, region: str) -> Iterator[str]:
        """Find grants after which other regions' floors, or moves to them, are no longer covered."""
        catalogue, pool = self._ledger.catalogue([key.quota], self._clock.now()), self._ledger.pools[key]
        settings = {} if catalogue.mode_of(key.quota) is Mode.REGIONAL else catalogue.settings_of(key.quota)
        floors = {name: settings.get(name, NOTHING_SET).floor for name in catalogue.weights_of(key.quota)}
        whole = {name: floor for name, floor in floors.items() if isinstance(floor, int)}
        if sum(whole.values()) > pool.funded:
            whole = {}  # reduced in proportion
        travelling = self._travelling(key)
        others = (whole.keys() | travelling.keys()) - {region}
        lacks = {name: max(0, whole.get(name, 0) - self._taken(key, name), travelling[name]) for name in others}
        if pool.grantable < sum(lacks.values()):
            yield f"{region} was granted of {key}: {pool.grantable} are left, and kept were {lacks}"

    def _taken(self, key: Key, region: str) -> int:
        leases = (lease for (_, about), lease in self._ledger.leases.items() if about == key and lease.region == region)
        return sum(lease.granted + lease.overage - lease.returned for lease in leases)

    def _travelling(self, key: Key) -> Counter[str]:
        travelling = Counter[str]()
        for move in self._ledger.rows["move"].values():
            if move is not None and move.target and move.key == key:
                travelling[move.target] += move.returned - move.regranted
        return travelling


def _lower(limit: int, ceiling: LimitValue | None) -> int:
    return min(limit, ceiling) if isinstance(ceiling, int) else limit


def _units(booked: list[tuple[str | None, Transfer]], cause: Cause, into: Account) -> ToRegion:
    units: ToRegion = Counter()
    for region, each in booked:
        if each.cause is cause and each.dst is into and region is not None:
            units[each.key, region] += each.units
    return units


def _only_harmless(granted: ToRegion, booked: list[tuple[str | None, Transfer]]) -> list[tuple[Key, str]]:
    others = {each.key for _, each in booked if each.cause not in HARMLESS}
    return [name for name in granted if name[0] not in others]


def _not_of_units(moves: list[Before], granted: ToRegion, returned: ToRegion) -> Iterator[str]:
    """Find moves whose progress is no return of the source or no grant to the target."""
    back, note_regranted, travelled = ToRegion(), ToRegion(), ToRegion()
    for move, was_returned, was_regranted in moves:
        if not 0 <= move.regranted <= move.returned <= move.units and move.target:
            yield f"{move}"
        back[move.key, move.source] += move.returned - was_returned
        if move.target:
            note_regranted[move.key, move.target] += move.regranted - was_regranted
            travelled[move.key, move.target] += was_returned - was_regranted
    for name, units in back.items():
        if units > returned[name]:
            yield f"{name}: {units} back, {returned[name]} returned"
    for name, units in note_regranted.items():
        if not min(granted[name], travelled[name]) <= units <= granted[name]:
            yield f"{name}: {units} note_regranted, {granted[name]} granted, {travelled[name]} were on their way"
