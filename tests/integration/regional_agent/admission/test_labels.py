"""Policies match requests by the labels of their services, and count by them."""

from typing import Any

import pytest

from leasehold import RequestRejected
from leasehold.engine import Engine
from tests.integration.regional_agent.world import DOCUMENT, Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"tenant": "acme", "route": "/v1/chat", "method": "POST"}
LARGE, SMALL = ({"labels": {"model": model, "team": "research"}} for model in ("large", "small"))
POLICIES: list[dict[str, Any]] = [
    {"name": "per-model", "match": {"route": "/v1/chat"}, "by": ["tenant", "labels.model"], "quota": "api"},
    {"name": "large", "match": {"labels": {"model": ["large", "huge"]}}, "by": ["labels.team"], "quota": "scarce"},
    {"name": "tokens", "match": {"route": "/v1/tokens"}, "by": ["tenant", "labels.model"], "quota": "exports"},
    {"name": "tries", "match": {"route": "/v1/chat"}, "by": ["labels.model"], "quota": "trial", "shadow": True},
]
QUOTAS = [
    {"name": "scarce", "kind": "rate", "limit": "3/hour, burst 12", "sharing": "regional"},
    {"name": "trial", "kind": "rate", "limit": "3/hour, burst 6", "sharing": "regional"},
]


@pytest.fixture
async def agent(world: World) -> Agent:
    document = DOCUMENT | {
        "quotas": [*DOCUMENT["quotas"], *QUOTAS],
        "policies": [*DOCUMENT["policies"], *POLICIES],
    }
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    return await world.agent()


def remaining(answer: Any) -> dict[str, int]:
    return {each["policy"]: each["remaining"] for each in answer.json()["policies"]}


async def test_each_value_of_a_label_has_its_own_quota_and_labels_select_policies(agent: Agent) -> None:
    for left in (9, 8, 7):
        assert remaining(await agent.check(CHAT | SMALL)) == {"per-model": left, "tries": max(0, left - 8)}
    assert remaining(await agent.check(CHAT | LARGE)) == {"per-model": 9, "large": 3, "tries": 1}
    for left in (2, 1, 0):
        assert remaining(await agent.check(CHAT | LARGE))["large"] == left
    denied = await agent.check(CHAT | LARGE)
    assert (denied.status_code, denied.json()["denied_by"]) == (429, "large")
    assert (await agent.check(CHAT | {"labels": {"model": "huge", "team": "sales"}})).status_code == 200
    assert remaining(await agent.check(CHAT | SMALL))["per-model"] == 6, "nothing was taken by the denied request"


async def test_batches_count_by_labels(agent: Agent) -> None:
    checks = [{"subject": CHAT | labels} for labels in (SMALL, LARGE, SMALL, {})]
    items = (await agent.http.post("/v1/check:batch", json={"checks": checks})).json()["items"]
    assert [item["status"] for item in items] == [200, 200, 200, 422]
    assert [item["answer"]["policies"][0]["remaining"] for item in items[:3]] == [9, 9, 8]
    assert items[3]["problem"]["invalid_parameters"][0]["field"] == "subject.labels.model"


async def test_a_hold_is_booked_under_the_key_of_its_label(world: World, agent: Agent) -> None:
    subject = {"tenant": "acme", "route": "/v1/tokens"} | LARGE
    body = {"subject": subject, "units": 7, "ttl_ms": 60_000, "operation_id": "once"}
    hold = (await agent.http.post("/v1/holds", json=body)).json()
    again = (await agent.http.post("/v1/holds", json=body)).json()
    assert again["hold_id"] == hold["hold_id"]
    other = await agent.http.post("/v1/holds", json=body | {"subject": subject | SMALL})
    assert (other.status_code, other.json()["type"]) == (422, "/problems/operation-conflict")
    assert (await agent.http.post(f"/v1/holds/{hold['hold_id']}:commit", json={"units": 5})).status_code == 200

    async for _ in attempts():
        if await world.usage(quota_key="exports:tenant=acme,labels.model=large") == 5:
            break
    assert (await world.quota("exports:tenant=acme,labels.model=large"))["consumed"] == 5


async def test_an_override_gives_one_label_another_limit(world: World, agent: Agent) -> None:
    version = agent.whole.admission.policies.version  # type: ignore[union-attr]
    override = {"quota": "api", "subject": {"labels.model": "large"}, "limit": "3/hour, burst 3", "reason": "scarce"}
    assert (await world.admin.post("/v1/overrides", json=override)).status_code == 201
    await until(lambda: agent.whole.admission.policies.version > version)  # type: ignore[union-attr]
    assert remaining(await agent.check(CHAT | LARGE))["per-model"] == 0
    assert remaining(await agent.check(CHAT | SMALL))["per-model"] == 9
    unknown = await world.admin.post("/v1/overrides", json=override | {"subject": {"labels.color": "red"}})
    assert (unknown.status_code, unknown.json()["invalid_parameters"][0]["field"]) == (422, "subject")


async def test_an_engine_takes_labels_and_tells_them_apart(world: World, agent: Agent) -> None:
    engine = Engine(world.settings("us-east"))
    async with engine.running():
        left = [(await engine.check(CHAT | labels)).policies[0].remaining for labels in (SMALL, SMALL, LARGE, SMALL)]
        with pytest.raises(RequestRejected, match="labels"):
            await engine.check(CHAT | {"labels": {"Model": "large"}})
    assert left == [9, 8, 9, 7]
    assert remaining(await agent.check(CHAT | SMALL))["per-model"] == 6


@pytest.mark.parametrize(
    ("labels", "field", "rule"),
    [
        ({f"l{n}": "x" for n in range(17)}, "subject.labels", "max_length"),
        ({"Model": "x"}, "subject.labels.Model", "pattern"),
        ({"m" * 33: "x"}, f"subject.labels.{'m' * 33}", "pattern"),
        ({"model": ""}, "subject.labels.model", "min_length"),
        ({"model": "x" * 257}, "subject.labels.model", "max_length"),
        ({"model": 7}, "subject.labels.model", "type"),
        ({"model": "a\nb"}, "subject.labels.model", "characters"),
        (["model"], "subject.labels", "type"),
    ],
)
async def test_labels_are_bounded(agent: Agent, labels: Any, field: str, rule: str) -> None:
    refused = await agent.check(CHAT | {"labels": labels})
    fault = refused.json()["invalid_parameters"][0]
    assert (refused.status_code, fault["field"], fault["rule"]) == (422, field, rule)


async def test_labels_that_no_policy_reads_change_nothing(agent: Agent) -> None:
    many = {f"l{n}": "é\n" * 100 for n in range(15)} | {"model": "small"}
    assert remaining(await agent.check(CHAT | {"labels": many}))["per-model"] == 9
    assert remaining(await agent.check(CHAT | SMALL))["per-model"] == 8


async def test_a_block_on_a_label_is_refused(world: World) -> None:
    refused = await world.admin.post("/v1/blocks", json={"field": "labels.model", "value": "large", "reason": "x"})
    assert (refused.status_code, refused.json()["invalid_parameters"][0]["field"]) == (422, "field")
