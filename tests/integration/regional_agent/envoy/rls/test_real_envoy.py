"""A real Envoy asks agents: limits are held, and agents that are rolled or killed cost what the documentation says."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
import yaml

from tests.integration.regional_agent.envoy.real_envoy import LIMITS, Envoy, agent_process, answered, upstream
from tests.integration.regional_agent.world import World
from tests.waiting import attempts

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("envoy")]


def limits() -> dict[str, Any]:
    """Return the example's limits, with rates that do not refill during a test. A region has a third of them."""
    document: dict[str, Any] = yaml.safe_load(LIMITS.read_text())
    document["quotas"] = [
        {"name": "clients", "kind": "rate", "limit": "3/hour, burst 3000", "sharing": "regional"},
        {"name": "searches", "kind": "rate", "limit": "30/hour", "algorithm": "fixed_window"},
    ]
    document["policies"][1]["on_store_failure"] = "closed"
    return document


async def statuses(client: httpx.AsyncClient, times: int, path: str = "/v1/search?q=a", **headers: str) -> list[int]:
    return [(await client.get(path, headers=headers)).status_code for _ in range(times)]


@pytest.mark.extended
async def test_limits_are_held_and_agents_come_and_go(world: World, tmp_path: Path) -> None:
    (await world.admin.put("/v1/limits", json=limits())).raise_for_status()
    envoy = Envoy(tmp_path)
    rolled, killed = envoy.agents
    with (
        envoy.running(),
        agent_process(world, rolled, tmp_path) as first,
        agent_process(world, killed, tmp_path) as second,
    ):
        async with (
            upstream(envoy.ports["upstream"]),
            httpx.AsyncClient(base_url=envoy.url("open"), timeout=30) as lenient,
            httpx.AsyncClient(base_url=envoy.url("strict"), timeout=30) as strict,
        ):
            await hold_a_limit(envoy, lenient, strict)
            await lose_the_store(world, lenient)
            await roll_an_agent(strict, first, envoy)
            second.send_signal(signal.SIGKILL)
            await answered(strict, 500)
            assert await statuses(lenient, 5) == [200] * 5
            with agent_process(world, killed, tmp_path):
                await answered(strict, 200)
                assert await statuses(lenient, 1, **{"x-tenant": "acme"}) == [429], "the region's store remembers"


async def hold_a_limit(envoy: Envoy, lenient: httpx.AsyncClient, strict: httpx.AsyncClient) -> None:
    await answered(strict, 200)
    await both_agents_serve(envoy)
    first = await lenient.get("/v1/search?q=1", headers={"x-tenant": "acme"})
    assert first.headers["x-ratelimit-limit"] == "30"
    assert '"search";r=9' in first.headers["ratelimit"]
    assert await statuses(lenient, 9, **{"x-tenant": "acme"}) == [200] * 9
    denied = await lenient.get("/v1/search?q=1", headers={"x-tenant": "acme"})
    assert denied.status_code == 429
    assert denied.headers["x-ratelimit-remaining"] == "0"
    assert int(denied.headers["retry-after"]) > 0
    assert await statuses(lenient, 1, **{"x-tenant": "other"}) == [200]
    async for _ in attempts():  # Envoy writes its log once in a while
        lines = [json.loads(line) for line in envoy.access_log().splitlines()]
        if refused := [line for line in lines if line["status"] == 429]:
            assert (refused[0]["policy"], refused[0]["reason"], refused[0]["flags"]) == ("search", "limit", "RL")
            return
    pytest.fail("the access log has no denial")


async def both_agents_serve(envoy: Envoy) -> None:
    async with httpx.AsyncClient(base_url=envoy.url("admin"), timeout=30) as admin:
        async for _ in attempts():
            clusters = (await admin.get("/clusters")).text
            flags = [
                line for line in clusters.splitlines() if line.startswith("leasehold::") and "health_flags" in line
            ]
            if [line.rpartition("::")[2] for line in flags] == ["healthy", "healthy"]:
                return
    pytest.fail(f"the agents are not healthy: {flags}")


async def lose_the_store(world: World, lenient: httpx.AsyncClient) -> None:
    """Stop the store's answers, and see each policy's failure mode: addresses pass, and searches do not."""
    store: Any = redis.asyncio.from_url(world.store)
    async with store:
        await store.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")  # functions wait as well
        async for _ in attempts():
            answers = [await statuses(lenient, 1, path) for path in ("/v1/other", "/v1/search")]
            searched = await statuses(lenient, 1, **{"x-tenant": "third"})
            if (answers, searched) == ([[200], [200]], [429]):
                break
        else:
            pytest.fail(f"{answers}, {searched}")
        await store.execute_command("CLIENT", "UNPAUSE")
    async for _ in attempts():
        if await statuses(lenient, 1, **{"x-tenant": "third"}) == [200]:
            return
    pytest.fail("the store is not used again")


async def roll_an_agent(strict: httpx.AsyncClient, agent: Any, envoy: Envoy) -> None:
    """End one of two agents in order while requests go on: none of them may see it."""
    await both_agents_serve(envoy)
    agent.send_signal(signal.SIGTERM)
    seen: list[int] = []
    while agent.poll() is None:
        seen += await statuses(strict, 1, "/v1/other")
        await asyncio.sleep(0.01)
    seen += await statuses(strict, 20, "/v1/other")
    assert set(seen) == {200}, f"{len(seen)} requests"
    assert len(seen) > 20
