"""Refunds and resets on a real store: units come back, never more than the limit, and a reset is done once."""

from collections.abc import Sequence

import pytest

from protocol.identifiers import quota_key
from protocol.limits.rates import WINDOWS, RateAlgorithm
from protocol.messages import ResetKeys
from protocol.units import MAX_UNITS
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import Fenced, RateCharge, StoreIncarnation
from tests.lua.script_helpers import RATE, give_share, take_rate
from tests.lua.test_algorithms import Clocked, algorithm, clocked, limit_of

__all__ = ["algorithm", "clocked"]


def refund(clocked: Clocked, units: int) -> int:
    """Return what remains after a refund."""
    answer = clocked.take(-units, limit_of(clocked.algorithm), "refund")
    assert answer.allowed
    return answer.remaining


def takes(clocked: Clocked, cost: int) -> bool:
    return clocked.take(cost, limit_of(clocked.algorithm)).allowed


def test_a_refund_returns_units_and_never_more_than_the_limit(clocked: Clocked) -> None:
    assert refund(clocked, 5) == 10, "nothing was taken"
    assert takes(clocked, 4)
    assert takes(clocked, 6)
    assert not takes(clocked, 1)
    assert refund(clocked, 3) == 3
    assert takes(clocked, 2)
    assert refund(clocked, 4) == 5
    assert takes(clocked, 5)
    assert not takes(clocked, 1)
    assert refund(clocked, MAX_UNITS) == 10
    assert takes(clocked, 10)
    assert not takes(clocked, 1)


def test_a_refund_returns_units_of_the_window_before_as_well(clocked: Clocked) -> None:
    if clocked.algorithm not in WINDOWS:
        return
    assert takes(clocked, 10)
    clocked.advance(1_000_000)
    assert takes(clocked, 1) is (clocked.algorithm != RateAlgorithm.SLIDING_WINDOW)
    assert refund(clocked, 30) == 10
    assert takes(clocked, 10)
    assert not takes(clocked, 1)


def test_a_refund_begins_no_window(clocked: Clocked) -> None:
    refund(clocked, 5)
    clocked.advance(500_000)
    assert takes(clocked, 10)
    if clocked.algorithm == RateAlgorithm.FIXED_WINDOW:
        clocked.advance(999_000)
        assert not takes(clocked, 1), "the window began with the first unit"


def test_an_entry_of_a_log_keeps_its_moment_when_a_part_of_it_is_returned(clocked: Clocked) -> None:
    if clocked.algorithm != RateAlgorithm.SLIDING_LOG:
        return
    for cost in (1, 1, 8):
        assert takes(clocked, cost)
        clocked.advance(300_000)
    assert refund(clocked, 2) == 2
    clocked.advance(200_000)  # 1.1 s after the first
    assert refund(clocked, 1) == 4
    clocked.advance(499_000)  # 0.999 s after the third
    assert not takes(clocked, 6)
    clocked.advance(2_000)
    assert takes(clocked, 10)


# --- resets -----------------------------------------------------------------------------------------------------------

OTHER = quota_key("api", [("tenant", "other")])


def reset(number: int, *keys: str) -> ResetKeys:
    return ResetKeys(number=number, keys=list(keys or (RATE,)))


async def spend(scripts: Scripts, incarnation: StoreIncarnation, kinds: Sequence[str]) -> None:
    for kind in kinds:
        charge = RateCharge(f"{RATE}{kind}", 10, 1_000, 10, kind, 3_600_000)
        assert (await scripts.check(incarnation, "enforce", [charge])).allowed


@pytest.mark.anyio
async def test_a_reset_forgets_what_every_algorithm_has_counted(
    scripts: Scripts, incarnation: StoreIncarnation, connection: StoreConnection
) -> None:
    kinds = sorted(RateAlgorithm)
    await spend(scripts, incarnation, kinds)
    assert await scripts.reset_rates(incarnation, [reset(5, *(f"{RATE}{kind}" for kind in kinds))]) == len(kinds)
    await spend(scripts, incarnation, kinds)


@pytest.mark.anyio
async def test_a_reset_is_done_once_and_touches_no_other_key(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    assert (await scripts.check(incarnation, "enforce", [RateCharge(OTHER, 10, 1_000, 10)])).allowed
    assert (await take_rate(scripts, incarnation, 10)).allowed
    assert await scripts.reset_rates(incarnation, [reset(7), reset(8, RATE)]) == 2
    assert (await take_rate(scripts, incarnation, 10)).allowed
    for again in ([reset(7)], [reset(8)], [reset(3), reset(8)]):
        assert await scripts.reset_rates(incarnation, again) == 0
    assert not (await take_rate(scripts, incarnation, 1)).allowed
    assert not (await scripts.check(incarnation, "enforce", [RateCharge(OTHER, 1, 1_000, 10)])).allowed
    assert await scripts.reset_rates(incarnation, [reset(8), reset(9)]) == 1
    assert (await take_rate(scripts, incarnation, 10)).allowed
    with pytest.raises(Fenced):
        await scripts.reset_rates(incarnation._replace(fingerprint="another"), [reset(10)])


@pytest.mark.anyio
async def test_a_reset_keeps_the_share_that_the_coordinator_gave(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    assert (await take_rate(scripts, incarnation, 10)).allowed
    await give_share(scripts, incarnation, 1, 2_000_000)
    await scripts.reset_rates(incarnation, [reset(5)])
    decision = await take_rate(scripts, incarnation, 10)
    assert (decision.allowed, decision.policies[0].last_grant) == (True, 2_000_000)
