"""One stack for all faults: two Envoys with both protocols, two agents, a coordinator, a store, and links between.

Callers request at a steady pace, and count what they see.
"""

import asyncio
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from tests.conftest import free_port
from tests.integration.regional_agent.envoy.links import Link
from tests.integration.regional_agent.envoy.real_envoy import (
    EXAMPLE,
    agent_process,
    endpoints_of,
    envoy_process,
    manager_of,
    place,
    upstream,
)
from tests.integration.regional_agent.world import World
from tests.waiting import attempts

SHARE, BURST = 30, 30  # of each protocol in this region: units a second, and at once
FALLBACK = 5  # requests at once, and a second, as quota.yaml says
PROTOCOLS = ("rls", "rlqs")  # each has a tenant, and so a bucket, of its own
CALLERS, PAUSE_S = 4, 0.1  # of each listener: 40 requests a second, 80 at both Envoys
DOCUMENT: dict[str, Any] = {
    "plans": {},
    "quotas": [
        {"name": "edge", "kind": "rate", "limit": f"{3 * SHARE}/second, burst {3 * BURST}", "sharing": "regional"}
    ],
    "policies": [{"name": "edge", "quota": "edge", "by": ["tenant"], "on_store_failure": "local"}],
}


@dataclass
class Caller:
    """Requests over one connection at a time."""

    port: int
    tenant: str
    seen: Counter[str]

    async def run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                await self._request(reader, writer)
            except (OSError, EOFError):
                self.seen["error"] += 1
                await asyncio.sleep(PAUSE_S)

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = f"GET /v1/anything HTTP/1.1\r\nhost: localhost\r\nx-tenant: {self.tenant}\r\n\r\n".encode()
        try:
            while True:
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0))
                self.seen[self._name(head)] += 1
                await asyncio.sleep(PAUSE_S)
        finally:
            writer.transport.abort()

    def _name(self, head: bytes) -> str:
        """Return how a request was answered. An admission by RLS has headers of the agent, unless Envoy let it pass."""
        status = head.split()[1]
        if status == b"200":
            return "admitted" if self.tenant == "rlqs" or b"x-ratelimit-limit" in head else "passed"
        return "denied" if status == b"429" else "error"


@dataclass
class Proxy:
    """An Envoy with a listener for each protocol."""

    name: str
    directory: Path
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in (*PROTOCOLS, "admin")})
    process: subprocess.Popen[bytes] | None = None
    running: ExitStack = field(default_factory=ExitStack)

    def start(self, doors: Sequence[int], upstream_port: int) -> None:
        config = self._configuration(doors, upstream_port)
        self.process = self.running.enter_context(envoy_process(config, self.directory / f"{self.name}.yaml"))

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _configuration(self, doors: Sequence[int], upstream_port: int) -> dict[str, Any]:
        """Return both examples as one, with two agents, quick health checks, and time for a busy machine."""
        rls = yaml.safe_load(EXAMPLE.read_text())
        text = EXAMPLE.with_name("quota.yaml").read_text()
        rlqs = yaml.safe_load(text.replace("edge-1", self.name).replace("leasehold}", "quotas}"))
        [own], [api, leasehold] = rls["static_resources"]["listeners"], rls["static_resources"]["clusters"]
        [other], [_, quotas] = rlqs["static_resources"]["listeners"], rlqs["static_resources"]["clusters"]
        manager = manager_of(own)
        del manager["access_log"]
        manager["http_filters"][0]["typed_config"]["timeout"] = "1s"
        tenant = [{"actions": [{"request_headers": {"header_name": "x-tenant", "descriptor_key": "tenant"}}]}]
        manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["rate_limits"] = tenant
        manager_of(other)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = "api"
        quotas["name"] = quotas["load_assignment"]["cluster_name"] = "quotas"
        leasehold["health_checks"][0] |= {"interval": "0.5s", "no_traffic_interval": "0.5s"}
        for listener, protocol in ((own, "rls"), (other, "rlqs")):
            listener["name"] = protocol
            place(listener, self.ports[protocol])
        for cluster, ports in ((api, [upstream_port]), (leasehold, doors), (quotas, doors)):
            endpoints = endpoints_of(cluster)
            endpoints[:] = [deepcopy(endpoints[0]) for _ in ports]
            for endpoint, port in zip(endpoints, ports, strict=True):
                place(endpoint["endpoint"], port)
        resources = {"listeners": [own, other], "clusters": [api, leasehold, quotas]}
        place(rls["admin"], self.ports["admin"])
        return {"admin": rls["admin"], "static_resources": resources}


@dataclass
class AgentProcess:
    world: World
    directory: Path
    settings: dict[str, Any]
    door: int = field(default_factory=free_port)
    http: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    is_ending: bool = False
    running: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        own, self.is_ending = self.settings | {"PORT": self.http}, False
        self.process = self.running.enter_context(agent_process(self.world, self.door, self.directory, **own))

    def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.is_ending = True
        self.process.send_signal(number)

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    async def assigned(self) -> set[str]:
        """Return the proxies that this agent has assigned something."""
        with suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.http}", timeout=5) as client:
                status = (await client.get("/v1/status")).json()
            quotas = status["proxy_quotas"]
            connected = {each["proxy"] for each in quotas["proxies"] if each["connected"]}
            return {each["proxy"] for each in quotas["assignments"] if each["rate_milli"]} & connected
        return set()


@dataclass
class FaultStack:
    proxies: list[Proxy]
    agents: list[AgentProcess]
    doors: list[Link]  # from the proxies to each agent
    coordinator: Link
    store: Link
    upstream_port: int
    seen: dict[tuple[str, str], Counter[str]]  # by proxy and protocol

    def start_proxy(self, proxy: Proxy) -> None:
        proxy.start([each.port for each in self.doors], self.upstream_port)

    def total(self, protocol: str) -> Counter[str]:
        return sum((seen for (_, each), seen in self.seen.items() if each == protocol), Counter())

    async def settled(self) -> None:
        """Wait until all proxies have assignments, and are answered by agents."""
        before = deepcopy(self.seen)
        async for _ in attempts():
            assigned = [await agent.assigned() for agent in self.agents]
            rls = [seen["admitted"] > before[who]["admitted"] for who, seen in self.seen.items() if who[1] == "rls"]
            if {each.name for each in self.proxies} <= set().union(*assigned) and all(rls):
                return
        raise AssertionError(f"not settled: {assigned}, {self.seen}")


@asynccontextmanager
async def fault_stack(world: World, directory: Path) -> AsyncIterator[FaultStack]:
    (await world.admin.put("/v1/limits", json=DOCUMENT)).raise_for_status()
    port = free_port()
    store_url = world.settings("us-east").store_url.get_secret_value()
    coordinator = await Link(urlsplit(world.url).port or 0).serve()
    store = await Link(urlsplit(store_url).port or 0).serve()
    settings = {
        "COORDINATOR_URL": f"http://127.0.0.1:{coordinator.port}",
        "STORE_URL": store_url.replace(str(urlsplit(store_url).port), str(store.port)),
        "DECISION_TIMEOUT_MS": 500,
        "DECISION_TIMEOUT_MAX_MS": 500,
    }
    agents = [AgentProcess(world, directory, settings) for _ in range(2)]
    doors = [await Link(each.door).serve() for each in agents]
    proxies = [Proxy(name, directory) for name in ("edge-1", "edge-2")]
    seen = {(proxy.name, protocol): Counter[str]() for proxy in proxies for protocol in PROTOCOLS}
    stack = FaultStack(proxies, agents, doors, coordinator, store, port, seen)
    async with AsyncExitStack() as running:
        await running.enter_async_context(upstream(port))
        for agent in agents:
            running.enter_context(agent.running)
            agent.start()
        for proxy in proxies:
            running.enter_context(proxy.running)
            stack.start_proxy(proxy)
        callers = [
            asyncio.create_task(Caller(proxy.ports[protocol], protocol, seen[proxy.name, protocol]).run())
            for proxy in proxies
            for protocol in PROTOCOLS
            for _ in range(CALLERS)
        ]
        try:
            await stack.settled()
            yield stack
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            for link in (*doors, coordinator, store):
                link.refuse()
