"""The servers beside Leasehold: how each is configured and started, and what it is sent.

Each has its fastest transport and a limit that is never reached. A server that keeps its state in a store has one of
its own, started from the same binary with the same configuration as the store of Leasehold's agent.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from benchmarks.load import RefusedError, post
from benchmarks.peers.generator import KEY, Generator, Request, encode_field, hot_key
from benchmarks.peers.installing import Installed
from benchmarks.stack import PATIENCE_S, PLANS, REGION, Stack
from leasehold.local_stack.embedded import start_store, store_is_ready, store_url

PER_MINUTE = 9_000_000  # the largest that Leasehold has; no turn uses as much of one key
FIXED_WINDOW, TOKEN_BUCKET, SLICES = "/fixed-window", "/token-bucket", "/slices"
# A bucket that is never empty, and not full for half a minute after a request, so that the store has each key's state.
BUCKET = f"6/minute, burst {PER_MINUTE}"
_STARTS_S = 0.2
STORE_PASSWORD = "peers"  # noqa: S105 (of a store on loopback that ends with the run)


class Target(NamedTuple):
    """A server that runs."""

    name: str
    address: str
    pid: int
    request: Request
    store_pid: int | None
    only_hot: bool = False  # what has no meaning with keys that are seldom used


class Peer(NamedTuple):
    """A server to start."""

    name: str
    command: Sequence[str | Path]
    environ: Mapping[str, str]
    address: str
    request: Request
    store_port: int | None = None  # where it expects a store of its own
    store_pid: int | None = None  # of the store that it shares with others


def leasehold_limits() -> dict[str, object]:
    kinds: dict[str, dict[str, object]] = {
        FIXED_WINDOW: {"limit": f"{PER_MINUTE}/minute", "algorithm": "fixed_window"},
        TOKEN_BUCKET: {"limit": BUCKET, "algorithm": "token_bucket", "slices": False},
        SLICES: {"limit": BUCKET, "algorithm": "token_bucket"},
    }
    return {
        "plans": PLANS,
        "quotas": [{"name": route[1:], "kind": "rate", **kind} for route, kind in kinds.items()],
        "policies": [
            {"name": route[1:], "match": {"route": route}, "by": ["tenant"], "quota": route[1:]} for route in kinds
        ],
    }


def leasehold_check(route: str) -> dict[str, object]:
    return {"subject": {"tenant": KEY, "route": route, "method": "GET"}}


def leasehold_targets(stack: Stack) -> list[Target]:
    names = {
        FIXED_WINDOW: "Leasehold, fixed window, HTTP",
        TOKEN_BUCKET: "Leasehold, token bucket, HTTP",
        SLICES: "Leasehold, token bucket by slices, HTTP",
    }
    address, pids = urlsplit(stack["agents"][REGION]).netloc, stack["pids"]
    agent, store = pids[f"agent-{REGION}"], pids[f"store-{REGION}"]
    return [
        Target(name, address, agent, _check_request(route), store, only_hot=route == SLICES)
        for route, name in names.items()
    ]


def _check_request(route: str) -> Request:
    return Request(post("/v1/check", msgspec.json.encode(leasehold_check(route))), "^HTTP/1.1 200")


def peers(installed: Installed, first_port: int, directory: Path) -> Iterator[Peer]:
    """Return the servers that this machine has."""
    if ratelimit := installed.program("ratelimit"):
        yield envoyproxy_ratelimit(ratelimit, first_port, directory)
    if limitador := installed.program("limitador-server"):
        yield from _limitador(limitador, first_port + 10, directory)
    if gubernator := installed.program("gubernator"):
        yield _gubernator(gubernator, first_port + 20)


# --- envoyproxy/ratelimit


def envoyproxy_ratelimit(program: Path, first_port: int, directory: Path) -> Peer:
    store_port = first_port + 3
    config = directory / "ratelimit" / "config"
    config.mkdir(parents=True)
    limit = f"{{unit: minute, requests_per_unit: {PER_MINUTE}}}"
    (config / "peers.yaml").write_text(f"domain: peers\ndescriptors:\n  - key: tenant\n    rate_limit: {limit}\n")
    environ = {
        "RUNTIME_ROOT": str(directory),
        "RUNTIME_SUBDIRECTORY": "ratelimit",
        "RUNTIME_WATCH_ROOT": "false",
        "USE_STATSD": "false",
        "LOG_LEVEL": "warn",
        "HOST": "127.0.0.1",
        "PORT": str(first_port),
        "GRPC_HOST": "127.0.0.1",
        "GRPC_PORT": str(first_port + 1),
        "DEBUG_HOST": "127.0.0.1",
        "DEBUG_PORT": str(first_port + 2),
        "REDIS_SOCKET_TYPE": "tcp",
        "REDIS_URL": f"127.0.0.1:{store_port}",
        "REDIS_AUTH": STORE_PASSWORD,
        "REDIS_PIPELINE_WINDOW": "150us",
    }
    entry = encode_field(1, "tenant") + encode_field(2, KEY)
    body = encode_field(1, "peers") + encode_field(2, encode_field(1, entry))
    # overall_code OK, and the first status: OK under a limit
    request = Request(
        body, r"^\x08\x01\x12.\x08\x01\x12", grpc_method="/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
    )
    name, address = "envoyproxy/ratelimit, fixed window, gRPC", f"127.0.0.1:{first_port + 1}"
    return Peer(name, [program], environ, address, request, store_port)


# --- Limitador


def _limitador(program: Path, first_port: int, directory: Path) -> Iterator[Peer]:
    limits = directory / "limitador.yaml"
    limits.write_text(
        f"- namespace: peers\n  max_value: {PER_MINUTE}\n  seconds: 60\n  conditions: []\n  variables: [tenant]\n"
    )
    body = msgspec.json.encode({"namespace": "peers", "values": {"tenant": KEY}, "delta": 1})
    request = Request(post("/check_and_report", body), "^HTTP/1.1 200")
    store_port = first_port + 9
    in_store, in_memory = ["redis", store_url(store_port, STORE_PASSWORD)], ["memory", "200000"]
    variants = [("", in_store, store_port), (", own memory", in_memory, None)]
    for place, (where, storage, port) in enumerate(variants):
        http, grpc = str(first_port + 2 * place), str(first_port + 2 * place + 1)
        ports = ["--http-ip", "127.0.0.1", "--http-port", http, "--rls-ip", "127.0.0.1", "--rls-port", grpc]
        command: list[str | Path] = [program, *ports, limits, *storage]
        yield Peer(f"Limitador, fixed window, HTTP{where}", command, {}, f"127.0.0.1:{http}", request, port)


# --- Gubernator


def _gubernator(program: Path, first_port: int) -> Peer:
    grpc, http, members = (f"127.0.0.1:{first_port + place}" for place in range(3))
    environ = {
        "GUBER_GRPC_ADDRESS": grpc,
        "GUBER_HTTP_ADDRESS": http,
        "GUBER_ADVERTISE_ADDRESS": grpc,
        "GUBER_PEER_DISCOVERY_TYPE": "member-list",  # without members it does not find even itself
        "GUBER_MEMBERLIST_ADDRESS": members,
        "GUBER_MEMBERLIST_BIND_ADDRESS": members,
        "GUBER_MEMBERLIST_KNOWN_NODES": members,
        "GUBER_CACHE_SIZE": "200000",
        "GUBER_LOG_LEVEL": "error",
        "OTEL_TRACES_EXPORTER": "none",
    }
    # name, key, hits, limit and duration in ms; the algorithm is a token bucket unless another is named
    fields: dict[int, str | int] = {1: "peers", 2: KEY, 3: 1, 4: PER_MINUTE, 5: 60_000}
    body = encode_field(1, b"".join(encode_field(number, value) for number, value in fields.items()))
    # one response, whose first field is the limit: no status, which is "under the limit"
    request = Request(body, r"^\n.\x10", grpc_method="/pb.gubernator.V1/GetRateLimits")
    return Peer("Gubernator, token bucket, gRPC, own memory", [program], environ, grpc, request)


# --- running


@asynccontextmanager
async def running(
    every: Sequence[Peer],
    generator: Generator,
    measure: Callable[[int], None],
    directory: Path,
    missing: MutableMapping[str, str],
) -> AsyncIterator[list[Target]]:
    """Run servers on the measured core until the block ends. Add those that do not admit requests to `missing`."""
    targets: list[Target] = []
    async with AsyncExitStack() as stack:
        for each in every:
            try:
                targets.append(await stack.enter_async_context(_running(each, generator, measure, directory)))
            except RefusedError as error:
                missing[each.name] = f"it does not admit requests: {error}"
        yield targets


@asynccontextmanager
async def _running(
    peer: Peer, generator: Generator, measure: Callable[[int], None], directory: Path
) -> AsyncIterator[Target]:
    name = f"{Path(peer.command[0]).name}-{peer.address.rpartition(':')[2]}"
    log = directory / f"{name}.log"
    async with AsyncExitStack() as stack:
        store_pid = peer.store_pid
        if peer.store_port is not None:
            store_pid = await stack.enter_async_context(own_store(directory / f"{name}-store", peer.store_port))
            measure(store_pid)
        process = await stack.enter_async_context(_process(peer, log))
        measure(process.pid)
        await _until_it_admits(peer, process, generator, log)
        measure(process.pid)  # the threads that it has started since, too
        yield Target(peer.name, peer.address, process.pid, peer.request, store_pid)


@asynccontextmanager
async def own_store(directory: Path, port: int) -> AsyncIterator[int]:
    """Run a store like those of `leasehold up` until the block ends; gives its process id."""
    process = start_store(directory, port, STORE_PASSWORD, log=directory.with_suffix(".log"))
    try:
        await asyncio.to_thread(_wait_for_store, port)
        yield process.pid
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


def _wait_for_store(port: int) -> None:
    last = time.monotonic() + PATIENCE_S
    while not store_is_ready(port, STORE_PASSWORD):
        if time.monotonic() > last:
            raise SystemExit(f"the store on port {port} did not start")
        time.sleep(0.05)


@asynccontextmanager
async def _process(peer: Peer, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *peer.command, env={**os.environ, **peer.environ}, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_it_admits(peer: Peer, process: asyncio.subprocess.Process, generator: Generator, log: Path) -> None:
    """Wait until requests are admitted under a limit: admitting without one would be no comparison."""
    limited = peer.request._replace(accepted=peer.request.shows_limit or peer.request.accepted)
    refusal = ""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while process.returncode is None:
                try:
                    await generator.run(peer.address, limited, hot_key(0), _STARTS_S, callers=1)
                except RefusedError as error:
                    refusal = str(error)
                    await asyncio.sleep(_STARTS_S)
                else:
                    return
    except TimeoutError:
        pass
    logged = await asyncio.to_thread(log.read_text, errors="replace")
    raise RefusedError(" ".join(f"{refusal} {logged[-300:]}".split()))
