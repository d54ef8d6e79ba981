"""A region is away for longer than its lease: its units go to suspense, and return when the region does."""

import asyncpg
import pytest

from tests.integration.regional_agent.world import World, another_coordinator, running
from tests.waiting import attempts

pytestmark = pytest.mark.anyio


async def quota_with(world: World, **expected: int) -> None:
    async for _ in attempts():
        quota = await world.quota()
        if expected.items() <= quota.items():
            return
    raise AssertionError(f"{quota} and not {expected}")


async def test_a_lost_regions_units_go_to_suspense_and_are_settled_when_it_is_back(world: World, database: str) -> None:
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


@pytest.mark.extended
async def test_leases_of_a_dead_agent_are_returned_without_requests(world: World, database: str) -> None:
    """Another agent of the region runs, and does not know the lease: it never reports what the dead one did."""
    async with another_coordinator(database, lease_ms=1_000) as url:
        await world.agent("us-east", coordinator_url=url, report_interval_ms=60_000)
        async with running(world.settings("us-east", coordinator_url=url)) as dies:
            await dies.ready()
            await ask_again(database, "1 hour")  # not by itself, in the moment in which the lease expires
            await dies.lease(50)
            assert (await dies.check(cost=11)).status_code == 200
        await quota_with(world, consumed=11, outstanding=0, suspense=39)
        await ask_again(database, "0")
        await quota_with(world, consumed=11, outstanding=0, suspense=0, unallocated=89)


async def ask_again(database: str, after: str) -> None:
    """Let coordinators ask regions for what is in suspense, as they do every half a minute."""
    connection = await asyncpg.connect(database)
    try:
        due = """INSERT INTO job VALUES ('recall_suspense', now() + $1::text::interval)
                 ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at"""
        await connection.execute(due, after)
    finally:
        await connection.close()
