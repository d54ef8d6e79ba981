"""`lane`, `region`, `ledger`, `suspense` and `rebalance --hold` work against a real coordinator and a real agent."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import msgspec
import pytest
from structlog.testing import capture_logs

from coordinator.access.issue_token import issue_token
from protocol.messages import FrozenBatch
from tests.integration.cli.test_limits_commands import Shell
from tests.integration.coordinator.fixtures import connected
from tests.integration.regional_agent.world import World
from tests.waiting import attempts

pytestmark = pytest.mark.anyio

EXPORTS = "exports:tenant=acme"


@pytest.fixture
async def shell(world: World) -> AsyncIterator[Shell]:
    with capture_logs():
        yield Shell({"LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": world.tokens["admin"], "COLUMNS": "400"})


async def approver(world: World) -> Shell:
    async with connected(world.database) as owner:
        issued = await issue_token(owner, ["adjust:approve"], "the other person", datetime.now(UTC))
    return Shell({"LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": issued.token, "COLUMNS": "400"})


async def keep_batch(world: World, epoch: int, lane: int, seq: int) -> None:
    """Keep a batch that shows that the ledger has lost data, as an exchange that lacks numbers does."""
    batch = msgspec.json.encode(FrozenBatch(epoch=epoch, lane=lane, seq=seq)).decode()
    async with connected(world.database) as owner:
        await owner.execute(
            "INSERT INTO quarantine (epoch, lane, seq, quota, period, reason, evidence, recorded_at)"
            " VALUES ($1, $2, $3, '', '', 'ledger_regressed', $4::text::jsonb, now())",
            *(epoch, lane, seq, batch),
        )


async def test_two_people_rebase_all_lanes_of_a_region(shell: Shell, world: World) -> None:
    await world.agent("us-east")
    [epoch] = [each["epoch"] for each in await shell.json("region", "list") if each["name"] == "us-east"]
    assert await shell.json("lane", "list") == []
    assert len(await shell.json("lane", "list", "--all", "--region", "us-east")) == 4
    for lane in (1, 3):
        await keep_batch(world, epoch, lane, 7)
    waiting = await shell.json("lane", "list")
    assert [(each["lane"], each["lacking"]) for each in waiting] == [(1, 6), (3, 6)]
    words = ("lane", "rebase", "--all", "--region", "us-east", "--reason", "restored")
    proposed = await shell.json(*words)
    assert [each["lane"] for each in proposed] == [1, 3]
    assert await shell.json(*words) == []  # each has a proposal
    table = await shell.output("lane", "list")
    assert f"{epoch}/3" in table
    assert all(each["id"] in table for each in proposed)
    assert "cannot approve" in await shell.error("lane", "approve", proposed[0]["id"], "--yes")
    other = await approver(world)
    assert "nothing was changed" in (await other.run("lane", "approve", "--all", stdin="n\n")).output
    approved = await other.json("lane", "approve", "--all", "--yes")
    assert {each["id"] for each in approved} == {each["id"] for each in proposed}
    assert [each["last_seq"] for each in await shell.json("lane", "list")] == [6, 6]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rebase", "--reason", "x"), "name lanes such as 7/2"),
        (("rebase", "7-2", "--reason", "x"), "write a lane as EPOCH/LANE"),
        (("rebase", "7/2", "--all", "--reason", "x"), "name lanes such as 7/2"),
        (("rebase", "99/2", "--reason", "x"), "no such lane"),
        (("approve",), "name proposals"),
        (("approve", "3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10", "--yes"), "no lane waits for 3f2b7c52"),
    ],
)
async def test_a_wrong_lane_is_one_sentence(shell: Shell, words: tuple[str, ...], said: str) -> None:
    assert said in await shell.error("lane", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rebalance", "move", EXPORTS, "3", "--from", "us-east", "--to", "ap-south", "--hold", "", "--yes"), "hold: "),
        (("suspense", "resolve", "charge", "7", EXPORTS, "2026-13", "--reason", "x"), "period: '2026-13' names no"),
        (("decisions", "--region", "mars"), "region: There is no region 'mars'"),
        (("doctor", "--database-url", "nonsense"), "--database-url: it must look like postgresql://"),
        (("doctor", "--store-url", "nonsense"), "--store-url: it must look like redis://"),
    ],
)
async def test_a_wrong_input_is_named_and_changes_nothing(shell: Shell, words: tuple[str, ...], said: str) -> None:
    assert said in await shell.error(*words)
    assert await shell.json("rebalance", "show") == []


async def test_a_region_is_shown_with_when_it_was_last_heard(shell: Shell, world: World) -> None:
    assert "never" in await shell.output("region", "show", "us-east")
    async with connected(world.database) as owner:
        await owner.execute("INSERT INTO region_last_seen VALUES ('us-east', now() - interval '90 seconds')")
    shown = await shell.output("region", "show", "us-east")
    assert "last heard" in shown
    assert "s ago)" in shown
    assert (await shell.json("region", "show", "us-east"))["last_seen_at"]


async def test_identities_of_a_region_are_set_shown_and_removed(shell: Shell) -> None:
    identity = "spiffe://example.org/leasehold/us-east"
    assert identity in await shell.output("region", "identities", "us-east", identity)
    assert identity in await shell.output("region", "show", "us-east")
    await shell.output("region", "identities", "us-east", "--none")
    assert (await shell.json("region", "show", "us-east"))["identities"] == []


async def test_the_balance_of_a_period_is_shown_and_verified(shell: Shell, world: World) -> None:
    agent = await world.agent("us-east")
    await agent.check(cost=3)
    async for _ in attempts():
        if await world.usage() == 3:
            break
    [period] = [each["id"] for each in await shell.json("period", "list")]
    assert "balanced" in await shell.output("ledger", "balance", period)
    assert (await shell.json("ledger", "balance", period))["status"] == "balanced"
    assert (await shell.json("ledger", "verify"))["intact"]


async def test_one_lease_is_resolved_by_two_people(shell: Shell, world: World) -> None:
    agent = await world.agent("us-east")
    await agent.lease(10)
    [period] = [each["id"] for each in await shell.json("period", "list")]
    async with connected(world.database) as owner:
        epoch = await owner.fetchval("SELECT epoch FROM lease")
    lease = (str(epoch), EXPORTS, period, "--reason", "lost")
    assert "no units in suspense" in await shell.error("suspense", "resolve", "charge", *lease)
    async with connected(world.database) as owner, owner.transaction():
        await owner.execute("UPDATE lease SET state = 'expired', suspense = outstanding, outstanding = 0")
        await owner.execute("UPDATE pool SET suspense = outstanding, outstanding = 0")
    proposal = await shell.json("suspense", "resolve", "estimate", *lease, "--units", "2")
    assert (proposal["charged"], proposal["approved_at"]) == (2, None)
    assert proposal["id"] in await shell.output("suspense", "list")
    other = await approver(world)
    assert (await other.json("suspense", "approve", proposal["id"], "--yes"))["approved_at"]
    assert "no such proposal" in await other.error(
        "suspense", "approve", "3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10", "--yes"
    )


async def test_a_move_with_a_hold_says_how_long_it_keeps_the_units(shell: Shell, world: World) -> None:
    east, _ = await world.agent("us-east"), await world.agent("ap-south")
    await east.lease(60)
    words = ("rebalance", "move", EXPORTS, "30", "--from", "us-east", "--to", "ap-south", "--hold", "1h")
    planned = await shell.output(*words, "--dry-run")
    assert f"keeps 30 of {EXPORTS}" in planned
    done = await shell.output(*words, "--yes")
    assert "keeps 30 of" in done
    [held] = await shell.json("allocations", "--region", "ap-south")
    assert next(each["hold"] for each in held["regions"] if each["region"] == "ap-south") == 30
    assert "hold 30 until" in await shell.output("allocations", "--region", "ap-south")
