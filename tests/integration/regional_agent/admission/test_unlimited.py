"""A limit may be `unlimited`: the policy matches and admits, is shown in answers, and costs no call of the store."""

from typing import Any

import pytest

from protocol.units import MAX_UNITS
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

DOCUMENT: dict[str, Any] = {
    "plans": {"free": {}, "enterprise": {}},
    "default_plan": "free",
    "quotas": [
        {"name": "api", "kind": "rate", "limit": {"free": "3/hour, burst 6", "enterprise": "unlimited"}}
        | {"sharing": "regional"},
        {"name": "jobs", "kind": "concurrency", "limit": {"free": 3, "enterprise": "unlimited"}},
        {"name": "all", "kind": "rate", "limit": "3/hour, burst 30", "sharing": "regional"},
    ],
    "policies": [
        {"name": "api", "match": {"route": "/v1/search*"}, "by": ["tenant"], "quota": "api"},
        {"name": "jobs", "match": {"route": "/v1/jobs"}, "by": ["tenant"], "quota": "jobs"},
        {"name": "all", "match": {"route": "/v1/search/all"}, "by": ["tenant"], "quota": "all"},
    ],
}
SEARCH = {"tenant": "acme", "route": "/v1/search", "method": "GET"}


@pytest.fixture
async def agent(world: World) -> Agent:
    assert (await world.admin.put("/v1/limits", json=DOCUMENT)).is_success
    put = await world.admin.put("/v1/subscriptions/acme", json={"plan": "enterprise"})
    assert put.is_success
    agent = await world.agent()
    await until(lambda: _plan(agent, "acme") == "enterprise")
    return agent


def _plan(agent: Agent, tenant: str) -> str | None:
    policies = agent.region.admission.policies
    return None if policies is None else policies._plan_of({"tenant": tenant})


async def test_an_unlimited_plan_admits_everything_without_a_call_of_the_store(agent: Agent) -> None:
    before = agent.region.store.calls
    for _ in range(20):
        answer = await agent.check(SEARCH, cost=1_000_000)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith(("ratelimit", "x-ratelimit"))]
        [policy] = answer.json()["policies"]
        assert (policy["policy"], policy["unlimited"], policy["remaining"]) == ("api", True, MAX_UNITS)
    assert agent.region.store.calls == before
    counts = agent.whole.metrics.checks.counts["allowed"]
    assert counts["api", ""] == 20


async def test_other_plans_and_other_policies_are_limited_as_ever(agent: Agent) -> None:
    free = SEARCH | {"tenant": "globex"}
    assert [(await agent.check(free)).status_code for _ in range(3)] == [200, 200, 429]
    both = SEARCH | {"route": "/v1/search/all"}
    answers = [await agent.check(both) for _ in range(11)]
    assert [each.status_code for each in answers] == [200] * 10 + [429]
    shown = {each["policy"]: each["unlimited"] for each in answers[0].json()["policies"]}
    assert shown == {"api": True, "all": False}
    denied = answers[-1].json()
    assert denied["denied_by"] == "all"
    assert {each["policy"]: each["allowed"] for each in denied["policies"]} == {"api": True, "all": False}
    assert answers[-1].headers["RateLimit"].startswith('"all";r=0')


async def test_unlimited_slots_need_no_hold_and_hold_nothing(agent: Agent) -> None:
    job = {"tenant": "acme", "route": "/v1/jobs", "method": "POST"}
    assert (await agent.check(job)).status_code == 200, "a check would need a hold if there was a limit"
    body = {"subject": job, "units": 1, "ttl_ms": 60_000}
    held = [await agent.http.post("/v1/holds", json=body | {"operation_id": f"o{n}"}) for n in range(5)]
    assert [each.status_code for each in held] == [201] * 5
    ended = await agent.http.post(f"/v1/holds/{held[0].json()['hold_id']}:release", json={})
    assert ended.is_success


async def test_an_override_lifts_a_limit_for_a_while(world: World, agent: Agent) -> None:
    free = SEARCH | {"tenant": "globex"}
    override = {"quota": "api", "subject": {"tenant": "globex"}, "limit": "unlimited", "reason": "their launch"}
    made = await world.admin.post("/v1/overrides", json=override)
    assert made.is_success, made.text
    policies = agent.region.admission
    await until(lambda: policies.policies is not None and policies.policies.unlimited_for(free) != ())
    assert {(await agent.check(free)).status_code for _ in range(10)} == {200}


async def test_it_is_admitted_while_the_store_is_away(agent: Agent) -> None:
    await agent.whole.store.close()
    answer = await agent.check(SEARCH)
    assert (answer.status_code, answer.json()["degraded"]) == (200, None)
    assert (await agent.check(SEARCH | {"tenant": "globex"})).status_code == 503
    both = await agent.check(SEARCH | {"route": "/v1/search/all"})
    assert {each["policy"]: each["allowed"] for each in both.json()["policies"]} == {"api": True, "all": False}


async def test_an_allowance_cannot_be_unlimited(world: World) -> None:
    limit = {"free": 5, "enterprise": "unlimited"}
    exports = {"name": "exports", "kind": "allowance", "period": "month", "limit": limit}
    answer = await world.admin.put("/v1/limits", json=DOCUMENT | {"quotas": [exports], "policies": []})
    assert answer.status_code == 422
    [fault] = answer.json()["invalid_parameters"]
    assert (fault["field"], fault["rule"]) == ("quotas[0].limit.enterprise", "unlimited")
    assert "the most that you would bill" in fault["reason"]
