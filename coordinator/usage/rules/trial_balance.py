"""The trial balance of a period: each account three ways, and one status.

    transfers       the sums of the movements
    pools, leases   what the coordinator decides by
    regions         the totals that regions report, where they can know them

The sums of a period can agree although two faults cancel each other out. So the status is not taken from the sums, but
from the reconciliation of every pool and lease. Gaps, chains and rollups are not part of it.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime

from msgspec import Struct

from coordinator.usage.rules.reconciliation import LEASE, POOL, BalanceStatus, Books, Sums, reconcile

SOURCES = (
    "funded",
    "soft_cap_extension",
    "carried_over_in",
    "overage",
    "suspense_carried_in",
    "correction",
    "adjustment",
)  # the sources of units; all other accounts are uses
_IN_A_TRIAL_BALANCE = (BalanceStatus.DRIFT, BalanceStatus.RETURNS, BalanceStatus.PROJECTION)


class AccountBalance(Struct, frozen=True):
    account: str
    transfers: int
    pools: int | None  # None: pools have no such account
    leases: int | None
    regions: int | None


class TrialBalance(Struct, frozen=True):
    period: str
    status: BalanceStatus
    sources: int  # by the transfers; equal to `uses` if the ledger balances
    uses: int
    accounts: list[AccountBalance]


def trial_balance(period: str, books: Books, now: datetime) -> TrialBalance:
    found = {finding.kind for finding in reconcile(period, books, now).findings}
    sums = Sums(period, books.moved)
    of_pools = _added_up(sums.of_pool.values(), POOL)
    of_leases = _added_up([*sums.of_lease.values(), *sums.of_correction.values()], LEASE)
    pools = _added_up((pool.accounts for pool in books.pools), POOL)
    given_up = [{"written_off": each.adjusted.written_off} for each in books.adjustments]
    parts = [*(lease.accounts for lease in books.leases), *(each.accounts for each in books.corrections), *given_up]
    leases = _added_up(parts, LEASE)
    corrected = sum(each.accounts["consumed"] + each.drift for each in books.corrections)
    regions = {
        "consumed": sum(lease.region_consumed for lease in books.leases) + corrected,
        "returned": sum(lease.region_returned for lease in books.leases),
    }
    transfers = of_leases | of_pools
    return TrialBalance(
        period,
        next((status for status in _IN_A_TRIAL_BALANCE if status in found), BalanceStatus.BALANCED),
        sources=sum(transfers[account] for account in SOURCES),
        uses=sum(transfers[account] for account in POOL if account not in SOURCES),
        accounts=[
            AccountBalance(account, transfers[account], pools.get(account), leases.get(account), regions.get(account))
            for account in dict.fromkeys((*POOL, *LEASE))
        ],
    )


def _added_up(books: Iterable[Mapping[str, int]], accounts: Iterable[str]) -> dict[str, int]:
    sums = dict.fromkeys(accounts, 0)
    for book in books:
        for account in sums:
            sums[account] += book.get(account, 0)
    return sums
