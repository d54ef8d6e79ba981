"""The migration of docs/guides/envoy.md from a real envoyproxy/ratelimit: import, run both, compare, switch.

It builds envoyproxy/ratelimit with Go, once.
"""

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.peers.installing import install
from leasehold.cli.app import app
from leasehold.local_stack import embedded
from leasehold.local_stack.processes import spawn, stop
from tests.conftest import free_port
from tests.integration.regional_agent.envoy.grpc_harness import GrpcAgent, grpc_agent
from tests.integration.regional_agent.envoy.real_envoy import (
    EXAMPLE,
    endpoints_of,
    envoy_process,
    manager_of,
    place,
    upstream,
)
from tests.integration.regional_agent.world import REGIONS, World
from tests.parts import toolchain
from tests.waiting import attempts

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("envoy"), pytest.mark.extended]

LIMIT = 6
CONFIG = {
    "domain": "edge",
    "descriptors": [
        {
            "key": "tenant",
            "descriptors": [{"key": "path", "rate_limit": {"unit": "day", "requests_per_unit": LIMIT}}],
        }
    ],
}
OLD, NEW = "ratelimit", "leasehold"  # clusters


@contextmanager
def envoyproxy_ratelimit(directory: Path, ports: dict[str, int]) -> Iterator[None]:
    """Run the service that is moved from, with a store of its own."""
    toolchain("go")
    installed = install(["ratelimit"])
    program = installed.program("ratelimit")
    assert program is not None, installed.missing
    config = directory / "ratelimit" / "config"
    config.mkdir(parents=True)
    (config / "edge.yaml").write_text(yaml.safe_dump(CONFIG))
    environ = {
        "RUNTIME_ROOT": str(directory),
        "RUNTIME_SUBDIRECTORY": "ratelimit",
        "RUNTIME_WATCH_ROOT": "false",
        "USE_STATSD": "false",
        "USE_PROMETHEUS": "true",
        "PROMETHEUS_ADDR": f"127.0.0.1:{ports['PROMETHEUS']}",
        "LOG_LEVEL": "warn",
        "REDIS_SOCKET_TYPE": "tcp",
        "REDIS_URL": f"127.0.0.1:{ports['store']}",
        "REDIS_AUTH": "secret",
        **{f"{name}HOST": "127.0.0.1" for name in ("", "GRPC_", "DEBUG_")},
        **{name: str(ports[name]) for name in ("PORT", "GRPC_PORT", "DEBUG_PORT")},
    }
    store = embedded.start_store(directory / "data", ports["store"], "secret", log=directory / "store.log")
    service = spawn([program], log=directory / "ratelimit.log", environ=os.environ | environ)
    try:
        yield
    finally:
        stop(service)
        stop(store)


@asynccontextmanager
async def envoy(clusters: list[str], ports: dict[str, int], directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run Envoy with a filter for each cluster, in this order."""
    config = yaml.safe_load(EXAMPLE.read_text())
    resources = config["static_resources"]
    [listener], [api, leasehold] = resources["listeners"], resources["clusters"]
    manager, own = manager_of(listener), free_port()
    place(config["admin"], free_port())
    place(listener, own)
    place(endpoints_of(api)[0]["endpoint"], ports["upstream"])
    [example, router] = manager["http_filters"]
    del manager["access_log"]
    manager["http_filters"] = [*(_filter(example, cluster) for cluster in clusters), router]
    resources["clusters"] = [api, *(_cluster(leasehold, cluster, ports[cluster]) for cluster in (OLD, NEW))]
    path = directory / f"{'-'.join(clusters)}.yaml"
    with envoy_process(config, path):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{own}", timeout=30) as client:
            await _is_limited(client, path.with_suffix(".log"))
            yield client


def _filter(example: dict[str, Any], cluster: str) -> dict[str, Any]:
    found = deepcopy(example)
    found["typed_config"]["timeout"] = "30s"
    found["typed_config"]["failure_mode_deny"] = True  # so that a decision is known to be one
    found["typed_config"]["rate_limit_service"]["grpc_service"]["envoy_grpc"]["cluster_name"] = cluster
    return found


def _cluster(example: dict[str, Any], name: str, port: int) -> dict[str, Any]:
    found = deepcopy(example) | {"name": name}
    del found["health_checks"]
    found["load_assignment"]["cluster_name"] = name
    place(endpoints_of(found)[0]["endpoint"], port)
    return found


async def _is_limited(client: httpx.AsyncClient, log: Path) -> None:
    """Wait until the services behind Envoy decide."""
    async for _ in attempts():
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx.TransportError:
            continue
    raise AssertionError(f"Envoy or a service behind it does not answer: {log}")


async def statuses(client: httpx.AsyncClient, tenant: str, times: int = 2 * LIMIT) -> Counter[int]:
    headers = {"x-tenant": tenant}
    return Counter([(await client.get("/v1/search", headers=headers)).status_code for _ in range(times)])


async def over_limit_of_the_old(ports: dict[str, int], expected: int) -> None:
    """Wait until the old service, which counts with a delay, shows so many requests over their limit."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['PROMETHEUS']}") as client:
        async for _ in attempts():
            text = (await client.get("/metrics")).text
            found = re.findall(r'^ratelimit_service_rate_limit_over_limit\{.*domain="edge".*\} (\S+)$', text, re.M)
            if sum(map(float, found)) == expected:
                return
    raise AssertionError(f"not {expected}: {text}")


async def shadow_denied(at: GrpcAgent) -> int:
    text = (await at.agent.http.get("/metrics")).text
    found = re.findall(r'leasehold_checks_total\{[^}]*answer="shadow_denied"[^}]*\} (\S+)', text)
    return int(sum(map(float, found)))


def imported(directory: Path, *options: str) -> dict[str, Any]:
    """Return what the command makes of the configuration."""
    config, output = directory / "ratelimit" / "config" / "edge.yaml", directory / "limits.yaml"
    done = CliRunner().invoke(app, ["import", "envoy-ratelimit", str(config), "-o", str(output), *options])
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = yaml.safe_load(output.read_text())
    return document


async def test_the_migration_step_by_step(world: World, tmp_path: Path) -> None:
    names = ("upstream", "store", "PORT", "GRPC_PORT", "DEBUG_PORT", "PROMETHEUS")
    ports = {name: free_port() for name in names}
    for region in REGIONS[1:]:  # one region has the whole window, as the old service does
        (await world.admin.put(f"/v1/regions/{region}", json={"weight": 0})).raise_for_status()
    with envoyproxy_ratelimit(tmp_path, ports):
        document = imported(tmp_path, "--shadow")
        async with upstream(ports["upstream"]), grpc_agent(world, document) as at:
            ports |= {OLD: ports["GRPC_PORT"], NEW: int(at.address.rpartition(":")[2])}
            async with envoy([OLD], ports, tmp_path) as client:
                assert await statuses(client, "before") == {200: LIMIT, 429: LIMIT}
            await over_limit_of_the_old(ports, LIMIT)
            async with envoy([NEW, OLD], ports, tmp_path) as client:
                assert await statuses(client, "both") == {200: LIMIT, 429: LIMIT}, "as the old service says"
                denied = await client.get("/v1/search", headers={"x-tenant": "both"})
                assert "x-ratelimit-limit" not in denied.headers, "shadow policies are in no header"
                assert await shadow_denied(at) == LIMIT + 1
                await over_limit_of_the_old(ports, LIMIT + LIMIT + 1)
            await switch(world, at, imported(tmp_path))
            async with envoy([NEW], ports, tmp_path) as client:
                assert await statuses(client, "after") == {200: LIMIT, 429: LIMIT}
                denied = await client.get("/v1/search", headers={"x-tenant": "after"})
                assert denied.headers["x-ratelimit-limit"] == str(LIMIT)


async def switch(world: World, at: GrpcAgent, document: dict[str, Any]) -> None:
    """Apply the document without shadow, and wait until the agent has it."""
    version = at.agent.whole.admission.policies
    (await world.admin.put("/v1/limits", json=document)).raise_for_status()
    async for _ in attempts():
        await asyncio.sleep(0)
        if at.agent.whole.admission.policies is not version:
            return
    raise AssertionError("the agent does not get the document")
