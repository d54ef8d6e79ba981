"""Check every committed transaction: what counts as within a limit, and what as beyond it.

The checks use what was booked in all regions together and the limits that were in force, not the product's own rules.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.exchange.rules.balances import Account, Cause, Key, Pool
from coordinator.exchange.rules.posting import COUNTED_AS
from coordinator.limits.rules.entitlement import Entitlement, entitlement
from protocol.identifiers import parse_quota_key
from protocol.limits.document import AllowanceQuota, LimitsDocument, Mode, extension_of
from tests.simulation.faults import REGIONS
from tests.simulation.simulated.ledger_model import LedgerModel, Name, Transaction
from tests.simulation.simulated.virtual_time import VirtualClock

_HELD = (
    "outstanding",
    "suspense",
    "consumed",
    "estimated",
    "written_off",
    "suspense_carried",
    "overage",
    "soft_cap_extension",
)


class Limits:
    """Violations that were found, and the largest limit of each quota so far."""

    def __init__(self, ledger: LedgerModel, clock: VirtualClock) -> None:
        self._clock = clock
        self.included: list[str] = []
        self.promised: list[str] = []
        self.debited: list[str] = []
        self.carried_over: list[str] = []
        self._limits, self._extensions = Counter[str](), Counter[str]()
        self._each: set[str] = set()  # quotas in regional mode
        self._ledger = ledger

    def look(self, transaction: Transaction, before: Mapping[Name, Any]) -> None:
        self.promised += self._not_in_force(transaction)
        self.carried_over += self._not_left(transaction, before)
        self.debited += self._not_free(transaction, before)
        for name, row in transaction.writes.items():
            if name.table == "limits":
                self._hear(row)
            elif name.table == "override":
                self._limits |= Counter({parse_quota_key(row.key)[0]: row.limit})
            elif name.table == "pool":
                self.promised += self._not_promised(row)
        booked = [each for entry in transaction.entries for each in entry.transfers if each.dst is Account.CONSUMED]
        told: dict[Key, Counter[bool]] = {}
        for each in booked:
            is_beyond = COUNTED_AS in (each.dimensions or {})
            told.setdefault(Key(each.key.quota, each.charge_period), Counter())[is_beyond] += each.units
        for key, units in told.items():
            pool = self._ledger.pools.get(key)
            was = before.get(Name("pool", key), pool)
            if (
                pool and was and (was.funded or was.credited or was.soft_cap_extension)
            ):  # before that the limit is unknown
                self.included += self._not_its_limit(was, pool, units)

    def _hear(self, document: LimitsDocument) -> None:
        for spec in document.quotas:
            if isinstance(spec, AllowanceQuota):
                limits = spec.limit.values() if isinstance(spec.limit, dict) else [spec.limit]
                self._limits |= Counter({spec.name: max(each for each in limits if isinstance(each, int))})
                self._extensions |= Counter({spec.name: extension_of(spec)})
                self._each |= {spec.name} if spec.mode == Mode.REGIONAL else set()

    def _not_promised(self, pool: Pool) -> Iterator[str]:
        """Find pools that are funded beyond every limit, except by a rebase of what a ledger had lost."""
        name = parse_quota_key(pool.key.quota)[0]
        promised = self._limits[name] * (len({*REGIONS, *self._ledger.rows["region"]}) if name in self._each else 1)
        if pool.funded > promised and pool.funded > promised + self._rebased(pool.key):
            yield f"{pool} is funded, and {promised} was promised"
        if pool.soft_cap_extension > self._extensions[name]:
            yield f"{pool} is extended, and {self._extensions[name]} was promised"

    def _not_in_force(self, transaction: Transaction) -> Iterator[str]:
        """Find what is funded by a limit that was replaced before the transaction committed."""
        transfers = (each for entry in transaction.entries for each in entry.transfers)
        for key in {each.key for each in transfers if each.cause is Cause.FUNDED}:
            catalogue = self._ledger.catalogue([key.quota], self._clock.now())
            found = entitlement(catalogue, key.quota)
            limit = found.limit if isinstance(found, Entitlement) else 0
            if catalogue.mode_of(key.quota) is not Mode.REGIONAL and self._ledger.pools[key].funded > limit:
                yield f"{self._ledger.pools[key]} is funded, and the limit in force is {limit}"

    def _rebased(self, key: Key) -> int:
        moved = self._ledger.rows["moved"].items()
        return sum(
            units
            for (about, *_, src, _, cause), units in moved
            if (about, src, cause) == (key, Account.FUNDING, Cause.REBASED)
        )

    def _not_free(self, transaction: Transaction, before: Mapping[Name, Any]) -> Iterator[str]:
        """Find debits of units that were leased, used, lent by a soft cap or owed for overage."""
        debits = (each for entry in transaction.entries for each in entry.transfers if each.cause is Cause.DEBITED)
        for each in debits:
            pool, was = self._ledger.pools[each.key], before.get(Name("pool", each.key)) or Pool(each.key)
            changed = [name for name in _HELD if getattr(pool, name) != getattr(was, name)]
            if changed or pool.unallocated < pool.overage or pool.funded + pool.credited < 0:
                yield f"{each.units} were debited of {was}, and it is {pool}"

    def _not_left(self, transaction: Transaction, before: Mapping[Name, Any]) -> Iterator[str]:
        """Find carry-over of more than was left of the period's limit and credits, as far as the document allows it."""
        specs = {spec.name: spec for spec in self._ledger.rows["limits"][0].quotas}
        for entry in transaction.entries:
            for each in entry.transfers:
                if each.dst is Account.CARRIED_OVER_OUT:
                    was = before.get(Name("pool", each.key)) or self._ledger.pools[each.key]
                    said = specs[parse_quota_key(each.key.quota)[0]].carry_over
                    most = {"all": each.units, "50%": was.funded // 2}.get(str(said), said)
                    left = min(was.unallocated - was.overage - was.soft_cap_extension, was.funded + was.credited)
                    if was.outstanding or not isinstance(most, int) or each.units > min(most, left):
                        yield f"{each.units} go over of {was}, and {said} may"

    def _not_its_limit(self, was: Pool, pool: Pool, told: Counter[bool]) -> Iterator[str]:
        """Find usage on the wrong side of the limit, in any order of reports; the limit may change in the same
        transaction.
        """
        limits = sorted(
            each.funded + each.credited + each.carried_over_in - each.carried_over_out for each in (was, pool)
        )
        included = self._of("used", pool.key) - self._of("overage", pool.key)
        if told[False] and included > limits[1]:
            yield f"of {pool.key} {included} are included, and its limit is {limits[1]}"
        if told[True] and included < limits[0]:
            yield f"of {pool.key} there is overage, and only {included} of {limits[0]} are used"

    def _of(self, table: str, key: Key) -> int:
        """Return the usage of a period, in whichever period it was booked."""
        rows: dict[tuple[Key, str], int] = self._ledger.rows[table]
        return sum(units for (at, period), units in rows.items() if (at.quota, period) == key)
