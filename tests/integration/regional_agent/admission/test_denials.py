"""A caller that is denied often costs the store next to nothing, and is admitted no later for it."""

import pytest

from tests.integration.regional_agent.world import World

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000
SEARCH = {"tenant": "acme", "route": "/v1/search", "method": "GET"}


async def limited_to(world: World, limit: str) -> None:
    document = (await world.admin.get("/v1/limits")).json()["document"]
    for quota in document["quotas"]:
        if quota["name"] == "api":
            quota["limit"] = limit
    assert (await world.admin.put("/v1/limits", json=document)).is_success


async def test_an_abuser_costs_the_store_next_to_nothing(world: World) -> None:
    agent = await world.agent(report_interval_ms=60_000)
    while (await agent.check(SEARCH)).status_code == 200:
        pass
    before = agent.region.store.calls
    answers = [await agent.check(SEARCH) for _ in range(500)]
    assert {answer.status_code for answer in answers} == {429}
    assert agent.region.store.calls - before <= 10
    waits_ms = [answer.json()["retry_after_ms"] for answer in answers]
    assert waits_ms == sorted(waits_ms, reverse=True), "the moment stands still, and comes nearer"


async def test_a_denial_is_not_cached_for_longer_than_the_store_denies(world: World) -> None:
    """Once the store has room, the next check is admitted, as there are no other callers here."""
    await limited_to(world, "15/second, burst 3")
    agent = await world.agent()
    opened, was_denied = 0, False
    for _ in range(3_000):
        found_room = (await agent.check(SEARCH, mode="peek")).status_code == 200
        is_admitted = (await agent.check(SEARCH)).status_code == 200
        assert is_admitted or not found_room
        opened, was_denied = opened + (is_admitted and was_denied), not is_admitted
        if opened == 5:
            return
    raise AssertionError("it never opened again")


async def test_a_denial_after_an_adjustment_waits_for_the_adjusted_units_too(world: World) -> None:
    """A region has one unit an hour, so what was adjusted comes back in so many hours."""
    agent = await world.agent()
    assert (await agent.check(SEARCH, cost=10)).status_code == 200
    first = (await agent.check(SEARCH)).json()["retry_after_ms"]
    assert (await agent.check(SEARCH, cost=5, mode="adjust")).status_code == 200
    assert (await agent.check(SEARCH)).json()["retry_after_ms"] > first + 4 * HOUR_MS


async def test_a_replay_is_answered_from_its_record_even_if_the_rate_denies(world: World) -> None:
    agent = await world.agent()
    assert (await agent.check(SEARCH, operation_id="one")).status_code == 200
    while (await agent.check(SEARCH)).status_code == 200:
        pass
    assert (await agent.check(SEARCH)).status_code == 429
    assert (await agent.check(SEARCH, operation_id="one")).status_code == 200
    assert (await agent.check(SEARCH, mode="adjust")).status_code == 200
