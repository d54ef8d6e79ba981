"""Three regions share slots by demand, with a real coordinator, three stores and the network between."""

import asyncio
import itertools
from typing import Any

import httpx
import pytest

from tests.integration.regional_agent.world import REGIONS, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

KEY = "renders:tenant=acme"
ASK = {"tenant": "acme", "route": "/v1/renders"}
LIMIT, SAFE = 6, 2


async def limit(world: World, agents: list[Agent], **slots: Any) -> None:
    quota = {"name": "renders", "kind": "concurrency", "limit": LIMIT, "slot_ttl": "5m", "sharing": "strict"} | slots
    more: dict[str, list[dict[str, Any]]] = {
        "quotas": [quota],
        "policies": [{"name": "renders", "match": {"route": "/v1/renders"}, "by": ["tenant"], "quota": "renders"}],
    }
    await world.try_out(more)
    await until(lambda: all(each.region.share_loop.policies.shared(KEY) is not None for each in agents))  # type: ignore[union-attr]


_operation = itertools.count()


async def hold(agent: Agent) -> httpx.Response:
    body = {"subject": ASK, "units": 1, "ttl_ms": 300_000, "operation_id": f"render-{next(_operation)}"}
    return await agent.http.post("/v1/holds", json=body)


async def taken(agent: Agent) -> list[str]:
    """Take all slots that are free at once."""
    holds = []
    while (answer := await hold(agent)).status_code == 201:
        holds.append(answer.json()["hold_id"])
    assert answer.status_code == 429, answer.text
    return holds


async def until_taken(agent: Agent) -> str:
    """Retry as a denied service does."""
    for _ in range(900):
        answer = await hold(agent)
        if answer.status_code == 201:
            return str(answer.json()["hold_id"])
        assert answer.status_code == 429, answer.text
        await asyncio.sleep(0.1)
    raise AssertionError(f"none came: {(await agent.http.get('/v1/status')).json()['slot_shares']}")


async def release(agent: Agent, hold_id: str) -> None:
    assert (await agent.http.post(f"/v1/holds/{hold_id}:release")).status_code == 200


@pytest.fixture
async def agents(world: World) -> list[Agent]:
    return [await world.agent(region) for region in REGIONS]


async def test_one_region_gets_all_slots_that_no_other_uses(world: World, agents: list[Agent]) -> None:
    await limit(world, agents)
    one, other, _ = agents
    held = await taken(one)
    assert len(held) == SAFE, "until it is told more, its part by weight"
    held += [await until_taken(one) for _ in range(LIMIT - SAFE)]
    assert len(await taken(one)) == 0
    assert len(await taken(other)) == 0
    await release(one, held.pop())
    await until_taken(other)
    in_use = [(await each.http.get("/v1/status")).json()["slots"] for each in agents]
    assert sum(slots["in_use"] for found in in_use for slots in found) == LIMIT


@pytest.mark.extended
async def test_a_partitioned_region_has_its_base_share(world: World, agents: list[Agent]) -> None:
    await limit(world, agents)
    world.weather.swallows_requests = True
    assert [len(await taken(each)) for each in agents] == [SAFE] * len(agents)
    world.weather.swallows_requests = False


@pytest.mark.extended
async def test_status_shows_how_slots_are_shared(world: World, agents: list[Agent]) -> None:
    await limit(world, agents)
    held = await taken(agents[0])
    held.append(await until_taken(agents[0]))
    [shown] = (await agents[0].http.get("/v1/status")).json()["slot_shares"]
    assert (shown["quota"], shown["base_share"], shown["contended"]) == (KEY, SAFE, True)
    assert shown["share"] > SAFE


@pytest.mark.extended
async def test_quiet_slots_cost_no_message(world: World, agents: list[Agent]) -> None:
    await limit(world, agents, limit=30)
    for _ in range(5):
        assert (await hold(agents[0])).status_code == 201
    assert await world._rows("SELECT quota FROM shared_limit") == []


async def test_the_limit_holds_while_all_regions_take_and_give_back(world: World, agents: list[Agent]) -> None:
    """Each worker knows that it works; together they count how many do."""
    await limit(world, agents)
    working = most = worked = 0

    async def work(agent: Agent) -> None:
        nonlocal working, most, worked
        for _ in range(12):
            hold_id = await until_taken(agent)
            working += 1
            most = max(most, working)
            await asyncio.sleep(0)
            working -= 1
            worked += 1
            await release(agent, hold_id)

    await asyncio.gather(*(work(agent) for agent in agents for _ in range(4)))
    assert worked == 12 * 4 * len(agents)
    assert most <= LIMIT
