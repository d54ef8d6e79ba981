"""A denial has its reason and the time to retry in the body, the headers, the problem's text and the metrics."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from protocol.check import Check, Subject
from tests.integration.regional_agent.store_outage.test_failures import Store, its_store, quiet_agent
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, World
from tests.waiting import attempts, until

__all__ = ["its_store"]  # a fixture

pytestmark = pytest.mark.anyio

SEARCH = {"tenant": "acme", "route": "/v1/search"}
REPORT = {"tenant": "acme", "route": "/v1/reports"}
DAY_MS = 24 * 3_600_000


def denial(answer: httpx.Response, status: int = 429) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    assert body["policies"], body
    return body


def reason(answer: httpx.Response) -> str | None:
    body: dict[str, Any] = answer.json()
    found: list[str | None] = [each["reason"] for each in body["policies"] if each["policy"] == body["denied_by"]]
    return found[0] if found else None


async def counted(agent: Agent, policy: str, why: str) -> float:
    text = (await agent.http.get("/metrics")).text
    name = f'leasehold_checks_total{{answer="denied",policy="{policy}",reason="{why}"}} '
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)), 0)


async def until_reason(agent: Agent, why: str, **fields: Any) -> httpx.Response:
    answer = None
    async for _ in attempts():
        answer = await agent.check(**fields)
        if answer.status_code != 200 and reason(answer) == why:
            return answer
    raise AssertionError(answer and answer.text)


async def test_an_exceeded_rate_is_a_limit(world: World) -> None:
    agent = await world.agent()
    assert (await agent.check(SEARCH, cost=10)).status_code == 200
    denied = await agent.check(SEARCH)
    assert reason(denied) == "limit"
    assert denied.json()["type"] == "/problems/quota-exceeded"
    assert await counted(agent, "search", "limit") == 1
    assert (await agent.check(SEARCH, mode="peek")).json()["policies"][0]["reason"] == "limit"


@pytest.mark.parametrize("subject", [EXPORT, SEARCH], ids=["allowance", "rate"])
async def test_a_cost_above_the_limit_can_never_pass(world: World, subject: dict[str, str]) -> None:
    agent = await world.agent()
    denied = await agent.check(subject, cost=101)
    body = denial(denied)
    assert (reason(denied), body["retry_after_ms"]) == ("never", None)
    assert body["policies"][0]["retry_after_ms"] is None
    assert "Retry-After" not in denied.headers
    assert "t=" not in denied.headers["RateLimit"]
    assert body["type"] == "/problems/cost-above-limit"
    assert "ask again" not in body["detail"]
    batch = (await agent.http.post("/v1/check:batch", json={"checks": [{"subject": subject, "cost": 101}]})).json()
    assert batch["items"][0]["answer"]["policies"][0]["reason"] == "never"


async def test_a_hold_above_the_limit_and_one_above_all_slots_can_never_be_granted(world: World) -> None:
    agent = await world.agent()
    for subject, units in ((EXPORT, 101), (REPORT, 1)):
        quotas = [*DOCUMENT["quotas"][:2], DOCUMENT["quotas"][2] | {"limit": 0}]
        assert (await world.admin.put("/v1/limits", json=DOCUMENT | {"quotas": quotas})).is_success
        await until(lambda: agent.whole.admission.policies is not None and agent.whole.admission.policies.version > 4)
        wanted = {"subject": subject, "units": units, "ttl_ms": 1_000, "operation_id": f"o{units}"}
        denied = await agent.http.post("/v1/holds", json=wanted)
        assert (reason(denied), denied.json()["retry_after_ms"]) == ("never", None)
        assert "Retry-After" not in denied.headers


async def test_retry_after_of_a_spent_limit_is_the_end_of_the_period(world: World) -> None:
    agent = await world.agent()
    for _ in range(10):
        assert (await agent.check(cost=10)).status_code == 200
    denied = await until_reason(agent, "limit")
    body = denial(denied)
    assert body["retry_after_ms"] == body["policies"][0]["reset_ms"] > 1_000
    assert (body["policies"][0]["remaining"], body["type"]) == (0, "/problems/quota-exceeded")


async def test_retry_after_of_held_units_is_the_end_of_the_hold(world: World) -> None:
    agent = await world.agent()
    await agent.lease(100)
    hold = {"subject": EXPORT, "units": 100, "ttl_ms": 40_000, "operation_id": "one"}
    assert (await agent.http.post("/v1/holds", json=hold)).status_code == 201
    body = denial(await until_reason(agent, "limit"))
    assert 0 < body["retry_after_ms"] <= 40_000
    assert body["policies"][0]["reset_ms"] > 40_000


async def test_a_partitioned_region_denies_with_that_reason_and_without_waiting(world: World) -> None:
    agent, other = await world.agent(), await world.agent("eu-west")
    await agent.lease(10)
    world.weather.swallows_requests = True
    denied = await until_reason(agent, "cut_off")
    body = denial(denied)
    assert body["type"] == "/problems/cut-off"
    assert "cut off from the coordinator" in body["detail"]
    assert "Quota exceeded" not in denied.text
    assert (body["policies"][0]["remaining"], body["retry_after_ms"]) == (0, 1_000)
    assert await counted(agent, "export", "cut_off") >= 1
    waits = agent.whole.metrics.waits._value.get()
    answers = await asyncio.gather(*(agent.check({**EXPORT, "tenant": f"t{n}"}) for n in range(20)))
    assert {(each.status_code, reason(each)) for each in answers} == {(429, "cut_off")}
    assert agent.whole.metrics.waits._value.get() == waits, "each would have waited for five seconds"
    assert (await other.check(mode="peek")).status_code in (200, 429)
    world.weather.swallows_requests = False
    async for _ in attempts():
        if (await agent.check({**EXPORT, "tenant": "t1"})).status_code == 200:
            return
    raise AssertionError("the region is never reached again")


async def test_a_waiting_request_is_answered_early_when_its_region_is_partitioned(world: World) -> None:
    """The policy lets a request wait for a minute; the test would time out if it did."""
    policies = [DOCUMENT["policies"][0] | {"wait": "10m"}, *DOCUMENT["policies"][1:]]
    assert (await world.admin.put("/v1/limits", json=DOCUMENT | {"policies": policies})).is_success
    agent = await world.agent()
    world.weather.swallows_requests = True
    async with asyncio.timeout(60):
        denied = await agent.check()
    assert reason(denied) == "cut_off"


async def test_a_drained_region_denies_with_that_reason(world: World) -> None:
    agent = await world.agent()
    assert (await agent.check()).status_code == 200
    assert (await world.admin.put("/v1/regions/us-east", json={"status": "draining"})).is_success
    denied = await until_reason(agent, "drained")
    body = denial(denied)
    assert (body["retry_after_ms"], body["policies"][0]["remaining"]) == (5_000, 0)
    assert body["type"] == "/problems/region-drained"
    assert (await world.admin.put("/v1/regions/us-east", json={"status": "active"})).is_success
    async for _ in attempts():
        if (await agent.check()).status_code == 200:
            return
    raise AssertionError("it is drained for ever")


async def test_a_store_outage_is_the_reason_of_a_denial(world: World, its_store: Store) -> None:
    agent = await quiet_agent(world, store_url=its_store.url)
    its_store.stall()
    closed = await until_reason(agent, "store", subject=SEARCH)
    assert denial(closed, 503)["type"] == "/problems/store-unavailable"
    local = await until_reason(agent, "store", subject={"tenant": "acme", "route": "/v1/local"})
    assert (local.status_code, local.json()["policies"][0]["degraded"]) == (429, "local")
    opened = await agent.check({"tenant": "acme", "route": "/v1/open"})
    assert (opened.status_code, opened.json()["policies"][0]["degraded"]) == (200, "open")
    assert "RateLimit" not in opened.headers
    assert await counted(agent, "search", "store") >= 1
    its_store.go_on()
    await world.agents.aclose()


async def test_a_central_quota_without_the_coordinator_is_denied_as_partitioned(world: World) -> None:
    quotas = [{"name": "c", "kind": "allowance", "limit": 10, "period": "month", "mode": "central"}]
    policies = [{"name": "c", "match": {"route": "/c"}, "by": ["tenant"], "quota": "c"}]
    await world.try_out({"quotas": quotas, "policies": policies})
    agent = await world.agent()
    asked = {"tenant": "acme", "route": "/c"}
    async for _ in attempts():  # a busy coordinator answers too late, and then nothing was consumed
        if (await agent.check(asked)).status_code == 200:
            break
    world.weather.swallows_requests = True
    denied = await until_reason(agent, "cut_off", subject=asked)
    assert denial(denied, 503)["type"] == "/problems/coordinator-unavailable"


async def test_a_shadow_policy_has_the_reason_of_its_denial(world: World) -> None:
    await world.try_out()
    agent = await world.agent()
    verdict = await agent.whole.admission.decide(Check(subject=msgspec.convert(SEARCH, Subject), cost=10))
    told = {each.policy: each for each in verdict.answer.policies}
    assert (told["trial"].allowed, told["trial"].reason) == (False, "never")
    assert (told["search"].allowed, told["search"].reason) == (True, None)
