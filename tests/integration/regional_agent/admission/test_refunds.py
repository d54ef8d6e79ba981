"""Refunds give units of rates back, and of nothing else."""

import pytest

from leasehold.engine import Engine
from tests.integration.client.test_middleware import engine_of
from tests.integration.regional_agent.admission.test_costs import MORE, invalid
from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

SEARCH = {"tenant": "acme", "route": "/v1/search"}
CHAT = {"tenant": "acme", "route": "/v1/chat"}


@pytest.fixture
async def agent(world: World) -> Agent:
    return await world.agent()


async def test_a_refund_is_given_once_and_not_above_the_limit(agent: Agent) -> None:
    assert (await agent.check(SEARCH, cost=10)).status_code == 200
    assert [(await agent.check(SEARCH)).status_code for _ in range(2)] == [429, 429]
    for _ in range(2):
        answer = await agent.check(SEARCH, cost=3, mode="refund", operation_id="back")
        assert (answer.status_code, answer.json()["policies"][0]["remaining"]) == (200, 3)
    assert (await agent.check(SEARCH)).status_code == 200, "no denial from before is repeated"
    assert (await agent.check(SEARCH, cost=100, mode="refund")).json()["policies"][0]["remaining"] == 10
    metrics = (await agent.http.get("/metrics")).text
    assert 'leasehold_refunds_total{policy="search"} 3.0' in metrics
    assert 'leasehold_checks_total{answer="allowed",policy="search",reason=""} 2.0' in metrics, "a refund is no check"


async def test_allowances_and_slots_are_refused_by_name(agent: Agent) -> None:
    refused = await agent.check(EXPORT, mode="refund")
    assert invalid(refused) == [("mode", "refundable")]
    assert "POST /v1/adjustments" in refused.json()["detail"]
    refused = await agent.check({"tenant": "acme", "route": "/v1/reports"}, mode="refund")
    assert invalid(refused) == [("mode", "refundable")]
    assert "release its hold" in refused.json()["detail"]


async def test_costs_choose_what_is_refunded(world: World) -> None:
    await world.try_out(MORE)
    agent = await world.agent()
    await until(lambda: agent.region.admission.policies is not None and agent.region.admission.policies.version >= 2)
    assert (await agent.check(CHAT, costs={"calls": 4, "tokens": 10})).status_code == 200
    assert invalid(await agent.check(CHAT, mode="refund")) == [("mode", "refundable")]
    answer = await agent.check(CHAT, costs={"calls": 3}, mode="refund")
    assert [(each["quota"], each["remaining"]) for each in answer.json()["policies"]] == [("calls", 9)]


async def test_a_batch_and_a_blocked_subject_are_refunded_as_well(world: World, agent: Agent) -> None:
    assert (await agent.check(SEARCH, cost=10)).status_code == 200
    await world.admin.post("/v1/blocks", json={"field": "tenant", "value": "acme", "reason": "x"})
    await until(lambda: bool(agent.region.admission.blocks))
    checks = [{"subject": SEARCH, "cost": 2, "mode": "refund"}, {"subject": EXPORT, "mode": "refund"}]
    items = (await agent.http.post("/v1/check:batch", json={"checks": checks})).json()["items"]
    assert [item["status"] for item in items] == [200, 422]
    assert items[0]["answer"]["policies"][0]["remaining"] == 2


async def test_an_outage_refunds_what_it_counted(world: World) -> None:
    agent = await world.agent()
    wide = {"tenant": "acme", "route": "/v1/local"}
    agent.region.breaker.allows_calls = lambda: False  # type: ignore[method-assign]
    assert (await agent.check(wide, cost=5)).json()["degraded"] == "local"
    assert (await agent.check(wide)).status_code == 429
    answer = await agent.check(wide, cost=90, mode="refund")
    assert (answer.status_code, answer.json()["policies"][0]["remaining"]) == (200, 5)
    assert (await agent.check(SEARCH, mode="refund")).status_code == 503, "this policy fails closed"


async def test_a_refund_of_a_sliced_rate_is_exact(world: World) -> None:
    limit = {"name": "hot", "kind": "rate", "limit": "3/hour, burst 2400", "sharing": "regional"}
    policy = {"name": "hot", "match": {"route": "/v1/hot"}, "by": ["tenant"], "quota": "hot"}
    await world.try_out({"quotas": [limit], "policies": [policy]})
    hot = {"tenant": "acme", "route": "/v1/hot"}
    async with engine_of(world) as engine:
        admission = engine.region.cells[0].admission
        await until(lambda: admission.policies is not None and admission.policies.version >= 2)
        taken = await admit_all(engine, hot)
        assert taken == 800
        assert engine.region.cells[0].slices.taken, "units were taken as slices"
        assert (await engine.check(hot, cost=300, mode="refund")).policies[0].remaining == 300
        assert await admit_all(engine, hot) == 300
        assert (await engine.check(hot, cost=5_000, mode="refund")).policies[0].remaining == 800
        assert await admit_all(engine, hot) == 800


async def admit_all(engine: Engine, subject: dict[str, str]) -> int:
    admitted = 0
    while (await engine.check(subject)).allowed:
        admitted += 1
    return admitted
