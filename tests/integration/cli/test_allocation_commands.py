"""`allocations`, `rates`, `slots`, `rebalance` and `region` work against a real coordinator and real agents."""

import asyncio
import os
import pty
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.integration.cli.test_limits_commands import Shell
from tests.integration.regional_agent.world import Agent, World, running
from tests.waiting import attempts

pytestmark = pytest.mark.anyio

EXPORTS = "exports:tenant=acme"
MOVE = ("rebalance", "move", EXPORTS, "--from", "us-east", "--to", "ap-south")


@pytest.fixture
def environment(world: World) -> dict[str, str]:
    return {"LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": world.tokens["admin"], "COLUMNS": "200"}


@pytest.fixture
async def shell(environment: dict[str, str]) -> AsyncIterator[Shell]:
    with capture_logs():  # command and coordinator share this process's output
        yield Shell(environment)


@pytest.fixture
async def east(shell: Shell, world: World) -> Agent:
    east = await world.agent("us-east")
    await east.lease(60)
    return east


@pytest.fixture
async def south(shell: Shell, world: World) -> Agent:
    return await world.agent("ap-south")


async def held(shell: Shell) -> dict[str, int]:
    [found] = await shell.json("allocations", "--quota", EXPORTS)
    return {each["region"]: each["outstanding"] for each in found["regions"]}


async def test_allocations_are_printed_once_without_a_terminal(shell: Shell, east: Agent) -> None:
    said = await shell.output("allocations", "--watch")
    assert EXPORTS in said
    assert "(unallocated, of 100)" in said
    assert await held(shell) == {"us-east": 60}
    assert await shell.json("allocations", "--tenant", "nobody") == []


@pytest.mark.extended
async def test_watch_refreshes_on_a_terminal(shell: Shell, environment: dict[str, str], east: Agent) -> None:
    terminal, theirs = pty.openpty()
    words = (sys.executable, "-m", "leasehold.cli", "allocations", "--watch")
    command = await asyncio.create_subprocess_exec(
        *words, env=os.environ | environment | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    try:
        while seen.count(EXPORTS.encode()) < 3:
            seen += await asyncio.wait_for(asyncio.to_thread(os.read, terminal, 10_000), 30)
        command.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(command.wait(), 30) == 0
    finally:
        os.close(terminal)
    assert b"\x1b[1A" in seen  # over the previous table


# --- rates and slots that are shared ----------------------------------------------------------------------------------

SHARED: dict[str, list[dict[str, Any]]] = {
    "quotas": [
        {"name": "pages", "kind": "rate", "limit": "90/second, burst 30"},
        {"name": "renders", "kind": "concurrency", "limit": 6, "slot_ttl": "1m", "sharing": "strict"},
    ],
    "policies": [
        {"name": "pages", "match": {"route": "/v1/pages"}, "by": ["tenant"], "quota": "pages"},
        {"name": "renders", "match": {"route": "/v1/renders"}, "by": ["tenant"], "quota": "renders"},
    ],
}


@pytest.fixture
async def with_demand(world: World, shell: Shell) -> None:
    """Let one region report demand above its share of a rate and of slots."""
    await world.try_out(SHARED)
    pages, renders = ({"quota": f"{name}:tenant=acme", "number": 0} for name in ("pages", "renders"))
    rate = pages | {"demand_micro": 80_500_000, "rate_micro": 30_000_000}
    slots = renders | {"epoch": 1, "wanted": 6, "held": 2}
    headers = {"Authorization": f"Bearer {world.tokens['us-east']}"}
    body = {"rates": [rate], "slots": [slots]}
    answer = await world.admin.post("/v1/regions/us-east/shares", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


async def test_shares_of_a_rate_are_printed(shell: Shell, with_demand: None) -> None:
    heading, columns, *regions = (await shell.output("rates", "--quota", "pages", "--watch")).splitlines()
    assert heading.startswith("pages:tenant=acme 90/s, adaptive: at most 90 units above it, so far at most ")
    assert columns.split()[0] == "region"
    assert {line.split()[0]: line.split()[2] for line in regions if "ago" in line} == {"us-east": "80.5/s"}
    assert {line.split()[0] for line in regions} == {"us-east", "eu-west", "ap-south"}
    [shown] = await shell.json("rates", "--quota", "pages:tenant=acme", "--region", "eu-west")
    assert [(each["region"], each["demand_micro"]) for each in shown["regions"]] == [("eu-west", None)]
    assert await shell.json("rates", "--tenant", "nobody") == []
    assert "not yet" in await shell.output("rates", "--tenant", "acme", "--region", "eu-west")


@pytest.mark.extended
async def test_shares_of_slots_are_printed(shell: Shell, with_demand: None) -> None:
    heading, _, *regions = (await shell.output("slots")).splitlines()
    assert heading == "renders:tenant=acme 6 at once, for 60 s at most"
    assert [line.split()[:4] for line in regions if "ago" in line] == [["us-east", "2", "6", "2"]]
    [shown] = await shell.json("slots", "--quota", "renders", "--tenant", "acme")
    assert (shown["quota"], shown["limit"]) == ("renders:tenant=acme", 6)


@pytest.mark.extended
async def test_without_demand_the_safe_shares_are_printed(shell: Shell, world: World) -> None:
    await world.try_out(SHARED)
    for name in ("rates", "slots"):
        assert "no region has reported demand" in await shell.output(name)
        assert await shell.json(name) == []


async def test_an_unknown_quota_is_an_error(shell: Shell, world: World) -> None:
    await world.try_out(SHARED)
    for more in ([], ["--json"]):
        assert "there is no quota 'pagse'" in await shell.error("rates", "--quota", "pagse:tenant=acme", *more)
    assert "use `leasehold allocations`" in await shell.error("rates", "--quota", EXPORTS)
    assert "use `leasehold rates`" in await shell.error("slots", "--quota", "pages")


# --- rebalances -------------------------------------------------------------------------------------------------------


async def test_a_move_prints_its_plan_asks_for_consent_and_is_followed(shell: Shell, east: Agent, south: Agent) -> None:
    refused = await shell.run(*MOVE, "30", stdin="n\n")
    assert refused.exit_code == 1
    assert "recalls 30 of exports:tenant=acme from us-east for ap-south" in refused.stdout
    assert "nothing was changed" in refused.stderr
    assert await shell.json("rebalance", "show") == []
    done = await shell.run(*MOVE, "30", stdin="y\n")
    assert done.exit_code == 0, done.output
    assert "recalled 30, returned 30, regranted 30" in done.stdout
    assert (await held(shell))["us-east"] <= 30
    [listed] = await shell.json("rebalance", "show")
    assert "done" in await shell.output("rebalance", "show", listed["id"])


@pytest.mark.extended
async def test_a_dry_run_changes_nothing_and_prints_what_is_impossible(shell: Shell, east: Agent, south: Agent) -> None:
    said = await shell.output(*MOVE, "90", "--dry-run")
    assert "cannot: 30 of exports:tenant=acme: us-east: The region does not hold them" in said
    assert await shell.json("rebalance", "show") == []
    refused = await shell.error("rebalance", "move", EXPORTS, "5", "--from", "ap-south", "--to", "us-east", "-y")
    assert "[spent]" in refused


@pytest.mark.extended
async def test_weigh_sets_settings_by_name(shell: Shell, east: Agent) -> None:
    await shell.output("rebalance", "weigh", EXPORTS, "ap-south.pin=20", "us-east.weight=3", "-y")
    assert "weight 3" in await shell.output("allocations")
    said = await shell.output("rebalance", "weigh", EXPORTS, "ap-south.pin=-", "--dry-run")
    assert "ap-south: floor 20, ceiling 20 → nothing set" in said
    assert "settings: The floors" in await shell.error("rebalance", "weigh", EXPORTS, "ap-south.floor=101", "-y")
    assert "write it as" in await shell.error("rebalance", "weigh", EXPORTS, "floor=101", "-y")


@pytest.mark.extended
async def test_a_region_is_drained_and_restored(shell: Shell, east: Agent) -> None:
    assert "recalls all that us-east holds: 60 units" in await shell.output(
        "rebalance", "drain", "us-east", "--dry-run"
    )
    assert "done" in await shell.output("rebalance", "drain", "us-east", "-y")
    assert await held(shell) == {"us-east": 0}
    assert (await shell.json("region", "show", "us-east"))["status"] == "draining"
    assert "draining already" in await shell.error("rebalance", "drain", "us-east", "-y")
    assert "done" in await shell.output("rebalance", "restore", "us-east", "-y")
    assert {each["status"] for each in await shell.json("region", "list")} == {"active"}
    assert (await shell.json("region", "put", "us-east", "--weight", "4"))["weight"] == 4
    assert "us-east" in await shell.output("region", "list")


@pytest.mark.extended
async def test_ctrl_c_ends_only_the_following(
    shell: Shell, world: World, environment: dict[str, str], east: Agent
) -> None:
    async with running(world.settings("ap-south")) as south:
        await south.ready()  # and then no agent is left to request anything
    words = (sys.executable, "-m", "leasehold.cli", *MOVE, "30", "-y")
    command = await asyncio.create_subprocess_exec(*words, env=os.environ | environment, stdout=PIPE, stderr=PIPE)
    begun = await listed(shell)
    asked = asyncio.Event()
    world.weather.before_replies_to[f"/v1/rebalances/{begun['id']}"] = noted(asked)
    await asyncio.wait_for(asked.wait(), 30)
    command.send_signal(signal.SIGINT)
    _, told = await asyncio.wait_for(command.communicate(), 30)
    assert command.returncode == 130
    assert f"it goes on by itself: `leasehold rebalance show {begun['id']}`" in told.decode()
    assert (await shell.json("rebalance", "show", begun["id"]))["state"] == "running"
    await shows(shell, begun["id"], "waits for ap-south to fetch 30")
    assert (await shell.json("rebalance", "cancel", begun["id"]))["state"] == "cancelled"


async def shows(shell: Shell, id_: str, sentence: str) -> None:
    async for _ in attempts():
        if sentence in await shell.output("rebalance", "show", id_):
            return
    raise AssertionError(sentence)


async def listed(shell: Shell) -> dict[str, Any]:
    async for _ in attempts():
        if found := await shell.json("rebalance", "show"):
            return dict(found[0])
    raise AssertionError("none has begun")


def noted(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def note() -> None:
        event.set()

    return note
