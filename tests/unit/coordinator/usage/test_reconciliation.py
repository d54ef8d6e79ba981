"""Reconciliation balances for every ledger kept by the rules and for no other."""

from dataclasses import asdict
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from coordinator.exchange.rules.balances import Account, Cause, Key, Lease, Pool
from coordinator.exchange.rules.posting import Report, post
from coordinator.proof.rules import genesis_head
from coordinator.usage.rules.reconciliation import (
    LEASE,
    POOL,
    BalanceStatus,
    Books,
    LaneSummary,
    LeaseRow,
    Moved,
    PoolRow,
    Reconciliation,
    reconcile,
)
from protocol.lease import LeaseState

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
KEY = Key("exports:tenant=acme", "2026-11")
MOVES = (
    (Account.UNALLOCATED, Account.OUTSTANDING, Cause.GRANT),
    (Account.OVERAGE, Account.OUTSTANDING, Cause.OVERAGE),
    (Account.OUTSTANDING, Account.CONSUMED, Cause.USAGE),
    (Account.OUTSTANDING, Account.UNALLOCATED, Cause.RETURNED),
    (Account.OUTSTANDING, Account.SUSPENSE, Cause.QUARANTINED),
)


class Kept:
    """A pool and the leases of two epochs, posted through `books.post`."""

    def __init__(self) -> None:
        self.pool = Pool(KEY)
        self.leases = [Lease(KEY, epoch, f"region-{epoch}", NOW, NOW) for epoch in (1, 2)]
        self.reports = [Report(lease.region, lease.epoch, 0, 1) for lease in self.leases]
        post(self.reports[0], self.pool, None, Account.FUNDING, Account.UNALLOCATED, 1000, Cause.FUNDED)

    def move(self, which: int, move: int, units: int) -> None:
        src, dst, cause = MOVES[move]
        lease, report = self.leases[which], self.reports[which]
        there = {Account.UNALLOCATED: self.pool.unallocated, Account.OUTSTANDING: lease.outstanding}.get(src, units)
        post(report, self.pool, lease, src, dst, min(units, there), cause)
        lease.region_consumed, lease.region_returned = lease.consumed, lease.returned

    def books(self) -> Books:
        moved = [
            Moved(KEY.quota, report.epoch, each.charge_period, each.src, each.dst, each.cause, each.units)
            for report in self.reports
            for each in report.transfers
        ]
        pool = asdict(self.pool)
        return Books(
            pools=[PoolRow(KEY.quota, "exports", "acme", {account: pool[account] for account in POOL})],
            leases=[_row(lease) for lease in self.leases],
            moved=moved,
            lanes=[LaneSummary(epoch, 0, 0, genesis_head(epoch, 0), 0, None) for epoch in (1, 2)],
        )


def _row(lease: Lease) -> LeaseRow:
    columns = asdict(lease)
    return LeaseRow(
        quota=KEY.quota,
        epoch=lease.epoch,
        region=lease.region,
        state=LeaseState(lease.state),
        lanes=1,
        accounts={account: columns[account] for account in LEASE},
        region_consumed=lease.region_consumed,
        region_returned=lease.region_returned,
        reported_at=lease.reported_at,
    )


def judged(books: Books) -> Reconciliation:
    return reconcile("2026-11", books, NOW)


moves = st.lists(st.tuples(st.integers(0, 1), st.integers(0, len(MOVES) - 1), st.integers(1, 400)), max_size=12)


@st.composite
def kept(draw: st.DrawFn) -> Books:
    books = Kept()
    for which, move, units in draw(moves):
        books.move(which, move, units)
    return books.books()


@given(kept())
def test_books_that_were_kept_by_the_rules_are_balanced(books: Books) -> None:
    found = judged(books)
    assert (found.status, found.drift, found.findings) == (BalanceStatus.BALANCED, 0, [])


@given(kept(), st.sampled_from(POOL), st.sampled_from((-1, 1)))
def test_no_account_of_a_pool_can_be_changed_unseen(books: Books, account: str, change: int) -> None:
    (pool,) = books.pools
    changed = pool._replace(accounts={**pool.accounts, account: pool.accounts[account] + change})
    assert judged(books._replace(pools=[changed])).status is BalanceStatus.PROJECTION


@given(kept(), st.sampled_from(LEASE), st.integers(0, 1), st.sampled_from((-1, 1)))
def test_no_account_of_a_lease_can_be_changed_unseen(books: Books, account: str, which: int, change: int) -> None:
    leases = list(books.leases)
    accounts = leases[which].accounts
    leases[which] = leases[which]._replace(accounts={**accounts, account: accounts[account] + change})
    found = judged(books._replace(leases=leases))
    assert BalanceStatus.PROJECTION in {finding.kind for finding in found.findings}


@given(kept(), st.data())
def test_no_movement_can_be_left_out_or_changed_unseen(books: Books, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(books.moved) - 1))
    before, (moved, *after) = books.moved[:place], books.moved[place:]
    forged = data.draw(st.sampled_from(([], [moved._replace(units=moved.units + 1)])))
    assert judged(books._replace(moved=[*before, *forged, *after])).status is not BalanceStatus.BALANCED


@given(kept(), st.integers(0, 1), st.sampled_from((-1, 1)))
def test_a_region_that_reports_other_totals_drifts(books: Books, which: int, change: int) -> None:
    leases = list(books.leases)
    leases[which] = leases[which]._replace(region_consumed=leases[which].region_consumed + change)
    found = judged(books._replace(leases=leases))
    assert (found.status, found.drift) == (BalanceStatus.DRIFT, 1)
    assert found.findings[0].region == leases[which].region


def test_drifts_do_not_hide_each_other() -> None:
    books = Kept().books()
    one, two = books.leases
    drifting = [one._replace(region_consumed=5), two._replace(region_consumed=-5)]
    assert judged(books._replace(leases=drifting)).drift == 10
