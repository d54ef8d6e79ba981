"""Signals arrive over a real connection, long polls of policies return, and shutting down ends both."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from coordinator.notice import Notice
from protocol.messages import Signal
from tests.integration.coordinator.agent_harness import EXPORTS, AgentHarness, lease, leased, want
from tests.waiting import until

pytestmark = pytest.mark.anyio

BOUND_S = 60


class Stream:
    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200
        self._lines = answer.aiter_lines()

    async def next(self) -> Signal:
        async with asyncio.timeout(BOUND_S):
            async for line in self._lines:
                if line.startswith("data:"):
                    return msgspec.json.decode(line[5:], type=Signal)
        raise EOFError


@asynccontextmanager
async def stream(client: httpx.AsyncClient, region: str) -> AsyncIterator[Stream]:
    async with client.stream("GET", f"/v1/regions/{region}/signals") as answer:
        opened = Stream(answer)
        assert (await opened.next()).kind == "hello"
        yield opened


async def test_a_recall_goes_to_the_holder_and_a_grant_to_the_waiting_region(agent_harness: AgentHarness) -> None:
    await agent_harness.limit([{"name": "exports", "kind": "allowance", "limit": 10, "period": "month"}])
    async with agent_harness.served() as url:
        east, west = await agent_harness.agent("us-east", url), await agent_harness.agent("eu-west", url)
        async with stream(east.client, "us-east") as east_hears, stream(west.client, "eu-west") as west_hears:
            await east.say(1, demands=[want(waiting=10)])
            assert leased(await west.say(1, demands=[want(waiting=4)])).granted == 0
            assert await east_hears.next() == Signal(kind="recall", quota=EXPORTS, keep=0)
            await east.say(2, lease(granted=10, consumed=3, returned=7))
            assert await west_hears.next() == Signal(kind="grant", quota=EXPORTS)
            assert leased(await west.say(2, lease(), demands=[want(waiting=4)])).granted == 4


async def test_what_was_rolled_back_is_never_signalled(agent_harness: AgentHarness) -> None:
    """A notice is sent at commit, so the notice of a later commit is the first to arrive."""
    async with agent_harness.served() as url:
        agent = await agent_harness.agent("us-east", url)
        async with stream(agent.client, "us-east") as hears:
            transaction = agent_harness.owner.transaction()
            await transaction.start()
            await _change_limit(agent_harness, 7)
            await transaction.rollback()
            await _change_limit(agent_harness, 8)
            signal = await hears.next()
            assert signal.kind == "policies"
            assert (
                await agent_harness.one(
                    "SELECT document #>> '{quotas,0,limit}' FROM limits_version ORDER BY version DESC LIMIT 1"
                )
                == "8"
            )


async def _change_limit(agent_harness: AgentHarness, limit: int) -> None:
    await agent_harness.limit([{"name": "exports", "kind": "allowance", "limit": limit, "period": "month"}])


async def test_a_coordinator_that_stops_ends_its_streams(agent_harness: AgentHarness) -> None:
    async with agent_harness.served() as url:
        agent = await agent_harness.agent("us-east", url)
        async with stream(agent.client, "us-east") as hears:
            agent_harness.hub.close()
            with pytest.raises(EOFError):
                await hears.next()


async def test_a_revoked_token_ends_its_stream(agent_harness: AgentHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.exchange.routes.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("coordinator.exchange.routes.TOKEN_CHECK_S", 0.05)
    async with agent_harness.served() as url:
        agent = await agent_harness.agent("us-east", url)
        async with stream(agent.client, "us-east") as hears:
            await agent_harness.owner.execute("UPDATE token SET revoked_at = now()")
            with pytest.raises(EOFError):
                await hears.next()


async def test_a_revoked_token_ends_a_busy_stream(agent_harness: AgentHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.exchange.routes.TOKEN_CHECK_S", 0.05)
    async with agent_harness.served() as url:
        agent = await agent_harness.agent("us-east", url)
        async with stream(agent.client, "us-east") as hears, asyncio.TaskGroup() as tasks:
            await agent_harness.owner.execute("UPDATE token SET revoked_at = now()")
            talking = tasks.create_task(_talk(agent_harness))
            with pytest.raises(EOFError):
                await listen_on(hears)
            talking.cancel()


async def listen_on(hears: Stream) -> None:
    for _ in range(10_000):
        await hears.next()


async def _talk(agent_harness: AgentHarness) -> None:
    signal = Signal(kind="grant", quota="exports:tenant=acme")
    while True:
        agent_harness.hub.deliver(msgspec.json.encode(Notice(region="us-east", signal=signal)).decode())
        await asyncio.sleep(0.01)


async def test_streams_and_polls_leave_no_subscription_behind(agent_harness: AgentHarness) -> None:
    async with agent_harness.served() as url:
        agent = await agent_harness.agent("us-east", url)
        async with stream(agent.client, "us-east"):
            assert len(agent_harness.hub) == 1
        await until(lambda: len(agent_harness.hub) == 0)


# --- policies ---------------------------------------------------------------------------------------------------------


async def test_policies_and_their_tag(agent_harness: AgentHarness) -> None:
    agent = await agent_harness.agent()
    answer = await agent.client.get("/v1/policies")
    bundle = answer.json()
    assert (bundle["weight"], bundle["total_weight"]) == (1, 1)
    assert [quota["name"] for quota in bundle["document"]["quotas"]] == ["exports", "mails", "api"]
    again = await agent.client.get("/v1/policies", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    older = await agent.client.get("/v1/policies", params={"since": bundle["version"] - 1})
    assert older.json() == bundle


async def test_a_poll_waits_for_the_next_version(agent_harness: AgentHarness) -> None:
    agent = await agent_harness.agent()
    version = (await agent.client.get("/v1/policies")).json()["version"]
    poll = asyncio.create_task(agent.client.get("/v1/policies", params={"since": version}))
    await until(lambda: len(agent_harness.hub) == 1)
    await _change_limit(agent_harness, 7)
    answer = await asyncio.wait_for(poll, BOUND_S)
    assert answer.json()["version"] == version + 1
    assert answer.json()["document"]["quotas"][0]["limit"] == 7


async def test_a_poll_ends_when_the_coordinator_stops(agent_harness: AgentHarness) -> None:
    agent = await agent_harness.agent()
    version = (await agent.client.get("/v1/policies")).json()["version"]
    poll = asyncio.create_task(agent.client.get("/v1/policies", params={"since": version}))
    await until(lambda: len(agent_harness.hub) == 1)
    agent_harness.hub.close()
    assert (await asyncio.wait_for(poll, BOUND_S)).status_code == 304


async def test_scopes_of_policies(agent_harness: AgentHarness) -> None:
    for scopes, status in (((), 401), (("admin",), 403), (("region:a", "region:b"), 403)):
        assert (await (await agent_harness.client(*scopes)).get("/v1/policies")).status_code == status
    agent = await agent_harness.agent()
    for query in ("since=-1", "since=x", "since=1&since=2", "until=1"):
        assert (await agent.client.get(f"/v1/policies?{query}")).status_code == 422
