"""`leasehold period` works for finance, against a coordinator whose month has ended."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from coordinator.access.issue_token import issue_token
from coordinator.periods.close import continue_closing
from leasehold.cli.app import app
from tests.integration.coordinator.agent_harness import EXPORTS, PERIOD, Agent, AgentHarness
from tests.integration.coordinator.fixtures import NOON
from tests.integration.coordinator.periods.test_close import GRACE, NEXT, in_december, pool, use

pytestmark = pytest.mark.anyio
Typed = Callable[..., Coroutine[Any, Any, Result]]


@pytest.fixture
async def typed(agent_harness: AgentHarness) -> AsyncIterator[Typed]:
    token = (await issue_token(agent_harness.owner, ["usage:read", "period:close"], "", NOON)).token
    with capture_logs():  # command and coordinator share this process's output
        async with agent_harness.served() as url:

            async def type_(*words: str, stdin: str = "") -> Result:
                environment = {"LEASEHOLD_URL": url, "LEASEHOLD_TOKEN": token, "COLUMNS": "200"}
                return await asyncio.to_thread(
                    CliRunner().invoke, app, ("period", *words), input=stdin, env=environment
                )

            yield type_


async def test_a_month_is_shown_confirmed_and_closed(agent_harness: AgentHarness, agent: Agent, typed: Typed) -> None:
    await use(agent_harness, agent)
    await in_december(agent_harness, in_suspense=True)
    shown = await typed("show", PERIOD)
    assert shown.exit_code == 0, shown.output
    assert "its accounts: balanced" in shown.stdout
    assert [line.split()[:4] for line in shown.stdout.splitlines()][-1] == [EXPORTS, "us-east", "0", "3"]
    refused = await typed("close", PERIOD, "-y")
    assert (refused.exit_code, f"suspense: 3 of {EXPORTS} in us-east, epoch {agent.epoch}: " in refused.stderr) == (
        1,
        True,
    )
    tried = await typed("close", PERIOD, "--carry-suspense", "--dry-run")
    assert (tried.exit_code, "waits for grace" in tried.stdout) == (0, True)
    assert f"is to be carried: 3 of {EXPORTS} in us-east ({PERIOD})" in tried.stdout
    no = await typed("close", PERIOD, "--carry-suspense", stdin="n\n")
    assert (no.exit_code, "nothing was changed" in no.stderr) == (1, True)
    assert await agent_harness.one("SELECT state FROM period") == "open"
    begun = await typed("close", PERIOD, "--carry-suspense", stdin="y\n")
    assert (begun.exit_code, f"{PERIOD} is closing; it closes by itself" in begun.stdout) == (0, True)
    waiting = asyncio.create_task(typed("close", PERIOD, "--carry-suspense", "--wait", "-y"))
    agent_harness.clock.move(minutes=16)
    await continue_closing(agent_harness.app.state.coordinator.database, agent_harness.clock, GRACE)
    closed = await asyncio.wait_for(waiting, 30)
    assert (closed.exit_code, f"{PERIOD} is closed: " in closed.stdout) == (0, True), closed.output
    assert await pool(agent_harness, NEXT) == {"suspense_carried_in": 3, "suspense_carried": 3}
    again = await typed("close", PERIOD, "--json")
    assert json.loads(again.stdout)["period"]["state"] == "closed"


async def test_periods_are_listed(agent_harness: AgentHarness, agent: Agent, typed: Typed) -> None:
    await use(agent_harness, agent)
    listed = await typed("list")
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [[PERIOD, "open"]]
    assert [each["id"] for each in json.loads((await typed("list", "--json")).stdout)] == [PERIOD]
    shown = json.loads((await typed("show", PERIOD, "--json")).stdout)
    assert (shown["period"]["id"], shown["reconciliation"]["status"]) == (PERIOD, "balanced")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("close", PERIOD, "-y"), "not_over: it ends at 2026-12-01"),
        (("close", "soon", "-y"), "Unknown period."),
        (("show", "2027-01"), "Unknown period."),
    ],
)
async def test_refusals_are_explained(
    agent_harness: AgentHarness, agent: Agent, typed: Typed, words: tuple[str, ...], said: str
) -> None:
    await use(agent_harness, agent)
    done = await typed(*words)
    assert (done.exit_code, said in done.stderr, "Traceback" in done.output) == (1, True, False)
