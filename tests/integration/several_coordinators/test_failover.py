"""An agent knows two coordinators, and the one that it uses dies or hangs while it is under load."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from pydantic import SecretStr

from protocol.messages import ExchangeRequest
from regional_agent.leasing import coordinator_client
from regional_agent.leasing.coordinator_client import (
    CoordinatorClient,
    CoordinatorRefused,
    CoordinatorUnavailable,
    NoReply,
)
from tests.budget import cases
from tests.conftest import free_port, restricted
from tests.integration.coordinator.fixtures import connected
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import BOUND_S, attempts, until

pytestmark = pytest.mark.anyio

CHECKS = 90  # of a hundred units: none of them has to be denied


@asynccontextmanager
async def coordinator_process(database: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start a coordinator as a process of its own, and yield it with its URL once it is ready."""
    port = free_port()
    settings = {
        "LEASEHOLD_COORDINATOR_DATABASE_URL": restricted(database),
        "LEASEHOLD_COORDINATOR_PORT": str(port),
        "LEASEHOLD_COORDINATOR_LOG_LEVEL": "error",
    }
    command = (sys.executable, "-m", "leasehold.cli", "coordinator")
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | settings)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            async for _ in attempts():
                assert process.returncode is None
                try:
                    if (await client.get(f"{url}/readyz")).is_success:
                        break
                except httpx.HTTPError:
                    continue
        yield process, url
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def check_under_load(agent: Agent, process: asyncio.subprocess.Process, by: signal.Signals) -> list[int]:
    """Check one unit after the other, and send the coordinator a signal when a third of them is through."""
    statuses = []
    for number in range(CHECKS):
        if number == CHECKS // 3:
            process.send_signal(by)
        statuses.append((await agent.check()).status_code)
    return statuses


async def used(agent: Agent) -> list[str]:
    status = (await agent.http.get("/v1/status")).json()
    return [each["url"] for each in status["coordinators"] if each["in_use"]]


@pytest.mark.parametrize("by", cases([signal.SIGKILL, signal.SIGSTOP], short=1))
async def test_no_check_is_denied_and_no_unit_lost_when_a_coordinator_goes_away(
    world: World, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    """One that is killed refuses connections; one that hangs accepts them and says nothing."""
    monkeypatch.setattr(coordinator_client, "RETURN_S", 0.2)
    async with coordinator_process(world.database) as (process, url):
        agent = await world.agent(coordinator_url=f"{url},{world.url}")
        assert await used(agent) == [url]
        assert await check_under_load(agent, process, by) == [200] * CHECKS
        async for _ in attempts():
            if await world.usage() == CHECKS:
                break
        assert await world.usage() == CHECKS
        quota = await world.quota()
        assert (quota["consumed"], quota["overage"], quota["suspense"]) == (CHECKS, 0, 0)
        addresses = agent.whole.coordinator.addresses
        assert addresses.moves >= 1
        await until(lambda: addresses.in_use.url == world.url)
        metrics = (await agent.http.get("/metrics")).text
        assert f'leasehold_coordinator_address_in_use{{url="{world.url}"}} 1.0' in metrics
        if by is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            await until(lambda: addresses.in_use.url == url)
        await world.agents.aclose()


_WAITS_WITH_A_LANE_LOCKED = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity JOIN pg_locks USING (pid)
    WHERE application_name = 'leasehold-coordinator' AND wait_event_type = 'Lock' AND relation = 'lane'::regclass
)
"""


async def test_no_check_is_denied_when_a_coordinator_hangs_within_an_exchange(world: World) -> None:
    """Postgres ends its transaction. Otherwise the lane would stay locked for the other coordinator as well."""
    async with coordinator_process(world.database) as (process, url), connected(world.database) as owner:
        agent = await world.agent(coordinator_url=f"{url},{world.url}")
        await agent.lease(1)
        async with owner.transaction():
            await owner.execute("SELECT FROM pool FOR UPDATE")
            checks = [asyncio.create_task(agent.check()) for _ in range(CHECKS)]
            async for _ in attempts():
                if await owner.fetchval(_WAITS_WITH_A_LANE_LOCKED):
                    break
            process.send_signal(signal.SIGSTOP)
        assert [(await check).status_code for check in checks] == [200] * CHECKS
        await world.agents.aclose()
        quota = await world.quota()
        assert (quota["consumed"], quota["overage"], quota["suspense"]) == (CHECKS, 0, 0)


@asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    """Yield the address of a server that answers every request so, or never."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer or b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_what_waits_at_a_silent_coordinator_goes_to_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange finds out within its time. Long polls and the event stream would wait for half a minute."""
    monkeypatch.setattr(coordinator_client, "LONG_POLL_S", 3_600)
    monkeypatch.setattr(coordinator_client, "SILENCE_S", 3_600)
    async with answering(None) as silent:
        client = CoordinatorClient([silent, world.url], SecretStr(world.tokens["us-east"]), "us-east")
        poll = asyncio.create_task(client.policies(None, bytes))
        stream = asyncio.ensure_future(anext(client.signals()))
        await until(lambda: len(client._polls[client.addresses.in_use]) == 2)
        with pytest.raises(CoordinatorRefused, match="422"):  # the other coordinator's answer to an empty exchange
            await client.exchange(ExchangeRequest(fingerprint="a:b", exchanges=[]), 3)
        assert client.addresses.in_use.url == world.url
        async with asyncio.timeout(BOUND_S):
            assert await poll is not None
            with pytest.raises(NoReply):
                await stream
            assert (await anext(client.signals())).kind == "hello"
        await client.close()


async def test_an_answer_of_503_moves_to_the_next_coordinator(world: World) -> None:
    """A coordinator that has lost its database answers so while another one has not."""
    async with answering(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n") as unavailable:
        agent = await world.agent(coordinator_url=f"{unavailable},{world.url}")
        assert (await agent.check(cost=10)).status_code == 200
        assert await used(agent) == [world.url]
        [first, _] = (await agent.http.get("/v1/status")).json()["coordinators"]
        assert first == {"url": unavailable, "in_use": False, "fault": "503"}
        await world.agents.aclose()


async def test_a_refusal_moves_nowhere(world: World) -> None:
    """Every coordinator would refuse the same."""
    client = CoordinatorClient([world.url, "http://127.0.0.1:1"], SecretStr("lh_unknown"), "us-east")
    with pytest.raises(CoordinatorRefused, match="401"):
        await client.policies(None, bytes)
    assert client.addresses.moves == 0
    await client.close()


async def test_without_any_answer_the_last_reason_is_raised() -> None:
    client = CoordinatorClient(["http://127.0.0.1:1", "http://127.0.0.1:2"], SecretStr("lh_unknown"), "us-east")
    with pytest.raises(CoordinatorUnavailable, match="ConnectError"):
        await client.policies(None, bytes)
    assert [bool(each.fault) for each in client.addresses.known] == [True, True]
    await client.close()
