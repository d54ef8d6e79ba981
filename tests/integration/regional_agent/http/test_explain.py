"""`POST /v1/explain` and `leasehold check` tell which policies match a request, and why the others do not."""

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from leasehold.cli.app import app
from tests.integration.client.test_clients import served_agent
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

CHAT = {"tenant": "acme", "route": "//v1/chat/?stream=1", "method": "post", "labels": {"model": "small"}}
POLICIES: list[dict[str, Any]] = [
    {"name": "chat", "match": {"route": "/v1/chat/", "method": "POST"}, "by": ["tenant", "labels.model"]},
    {"name": "get", "match": {"route": "/v1/chat", "method": "GET"}, "by": ["route", "method"]},
    {"name": "large", "match": {"labels": {"model": ["large", "huge"]}}, "by": ["labels.model"]},
    {"name": "office", "match": {"ip": "10.0.0.0/8", "route_class": "heavy"}, "by": ["ip"]},
    {"name": "person", "match": {"route": "/v1/chat"}, "by": ["user"], "quota": "trial", "shadow": True},
]
MORE: dict[str, Any] = {
    "route_classes": {"heavy": [{"route": "/v1/reports*"}]},
    "quotas": [*DOCUMENT["quotas"], {"name": "trial", "kind": "rate", "limit": "10/second"}],
    "policies": [*DOCUMENT["policies"], *({"quota": "api"} | policy for policy in POLICIES)],
}


async def put(world: World, **more: Any) -> None:
    assert (await world.admin.put("/v1/limits", json=DOCUMENT | MORE | more)).is_success


async def explained(agent: Agent, subject: dict[str, Any], **check: Any) -> dict[str, Any]:
    answer = await agent.http.post("/v1/explain", json={"subject": subject, **check})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_each_policy_says_what_the_check_costs(world: World) -> None:
    await put(world)
    agent = await world.agent()

    async def costs(**check: Any) -> dict[str, int]:
        found = (await explained(agent, CHAT, **check))["policies"]
        return {each["policy"]: each["cost"] for each in found if each["policy"] in ("chat", "export", "person")}

    assert await costs() == {"chat": 1, "export": 1, "person": 1}
    assert await costs(cost=3) == {"chat": 3, "export": 3, "person": 3}
    assert await costs(cost=3, costs={"api": 900}) == {"chat": 900, "export": 3, "person": 3}
    refused = await agent.http.post("/v1/explain", json={"subject": CHAT, "costs": {"apy": 1}})
    assert (refused.status_code, refused.json()["invalid_parameters"][0]["field"]) == (422, "costs.apy")


async def test_each_policy_says_whether_it_matches_and_which_conditions_fail(world: World) -> None:
    await put(world)
    agent = await world.agent()
    found = await explained(agent, CHAT)
    read = {"tenant": "acme", "route": "/v1/chat", "method": "POST", "labels.model": "small"}
    assert (found["subject"], found["route_class"], found["plan"]) == (read, "*", "free")
    assert (found["unmatched"], found["blocked_by"]) == (None, None)
    assert [each["policy"] for each in found["policies"]] == [each["name"] for each in MORE["policies"]]
    by_name = {each["policy"]: each for each in found["policies"]}
    unmet = {
        name: [(each["condition"], each["wanted"], each["found"]) for each in by_name[name]["unmet"]]
        for name in ("chat", "get", "large", "office", "export", "person")
    }
    assert unmet == {
        "chat": [],
        "get": [("match.method", "GET", "POST")],
        "large": [("match.labels.model", ["large", "huge"], "small")],
        "office": [("match.route_class", "heavy", "*"), ("match.ip", "10.0.0.0/8", None)],
        "export": [("match.route", "/v1/exports", "/v1/chat")],
        "person": [],
    }
    assert [name for name, each in by_name.items() if each["matches"]] == ["chat", "person"]
    assert by_name["chat"]["key"] == "api:tenant=acme,labels.model=small"
    assert by_name["get"]["key"] == "api:route=%2Fv1%2Fchat,method=POST"
    assert (by_name["export"]["key"], by_name["export"]["invalid"]) == ("exports:tenant=acme", None)
    assert (by_name["person"]["key"], by_name["person"]["shadow"]) == (None, True)
    assert by_name["person"]["invalid"] == "subject.user: it is missing, and the policy counts by it"


async def test_nothing_is_consumed(world: World) -> None:
    await put(world)
    agent = await world.agent()
    first = (await agent.check(CHAT)).json()["policies"][0]["remaining"]
    for _ in range(5):
        await explained(agent, CHAT)
        await explained(agent, EXPORT)
    assert (await agent.check(CHAT)).json()["policies"][0]["remaining"] == first - 1


async def test_what_matches_nothing_and_what_is_blocked_is_said(world: World) -> None:
    await put(world, unmatched="warn")
    agent = await world.agent()
    nowhere = await explained(agent, {"tenant": "acme", "route": "/v1/nowhere"})
    assert (nowhere["unmatched"], any(each["matches"] for each in nowhere["policies"])) == ("warn", False)
    block = {"field": "tenant", "value": "acme", "reason": "test"}
    assert (await world.admin.post("/v1/blocks", json=block)).is_success
    await until(lambda: agent.whole.admission.blocks)
    assert (await explained(agent, EXPORT))["blocked_by"] == "tenant"
    refused = await agent.http.post("/v1/explain", json={"subject": {"color": "red"}})
    assert (refused.status_code, refused.json()["invalid_parameters"][0]["field"]) == (422, "subject.color")


async def run(url: str, *words: str) -> Result:
    """Run a command in a thread, because the agent runs in this loop."""
    environment = {"LEASEHOLD_AGENT_URL": url, "COLUMNS": "200"}
    return await asyncio.to_thread(CliRunner().invoke, app, ["check", *words], env=environment)


async def test_the_command_checks_and_explains(world: World) -> None:
    await put(world)
    with capture_logs():  # command and agent share this process's output
        async with served_agent(world) as url:
            words = ("tenant=acme", "route=/v1/chat/", "method=post", "labels.model=small")
            told = await run(url, *words, "--explain")
            found = json.loads((await run(url, *words, "--explain", "--json")).stdout)
            allowed = await run(url, *words, "--cost", "10")
            denied = await run(url, *words)
            peeked = json.loads((await run(url, "tenant=acme", "route=/v1/search", "--peek", "--json")).stdout)
            wrong = await run(url, "tenant", "--explain")
            refused = await run(url, "color=red")
    assert told.exit_code == 0, told.output
    assert "read as tenant=acme route=/v1/chat method=POST labels.model=small; route class *, plan free" in told.stdout
    assert "match.labels.model is large, huge, not small" in told.stdout
    assert found["subject"]["labels.model"] == "small"
    assert (allowed.exit_code, allowed.stdout.splitlines()[0]) == (0, "allowed")
    assert (denied.exit_code, denied.stdout.startswith("denied: policy 'chat' denies this request")) == (1, True)
    assert peeked["policies"][0]["remaining"] == 10
    assert (wrong.exit_code, "labels.model=large" in wrong.stderr) == (1, True)
    assert (refused.exit_code, "subject.color" in refused.stderr) == (1, True)
    unanswered = await run("http://127.0.0.1:1", "tenant=acme")
    assert (unanswered.exit_code, "http://127.0.0.1:1 does not answer" in unanswered.stderr) == (1, True)
