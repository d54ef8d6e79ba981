"""Several equal coordinators run on one Postgres, and the effect of each reaches all regions."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, World, another_coordinator, running
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio


async def booked(world: World, units: int) -> None:
    async for _ in attempts():
        if await world.usage() == units:
            return
    raise AssertionError(f"{await world.usage()} and not {units}")


@pytest.fixture
async def apart(world: World) -> AsyncIterator[tuple[Agent, Agent]]:
    """Yield two regions, each with a coordinator of its own."""
    async with another_coordinator(world.database) as url:
        settings = world.settings("eu-west", coordinator_url=url)
        async with running(world.settings("us-east")) as one, running(settings) as other:
            await one.ready()
            await other.ready()
            yield one, other


async def test_the_last_units_move_between_regions_of_two_coordinators(
    world: World, apart: tuple[Agent, Agent]
) -> None:
    """The signals of recall and grant travel from coordinator to coordinator."""
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


async def test_limits_applied_at_one_coordinator_are_in_force_at_the_other(
    world: World, apart: tuple[Agent, Agent]
) -> None:
    _, other = apart
    before = other.region.admission.policies
    assert before is not None
    raised = DOCUMENT | {"quotas": [DOCUMENT["quotas"][0] | {"limit": 150}, *DOCUMENT["quotas"][1:]]}
    assert (await world.admin.put("/v1/limits", json=raised)).is_success
    await until(lambda: other.region.admission.policies is not before)
    assert (await other.check(EXPORT, cost=150)).status_code == 200


async def test_a_region_continues_with_the_other_coordinator(world: World) -> None:
    """Both have one address, as behind a load balancer: a batch that one had booked is a replay for the other."""
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
