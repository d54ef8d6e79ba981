"""Find anomalies: usage that balances, or waits in quarantine, but that people should look at.

Anomalies do not change a period's status. Usage that agents admitted during a store outage has no grant either, and is
billed. But a region that invents usage is visible only here.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from coordinator.exchange.rules.balances import Cause
from coordinator.exchange.rules.settlement import QuarantineReason
from coordinator.usage.rules.reconciliation import Anomaly, AnomalyKind, Books, PoolRow
from protocol.counting import counted

TIMES_THE_LIMIT = 2
MOST_ANOMALIES = 1000


class Quarantinings(NamedTuple):
    """Open rows of the quarantine table, of one quota, region and reason."""

    quota: str
    region: str
    reason: str
    rows: int
    units: int  # the largest total of any epoch that the region reported


def find_anomalies(books: Books, known_quotas: Collection[str], quarantined: Iterable[Quarantinings]) -> list[Anomaly]:
    """List the largest of each kind, `MOST_ANOMALIES` in all."""
    found = [
        *map(_in_quarantine, quarantined),
        *_of_unknown_quotas(books.pools, known_quotas),
        *_above_limits(books.pools),
        *_without_grant(books),
    ]
    kinds = list(AnomalyKind)
    found.sort(key=lambda each: (kinds.index(each.kind), -each.units, each.quota_key, each.region or ""))
    return found[:MOST_ANOMALIES]


def _in_quarantine(each: Quarantinings) -> Anomaly:
    what_to_do = "propose `unattributed` to bill it, `write_off` to dismiss it"
    reason = f"{counted(each.rows, 'report')} in quarantine: {what_to_do}"
    return Anomaly(AnomalyKind(each.reason), each.quota, each.region, each.units, reason)


QUARANTINED_AS = (
    QuarantineReason.IMPLAUSIBLE,
    QuarantineReason.IMPLAUSIBLE_PERIOD,
    QuarantineReason.UNKNOWN_QUOTA,
    QuarantineReason.OVER_BUDGET,
)


def _of_unknown_quotas(pools: Sequence[PoolRow], known_quotas: Collection[str]) -> Iterator[Anomaly]:
    for pool in pools:
        if pool.name not in known_quotas and pool.accounts["consumed"]:
            reason = "the limits document in force has no such quota"
            yield Anomaly(AnomalyKind.UNKNOWN_QUOTA, pool.quota, None, pool.accounts["consumed"], reason)


def _above_limits(pools: Sequence[PoolRow]) -> Iterator[Anomaly]:
    for pool in pools:
        accounts = pool.accounts
        spendable = accounts["funded"] + accounts["soft_cap_extension"] + accounts["carried_over_in"] + pool.credited
        if spendable and accounts["consumed"] > TIMES_THE_LIMIT * spendable:
            reason = f"more than {TIMES_THE_LIMIT} times the {spendable} that could be spent"
            yield Anomaly(AnomalyKind.ABOVE_LIMIT, pool.quota, None, accounts["consumed"], reason)


def _without_grant(books: Books) -> Iterator[Anomaly]:
    granted = {(each.quota, each.epoch) for each in books.moved if each.cause == Cause.GRANT}
    units, epochs = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], int](int)
    for lease in books.leases:
        if lease.accounts["consumed"] and (lease.quota, lease.epoch) not in granted:
            units[lease.quota, lease.region] += lease.accounts["consumed"]
            epochs[lease.quota, lease.region] += 1
    for (quota, region), used in units.items():
        reason = f"nothing was granted to {counted(epochs[quota, region], 'epoch')} that reported it"
        yield Anomaly(AnomalyKind.WITHOUT_GRANT, quota, region, used, reason)
