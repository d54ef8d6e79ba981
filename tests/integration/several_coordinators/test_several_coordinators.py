"""Several coordinators on one Postgres, none of them special: what one does, all regions hear of and obey."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.integration.regional_agent.world import (
    DOCUMENT,
    EXPORT,
    Agent,
    World,
    another_coordinator,
    running,
    until,
)

pytestmark = pytest.mark.anyio


async def booked(world: World, units: int) -> None:
    for _ in range(1_000):
        if await world.usage() == units:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{await world.usage()} and not {units}")


@pytest.fixture
async def apart(world: World) -> AsyncIterator[tuple[Agent, Agent]]:
    """Two regions, each with a coordinator of its own."""
    async with another_coordinator(world.database) as url:
        settings = world.settings("eu-west", coordinator_url=url)
        async with running(world.settings("us-east")) as one, running(settings) as other:
            await one.ready()
            await other.ready()
            yield one, other


async def test_the_last_units_cross_from_one_to_the_other(world: World, apart: tuple[Agent, Agent]) -> None:
    """The recall and the news that units came free travel from coordinator to coordinator."""
    holder, asker = apart
    await holder.lease(90)
    assert (await holder.check(cost=20)).status_code == 200
    assert (await asker.check(cost=80)).status_code == 200
    assert (await holder.check()).status_code == 429
    await booked(world, 100)


async def test_both_at_once_never_sell_a_unit_twice(world: World, apart: tuple[Agent, Agent]) -> None:
    answers = await asyncio.gather(*(agent.check() for agent in apart for _ in range(80)))
    assert [answer.status_code for answer in answers].count(200) == 100
    await booked(world, 100)
    quota = await world.quota()
    assert (quota["consumed"], quota["outstanding"], quota["overage"]) == (100, 0, 0)


async def test_limits_that_one_was_given_are_in_force_at_the_other(world: World, apart: tuple[Agent, Agent]) -> None:
    _, other = apart
    before = other.region.admission.policies
    assert before is not None
    raised = DOCUMENT | {"quotas": [DOCUMENT["quotas"][0] | {"limit": 150}, *DOCUMENT["quotas"][1:]]}
    assert (await world.admin.put("/v1/limits", json=raised)).is_success
    await until(lambda: other.region.admission.policies is not before)
    assert (await other.check(EXPORT, cost=150)).status_code == 200


async def test_when_one_is_gone_its_region_goes_on_with_the_other(world: World) -> None:
    """Behind one address, as a load balancer has it: the batch that one had booked is a replay for the other."""
    async with another_coordinator(world.database) as url:
        async with running(world.settings("us-east", coordinator_url=url)) as agent:
            await agent.ready()
            await agent.lease(50)
            assert (await agent.check(cost=11)).status_code == 200
            await booked(world, 11)
            incarnation = agent.region.epochs.current
        async with running(world.settings("us-east")) as agent:
            await agent.ready()
            assert agent.region.epochs.current == incarnation
            assert (await agent.check(cost=39)).status_code == 200
    await booked(world, 50)
