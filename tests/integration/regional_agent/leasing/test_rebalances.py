"""People move units from region to region, with real agents and stores: under load, partitioned, and drained."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.integration.regional_agent.world import DOCUMENT, Agent, World, another_coordinator, running
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

EXPORTS = "exports:tenant=acme"
EAST_TO_SOUTH = {"mode": "move", "quota": EXPORTS, "from": "us-east", "to": "ap-south", "units": 300}


@pytest.fixture
async def wide(world: World) -> World:
    """Apply a limit that is worth moving."""
    quotas = [DOCUMENT["quotas"][0] | {"limit": 1000}, *DOCUMENT["quotas"][1:]]
    assert (await world.admin.put("/v1/limits", json=DOCUMENT | {"quotas": quotas})).is_success
    return world


async def begun(world: World, wish: dict[str, Any]) -> dict[str, Any]:
    answer = await world.admin.post("/v1/rebalances", json=wish)
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(world: World, id_: str) -> dict[str, Any]:
    async for _ in attempts():
        found: dict[str, Any] = (await world.admin.get(f"/v1/rebalances/{id_}")).json()
        if found["state"] != "running":
            return found
    raise AssertionError(found)


async def outstanding(world: World) -> dict[str, int]:
    [found] = (await world.admin.get("/v1/allocations", params={"quota": EXPORTS})).json()["data"]
    return {each["region"]: each["outstanding"] for each in found["regions"]}


async def load(agent: Agent, stop: asyncio.Event) -> Counter[int]:
    """A service that sends checks without pause, eight at a time."""
    answers = Counter[int]()

    async def ask() -> None:
        while not stop.is_set():
            answers[(await agent.check()).status_code] += 1
            await asyncio.sleep(0.02)

    await asyncio.gather(*(ask() for _ in range(8)))
    return answers


async def test_units_are_moved_under_load_without_denials(wide: World) -> None:
    """The source continues to serve, and the target has never had a request before."""
    east, south = await wide.agent("us-east"), await wide.agent("ap-south")
    await east.lease(600)
    stop = asyncio.Event()
    asking = asyncio.create_task(load(east, stop))
    try:
        planned = await begun(wide, EAST_TO_SOUTH | {"dry_run": True})
        found = await ended(wide, (await begun(wide, EAST_TO_SOUTH))["id"])
    finally:
        stop.set()
        answers = await asking
    assert (found["state"], found["reason"]) == ("done", None), found
    assert found["progress"] == {"recalled": 300, "returned": 300, "regranted": 300}
    assert found["plan"]["moves"] == planned["plan"]["moves"]
    assert set(answers) == {200}
    await until(lambda: not south.region.quotas.due())
    assert (await south.check(cost=300)).status_code == 200
    quota = await wide.quota()
    assert quota["overage"] == 0


@pytest.mark.extended
async def test_a_partitioned_source_returns_units_when_it_is_back(wide: World) -> None:
    east, south = await wide.agent("us-east"), await wide.agent("ap-south")
    await east.lease(600)
    await south.lease(10)
    wide.weather.swallows_requests = True
    async with another_coordinator(wide.database) as url:
        headers = {"Authorization": f"Bearer {wide.tokens['admin']}"}
        wish = await _ask_at(url, "POST", "/v1/rebalances", headers, EAST_TO_SOUTH)
        waits = (await _ask_at(url, "GET", f"/v1/rebalances/{wish['id']}", headers))["waits_for"]
    assert [(each["region"], each["what"]) for each in waits] == [("us-east", "return")]
    wide.weather.swallows_requests = False
    assert (await ended(wide, wish["id"]))["state"] == "done"
    assert (await outstanding(wide))["ap-south"] >= 310


async def _ask_at(url: str, method: str, path: str, headers: dict[str, str], body: Any = None) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        found: dict[str, Any] = (await http.request(method, path, json=body)).json()
        return found


@pytest.mark.extended
async def test_a_region_is_drained_under_load_and_others_serve(wide: World) -> None:
    east, south = await wide.agent("us-east"), await wide.agent("ap-south")
    await east.lease(600)
    stop = asyncio.Event()
    asking = asyncio.create_task(load(east, stop))
    try:
        found = await ended(wide, (await begun(wide, {"mode": "drain", "region": "us-east"}))["id"])
    finally:
        stop.set()
        answers = await asking
    assert (found["state"], found["reason"]) == ("done", None), found
    assert (await outstanding(wide))["us-east"] == 0
    assert (await east.check()).status_code == 429
    used = answers[200]
    assert (await south.check(cost=1000 - used)).status_code == 200
    assert (await begun(wide, {"mode": "restore", "region": "us-east"}))["state"] == "done"
    await until(lambda: east.region.quotas.may_wait(EXPORTS))
    assert (await south.check()).status_code == 429


@pytest.mark.extended
async def test_a_coordinator_dies_in_the_middle_and_another_goes_on(wide: World, database: str) -> None:
    """A running rebalance is stored in the ledger only."""
    async with another_coordinator(database) as url, running(wide.settings("us-east", coordinator_url=url)) as east:
        await east.ready()
        await east.lease(600)
        wide.weather.swallows_requests = True  # regions cannot reach the coordinator that began it
        async with running(wide.settings("ap-south", coordinator_url=url)) as south:
            await south.ready()
            headers = {"Authorization": f"Bearer {wide.tokens['admin']}"}
            wish = await _ask_at(url, "POST", "/v1/rebalances", headers, EAST_TO_SOUTH)
            async for _ in attempts():
                found = await _ask_at(url, "GET", f"/v1/rebalances/{wish['id']}", headers)
                if found["state"] != "running":
                    break
    assert (found["state"], found["progress"]["regranted"]) == ("done", 300)
