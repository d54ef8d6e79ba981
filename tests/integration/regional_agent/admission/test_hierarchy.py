"""Limits of user, tenant, plan and all apply to a request at once, in one round trip to the store."""

from collections import Counter
from typing import Any

import pytest

from tests.integration.regional_agent.leasing.test_exchange_loop import eventually
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

LEVELS = {"user": ["tenant", "user"], "tenant": ["tenant"], "plan": ["plan"], "everybody": []}
LIMITS: dict[str, Any] = {"user": 5, "tenant": 8, "plan": {"free": 11, "pro": 15}, "everybody": 21}


def document(times: int = 1) -> dict[str, Any]:
    limits = {name: _times(limit, times) for name, limit in LIMITS.items()}
    return {
        "plans": {"free": {}, "pro": {}},
        "default_plan": "free",
        "quotas": [
            {"name": name, "kind": "allowance", "limit": limit, "period": "month"} for name, limit in limits.items()
        ],
        "policies": [{"name": f"by-{name}", "quota": name, "by": by, "wait": "5s"} for name, by in LEVELS.items()],
    }


def _times(limit: Any, times: int) -> Any:
    return {plan: units * times for plan, units in limit.items()} if isinstance(limit, dict) else limit * times


@pytest.fixture
async def agent(world: World) -> Agent:
    assert (await world.admin.put("/v1/limits", json=document())).is_success
    for tenant in ("acme", "initech"):
        assert (await world.admin.put(f"/v1/subscriptions/{tenant}", json={"plan": "pro"})).is_success
    return await world.agent()


async def asked(agent: Agent, tenant: str, user: str, times: int) -> Counter[str | None]:
    """Count outcomes by the denying policy, which is None for admissions."""
    answers = [await agent.check({"tenant": tenant, "user": user}) for _ in range(times)]
    return Counter(answer.json()["denied_by"] for answer in answers)


async def test_each_level_applies_and_the_tightest_denies(agent: Agent) -> None:
    assert await asked(agent, "acme", "ann", 7) == {None: 5, "by-user": 2}
    assert await asked(agent, "acme", "bob", 4) == {None: 3, "by-tenant": 1}
    assert await asked(agent, "initech", "cy", 5) == {None: 5}
    assert await asked(agent, "initech", "dan", 3) == {None: 2, "by-plan": 1}
    assert await asked(agent, "globex", "eve", 5) == {None: 5}
    assert await asked(agent, "globex", "fay", 3) == {None: 1, "by-everybody": 2}


async def test_a_request_denied_by_one_level_is_charged_by_none(world: World, agent: Agent) -> None:
    await asked(agent, "acme", "ann", 30)
    assert (await agent.check({"tenant": "acme", "user": "bob"}, cost=3)).status_code == 200
    used = {}
    async for _ in attempts():
        rows = (await world.admin.get("/v1/allocations")).json()["data"]
        used = {row["quota"]: row["consumed"] for row in rows if row["consumed"]}
        if used.get("everybody:") == 8:
            break
    assert used == {
        "user:tenant=acme,user=ann": 5,
        "user:tenant=acme,user=bob": 3,
        "tenant:tenant=acme": 8,
        "plan:plan=pro": 8,
        "everybody:": 8,
    }


async def test_all_levels_are_one_call_of_the_store(world: World) -> None:
    assert (await world.admin.put("/v1/limits", json=document(times=1_000))).is_success
    agent = await world.agent(report_interval_ms=60_000)  # nothing else calls the store meanwhile
    ann = {"tenant": "acme", "user": "ann"}
    assert (await agent.check(ann, cost=1_000, mode="peek")).status_code == 200  # every level has its lease
    await until(lambda: not agent.region.quotas.due())

    async def calls_of_a_check() -> int:
        before = agent.region.store.calls
        answer = await agent.check(ann)
        assert [each["quota"] for each in answer.json()["policies"]] == list(LEVELS)
        return agent.region.store.calls - before

    await eventually(calls_of_a_check, 1)  # the agent's own loops call the store once in a while


async def test_a_tenant_that_moves_to_another_plan_counts_there(world: World, agent: Agent) -> None:
    assert await asked(agent, "acme", "ann", 2) == {None: 2}
    before = agent.region.admission.policies
    assert (await world.admin.put("/v1/subscriptions/acme", json={"plan": "free"})).is_success
    await until(lambda: agent.region.admission.policies is not before)
    answer = await agent.check({"tenant": "acme", "user": "ann"})
    levels = {each["quota"]: each["limit"] for each in answer.json()["policies"]}
    assert levels == {"user": 5, "tenant": 8, "plan": 11, "everybody": 21}
