"""One request costs different units of different quotas, all or none, wherever it is decided."""

from typing import Any

import httpx
import pytest

from leasehold import RequestRejected
from tests.integration.client.test_middleware import engine_of
from tests.integration.regional_agent.world import DOCUMENT, IN_SHADOW, Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

CHAT = {"tenant": "acme", "route": "/v1/chat", "method": "POST"}
MORE: dict[str, list[dict[str, Any]]] = {
    "quotas": [
        {"name": "tokens", "kind": "allowance", "limit": 5_000, "period": "month", "report_within": "100ms"},
        {"name": "calls", "kind": "rate", "limit": "3/hour, burst 30", "sharing": "regional"},
        {"name": "prompts", "kind": "allowance", "limit": 100, "period": "month", "report_within": "100ms"},
    ],
    "policies": [
        {"name": "chat", "match": {"route": "/v1/chat"}, "by": ["tenant"], "quota": "calls"},
        {"name": "chat-tokens", "match": {"route": "/v1/chat"}, "by": ["tenant"], "quota": "tokens", "wait": "5s"},
        {"name": "prompt", "match": {"route": "/v1/prompts"}, "by": ["tenant"], "quota": "prompts", "wait": "5s"},
        {"name": "prompt-tokens", "match": {"route": "/v1/prompts"}, "by": ["tenant"], "quota": "tokens", "wait": "5s"},
    ],
}


@pytest.fixture
async def agent(world: World) -> Agent:
    await world.try_out(MORE)
    agent = await world.agent()
    await until(lambda: agent.region.admission.policies is not None and agent.region.admission.policies.version >= 2)
    return agent


def left(answer: httpx.Response) -> dict[str, int]:
    return {each["quota"]: each["remaining"] for each in answer.json()["policies"]}


def invalid(answer: httpx.Response) -> list[tuple[str, str]]:
    assert answer.status_code == 422, answer.text
    return [(each["field"], each["rule"]) for each in answer.json()["invalid_parameters"]]


async def hold(agent: Agent, route: str = "/v1/chat", **fields: Any) -> httpx.Response:
    body = {"subject": CHAT | {"route": route}, "ttl_ms": 60_000, "operation_id": "once"} | fields
    return await agent.http.post("/v1/holds", json=body)


async def commit(agent: Agent, hold_id: str, **fields: Any) -> httpx.Response:
    return await agent.http.post(f"/v1/holds/{hold_id}:commit", json=fields)


async def booked(world: World, quota: str, units: int) -> None:
    found = None
    async for _ in attempts():
        if (found := await world.usage(quota=quota)) == units:
            return
    raise AssertionError(found)


async def test_one_request_costs_one_call_and_many_tokens(world: World, agent: Agent) -> None:
    answer = await agent.check(CHAT, costs={"tokens": 900})
    assert answer.status_code == 200, answer.text
    assert left(answer) == {"calls": 9, "tokens": 4_100}
    answer = await agent.check(CHAT, cost=2, costs={"tokens": 100})
    assert left(answer) == {"calls": 7, "tokens": 4_000}, "`cost` is for the others"
    await booked(world, "tokens", 1_000)


async def test_all_quotas_are_charged_or_none(agent: Agent) -> None:
    assert left(await agent.check(CHAT, costs={"tokens": 1})) == {"calls": 9, "tokens": 4_999}
    denied = await agent.check(CHAT, costs={"tokens": 6_000})
    assert (denied.status_code, denied.json()["denied_by"]) == (429, "chat-tokens")
    denied = await agent.check(CHAT, costs={"calls": 10, "tokens": 1})
    assert (denied.status_code, denied.json()["denied_by"]) == (429, "chat")
    assert left(await agent.check(CHAT, mode="peek")) == {"calls": 9, "tokens": 4_999}


async def test_a_quota_that_is_not_in_the_document_is_refused_by_its_name(agent: Agent) -> None:
    assert invalid(await agent.check(CHAT, costs={"tokens": 5, "tokenz": 5})) == [("costs.tokenz", "known")]
    assert invalid(await hold(agent, costs={"tokenz": 5})) == [("costs.tokenz", "known")]
    for costs in ({}, {"tokens": 0}, {"tokens": 1.5}, {"Tokens": 1}):
        refused = await agent.check(CHAT, costs=costs)
        assert refused.status_code == 422
        assert all(each["field"].startswith("costs") for each in refused.json()["invalid_parameters"])
    other = await agent.check(CHAT, costs={"exports": 5})
    assert left(other) == {"calls": 9, "tokens": 4_999}, "a quota that the request does not meet is ignored"


async def test_costs_belong_to_the_body_of_an_operation(agent: Agent) -> None:
    for _ in range(2):
        answer = await agent.check(CHAT, costs={"tokens": 10}, operation_id="one")
        assert left(answer) == {"calls": 9, "tokens": 4_990}
    assert invalid(await agent.check(CHAT, costs={"tokens": 11}, operation_id="one")) == [("operation_id", "same_body")]
    assert invalid(await agent.check(CHAT, operation_id="one")) == [("operation_id", "same_body")]


async def test_each_check_of_a_batch_has_its_costs(agent: Agent) -> None:
    checks = [{"subject": CHAT, "costs": {"tokens": tokens}} for tokens in (10, 20, 20)]
    batch = {"checks": [*checks, {"subject": CHAT, "costs": {"nothing": 1}}, {"subject": CHAT}]}
    items = (await agent.http.post("/v1/check:batch", json=batch)).json()["items"]
    assert [item["status"] for item in items] == [200, 200, 200, 422, 200]
    last = {each["quota"]: each["remaining"] for each in items[-1]["answer"]["policies"]}
    assert last == {"calls": 6, "tokens": 4_949}


async def test_a_hold_reserves_and_commits_by_quota(world: World, agent: Agent) -> None:
    made = await hold(agent, costs={"tokens": 4_000})
    assert (made.status_code, made.json()["units"]) == (201, 0), made.text
    assert left(made) == {"calls": 9, "tokens": 1_000}, "one call, spent at once"
    denied = await agent.check(CHAT, costs={"tokens": 1_001})
    assert denied.json()["denied_by"] == "chat-tokens"
    hold_id = made.json()["hold_id"]
    for _ in range(2):
        done = (await commit(agent, hold_id, costs={"tokens": 900})).json()
        assert (done["state"], done["quotas"]) == ("committed", [{"quota": "tokens", "units": 4_000, "committed": 900}])
    refused = await commit(agent, hold_id, costs={"tokens": 901})
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/hold-ended")
    assert left(await agent.check(CHAT, mode="peek"))["tokens"] == 4_100
    await booked(world, "tokens", 900)


async def test_a_quota_that_a_commit_does_not_name_consumes_what_is_held(world: World, agent: Agent) -> None:
    hold_id = (await hold(agent, "/v1/prompts", units=1, costs={"tokens": 400})).json()["hold_id"]
    look = (await agent.http.get(f"/v1/holds/{hold_id}")).json()
    assert {each["quota"]: each["units"] for each in look["quotas"]} == {"prompts": 1, "tokens": 400}
    done = (await commit(agent, hold_id, costs={"tokens": 90})).json()
    assert {each["quota"]: each["committed"] for each in done["quotas"]} == {"prompts": 1, "tokens": 90}
    await booked(world, "prompts", 1)
    await booked(world, "tokens", 90)
    other = (await hold(agent, "/v1/prompts", costs={"tokens": 50}, operation_id="two")).json()["hold_id"]
    done = (await commit(agent, other, units=7, costs={"tokens": 60})).json()
    assert {each["quota"]: each["committed"] for each in done["quotas"]} == {"prompts": 7, "tokens": 60}
    await booked(world, "prompts", 8)


async def test_commits_and_holds_that_contradict_themselves_are_refused_by_their_field(agent: Agent) -> None:
    assert invalid(await hold(agent)) == [("units", "required")]
    hold_id = (await hold(agent, costs={"tokens": 40})).json()["hold_id"]
    assert invalid(await commit(agent, hold_id)) == [("units", "required")]
    assert invalid(await commit(agent, hold_id, costs={"calls": 1})) == [("costs.calls", "held")]
    assert invalid(await commit(agent, hold_id, costs={"tokens": 2**53 - 1})) == [("costs.tokens", "maximum")]
    assert (await agent.http.get(f"/v1/holds/{hold_id}")).json()["state"] == "open"
    assert invalid(await agent.check(CHAT, costs={"tokens": 2**53 - 1}, mode="adjust")) == [("costs.tokens", "maximum")]


async def test_a_shadow_counts_by_its_own_cost(world: World) -> None:
    shadow = {**IN_SHADOW["policies"][0], "match": {"route": "/v1/chat"}}
    more = {
        "quotas": [*MORE["quotas"], IN_SHADOW["quotas"][0]],
        "policies": [*MORE["policies"], shadow],
    }
    await world.try_out(more)
    agent = await world.agent()
    await until(lambda: agent.region.admission.policies is not None and agent.region.admission.policies.version >= 2)
    answer = await agent.check(CHAT, costs={"trial": 4, "tokens": 10})
    assert left(answer) == {"calls": 9, "tokens": 4_990, "trial": 1}


async def test_an_outage_counts_by_costs_as_well(world: World) -> None:
    local = {"name": "wide", "match": {"route": "/v1/wide"}, "by": ["tenant"], "quota": "api", "local_fraction": 1.0}
    await world.try_out({"quotas": [], "policies": [local | {"on_store_failure": "local"}]})
    agent = await world.agent()
    await until(lambda: agent.region.admission.policies is not None and agent.region.admission.policies.version >= 2)
    agent.region.breaker.allows_calls = lambda: False  # type: ignore[method-assign]
    answer = await agent.check({"tenant": "acme", "route": "/v1/wide"}, costs={"api": 4})
    assert (answer.json()["degraded"], left(answer)) == ("local", {"api": 6})


async def test_the_engine_and_the_middleware_know_costs(world: World) -> None:
    await world.try_out(MORE)
    async with engine_of(world) as engine:
        admission = engine.region.cells[0].admission
        await until(lambda: admission.policies is not None and admission.policies.version >= 2)
        decision = await engine.check(CHAT, costs={"tokens": 900})
        assert {each.quota: each.remaining for each in decision.policies} == {"calls": 9, "tokens": 4_100}
        async with engine.holding(CHAT, costs={"tokens": 4_000}) as held:
            await held.commit(costs={"tokens": 100})
        decision = await engine.check(CHAT, mode="peek")
        assert {each.quota: each.remaining for each in decision.policies} == {"calls": 8, "tokens": 4_000}
        with pytest.raises(RequestRejected) as refused:
            await engine.check(CHAT, costs={"tokenz": 1})
        assert refused.value.problem["invalid_parameters"][0]["field"] == "costs.tokenz"


async def test_limit_is_the_whole_and_share_the_regions_part(agent: Agent) -> None:
    answer = await agent.check(CHAT, costs={"tokens": 1_000})
    said = {each["quota"]: (each["limit"], each["share"]) for each in answer.json()["policies"]}
    assert said["calls"] == (30, 10)
    limit, share = said["tokens"]
    assert limit == 5_000
    assert share <= left(answer)["tokens"] == 4_000
    assert '"chat";q=30;' in answer.headers["RateLimit-Policy"]
    reports = await agent.check({"tenant": "acme", "route": "/v1/reports"}, mode="peek")
    [slots] = reports.json()["policies"]
    assert (slots["limit"], slots["share"], slots["remaining"]) == (6, 2, 2)
    assert DOCUMENT["quotas"][2]["limit"] == 6
