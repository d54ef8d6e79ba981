"""Decisions of a real agent reach the log of its coordinator, and never wait for it."""

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from leasehold.cli.app import app
from regional_agent.decision_log import sender
from tests.integration.regional_agent.admission.test_shadows import trial
from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

SEARCH = {"tenant": "acme", "route": "/v1/search", "method": "get", "api_key": "ak_7"}


async def logged(world: World, is_enough: Any = bool, **only: Any) -> Any:
    """Wait until the log has what is expected, and return its answer."""
    async for _ in attempts():
        answer = (await world.admin.get("/v1/decisions", params=only)).json()
        if is_enough(answer["data"]):
            return answer
    raise AssertionError(f"the log has only {answer}")


async def log_all(world: World, **more: Any) -> None:
    document = (await world.admin.get("/v1/limits")).json()["document"]
    put = await world.admin.put("/v1/limits", json=document | {"decisions": {"admissions": "100%"}} | more)
    assert put.is_success, put.text


async def deny(agent: Agent, times: int = 1) -> None:
    """Use a rate up, and be denied so many times."""
    while (await agent.check(SEARCH)).status_code == 200:
        pass
    for _ in range(times - 1):
        assert (await agent.check(SEARCH)).status_code == 429


async def test_a_flood_of_denials_is_a_few_rows_that_add_up(world: World) -> None:
    agent = await world.agent()
    await deny(agent, 300)
    answer = await logged(world, lambda rows: sum(row["count"] for row in rows) == 300, outcome="denied")
    rows = answer["data"]
    assert len(rows) < 100
    assert {(row["reason"], row["policy"], row["key"]) for row in rows} == {("limit", "search", "api:tenant=acme")}
    assert rows[0]["subject"]["route"] == "/v1/search"
    [(epoch, *_)] = await world.epochs()
    assert (rows[0]["subject"]["method"], rows[0]["epoch"]) == ("GET", epoch)
    assert "ak_7" not in str(rows)
    assert any(row["latency_us"] is not None for row in rows), "the store decided the first one"
    assert answer["summary"]["denied"] == 300
    await the_command_says_why(world)


async def the_command_says_why(world: World) -> None:
    printed = await command(world, "--tenant", "acme", "--outcome", "denied")
    assert "300 denied of acme: 300 limit (policy search, quota api)." in printed
    assert "GET /v1/search" in printed
    assert "0 of 10 here, 30 in all" in printed
    assert json.loads(await command(world, "--tenant", "acme", "--json"))["summary"]["denied"] == 300


async def command(world: World, *words: str) -> str:
    """Run `leasehold decisions` in a thread, because the coordinator runs in this loop."""
    environment = {"LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": world.tokens["admin"], "COLUMNS": "250"}
    with capture_logs():  # of the coordinator, which writes where the command does
        done = await asyncio.to_thread(CliRunner().invoke, app, ["decisions", *words], env=environment)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.extended
async def test_admissions_are_logged_as_the_document_says(world: World) -> None:
    await log_all(world)
    agent = await world.agent()
    assert (await agent.check(EXPORT, cost=3, operation_id="order-17")).status_code == 200
    assert (await agent.check(EXPORT, cost=3, operation_id="order-17")).status_code == 200  # decided once
    hold = {"subject": EXPORT, "units": 5, "ttl_ms": 60_000, "operation_id": "render-1"}
    assert (await agent.http.post("/v1/holds", json=hold)).status_code == 201
    assert (await agent.check({"tenant": "acme", "route": "/v1/nowhere"})).status_code == 200
    answer = await logged(world, lambda rows: len(rows) == 3, tenant="acme")
    found = {(row["mode"], row["policy"], row["cost"], row["weight"]) for row in answer["data"]}
    assert found == {("enforce", "export", 3, 1.0), ("hold", "export", 5, 1.0), ("enforce", None, None, 1.0)}
    [by_operation] = (await logged(world, tenant="acme", operation_id="order-17"))["data"]
    assert (by_operation["cost"], by_operation["limit"]) == (3, 100)


async def test_blocks_and_shadow_denials_are_logged(world: World) -> None:
    await world.try_out(trial())
    block = {"field": "tenant", "value": "bcme", "reason": "abuse"}
    assert (await world.admin.post("/v1/blocks", json=block)).is_success
    agent = await world.agent()
    blocked = {"tenant": "bcme", "route": "/v1/search"}
    await until(lambda: agent.whole.admission.blocks is not None and agent.whole.admission.blocks.version)
    assert (await agent.check(blocked)).status_code == 429
    for _ in range(9):  # the shadow has five units
        assert (await agent.check({"tenant": "acme", "route": "/v1/nowhere"})).status_code == 200
    rows = (await logged(world, lambda rows: sum(row["count"] for row in rows) == 5))["data"]
    assert {(row["outcome"], row["policy"], row["reason"], row["tenant"]) for row in rows} == {
        ("denied", None, "blocked", "bcme"),
        ("shadow_denied", "trial", "limit", "acme"),
    }


async def test_denials_wait_while_the_coordinator_is_away_and_are_stored_once(world: World) -> None:
    agent = await world.agent()
    world.weather.swallows_replies_to.add("/decisions")
    await deny(agent, 3)
    await until(lambda: world.weather.swallowed >= 2)  # stored, and sent again
    world.weather.swallows_replies_to.clear()
    assert (await logged(world, lambda rows: sum(row["count"] for row in rows) == 3))["summary"]["denied"] == 3
    await until(lambda: agent.whole.recorder.take(1) == [])


@pytest.mark.extended
async def test_what_does_not_fit_is_counted_and_the_answer_tells(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_DECISIONS", 1)
    world.weather.swallows_requests = False
    agent = await world.agent(decision_log_max_bytes=65_536, decision_log_rows_per_second=2)
    world.weather.answers_for_it = lambda path, _: (503, b"") if path.endswith("/decisions") else None
    for number in range(12):
        subject = {"tenant": f"tenant-{number}", "route": "/v1/search"}
        assert (await agent.check(subject, cost=31)).status_code == 429  # above the burst
    world.weather.answers_for_it = None
    answer = await logged(world, lambda rows: len(rows) >= 2, outcome="denied")
    async for _ in attempts():
        if answer["summary"]["lost"] + answer["summary"]["denied"] == 12:
            break
        answer = (await world.admin.get("/v1/decisions", params={"outcome": "denied"})).json()
    assert answer["summary"]["lost"] + answer["summary"]["denied"] == 12
    assert answer["summary"]["lost"] >= 8


async def test_a_stopping_agent_sends_what_is_left(world: World) -> None:
    await deny(await world.agent())
    await world.agents.aclose()
    assert (await logged(world))["summary"]["denied"] == 1
