"""The libraries beside `leasehold.Engine`: each in a process of its own that waits for its turns."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Load
from benchmarks.load import RefusedError, get
from benchmarks.peers.generator import CALLERS, KEY, Generated, Keys, Request
from benchmarks.peers.installing import HERE, ROOT, Installed
from benchmarks.peers.servers import (
    FIXED_WINDOW,
    PER_MINUTE,
    SLICES,
    STORE_PASSWORD,
    TOKEN_BUCKET,
    Peer,
    own_store,
)
from benchmarks.stack import PATIENCE_S, REGION, Stack
from leasehold.local_stack.embedded import store_url
from leasehold.local_stack.launcher import DECISION_TIMEOUT_MS

ENGINES = {
    FIXED_WINDOW: "leasehold.Engine, fixed window",
    TOKEN_BUCKET: "leasehold.Engine, token bucket",
    SLICES: "leasehold.Engine, token bucket by slices",
}
LIBRARIES = {
    "limits": "limits, fixed window",
    "limits-sliding": "limits, sliding window counter",
    "throttled-py": "throttled-py, fixed window",
    "throttled-py-bucket": "throttled-py, token bucket",
    "pyrate-limiter": "pyrate-limiter, token bucket",
}


class Library(NamedTuple):
    """A library to start in a process of its own."""

    name: str
    command: Sequence[str | Path]
    environ: Mapping[str, str]
    only_hot: bool = False
    store_port: int | None = None  # where it expects a store of its own; else it uses that of the stack


class Caller(NamedTuple):
    """A process that limits itself and waits for its turns."""

    library: Library
    process: asyncio.subprocess.Process
    store_pid: int

    async def run(self, keys: Keys, seconds: float) -> Generated:
        turn = {"keys": keys.number, "first": keys.first, "seconds": seconds, "callers": CALLERS}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(turn).encode() + b"\n")
        measured = await self.read()
        load = Load(measured["per_second"], measured["p50_us"], measured["p99_us"], refused=0)
        return Generated(load, int(measured["decisions"]), late_p99_us=0)

    async def read(self) -> Mapping[str, float]:
        """Read one line of figures."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            async for line in self.process.stdout:
                if line.startswith(b"{"):  # anything else is what the library prints
                    figures: Mapping[str, float] = json.loads(line)
                    return figures
            complaint = await self.process.stderr.read()
        raise RefusedError(f"{self.library.name} ended: {complaint.decode(errors='replace')[-2000:]}")


def libraries(installed: Installed, stack: Stack, first_port: int) -> Iterator[Library]:
    """Return Leasehold's engine and the libraries that this machine has."""
    engine = [sys.executable, "-m", "benchmarks.peers.leasehold_engine"]
    command: list[str | Path]
    for route, name in ENGINES.items():
        yield Library(name, [*engine, route], engine_settings(stack), route == SLICES)
    if "python" not in installed.missing:
        for port, (key, name) in enumerate(LIBRARIES.items(), first_port + 1):
            command = [installed.python, HERE / "libraries.py", key]
            yield Library(name, command, _settings(port), store_port=port)
    if "node" not in installed.missing:
        environ = _settings(first_port) | {"PEER_MODULES": str(installed.node_modules)}
        command = [shutil.which("node") or "", HERE / "rate_limiter_flexible.mjs"]
        yield Library("rate-limiter-flexible (Node), fixed window", command, environ, store_port=first_port)


def _settings(store_port: int) -> dict[str, str]:
    return {"STORE_URL": store_url(store_port, STORE_PASSWORD), "PER_MINUTE": str(PER_MINUTE)}


def engine_settings(stack: Stack) -> dict[str, str]:
    """Return the settings of one more agent in the region."""
    settings = {
        "REGION": REGION,
        "COORDINATOR_URL": stack["coordinator"],
        "COORDINATOR_TOKEN": stack["tokens"][f"region:{REGION}"],
        "STORE_URL": stack["stores"][REGION],
        "DECISION_TIMEOUT_MS": DECISION_TIMEOUT_MS,  # as the stack's own agents have it, on the same shared cores
    }
    return {f"LEASEHOLD_AGENT_{name}": value for name, value in settings.items()}


@asynccontextmanager
async def waiting(
    every: Sequence[Library], stack: Stack, measure: Callable[[int], None], directory: Path
) -> AsyncIterator[list[Caller]]:
    """Run the processes of libraries until the block ends, with their stores on the measured core."""
    async with AsyncExitStack() as running_all:
        callers = []
        for each in every:
            store_pid: int = stack["pids"][f"store-{REGION}"]
            if each.store_port is not None:
                place = directory / f"library-{each.store_port}"
                store_pid = await running_all.enter_async_context(own_store(place, each.store_port))
                measure(store_pid)
            process = await running_all.enter_async_context(_process(each))
            caller = Caller(each, process, store_pid)
            await caller.read()
            callers.append(caller)
        yield callers


@asynccontextmanager
async def _process(library: Library) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *library.command,
        cwd=ROOT,
        env={**os.environ, **library.environ},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


# --- services that are limited in their own process


def services(installed: Installed, stack: Stack, first_port: int) -> Iterator[Peer]:
    """Return the same FastAPI service, limited by Leasehold's middleware and by slowapi."""
    variants = {FIXED_WINDOW: "fixed window", SLICES: "token bucket by slices"}
    for port, (route, name) in enumerate(variants.items(), first_port):
        environ = engine_settings(stack) | {"PEER_ROUTE": route}
        ours = _service(
            f"leasehold.middleware, {name}", sys.executable, ROOT, "benchmarks.peers.leasehold_service", port
        )
        yield ours._replace(environ=environ, store_pid=stack["pids"][f"store-{REGION}"])
    if "python" not in installed.missing:
        slowapi = _service("slowapi, fixed window", installed.python, HERE, "slowapi_service", first_port + 2)
        yield slowapi._replace(environ=_settings(first_port + 3), store_port=first_port + 3)


def _service(name: str, python: str | Path, directory: Path, module: str, port: int) -> Peer:
    command = [python, "-m", "uvicorn", "--app-dir", directory, f"{module}:app", "--port", str(port)]
    request = Request(get(f"/benchmark?tenant={KEY}"), "^HTTP/1.1 200", r"(?is)^HTTP/1.1 200.*\nx-ratelimit-limit:")
    return Peer(name, [*command, "--no-access-log", "--log-level", "warning"], {}, f"127.0.0.1:{port}", request)
