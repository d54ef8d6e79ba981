"""The modes regional and central keep their promises with real agents and stores."""

import asyncio
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest

from tests.integration.regional_agent.world import REGIONS, Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

PRINTS = "prints:tenant=acme"
ASK = {"tenant": "acme", "route": "/v1/prints"}
LIMIT = 20


def in_mode(mode: str, limit: int = LIMIT, wait: str = "5s", **more: Any) -> dict[str, list[dict[str, Any]]]:
    quota = {"name": "prints", "kind": "allowance", "limit": limit, "period": "month", "mode": mode} | more
    policy = {"name": "print", "match": {"route": "/v1/prints"}, "by": ["tenant"], "quota": "prints", "wait": wait}
    return {"quotas": [quota], "policies": [policy]}


async def put(world: World, agents: list[Agent], document: dict[str, list[dict[str, Any]]]) -> None:
    """Apply the document, and wait until all agents have it."""
    before = [agent.region.admission.policies for agent in agents]
    await world.try_out(document)
    await until(
        lambda: all(agent.region.admission.policies is not was for agent, was in zip(agents, before, strict=True))
    )


async def asked(agent: Agent, **fields: Any) -> int:
    """Repeat a check where the coordinator took too long, on a busy machine: then nothing was consumed."""
    async for _ in attempts():
        if (status := (await agent.check(ASK, **fields)).status_code) != 503:
            return status
    raise AssertionError("the coordinator never answers")


async def spend(agent: Agent, times: int) -> Counter[int]:
    return Counter([await asked(agent) for _ in range(times)])


async def held(agent: Agent, units: int) -> dict[str, Any]:
    body = {"subject": ASK, "units": units, "ttl_ms": 60_000, "operation_id": str(uuid4())}
    answer = await agent.http.post("/v1/holds", json=body)
    while answer.status_code == 503:
        answer = await agent.http.post("/v1/holds", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def allocation(world: World) -> dict[str, Any]:
    [found] = (await world.admin.get("/v1/allocations", params={"quota": PRINTS})).json()["data"]
    return dict(found)


async def until_books(world: World, **expected: int) -> dict[str, Any]:
    """Return figures of the whole pool."""
    found: dict[str, Any] = {}
    async for _ in attempts():
        found = await allocation(world)
        if all(found[name] == units for name, units in expected.items()):
            return found
    raise AssertionError(f"{expected}: {found}")


# --- regional quotas --------------------------------------------------------------------------------------------------


async def test_each_region_has_its_own_limit_and_no_other_region_s(world: World) -> None:
    await world.try_out(in_mode("regional"))
    agents = [await world.agent(region) for region in REGIONS]
    assert await spend(agents[0], LIMIT + 5) == {200: LIMIT, 429: 5}
    answers = await asyncio.gather(*(spend(agent, LIMIT + 3) for agent in agents[1:]))
    assert answers == [{200: LIMIT, 429: 3}] * 2
    found = await until_books(world, consumed=3 * LIMIT)
    assert (found["funded"], found["overage"], found["mode"]) == (3 * LIMIT, 0, "regional")
    assert {each["region"]: each["limit"] for each in found["regions"]} == dict.fromkeys(REGIONS, LIMIT)
    assert (await world.quota(PRINTS))["consumed"] == 3 * LIMIT


@pytest.mark.extended
async def test_remaining_units_are_those_of_the_regions_own_limit(world: World) -> None:
    await world.try_out(in_mode("regional"))
    east, south = await world.agent("us-east"), await world.agent("ap-south")
    await spend(east, 5)
    answer = (await south.check(ASK, cost=2)).json()["policies"][0]
    assert (answer["limit"], answer["remaining"]) == (LIMIT, LIMIT - 2)


@pytest.mark.extended
async def test_funding_follows_the_regions_that_take_part(world: World) -> None:
    await world.try_out(in_mode("regional"))
    east, south = await world.agent("us-east"), await world.agent("ap-south")
    assert await spend(east, 5) == {200: 5}
    await until_books(world, funded=3 * LIMIT)
    drained = {"mode": "drain", "region": "us-east"}
    assert (await world.admin.post("/v1/rebalances", json=drained)).is_success
    await until_books(world, outstanding=0, consumed=5)
    assert await spend(south, 1) == {200: 1}
    await until_books(world, funded=2 * LIMIT + 5)
    assert (await world.admin.put("/v1/regions/new", json={})).is_success
    assert await spend(south, LIMIT) == {200: LIMIT - 1, 429: 1}
    await until_books(world, funded=3 * LIMIT + 5)
    assert (await world.admin.post("/v1/rebalances", json={"mode": "restore", "region": "us-east"})).is_success
    await until(lambda: east.region.quotas.may_wait(PRINTS))
    answers = Counter[int]()
    while answers[200] < LIMIT - 5 and sum(answers.values()) < 3_000:
        answers += await spend(east, 1)
    assert await spend(east, 3) == {429: 3}
    assert answers[200] == LIMIT - 5, "what it had spent before counts"
    await until_books(world, funded=4 * LIMIT, consumed=2 * LIMIT)


async def test_usage_beyond_a_regions_limit_is_overage_and_takes_nothing_from_another(world: World) -> None:
    await world.try_out(in_mode("regional"))
    east, south = await world.agent("us-east"), await world.agent("ap-south")
    hold = await held(east, LIMIT)
    path = f"/v1/holds/{hold['hold_id']}:commit"
    assert (await east.http.post(path, json={"units": LIMIT + 7})).is_success
    await until_books(world, consumed=LIMIT + 7, overage=7)
    assert await spend(south, LIMIT + 2) == {200: LIMIT, 429: 2}
    assert await spend(east, 2) == {429: 2}


async def test_nothing_is_moved_where_each_region_has_its_own(world: World) -> None:
    await world.try_out(in_mode("regional"))
    await spend(await world.agent("us-east"), 1)
    move = {"mode": "move", "quota": PRINTS, "from": "us-east", "to": "ap-south", "units": 1}
    floor = {"mode": "weigh", "quota": PRINTS, "settings": {"us-east": {"floor": 3}}}
    for wish, field in ((move, "quota"), (floor, "settings.us-east.floor")):
        answer = await world.admin.post("/v1/rebalances", json=wish)
        assert answer.status_code == 422
        [fault] = answer.json()["invalid_parameters"]
        assert (fault["field"], fault["rule"]) == (field, "mode")
        assert "each region has a limit of its own" in fault["reason"]


@pytest.mark.extended
async def test_a_ceiling_lowers_one_region_s_own_limit(world: World) -> None:
    await world.try_out(in_mode("regional"))
    east, south = await world.agent("us-east"), await world.agent("ap-south")
    lower = {"mode": "weigh", "quota": PRINTS, "settings": {"us-east": {"ceiling": 4}}}
    assert (await world.admin.post("/v1/rebalances", json=lower)).is_success
    assert await spend(east, 6) == {200: 4, 429: 2}
    assert await spend(south, LIMIT + 1) == {200: LIMIT, 429: 1}
    await until_books(world, funded=2 * LIMIT + 4)


# --- central quotas ---------------------------------------------------------------------------------------------------


class Counted:
    """Count the calls of the coordinator's central operation."""

    def __init__(self, world: World) -> None:
        self.exchanges = 0
        real = world.weather.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.exchanges += scope.get("path", "").endswith("/exchanges")
            await real(scope, receive, send)

        world.weather.app = app


async def test_two_regions_spend_a_central_quota_to_the_last_unit(world: World) -> None:
    await world.try_out(in_mode("central", limit=41))
    east, south = await world.agent("us-east"), await world.agent("ap-south")
    answers = await asyncio.gather(*(spend(agent, 15) for agent in (east, south)))
    assert sum(answers, Counter()) == {200: 30}
    await until_books(world, outstanding=0, unallocated=11)
    answers = await asyncio.gather(*(spend(agent, 15) for agent in (east, south)))
    assert sum(answers, Counter()) == {200: 11, 429: 19}
    await until_books(world, outstanding=0, unallocated=0, consumed=41)


@pytest.mark.extended
async def test_a_region_holds_nothing_that_no_request_waits_for(world: World) -> None:
    await world.try_out(in_mode("central", limit=1000))
    east = await world.agent("us-east")
    for _ in range(20):
        assert await asked(east, cost=3) == 200
    found = await until_books(world, consumed=60, outstanding=0)
    [region] = found["regions"]
    assert (region["granted"], region["returned"]) == (60, 0), "and never was there more"


async def test_concurrent_requests_share_a_call(world: World) -> None:
    await world.try_out(in_mode("central", limit=1000))
    east = await world.agent("us-east", report_interval_ms=60_000)
    await spend(east, 1)
    counted = Counted(world)
    assert Counter(await asyncio.gather(*(asked(east) for _ in range(100)))) == {200: 100}
    assert counted.exchanges <= 10


@pytest.mark.extended
async def test_a_denied_large_request_leaves_units_to_smaller_ones(world: World) -> None:
    await world.try_out(in_mode("central", limit=10))
    east, south = await world.agent("us-east"), await world.agent("ap-south")
    assert await asked(east, cost=6) == 200
    assert await asked(south, cost=5) == 429
    assert await asked(south, cost=4) == 200
    await until_books(world, consumed=10, outstanding=0)


@pytest.mark.extended
async def test_a_central_denial_is_not_cached(world: World) -> None:
    await world.try_out(in_mode("central", limit=10))
    east, south = await world.agent("us-east"), await world.agent("ap-south")
    hold = await held(east, 10)
    await put(world, [east, south], in_mode("central", limit=10, wait="300ms"))
    assert (await south.check(ASK)).status_code in (429, 503), "an answer may take longer than it waits"
    assert (await east.http.post(f"/v1/holds/{hold['hold_id']}:commit", json={"units": 4})).is_success
    await until_books(world, outstanding=0, consumed=4, unallocated=6)
    await put(world, [east, south], in_mode("central", limit=10))
    assert await asked(south, cost=6) == 200


async def test_a_partitioned_region_denies_at_once_and_admits_nothing(world: World) -> None:
    await world.try_out(in_mode("central", limit=1000))
    east = await world.agent("us-east")
    assert await spend(east, 2) == {200: 2}
    world.weather.swallows_requests = True
    assert {(await east.check(ASK)).status_code for _ in range(20)} == {503}
    assert (await east.check(ASK)).json()["degraded"] == "closed"
    world.weather.swallows_requests = False
    await until(lambda: not east.region.exchange_loop.is_pausing)
    assert await asked(east) == 200
    await until_books(world, consumed=3, outstanding=0)


@pytest.mark.extended
async def test_units_granted_for_an_expired_wait_return_at_once(world: World) -> None:
    """The reply comes later than the request would wait."""
    await world.try_out(in_mode("central", limit=1000, wait="150ms"))
    east = await world.agent("us-east", report_interval_ms=60_000)
    assert await asked(east) == 200
    is_told = asyncio.Event()

    async def late() -> None:
        await is_told.wait()

    world.weather.before_replies_to["/exchanges"] = late
    assert (await east.check(ASK, cost=5)).status_code == 503, "it cannot tell"
    await until_books(world, outstanding=5)
    is_told.set()
    await until_books(world, outstanding=0, consumed=1)


@pytest.mark.extended
async def test_unused_units_of_a_hold_return_at_once(world: World) -> None:
    await world.try_out(in_mode("central"))
    east, south = await world.agent("us-east", report_interval_ms=60_000), await world.agent("ap-south")
    for ending, used in ((":commit", 4), (":release", 0)):
        hold = await held(east, 10)
        await until_books(world, outstanding=10)
        body = {"units": used} if used else {}
        assert (await east.http.post(f"/v1/holds/{hold['hold_id']}{ending}", json=body)).is_success
        await until_books(world, outstanding=0, consumed=4)
    assert await asked(south, cost=LIMIT - 4) == 200


@pytest.mark.extended
async def test_an_operation_is_charged_once_and_batches_and_peeks_are_decided_alike(world: World) -> None:
    await world.try_out(in_mode("central"))
    east = await world.agent("us-east")
    for _ in range(3):
        assert await asked(east, cost=2, operation_id="print-7") == 200
    assert await asked(east, cost=LIMIT - 2, mode="peek") == 200
    assert await asked(east, cost=LIMIT - 1, mode="peek") == 429
    await until_books(world, consumed=2, outstanding=0)
    batch = (await east.http.post("/v1/check:batch", json={"checks": [{"subject": ASK}] * (LIMIT + 3)})).json()
    assert Counter(item["status"] for item in batch["items"]) == {200: LIMIT - 2, 429: 5}
    assert await asked(east, cost=2, mode="adjust") == 200
    await until_books(world, consumed=LIMIT + 2, overage=2, outstanding=0)


@pytest.mark.extended
async def test_several_agents_of_a_region_share_a_central_quota(world: World) -> None:
    await world.try_out(in_mode("central", limit=60))
    one, other = await world.agent("us-east", name="one"), await world.agent("us-east", name="other")
    answers = await asyncio.gather(*(spend(agent, 10) for agent in (one, other) for _ in range(4)))
    assert sum(answers, Counter()) == {200: 60, 429: 20}
    await until_books(world, outstanding=0, consumed=60)


# --- changes of mode --------------------------------------------------------------------------------------------------


async def test_a_change_of_mode_within_a_period_loses_nothing_and_admits_no_more(world: World) -> None:
    limit = 60
    await world.try_out(in_mode("leased", limit=limit))
    agents = [await world.agent(region) for region in REGIONS]
    east, south, _ = agents
    await east.check(ASK, cost=30, mode="peek")
    admitted = (await spend(east, 3))[200] + (await spend(south, 4))[200]
    assert admitted == 7
    assert (await allocation(world))["outstanding"] > 0
    await put(world, agents, in_mode("central", limit=limit))
    await until_books(world, outstanding=0, unallocated=limit - 7)
    assert await spend(south, 3) == {200: 3}
    await put(world, agents, in_mode("regional", limit=limit))
    answers = await asyncio.gather(*(spend(agent, limit + 1) for agent in agents))
    assert [each[200] for each in answers] == [limit - 3, limit - 7, limit]
    await until_books(world, consumed=3 * limit, funded=3 * limit, overage=0)
    await put(world, agents, in_mode("leased", limit=limit))
    assert await spend(east, 2) == {429: 2}
    await put(world, agents, in_mode("leased", limit=4 * limit))
    await until(lambda: east.region.quotas.may_wait(PRINTS))
    answers = await asyncio.gather(*(spend(agent, limit) for agent in agents))
    assert sum(answers, Counter())[200] == limit
    await until_books(world, consumed=4 * limit, overage=0, outstanding=0)
    assert (await world.quota(PRINTS))["suspense"] == 0
