"""A reset is done in every region, once, also in one that was away."""

from typing import Any

import pytest

from regional_agent.store.connection import StoreUnavailable
from tests.integration.client.test_middleware import engine_of
from tests.integration.regional_agent.world import Agent, World, running
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

LOGIN = {"route": "/v1/login"}
MORE: dict[str, list[dict[str, Any]]] = {
    "quotas": [
        {"name": "logins", "kind": "rate", "limit": "15/hour", "algorithm": "sliding_log"},
        {"name": "steady", "kind": "rate", "limit": "3/hour, burst 2400", "sharing": "regional"},
    ],
    "policies": [
        {"name": "login", "match": {"route": "/v1/login"}, "by": ["user"], "quota": "logins"},
        {"name": "steady", "match": {"route": "/v1/steady"}, "by": ["user"], "quota": "steady"},
    ],
}


@pytest.fixture
async def limited(world: World) -> World:
    await world.try_out(MORE)
    return world


async def lock_out(agent: Agent, user: str) -> None:
    await until(lambda: agent.region.admission.policies is not None and agent.region.admission.policies.version >= 2)
    while await may_log_in(agent, user):
        pass


async def may_log_in(agent: Agent, user: str, **fields: Any) -> bool:
    return (await agent.check({"user": user, **LOGIN}, **fields)).status_code == 200


async def left(agent: Agent, user: str) -> int:
    answer = await agent.check({"user": user, **LOGIN}, mode="peek")
    found: int = answer.json()["policies"][0]["remaining"]
    return found


async def has(agent: Agent, user: str, units: int) -> None:
    found = None
    async for _ in attempts():
        if (found := await left(agent, user)) == units:
            return
    raise AssertionError(found)


async def reset(world: World, user: str, quota: str = "logins") -> None:
    body = {"quota": quota, "subject": {"user": user}, "reason": "called"}
    assert (await world.admin.post("/v1/resets", json=body)).status_code == 201


async def test_a_reset_unlocks_a_user_in_all_regions_and_nobody_else(limited: World) -> None:
    agents = [await limited.agent(region) for region in ("us-east", "eu-west")]
    for agent in agents:
        await lock_out(agent, "jane")
        await lock_out(agent, "mallory")
    await reset(limited, "jane")
    for agent in agents:
        await has(agent, "jane", 5)
        assert await may_log_in(agent, "jane"), "no denial from before is repeated"
        assert await left(agent, "mallory") == 0


async def test_an_agent_that_starts_later_gets_all_resets_and_does_none_twice(limited: World) -> None:
    agent = await limited.agent()
    await lock_out(agent, "jane")
    await reset(limited, "jane")
    await has(agent, "jane", 5)
    assert await may_log_in(agent, "jane", cost=3)
    other = await limited.agent()  # of the same region: it gets all resets when it starts
    await until(lambda: bool(other.region.resets._known) and not other.region.resets._pending)
    assert (await left(other, "jane"), await left(agent, "jane")) == (2, 2)
    metrics = (await agent.http.get("/metrics")).text
    assert "leasehold_resets_total 1.0" in metrics


async def test_an_agent_that_was_away_catches_up(limited: World) -> None:
    async with running(limited.settings("us-east")) as agent:
        await agent.ready()
        await lock_out(agent, "jane")
    await reset(limited, "jane")
    again = await limited.agent()
    await has(again, "jane", 5)


async def test_a_store_that_was_away_forgets_when_it_is_back(limited: World) -> None:
    agent = await limited.agent()
    await lock_out(agent, "jane")
    real = agent.region.scripts.reset_rates
    calls: list[object] = []

    async def fails(*arguments: Any) -> int:
        calls.append(arguments)
        raise StoreUnavailable("away")

    agent.region.scripts.reset_rates = fails  # type: ignore[method-assign, assignment]
    await reset(limited, "jane")
    await until(lambda: len(calls) >= 2)
    assert await left(agent, "jane") == 0
    agent.region.scripts.reset_rates = real  # type: ignore[method-assign]
    await has(agent, "jane", 5)


async def test_another_incarnation_of_the_store_is_told_again(limited: World) -> None:
    """A replica that was promoted may have the counts, and not the reset."""
    agent = await limited.agent()
    await lock_out(agent, "jane")
    await reset(limited, "jane")
    await has(agent, "jane", 5)
    await lock_out(agent, "jane")
    await agent.region.store.call("HDEL", "lh:fence", "resets")
    agent.region.epochs.invalidate()
    await has(agent, "jane", 5)


async def test_a_reset_returns_slices_first(limited: World) -> None:
    steady = {"user": "jane", "route": "/v1/steady"}
    async with engine_of(limited) as engine:
        cell = engine.region.cells[0]
        await until(lambda: cell.admission.policies is not None and cell.admission.policies.version >= 2)
        for _ in range(500):
            assert (await engine.check(steady)).allowed
        assert cell.slices.taken
        applied = engine.region.metrics.resets._value.get()
        await reset(limited, "jane", "steady")
        await until(lambda: engine.region.metrics.resets._value.get() > applied)
        admitted = 0
        while (await engine.check(steady)).allowed:
            admitted += 1
        assert admitted == 800, "the region's part, and no unit of a slice beside it"
