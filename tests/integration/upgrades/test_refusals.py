"""What does not work together is refused by name, with both releases and the order of an upgrade."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from typer.testing import CliRunner, Result

from coordinator.health.figures import measure
from coordinator.health.seen import MAX_AGENTS_KEPT, SeenAgents
from leasehold.cli.app import app
from migrations.run import AgentsTooOld, upgrade
from protocol.clock import SystemClock
from protocol.compatibility import releases
from protocol.compatibility.releases import AGENT_HEADER, CAPABILITIES, RELEASE, RELEASE_HEADER, UPGRADE_ORDER, Peer
from regional_agent.store import keys
from tests.conftest import restricted
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.health.test_health import codes, coordinator
from tests.integration.regional_agent.world import World, running
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

OLD = {RELEASE_HEADER: "0.0.9", AGENT_HEADER: "us-1"}
NEWER_QUOTA = """
INSERT INTO limits_version (version, document, applied_at, applied_by)
SELECT version + 1, '{"quotas": [{"kind": "budget", "name": "b"}]}', now(), 'a test' FROM policy_version
"""


@asynccontextmanager
async def agent_of(world: World, **stated: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {world.tokens['us-east']}", **stated}
    async with httpx.AsyncClient(base_url=world.url, headers=headers) as client:
        yield client


def names_both(text: str, other: str = "0.0.9") -> bool:
    return RELEASE in text and other in text and UPGRADE_ORDER in text


# --- agents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "policies"), ("GET", "blocks"), ("POST", "epochs"), ("POST", "exchanges"), ("POST", "shares")],
)
async def test_a_coordinator_refuses_an_agent_that_is_too_old(world: World, method: str, path: str) -> None:
    path = f"/v1/regions/us-east/{path}" if method == "POST" else f"/v1/{path}"
    async with agent_of(world, **OLD) as agent:
        refused = await agent.request(method, path, content=b"{}")
    assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (409, "release-unsupported")
    assert names_both(refused.json()["detail"]), refused.json()
    assert refused.headers[RELEASE_HEADER] == RELEASE
    async with agent_of(world, **{RELEASE_HEADER: RELEASE}) as agent:
        assert (await agent.request(method, path, content=b"{}")).status_code != 409


async def test_an_agent_refuses_a_coordinator_that_is_too_old(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "OLDEST_PEER", "0.999")
    texts: dict[str, str] = {}
    async with running(world.settings("us-east")) as agent:
        async for _ in attempts():
            found = (await agent.http.get("/readyz")).json()
            texts = {each["code"]: each["text"] for each in found["reasons"]}
            if "Upgrade" in texts.get("no_epoch", ""):
                break
    assert found["status"] == "not_ready"
    assert "the coordinator is of release" in texts["no_epoch"]
    assert names_both(texts["no_epoch"], "0.999")


async def test_an_agent_refuses_a_store_whose_keys_a_newer_release_has_changed(world: World) -> None:
    agent = await world.agent()
    await agent.region.store.call("HSET", "lh:fence", "format", keys.FORMAT + 1)
    assert (await agent.check()).status_code == 200  # a release that changes the format begins another incarnation
    await agent.region.store.call("HSET", "lh:fence", "nonce", "0" * 32, "fingerprint", "of the newer release")
    assert (await agent.check()).status_code == 503
    texts: dict[str, str] = {}
    async for _ in attempts():
        texts = {each["code"]: each["text"] for each in (await agent.http.get("/readyz")).json()["reasons"]}
        if "format" in texts.get("no_epoch", ""):
            break
    assert f"the format {keys.FORMAT + 1} of a newer release" in texts["no_epoch"]
    assert RELEASE in texts["no_epoch"]
    nonce, fingerprint = await agent.region.store.call("HMGET", "lh:fence", "nonce", "fingerprint")
    assert (nonce, fingerprint) == (b"0" * 32, b"of the newer release")


async def test_regions_show_their_agents_with_release_and_capabilities(world: World) -> None:
    await world.agent(name="us-1")
    async with connected(world.database) as owner:
        async for _ in attempts():
            if await owner.fetchval("SELECT count(*) FROM region_agent"):
                break
    regions = (await world.admin.get("/v1/regions")).json()["data"]
    [found] = [agent for region in regions for agent in region["agents"]]
    assert found.pop("last_seen_at") <= SystemClock().now().isoformat().replace("+00:00", "Z")
    assert found == {"name": "us-1", "release": RELEASE, "capabilities": sorted(CAPABILITIES)}
    shown = (await world.admin.get("/v1/regions/us-east")).json()["agents"]
    assert [each["name"] for each in shown] == ["us-1"]
    listed = await run(world, "region", "list")
    assert (listed.exit_code, f"1 of {RELEASE}" in listed.stdout) == (0, True)


async def run(world: World, *arguments: str) -> Result:
    """Run a command against the coordinator of the test's own loop."""
    environ = {"LEASEHOLD_TOKEN": world.tokens["admin"], "LEASEHOLD_URL": world.url, "COLUMNS": "200"}
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environ)


async def test_the_latest_statement_of_an_agent_counts_and_old_ones_are_forgotten(database: str) -> None:
    seen = SeenAgents(SystemClock())
    async with connected(database) as owner:
        await owner.execute("INSERT INTO region (name, created_at) VALUES ('r', now())")
        for number in range(MAX_AGENTS_KEPT + 5):
            seen.note("r", Peer("0.1.0", frozenset(), f"agent-{number}"))
        seen.note("unknown", Peer("0.1.0", frozenset(), "agent"))
        await seen.write(owner, seen.take())
        seen.note("r", Peer("0.2.0", frozenset({"b", "a"}), "agent-1"))
        seen.put_back(seen.take())
        await seen.write(owner, seen.take())
        await owner.execute("UPDATE region_agent SET last_seen_at = now() - interval '2 days' WHERE agent = 'agent-2'")
        await measure(owner, SystemClock().now())
        rows = {row["agent"]: tuple(row) for row in await owner.fetch("SELECT * FROM region_agent")}
    assert len(rows) == MAX_AGENTS_KEPT
    assert rows["agent-1"][2:4] == ("0.2.0", ["a", "b"])
    assert "agent-2" not in rows


# --- the schema -------------------------------------------------------------------------------------------------------


async def test_a_coordinator_runs_on_a_newer_schema_unless_that_needs_a_newer_release(database: str) -> None:
    async with coordinator(restricted(database)) as (_, client), connected(database) as owner:
        await owner.execute("UPDATE alembic_version SET version_num = '9999'")
        await owner.execute("COMMENT ON TABLE alembic_version IS 'needs release 0.1'")
        assert (await client.get("/readyz")).status_code == 200
        await owner.execute("COMMENT ON TABLE alembic_version IS 'needs release 0.999'")
        refused = await client.get("/readyz")
    assert (refused.status_code, codes(refused)) == (503, ["schema_ahead"])
    [reason] = refused.json()["reasons"]
    assert RELEASE in reason["text"]
    assert "0.999" in reason["text"]


async def test_a_coordinator_that_is_newer_than_the_schema_names_the_order(database: str) -> None:
    async with connected(database) as owner:
        await owner.execute("UPDATE alembic_version SET version_num = '0001'")
    async with coordinator(restricted(database)) as (_, client):
        refused = await client.get("/readyz")
    assert codes(refused) == ["schema_behind"]
    assert names_both(refused.json()["reasons"][0]["text"], "0001")


async def test_a_coordinator_that_cannot_read_the_limits_decides_nothing(world: World) -> None:
    agent = await world.agent()
    async with connected(world.database) as owner:
        await owner.execute(NEWER_QUOTA)
        await owner.execute("UPDATE policy_version SET version = version + 1")
    async with coordinator(restricted(world.database)) as (_, client):
        refused = await client.get("/readyz")
    assert (refused.status_code, codes(refused)) == (503, ["limits_not_readable"])
    assert RELEASE in refused.json()["reasons"][0]["text"]
    answer = await world.admin.get("/v1/limits")
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (503, "limits-not-readable")
    await agent.check(cost=90)  # nothing is booked and nothing set aside: it is an outage for the agent
    await until(lambda: agent.region.quotas.contact.reason)
    assert agent.region.count_set_aside() == 0


async def test_the_schema_is_not_changed_while_agents_run_that_the_release_would_refuse(database: str) -> None:
    async with connected(database) as owner:
        await owner.execute("INSERT INTO region (name, created_at) VALUES ('r', now())")
        await owner.execute("INSERT INTO region_agent VALUES ('r', 'us-1', '0.0.9', '{}', now())")
    with pytest.raises(AgentsTooOld, match="us-1") as refused:
        await asyncio.to_thread(upgrade, database)
    assert names_both(str(refused.value))
    async with connected(database) as owner:
        await owner.execute("UPDATE region_agent SET last_seen_at = now() - interval '11 minutes'")
    await asyncio.to_thread(upgrade, database)


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line_prints_its_release() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"{RELEASE}\n")


async def test_a_command_refuses_a_coordinator_that_is_too_old(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "OLDEST_PEER", "0.999")
    refused = await run(world, "region", "list")
    assert refused.exit_code == 1
    assert names_both(refused.stderr, "0.999"), refused.stderr
