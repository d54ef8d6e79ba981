"""Ending a quarantine settles its lease."""

from uuid import uuid4

import pytest

from coordinator.exchange.rules.balances import Account, Cause, Lease, Pool
from coordinator.exchange.rules.posting import movement, post
from coordinator.exchange.rules.settlement import EpochState
from coordinator.suspense.rules import EpochEnd, ResolutionKind, ResolutionTerms, propose, resolve
from protocol.lease import LeaseState
from tests.unit.coordinator.exchange.test_balances import KEY, NOW, new_lease


def in_quarantine() -> tuple[Pool, Lease]:
    """Report four of ten units as used and three as returned."""
    pool, lease = Pool(KEY), new_lease("us-east", 1)
    entry = movement(lease, "a test")
    post(entry, pool, None, Account.FUNDING, Account.UNALLOCATED, 10, Cause.FUNDED)
    post(entry, pool, lease, Account.UNALLOCATED, Account.SUSPENSE, 10, Cause.QUARANTINED)
    lease.state, lease.region_consumed, lease.region_returned = LeaseState.QUARANTINED, 4, 3
    return pool, lease


@pytest.mark.parametrize(
    ("epoch", "state", "free"),
    [
        (EpochEnd(EpochState.CURRENT, False), LeaseState.EXPIRED, 3),
        (EpochEnd(EpochState.FENCED, False), LeaseState.FENCED, 3),
        (EpochEnd(EpochState.FENCED, True), LeaseState.LOST, 0),  # the returned units may have been spent as well
        (EpochEnd(EpochState.RETIRED, True), LeaseState.RETIRED, 0),
    ],
)
def test_a_quarantine_of_an_ended_epoch_ends_as_the_epoch_did(epoch: EpochEnd, state: LeaseState, free: int) -> None:
    """Otherwise the lease would become active again in a store that spends in another epoch by now."""
    pool, lease = in_quarantine()
    terms = propose(lease, ResolutionKind.UNATTRIBUTED, 0)
    assert isinstance(terms, ResolutionTerms)
    resolve(pool, lease, terms, epoch, uuid4(), NOW)
    assert (lease.state, lease.consumed, pool.unallocated) == (state, 4, free)
    assert lease.balances
    assert pool.balances
