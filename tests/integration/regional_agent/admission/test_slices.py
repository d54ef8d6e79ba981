"""Slices on a real store give the same answers as without them in every operation, for a fraction of the calls."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from leasehold.engine import Engine
from tests.integration.client.test_middleware import engine_of, service
from tests.integration.regional_agent.http.test_fast_path import Doors, opened
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

BURST = 800  # of the region's third
SEARCH = {"route": "/v1/search", "method": "GET"}
HOT = {"tenant": "acme", **SEARCH}
Ask = Callable[[str, int], Awaitable[tuple[bool, int]]]


def document(limit: str = f"3/hour, burst {3 * BURST}", **quota: Any) -> dict[str, Any]:
    return {
        "plans": {"free": {}},
        "quotas": [{"name": "api", "kind": "rate", "limit": limit, "sharing": "regional", **quota}],
        "policies": [{"name": "search", "match": {"route": "/v1/search"}, "by": ["tenant"], "quota": "api"}],
    }


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def doors(world: World) -> AsyncIterator[Doors]:
    assert (await world.admin.put("/v1/limits", json=document())).is_success
    async with opened(world, store_timeout_ms=5_000) as doors:
        yield doors


def said(answer: Any) -> tuple[bool, int]:
    return answer["allowed"], answer["policies"][0]["remaining"]


def over_http(client: httpx.AsyncClient) -> Ask:
    async def ask(tenant: str, cost: int) -> tuple[bool, int]:
        check = {"subject": {"tenant": tenant, **SEARCH}, "cost": cost}
        return said((await client.post("/v1/check", json=check)).json())

    return ask


def in_batches(client: httpx.AsyncClient) -> Ask:
    async def ask(tenant: str, cost: int) -> tuple[bool, int]:
        check = {"subject": {"tenant": tenant, **SEARCH}, "cost": cost}
        [item] = (await client.post("/v1/check:batch", json={"checks": [check]})).json()["items"]
        return said(item.get("answer") or item["problem"])

    return ask


def in_process(engine: Engine) -> Ask:
    async def ask(tenant: str, cost: int) -> tuple[bool, int]:
        decision = await engine.check({"tenant": tenant, **SEARCH}, cost=cost)
        return decision.allowed, decision.policies[0].remaining

    return ask


def in_middleware(engine: Engine, stack: AsyncExitStack) -> Ask:
    cost_now = 0

    async def asking(subject: Any) -> Any:
        return await engine.check(subject, cost=cost_now)

    async def ask(tenant: str, cost: int) -> tuple[bool, int]:
        nonlocal cost_now
        cost_now = cost
        answer = await client.get("/v1/search", headers={"X-Tenant": tenant})
        return answer.status_code == 200, int(answer.headers["x-ratelimit-remaining"])

    client = service(asking)
    stack.push_async_callback(client.aclose)
    return ask


async def test_every_operation_admits_the_same_from_slices(doors: Doors, world: World) -> None:
    """Use each operation for a tenant of its own, with the same checks."""
    async with engine_of(world, store_timeout_ms=5_000) as engine, AsyncExitStack() as stack:
        ways = {
            "fast": over_http(doors.fast),
            "slow": over_http(doors.slow),
            "many": in_batches(doors.fast),
            "within": in_process(engine),
            "before": in_middleware(engine, stack),
        }
        chance = random.Random(7)
        costs = [chance.choice([1, 1, 1, 1, 2, 5, 40]) for _ in range(400)]
        heard = {tenant: [await ask(tenant, cost) for cost in costs] for tenant, ask in ways.items()}
    assert doors.agent.region.slices.taken > 3
    assert engine.region.cells[0].slices.taken > 1
    left, expected = BURST, []
    for cost in costs:  # nothing comes in so short a time
        left -= cost if cost <= left else 0
        expected.append(left)
    assert expected[-1] == 0, "and the last unit is found"
    for tenant, answers in heard.items():
        assert [remaining for _, remaining in answers] == expected, tenant


async def crowd(agent: Agent, times: int) -> int:
    """Return how many of so many checks pass, fifty at a time."""
    passed = 0
    for _ in range(times // 50):
        answers = await asyncio.gather(*(agent.check(HOT) for _ in range(50)))
        passed += sum(answer.status_code == 200 for answer in answers)
    return passed


async def test_exactly_the_limit_of_parallel_checks_passes_with_few_calls(doors: Doors) -> None:
    before = doors.agent.region.breaker.calls
    assert await crowd(doors.agent, 1_200) == BURST
    assert doors.agent.region.breaker.calls - before < 400


@pytest.mark.extended
async def test_slices_can_be_disabled_for_a_quota(doors: Doors, world: World) -> None:
    before = doors.agent.region.admission.policies
    assert (await world.admin.put("/v1/limits", json=document(slices=False))).is_success
    await until(lambda: doors.agent.region.admission.policies is not before)
    assert await crowd(doors.agent, 500) == 500
    assert doors.agent.region.slices.taken == 0


@pytest.mark.extended
async def test_slices_of_older_limits_are_not_used_under_newer_ones(doors: Doors, world: World) -> None:
    """The key stays hot, so its old slice would last as long as it is used, and be refilled."""
    region, narrow = doors.agent.region, 10
    before = region.admission.policies
    assert (await world.admin.put("/v1/limits", json=document("3/hour, burst 60000"))).is_success
    await until(lambda: region.admission.policies is not before)
    while not region.slices.taken:
        assert await crowd(doors.agent, 50) > 0
    before = region.admission.policies
    fewer = document(f"3/hour, burst {3 * narrow}", slices=False)
    putting = asyncio.create_task(world.admin.put("/v1/limits", json=fewer))
    while region.admission.policies is before:
        assert await crowd(doors.agent, 50) > 0
    assert region.slices.units_here("api:tenant=acme") == 0
    await doors.agent.check(HOT, mode="peek")  # after units that are still being returned
    assert await crowd(doors.agent, 500) <= narrow
    assert (await putting).is_success


async def test_an_adjustment_takes_slices_before_the_bucket_goes_below_zero(doors: Doors) -> None:
    slicing = doors.agent.region.slices
    assert await crowd(doors.agent, 300) == 300
    while not slicing.units_here("api:tenant=acme"):  # it may have been returned by now
        assert await crowd(doors.agent, 50) == 50
    adjusted = await doors.agent.check(HOT, cost=2 * BURST, mode="adjust")
    assert said(adjusted.json()) == (True, 0)
    assert await crowd(doors.agent, 200) == 0
    assert slicing.units_here("api:tenant=acme") == 0


async def test_slices_are_returned_at_shutdown(world: World) -> None:
    assert (await world.admin.put("/v1/limits", json=document())).is_success
    other = await world.agent(store_timeout_ms=5_000)
    async with opened(world, store_timeout_ms=5_000) as doors:
        assert await crowd(doors.agent, 100) == 100
    whole = await other.check(HOT, cost=BURST - 100, mode="peek")
    assert whole.status_code == 200, "all of it is there again"


@pytest.mark.extended
async def test_a_client_that_hangs_up_takes_no_slice_with_it(doors: Doors) -> None:
    """The request of this client fetches a slice, which arrives all the same, and later ones do not fetch for ever."""
    gone = [asyncio.create_task(doors.agent.check(HOT)) for _ in range(30)]
    await until(lambda: doors.agent.region.breaker.calls > 0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    assert await crowd(doors.agent, 300) == 300
    assert doors.agent.region.slices.taken <= doors.agent.region.breaker.calls < 330


@pytest.mark.extended
async def test_hot_keys_are_listed_with_their_slices(doors: Doors) -> None:
    ask = over_http(doors.fast)
    for _ in range(8):
        await asyncio.gather(*(ask("hot", 1) for _ in range(40)))
    await ask("cold", 1)
    await until(lambda: bool(doors.agent.whole.hottest(1)))
    status = (await doors.slow.get("/v1/status")).json()["hot_keys"]
    assert [key["quota"] for key in status] == ["api:tenant=hot", "api:tenant=cold"]
    assert status[0]["demand_milli"] > status[1]["demand_milli"] > 0
    assert status[1]["in_slices"] == 0 <= status[0]["in_slices"] <= BURST // 8
    assert "leasehold_hot_key_units_per_second" in (await doors.slow.get("/metrics")).text
