"""A trial balance and a pool are computed from the same transfers by separate code, and must agree."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.exchange.rules.balances import Account, Cause, Key, Pool
from coordinator.exchange.rules.posting import Overdrawn, Report, post
from coordinator.proof.rules import SealedBalance, without_zeros

ACCOUNTS = sorted({*Account} - {Account.ADJUSTMENT})
MOVES = st.lists(st.tuples(st.sampled_from(ACCOUNTS), st.sampled_from(ACCOUNTS), st.integers(1, 50)), max_size=30)


@given(MOVES)
def test_a_pool_equals_the_sum_of_its_transfers(moves: list[tuple[Account, Account, int]]) -> None:
    pool, balance = Pool(Key("exports", "2026-11")), SealedBalance()
    report = Report("us-east", 1, 0, 1)
    post(report, pool, None, Account.FUNDING, Account.UNALLOCATED, 100, Cause.FUNDED)
    for src, dst, units in moves:
        if src is not dst:
            try:
                post(report, pool, None, src, dst, units, Cause.GRANT)
            except Overdrawn:
                continue
    for transfer in report.transfers:
        balance.move(transfer.key.period, transfer.src, transfer.dst, transfer.units)
    kept = {name: getattr(pool, name) for name in Pool.__dataclass_fields__ if name != "key"}
    assert balance.of(["2026-11"]) == {"2026-11": without_zeros(kept)}
