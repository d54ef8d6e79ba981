"""Blocks and overrides take effect from their creation to the request they match, and survive restarts."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.http import polling
from coordinator.http.polling import rest_of_poll_s
from regional_agent.leasing import coordinator_client
from tests.integration.coordinator.fixtures import connected
from tests.integration.regional_agent.world import EXPORT, REGIONS, Agent, World, running
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

SEARCH = {"tenant": "acme", "route": "/v1/search", "method": "GET"}
VERSION = 5  # after three regions, the document and an override
OTHER = {"tenant": "acme", "route": "/v1/other", "ip": "2001:db8:0:1::7"}


async def comes_true(ask: Callable[[], Awaitable[bool]]) -> None:
    async for _ in attempts():
        if await ask():
            return
    raise AssertionError("it did not come to pass")


def at(**after: float) -> str:
    return (datetime.now(UTC) + timedelta(**after)).isoformat()


async def made(world: World, path: str, **body: Any) -> dict[str, Any]:
    answer = await world.admin.post(path, json={"reason": "a test"} | body)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def is_blocked(agent: Agent, subject: dict[str, str]) -> bool:
    answer = await agent.check(subject, mode="peek")
    return answer.status_code == 429 and answer.json()["type"] == "/problems/blocked"


@pytest.mark.extended
async def test_an_agent_lets_its_polls_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def note(now_s: float, poll_s: int) -> float:
        asked.append(poll_s)
        return rest_of_poll_s(now_s, poll_s)

    monkeypatch.setattr(polling, "rest_of_poll_s", note)
    await world.agent()
    await until(lambda: len(asked) >= 3)
    assert set(asked) == {polling.MAX_POLL_S}
    assert polling.MAX_POLL_S < coordinator_client.LONG_POLL_S


async def test_a_block_and_its_end_apply_in_every_region(world: World) -> None:
    agents = [await world.agent(region) for region in REGIONS]
    await made(world, "/v1/blocks", field="ip", value="2001:db8::/48")
    for agent in agents:
        await comes_true(lambda agent=agent: is_blocked(agent, OTHER))  # type: ignore[misc]
        answer = await agent.check(OTHER)
        body = answer.json()
        assert (body["allowed"], body["denied_by"], body["blocked_by"], body["policies"]) == (False, None, "ip", [])
        assert "block on its ip" in body["detail"]
        assert int(answer.headers["Retry-After"]) * 1000 >= body["retry_after_ms"] == 3_600_000
        assert not await is_blocked(agent, EXPORT)
    await world.admin.delete("/v1/blocks/ip/2001:db8::/48")
    for agent in agents:
        await comes_true(lambda agent=agent: _is_let_in(agent, OTHER))  # type: ignore[misc]


async def _is_let_in(agent: Agent, subject: dict[str, str]) -> bool:
    return (await agent.check(subject, mode="peek")).status_code == 200


async def test_a_block_ends_by_itself_and_denials_name_its_end(world: World) -> None:
    agent = await world.agent()
    await made(world, "/v1/blocks", field="tenant", value="acme", valid_until=at(seconds=3))
    await comes_true(lambda: is_blocked(agent, EXPORT))
    assert 0 < (await agent.check()).json()["retry_after_ms"] <= 3_000
    world.weather.swallows_requests = True  # it gets no signal
    await comes_true(lambda: _is_let_in(agent, SEARCH))


async def test_a_blocked_request_consumes_nothing(world: World) -> None:
    agent = await world.agent()
    assert (await agent.check()).json()["policies"][0]["remaining"] == 99
    await made(world, "/v1/blocks", field="tenant", value="acme")
    await comes_true(lambda: is_blocked(agent, EXPORT))
    item = (await agent.http.post("/v1/check:batch", json={"checks": [{"subject": EXPORT}]})).json()["items"][0]
    assert (item["status"], item["answer"]["blocked_by"]) == (429, "tenant")
    await world.admin.delete("/v1/blocks/tenant/acme")
    await comes_true(lambda: _is_let_in(agent, EXPORT))
    assert (await agent.check(mode="peek")).json()["policies"][0]["remaining"] == 99


async def test_an_override_raises_an_allowance_and_a_rate(world: World) -> None:
    agent = await world.agent()
    assert (await agent.check(cost=101)).status_code == 429
    await made(world, "/v1/overrides", quota="exports", subject={"tenant": "acme"}, limit=1000)
    await comes_true(lambda: _allows(agent, 101))
    override = await made(world, "/v1/overrides", quota="api", subject={"tenant": "acme"}, limit="3/hour, burst 90")
    await comes_true(lambda: _burst_is(agent, 30))
    await world.admin.delete(f"/v1/overrides/{override['id']}")
    await comes_true(lambda: _burst_is(agent, 10))


async def _allows(agent: Agent, cost: int) -> bool:
    return (await agent.check(cost=cost)).status_code == 200


async def _burst_is(agent: Agent, burst: int) -> bool:
    answer = await agent.check(SEARCH | {"tenant": "acme"}, mode="peek")
    return bool(answer.json()["policies"][0]["share"] == burst)


def _version_in_force(agent: Agent) -> int:
    policies = agent.region.admission.policies
    return policies.version if policies else 0


@pytest.mark.extended
async def test_announced_overrides_begin_and_end_in_a_partitioned_region(world: World) -> None:
    agent = await world.agent()
    await made(
        world, "/v1/overrides", quota="api", subject={}, limit="3/hour, burst 90", valid_from=at(seconds=2),
        valid_until=at(seconds=4),
    )  # fmt: skip
    await until(lambda: _version_in_force(agent) == VERSION)
    world.weather.swallows_requests = True
    assert await _burst_is(agent, 10)
    await comes_true(lambda: _burst_is(agent, 30))
    await comes_true(lambda: _burst_is(agent, 10))


async def test_the_last_known_blocks_and_overrides_apply_without_the_coordinator(world: World, tmp_path: Path) -> None:
    """Blocks and overrides that ended while no agent ran have ended, by this machine's own clock."""
    async with running(world.settings("us-east", state_dir=tmp_path)) as agent:
        await agent.ready()
        await made(world, "/v1/blocks", field="user", value="mallory")
        await made(world, "/v1/overrides", quota="api", subject={}, limit="3/hour, burst 90")
        await made(world, "/v1/overrides", quota="api", subject={"tenant": "x"}, limit="3/hour, burst 60",
                   valid_until=at(minutes=30))  # fmt: skip
        await comes_true(lambda: is_blocked(agent, OTHER | {"user": "mallory"}))
        await until(lambda: _version_in_force(agent) == VERSION + 1)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("policies.json", "blocks.json")] == [0o600, 0o600]
    world.weather.swallows_requests = True
    kept = json.loads((tmp_path / "policies.json").read_text())
    kept["received_at_ms"] -= 3_600_000  # it was an hour ago
    (tmp_path / "policies.json").write_text(json.dumps(kept))
    async with running(world.settings("us-east", state_dir=tmp_path)) as agent:
        await until(lambda: agent.region.admission.policies is not None and agent.region.admission.blocks is not None)
        assert await is_blocked(agent, OTHER | {"user": "mallory"})
        assert await _limits(agent, "x", 30)
        assert await _limits(agent, "acme", 30)


async def _limits(agent: Agent, tenant: str, burst: int) -> bool:
    policies = agent.region.admission.policies
    assert policies is not None
    [demanded] = policies.charges_for(SEARCH | {"tenant": tenant}, None)
    return getattr(demanded.charge, "burst", None) == burst


async def test_an_unreadable_file_is_ignored(world: World, tmp_path: Path) -> None:
    (tmp_path / "policies.json").write_text("{}")
    (tmp_path / "blocks.json").write_text("")
    agent = await world.agent(state_dir=tmp_path)
    assert (await agent.check()).status_code == 200


@pytest.mark.extended
async def test_a_stuck_poll_is_repeated_when_a_reply_names_a_version(world: World) -> None:
    """The notice was lost on its way to the coordinator of the poll."""
    agent = await world.agent()
    feed = agent.whole._blocks
    asked: list[int | None] = []

    async def stuck(since: int | None, _read: object) -> None:
        asked.append(since)
        await asyncio.get_running_loop().create_future()

    feed._poll = stuck
    feed.on_version(1)  # repeats the waiting poll, and the new one hangs
    await until(lambda: asked == [0])
    for _ in range(3):
        feed.on_version(2)
        await asyncio.sleep(0)
    await until(lambda: asked == [0, 0])
    assert (await agent.http.get("/readyz")).status_code == 200


async def test_an_agent_without_a_block_list_is_not_ready(world: World) -> None:
    world.weather.swallows_requests = True
    async with running(world.settings("us-east")) as agent:
        answer: httpx.Response = await agent.http.get("/readyz")
        assert answer.status_code == 503
        assert "no block list has arrived yet" in [each["text"] for each in answer.json()["reasons"]]


# --- version numbers that come again, after a restore of the database -------------------------------------------------


async def test_an_agent_follows_blocks_whose_number_comes_again(world: World) -> None:
    agent = await world.agent()
    await made(world, "/v1/blocks", field="tenant", value="acme")
    await comes_true(lambda: is_blocked(agent, EXPORT))
    async with connected(world.database) as owner, owner.transaction():
        await owner.execute("DELETE FROM block")
        await owner.execute("UPDATE block_version SET version = version - 1")
    await made(world, "/v1/blocks", field="tenant", value="another")
    await comes_true(lambda: _is_let_in(agent, EXPORT))
    await comes_true(lambda: is_blocked(agent, EXPORT | {"tenant": "another"}))


@pytest.mark.extended
async def test_an_agent_follows_policies_whose_number_comes_again(world: World) -> None:
    agent = await world.agent()
    await made(world, "/v1/overrides", quota="api", subject={"tenant": "acme"}, limit="3/hour, burst 90")
    await comes_true(lambda: _burst_is(agent, 30))
    async with connected(world.database) as owner, owner.transaction():
        await owner.execute("DELETE FROM limit_override")
        await owner.execute("UPDATE policy_version SET version = version - 1")
    await made(world, "/v1/overrides", quota="api", subject={"tenant": "acme"}, limit="3/hour, burst 60")
    await comes_true(lambda: _burst_is(agent, 20))


async def test_an_empty_block_list_has_a_version(world: World) -> None:
    agent = await world.agent()
    await until(lambda: agent.region.admission.blocks is not None)
    assert not agent.region.admission.blocks
    assert (await agent.http.get("/v1/status")).json()["block_version"] is not None
