"""Proxies are connected to any of an agent's workers, and each worker's status shows all of them."""

import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from regional_agent.envoy.quota.messages import STREAM_RATE_LIMIT_QUOTAS
from tests.conftest import free_port
from tests.integration.regional_agent.envoy.grpc_harness import channel_to
from tests.integration.regional_agent.envoy.quota.test_streams import DOCUMENT, Proxy
from tests.integration.regional_agent.http.test_workers import Workers, all_up, running
from tests.integration.regional_agent.world import World
from tests.waiting import attempts

pytestmark = pytest.mark.anyio

MOST = 64  # proxies, until both workers have some
ACME = {"tenant": "acme"}


async def statuses(workers: Workers, count: int) -> list[dict[str, Any]]:
    """Return what several requests are shown, each of which any worker answers."""
    return [(await workers.get("/v1/status")).json() for _ in range(count)]


@pytest.mark.extended
async def test_each_worker_shows_the_proxies_of_all(world: World, tmp_path: Path) -> None:
    (await world.admin.put("/v1/limits", json=DOCUMENT)).raise_for_status()
    port, names = free_port(), set[str]()
    async with (
        running(world, tmp_path, "--workers", "2", name="here", grpc_port=port) as workers,
        AsyncExitStack() as connections,
    ):
        await all_up(workers, 2)
        at: set[str] = set()
        while at != {"here-0", "here-1"} and len(names) < MOST:
            names.add(f"edge-{len(names)}")
            await connect(connections, f"127.0.0.1:{port}", f"edge-{len(names) - 1}")
            at = await agents_of(workers, names)
        assert at == {"here-0", "here-1"}
        seen = await statuses(workers, 10)
        assert {each["agent"] for each in seen} <= at
        for status in seen:
            assert {each["proxy"] for each in status["proxy_quotas"]["proxies"]} == names
            assert {each["agent"] for each in status["proxy_quotas"]["rates"]} == at
            assert len(status["grpc_clients"]) == len(names)
            assert status["silent_workers"] == 0
        os.kill(workers.pids()[0], signal.SIGSTOP)
        async for _ in attempts():
            [status] = await statuses(workers, 1)
            if status["silent_workers"] == 1:
                break
        else:
            pytest.fail("a worker that hangs is not counted")
        os.kill(workers.pids()[0], signal.SIGCONT)


async def connect(connections: AsyncExitStack, address: str, name: str) -> None:
    """Connect a proxy that reports once, over a connection of its own."""
    channel = await connections.enter_async_context(channel_to(address))
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(STREAM_RATE_LIMIT_QUOTAS)(
        metadata=[("x-leasehold-proxy", name)]
    )
    connections.callback(call.cancel)
    await Proxy(call).report(ACME, 1)


async def agents_of(workers: Workers, names: set[str]) -> set[str]:
    """Wait until all proxies are shown, and return the workers that they are connected to."""
    async for _ in attempts():
        [status] = await statuses(workers, 1)
        proxies = status["proxy_quotas"]["proxies"]
        if {each["proxy"] for each in proxies} == names:
            return {each["agent"] for each in proxies}
    raise AssertionError(f"only {proxies}")
