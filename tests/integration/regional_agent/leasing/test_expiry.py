"""A region that was away for longer than its lease: what it held is set aside, and comes back when the region does."""

import asyncio

import asyncpg
import pytest

from tests.integration.regional_agent.world import World, another_coordinator, running

pytestmark = pytest.mark.anyio


async def quota_with(world: World, **expected: int) -> None:
    for _ in range(2_000):
        quota = await world.quota()
        if expected.items() <= quota.items():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{quota} and not {expected}")


async def test_what_a_lost_region_held_is_set_aside_and_settled_exactly_when_it_is_back(
    world: World, database: str
) -> None:
    async with (
        another_coordinator(database, lease_ms=1_000) as url,
        running(world.settings("us-east", coordinator_url=url)) as agent,
    ):
        await agent.ready()
        await agent.lease(50)
        assert (await agent.check(cost=11)).status_code == 200
    await quota_with(world, consumed=11, outstanding=0, suspense=39)

    back = await world.agent("us-east")
    assert (await back.check(cost=9)).status_code == 200
    await quota_with(world, consumed=20, suspense=0)
    assert (await back.check(cost=80)).status_code == 200
    await quota_with(world, consumed=100, outstanding=0, suspense=0, unallocated=0)


async def test_what_an_agent_that_died_had_leased_comes_back_though_nobody_asks_for_it(
    world: World, database: str
) -> None:
    """Another agent of the region lives on, and knows nothing of it: it never tells what the one that died did."""
    async with another_coordinator(database, lease_ms=1_000) as url:
        await world.agent("us-east", coordinator_url=url, report_interval_ms=60_000)
        async with running(world.settings("us-east", coordinator_url=url)) as dies:
            await dies.ready()
            await dies.lease(50)
            assert (await dies.check(cost=11)).status_code == 200
        await quota_with(world, consumed=11, outstanding=0, suspense=39)
        await ask_again(database)
        await quota_with(world, consumed=11, outstanding=0, suspense=0, unallocated=89)


async def ask_again(database: str) -> None:
    """As a coordinator does every half a minute."""
    connection = await asyncpg.connect(database)
    try:
        await connection.execute("UPDATE job SET due_at = now() WHERE name = 'recall_suspense'")
    finally:
        await connection.close()
