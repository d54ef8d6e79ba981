"""check.lua on a real store admits at most the lease, counts everything, and charges all policies or none."""

import asyncio
import struct

import pytest

from protocol.identifiers import lane_of, quota_key
from protocol.units import MAX_UNITS
from regional_agent.store import keys
from regional_agent.store.connection import StoreConnection
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import (
    AllowanceCharge,
    Charge,
    Fenced,
    Operation,
    OperationConflict,
    RateCharge,
    StoreIncarnation,
)
from tests.lua.script_helpers import DIMENSIONS, QUOTA, RATE, available, install, lease_reply, take, take_rate

pytestmark = pytest.mark.anyio

ONCE = Operation("digest-of-id", "digest-of-body", 60_000)


async def lines(connection: StoreConnection, incarnation: StoreIncarnation) -> dict[str, int]:
    pairs = await connection.call(
        "HGETALL", keys.usage_lines(lane_of(QUOTA, incarnation.lanes), incarnation.epoch, QUOTA)
    )
    return {pairs[i].decode(): int(pairs[i + 1]) for i in range(0, len(pairs), 2)}


async def test_without_a_lease_nothing_is_admitted(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    decision = await take(scripts, incarnation)
    assert not decision.allowed
    assert decision.policies[0].reason == "no_lease"


async def test_of_200_at_once_exactly_the_lease_is_admitted(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=120))
    decisions = await asyncio.gather(*(take(scripts, incarnation) for _ in range(200)))
    assert sum(decision.allowed for decision in decisions) == 120
    assert {decision.policies[0].reason for decision in decisions} == {"", "lease_spent"}
    assert await available(scripts, incarnation) == 0
    assert sum((await lines(connection, incarnation)).values()) == 120


async def test_a_cost_is_taken_whole_or_not_at_all(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    assert (await take(scripts, incarnation, 7)).allowed
    assert not (await take(scripts, incarnation, 4)).allowed
    assert (await take(scripts, incarnation, 3)).allowed


async def test_a_cost_above_the_limit_is_distinguished_from_a_spent_lease(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    assert (await take(scripts, incarnation, 1001)).policies[0].reason == "cost_above_limit"
    assert (await take(scripts, incarnation, 1000)).policies[0].reason == "lease_spent"


async def test_remaining_counts_what_no_region_holds_yet(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=10, unallocated=990))
    policy = (await take(scripts, incarnation, 4)).policies[0]
    assert (policy.limit, policy.remaining, policy.available) == (1000, 996, 6)
    assert 0 < policy.reset_ms <= 3_600_000


async def test_an_expired_lease_admits_nothing_and_keeps_its_totals(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10, expires_in_ms=0))
    decision = await take(scripts, incarnation)
    assert decision.policies[0].reason == "lease_expired"
    assert await available(scripts, incarnation) == 10


async def test_peek_consumes_nothing(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    assert (await take(scripts, incarnation, 10, mode="peek")).allowed
    assert (await take_rate(scripts, incarnation, 10, mode="peek")).allowed
    assert await available(scripts, incarnation) == 10
    assert await lines(connection, incarnation) == {}
    assert (await take_rate(scripts, incarnation, 10)).allowed


async def test_adjust_may_go_below_zero_and_is_counted(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    assert (await take(scripts, incarnation, 25, mode="adjust")).allowed
    assert await available(scripts, incarnation) == -15
    assert sum((await lines(connection, incarnation)).values()) == 25
    assert (await take_rate(scripts, incarnation, 25, mode="adjust")).allowed
    assert not (await take_rate(scripts, incarnation, 1)).allowed


async def test_no_total_ever_leaves_the_range_in_which_lua_counts_exactly(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    assert (await take(scripts, incarnation, MAX_UNITS - 1, mode="adjust")).allowed
    assert not (await take(scripts, incarnation, 2, mode="adjust")).allowed
    assert (await scripts.lease_fields(incarnation, QUOTA))["consumed"] == str(MAX_UNITS - 1)


async def test_of_several_policies_all_are_consumed_or_none(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    both: list[Charge] = [AllowanceCharge(QUOTA, 1, 1000, DIMENSIONS), RateCharge(RATE, 4, 1_000, 10)]
    allowed = [(await scripts.check(incarnation, "enforce", both)).allowed for _ in range(4)]
    assert allowed == [True, True, False, False]  # the bucket has room for two
    assert sum((await lines(connection, incarnation)).values()) == 2
    assert await available(scripts, incarnation) == 8


async def test_two_policies_on_one_quota_each_take_their_cost(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10))
    other = '{"policy":"other"}'
    twice = [AllowanceCharge(QUOTA, 3, 1000, DIMENSIONS), AllowanceCharge(QUOTA, 3, 1000, other)]
    assert (await scripts.check(incarnation, "enforce", twice)).allowed
    decision = await scripts.check(incarnation, "enforce", twice)
    assert not decision.allowed, "4 units are left, and the two together need 6"
    assert [policy.allowed for policy in decision.policies] == [True, False]
    assert await available(scripts, incarnation) == 4
    assert sorted((await lines(connection, incarnation)).values()) == [3, 3]


async def test_two_policies_on_one_bucket_each_take_their_cost(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    twice = [RateCharge(RATE, 3, 1_000, 10), RateCharge(RATE, 3, 1_000, 10)]
    assert (await scripts.check(incarnation, "enforce", twice)).allowed
    assert not (await scripts.check(incarnation, "enforce", twice)).allowed
    assert (await take_rate(scripts, incarnation, 4)).allowed


async def test_ten_at_once_with_one_operation_are_charged_once(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    decisions = await asyncio.gather(*(take(scripts, incarnation, 5, operation=ONCE) for _ in range(10)))
    assert [decision.replayed for decision in decisions] == [False] + [True] * 9
    assert {decision.policies[0].remaining for decision in decisions} == {995}
    assert await available(scripts, incarnation) == 95


async def test_an_operation_with_another_body_is_refused(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    await take(scripts, incarnation, 5, operation=ONCE)
    with pytest.raises(OperationConflict):
        await take(scripts, incarnation, 5, operation=ONCE._replace(body="another"))
    assert await available(scripts, incarnation) == 95


async def test_a_denied_operation_is_decided_afresh(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    assert not (await take(scripts, incarnation, 5, operation=ONCE)).allowed
    await install(scripts, incarnation, lease_reply(granted=100))
    assert (await take(scripts, incarnation, 5, operation=ONCE)).allowed


async def test_only_operations_and_buckets_are_ever_forgotten(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    await take(scripts, incarnation, 5, operation=ONCE)
    await take_rate(scripts, incarnation)
    forgotten = {name for name in await connection.call("KEYS", "*") if await connection.call("PTTL", name) >= 0}
    lane = lane_of(ONCE.digest, incarnation.lanes)
    assert forgotten == {keys.operation(lane, ONCE.digest), keys.rate(lane_of(RATE, incarnation.lanes), RATE)}


@pytest.mark.parametrize("change", [{"fingerprint": "another:life"}, {"epoch": 8}])
async def test_a_script_for_another_incarnation_or_epoch_changes_nothing(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation, change: dict[str, object]
) -> None:
    await install(scripts, incarnation, lease_reply(granted=100))
    before = await connection.call("DUMP", keys.FENCE)
    with pytest.raises(Fenced):
        await take(scripts, incarnation._replace(**change))  # type: ignore[arg-type]
    assert await connection.call("DUMP", keys.FENCE) == before
    assert await available(scripts, incarnation) == 100


async def test_a_bucket_gives_its_burst_and_no_more(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    decisions = await asyncio.gather(*(take_rate(scripts, incarnation, burst=200) for _ in range(300)))
    assert sum(decision.allowed for decision in decisions) == 200
    denied = decisions[-1].policies[0]
    # At a thousandth of a unit a second the next whole unit takes a thousand seconds.
    assert 990_000 < denied.retry_after_ms <= 1_000_000


async def test_a_bucket_refills_exactly_with_the_stores_clock(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await take_rate(scripts, incarnation, 10, rate_micro=1_000_000)
    key = keys.rate(lane_of(RATE, incarnation.lanes), RATE)
    parts, at = await packed(connection, key)
    assert parts == 0
    await connection.call("SET", key, struct.pack("<Bdd", 6, 0, at - 2_500_000))  # as if 2.5 s had passed
    decision = await take_rate(scripts, incarnation, 2, rate_micro=1_000_000)
    assert decision.allowed
    parts, since = await packed(connection, key)
    elapsed_us = since - (at - 2_500_000)
    assert elapsed_us % 1_000 == 0
    assert parts == elapsed_us * 1_000 - 2 * 10**9


async def packed(connection: StoreConnection, key: bytes) -> tuple[float, ...]:
    """Return a rate's state without a share, as its algorithm stores it."""
    layout, *numbers = struct.unpack("<Bdd", await connection.call("GET", key))
    assert layout == 6
    return tuple(numbers)


async def test_time_stands_still_while_a_clock_is_behind(
    connection: StoreConnection, scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await take_rate(scripts, incarnation, 10, rate_micro=1_000_000)
    await connection.call("HSET", keys.FENCE, "last", 2**52)  # the store's clock was far ahead and is corrected
    before = int(await connection.call("HGET", keys.FENCE, "mono"))
    decision = await take_rate(scripts, incarnation, 10, rate_micro=1_000_000)
    assert not decision.allowed
    assert int(await connection.call("HGET", keys.FENCE, "mono")) == before


async def test_a_region_without_a_share_is_denied_with_a_finite_answer(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    policy = (await take_rate(scripts, incarnation, rate_micro=0, burst=0)).policies[0]
    assert (policy.allowed, policy.limit, policy.reset_ms) == (False, 0, 1_000)


async def test_values_with_separators_stay_values(scripts: Scripts, incarnation: StoreIncarnation) -> None:
    odd = quota_key("exports", [("tenant", "a|b,c=d:e {1}\n\u00e4")])
    await install(scripts, incarnation, lease_reply(odd, granted=3))
    charge = AllowanceCharge(odd, 2, 1000, DIMENSIONS)
    assert (await scripts.check(incarnation, "enforce", [charge])).allowed
    assert await scripts.leased_quotas(incarnation) == [odd]
    assert await available(scripts, incarnation, odd) == 1


async def test_remaining_is_unchanged_where_nothing_is_consumed(
    scripts: Scripts, incarnation: StoreIncarnation
) -> None:
    await install(scripts, incarnation, lease_reply(granted=10, unallocated=0))
    assert (await take(scripts, incarnation, 4, mode="peek")).policies[0].remaining == 10
    both: list[Charge] = [AllowanceCharge(QUOTA, 4, 1000, DIMENSIONS), RateCharge(RATE, 11, 1_000, 10)]
    assert [policy.remaining for policy in (await scripts.check(incarnation, "enforce", both)).policies] == [10, 10]
