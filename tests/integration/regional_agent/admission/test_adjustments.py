"""Usage that has happened is booked despite limits and blocks, up to a ceiling, for callers that may adjust."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.waiting import attempts

pytestmark = pytest.mark.anyio

SERVICE, ADJUST = "0123456789abcdef-service", "0123456789abcdef-adjust"
MAX_UNITS = 2**53 - 1


def invalid(answer: httpx.Response) -> list[tuple[str, str]]:
    assert answer.status_code == 422, answer.text
    return [(each["field"], each["rule"]) for each in answer.json()["invalid_parameters"]]


async def used(world: World, units: int) -> None:
    found = None
    async for _ in attempts():
        if (found := await world.usage()) == units:
            return
    raise AssertionError(found)


async def hold(agent: Agent, units: int, **headers: str) -> str:
    await_id = {"subject": EXPORT, "units": units, "ttl_ms": 60_000, "operation_id": f"hold {units}"}
    answer = await agent.http.post("/v1/holds", json=await_id, headers=headers)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["hold_id"]
    return found


async def test_an_adjustment_is_refused_above_a_factor_of_the_limit_and_names_its_field(world: World) -> None:
    agent = await world.agent(adjust_ceiling=10)
    assert invalid(await agent.check(cost=1_001, mode="adjust")) == [("cost", "maximum")]
    assert invalid(await agent.check(cost=MAX_UNITS, mode="adjust")) == [("cost", "maximum")]
    batch = {"checks": [{"subject": EXPORT, "cost": cost, "mode": "adjust"} for cost in (1_001, 1_000)]}
    items = (await agent.http.post("/v1/check:batch", json=batch)).json()["items"]
    assert [item["status"] for item in items] == [422, 200]
    await used(world, 1_000)
    assert (await agent.check(cost=MAX_UNITS)).json()["policies"][0]["reason"] == "never", "it consumes nothing"


async def test_a_commit_is_refused_above_the_ceiling_and_booked_beyond_the_hold_below_it(world: World) -> None:
    agent = await world.agent(adjust_ceiling=10)
    await agent.lease(20)
    one = await hold(agent, 5)
    answer = await agent.http.post(f"/v1/holds/{one}:commit", json={"units": MAX_UNITS})
    assert invalid(answer) == [("units", "maximum")]
    assert (await agent.http.post(f"/v1/holds/{one}:commit", json={"units": 1_000})).status_code == 200
    await used(world, 1_000)


async def test_a_hold_may_be_committed_after_the_limit_was_lowered(world: World) -> None:
    agent = await world.agent(adjust_ceiling=1)
    await agent.lease(60)
    one = await hold(agent, 50)
    lowered = {"quota": "exports", "subject": {"tenant": "acme"}, "limit": 3, "reason": "less"}
    assert (await world.admin.post("/v1/overrides", json=lowered)).is_success
    async for _ in attempts():
        if invalid_now := (await agent.check(cost=50, mode="adjust")).status_code == 422:
            break
    assert invalid_now
    assert (await agent.http.post(f"/v1/holds/{one}:commit", json={"units": 50})).status_code == 200


async def test_usage_of_a_blocked_subject_is_booked(world: World) -> None:
    agent = await world.agent()
    await agent.lease(10)
    assert (
        await world.admin.post("/v1/blocks", json={"field": "tenant", "value": "acme", "reason": "abuse"})
    ).is_success
    async for _ in attempts():
        if (await agent.check(mode="peek")).json().get("blocked_by"):
            break
    assert (await agent.check(cost=7, mode="adjust")).status_code == 200
    assert (await agent.check(mode="peek")).json()["blocked_by"] == "tenant"
    await used(world, 7)


RATES: list[dict[str, Any]] = [
    {"name": algorithm, "kind": "rate", "limit": limit, "algorithm": algorithm, "sharing": "regional"}
    for algorithm, limit in {
        "token_bucket": "100/second",
        "gcra": "100/second",
        "leaky_bucket": "100/second",
        "fixed_window": "1000/hour",
        "sliding_window": "1000/hour",
    }.items()
]


@pytest.mark.parametrize("algorithm", [each["name"] for each in RATES])
async def test_ten_million_units_on_a_rate_are_taken_and_it_denies_afterwards(world: World, algorithm: str) -> None:
    policy = {"name": "r", "match": {"route": "/r"}, "by": ["tenant"], "quota": algorithm}
    await world.try_out({"quotas": RATES, "policies": [policy]})
    agent = await world.agent(adjust_ceiling=1_000_000)
    asked = {"tenant": "acme", "route": "/r"}
    for _ in range(3):
        answer = await agent.check(asked, cost=10_000_000, mode="adjust")
        assert (answer.status_code, answer.json()["policies"][0]["remaining"]) == (200, 0)
    denied = (await agent.check(asked)).json()
    assert (denied["policies"][0]["reason"], denied["retry_after_ms"] > 1_000) == ("limit", True)


async def test_ten_trillion_units_on_a_new_allowance_are_booked_within_the_ceiling(world: World) -> None:
    await world.try_out(
        {
            "quotas": [{"name": "bytes", "kind": "allowance", "limit": 10**12, "period": "month"}],
            "policies": [{"name": "b", "match": {"route": "/b"}, "by": ["tenant"], "quota": "bytes", "wait": "30s"}],
        }
    )
    agent = await world.agent()
    answer = await agent.check({"tenant": "new", "route": "/b"}, cost=10**13, mode="adjust")
    assert answer.status_code == 200, answer.text
    await used(world, 10**13)


async def test_the_journal_books_usage_in_a_partitioned_region_without_a_lease(world: World, tmp_path: Path) -> None:
    agent = await world.agent(journal_dir=tmp_path / "journal")
    world.weather.swallows_requests = True
    async for _ in attempts():
        if (await agent.check({**EXPORT, "tenant": "other"})).json()["policies"][0]["reason"] == "cut_off":
            break
    answer = await agent.check(cost=7, mode="adjust", operation_id="done")
    assert (answer.status_code, answer.json()["degraded"]) == (200, "open")
    assert (await agent.check(cost=7, mode="adjust", operation_id="done")).status_code == 200
    world.weather.swallows_requests = False
    await used(world, 7)


async def test_only_the_adjust_token_books_beyond_limits(world: World) -> None:
    agent = await world.agent(service_token=SERVICE, adjust_token=ADJUST)
    service, adjust = ({"Authorization": f"Bearer {token}"} for token in (SERVICE, ADJUST))

    async def check(headers: dict[str, str], **fields: Any) -> httpx.Response:
        return await agent.http.post("/v1/check", json={"subject": EXPORT, **fields}, headers=headers)

    assert (await check({})).status_code == 401
    for headers in (service, adjust):
        assert (await check(headers)).status_code == 200
    forbidden = await check(service, cost=5, mode="adjust")
    assert (forbidden.status_code, forbidden.json()["type"]) == (403, "/problems/forbidden")
    assert (await check(adjust, cost=5, mode="adjust")).status_code == 200
    batch = {"checks": [{"subject": EXPORT}, {"subject": EXPORT, "mode": "adjust"}]}
    for headers, statuses in ((service, [200, 403]), (adjust, [200, 200])):
        items = (await agent.http.post("/v1/check:batch", json=batch, headers=headers)).json()["items"]
        assert [item["status"] for item in items] == statuses
    await used(world, 10)
    one = await hold(agent, 5, **service)
    path = f"/v1/holds/{one}:commit"
    assert (await agent.http.post(path, json={"units": 6}, headers=service)).status_code == 403
    assert (await agent.http.post(path, json={"units": 6}, headers=adjust)).status_code == 200
    two = await hold(agent, 4, **service)
    assert (await agent.http.post(f"/v1/holds/{two}:commit", json={"units": 4}, headers=service)).status_code == 200
    await used(world, 20)
