"""The libraries of others beside Leasehold: the same store, the same callers, one core for whoever asks.

They are installed when somebody asks for this benchmark, in an environment of their own (`.peers/`, versions and hashes
in requirements.txt), for Leasehold needs none of them. Each is asked as its documentation says, under a limit that is
never reached, by 64 callers at once in one process.
"""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx

from benchmarks.agent import check, limits
from benchmarks.frame import Lines, Load, Turn, compare
from benchmarks.load import Server, get, http_is_whole, load
from benchmarks.stack import PATIENCE_S, REGION, Stack, host_and_port, local_stack, pinned, put_limits
from leasehold.local_stack.launcher import DECISION_TIMEOUT_MS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALLED = ROOT / ".peers"
NODE_PACKAGES = ("rate-limiter-flexible@11.4.0", "ioredis@6.0.0")
CALLERS = 64
LIBRARIES = "64 callers in one process that asks the store, without HTTP"
SERVICES = "a FastAPI service that is limited, 64 requests at once"
NAMES = {
    "limits": "limits, fixed window",
    "limits-sliding": "limits, sliding window counter",
    "throttled-py": "throttled-py, token bucket",
    "pyrate-limiter": "pyrate-limiter, token bucket",
}


async def run(repeats: int, seconds: float, port: int) -> dict[str, Lines]:
    python = installed()
    async with local_stack(port) as stack:
        await put_limits(stack, limits(), check("/benchmark"))
        with pinned(stack) as measure:
            libraries = await compare(_libraries(stack, python, seconds), repeats)
            async with (
                _service(_leasehold_service(stack), port + 90, measure) as ours,
                _service(_slowapi(stack, python), port + 91, measure) as slowapi,
            ):
                asked = partial(load, connections=CALLERS, seconds=seconds, accepted=b"HTTP/1.1 200")
                turns = {"leasehold.middleware": ours, "slowapi": slowapi}
                services = await compare(
                    {name: partial(asked, server, get("/benchmark")) for name, server in turns.items()}, repeats
                )
    return {LIBRARIES: libraries, SERVICES: services}


# --- what is not ours


def installed() -> Path:
    """The Python of the others' environment; it is made once, and anew when what it is made from changes."""
    python = INSTALLED / "bin" / "python"
    made_from = hashlib.sha256((HERE / "requirements.txt").read_bytes() + repr(NODE_PACKAGES).encode()).hexdigest()
    mark = INSTALLED / "made-from"
    if mark.exists() and mark.read_text() == made_from:
        return python
    print("installing the libraries of others in .peers/: once, some seconds, needs the network")
    shutil.rmtree(INSTALLED, ignore_errors=True)
    venv.create(INSTALLED, with_pip=True)
    _install(python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", HERE / "requirements.txt")
    if npm := shutil.which("npm"):
        _install(npm, "install", "--silent", "--no-package-lock", "--prefix", INSTALLED / "node", *NODE_PACKAGES)
    mark.write_text(made_from)
    return python


def _install(*command: str | Path) -> None:
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{command[0]} could not install them; what it said is above")


# --- libraries


def _libraries(stack: Stack, python: Path, seconds: float) -> dict[str, Turn]:
    environ = {
        "STORE_URL": stack["stores"][REGION],
        "PEER_SECONDS": str(seconds),
        "PEER_CALLERS": str(CALLERS),
        "PEER_MODULES": str(INSTALLED / "node" / "node_modules"),
    }
    ours = [sys.executable, "-m", "benchmarks.peers.leasehold_engine"]
    ours_environ = _settings(stack) | environ
    turns: dict[str, Turn] = {
        "leasehold.Engine, token bucket, every decision in the store": partial(
            _asked, [*ours, "/benchmark"], ours_environ
        ),
        "leasehold.Engine, token bucket, as it comes: a hot key by slices": partial(
            _asked, [*ours, "/sliced"], ours_environ
        ),
    }
    for name, said in NAMES.items():
        turns[said] = partial(_asked, [python, HERE / "libraries.py", name], environ)
    node = shutil.which("node")
    if node and (INSTALLED / "node").exists():
        turns["rate-limiter-flexible (Node), fixed window"] = partial(
            _asked, [node, HERE / "rate_limiter_flexible.mjs"], environ
        )
    return turns


async def _asked(command: Sequence[str | Path], environ: Mapping[str, str]) -> Load:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaint = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{command[-1]} failed: {complaint.decode()[-2000:]}")
    said = json.loads(output.splitlines()[-1])
    return Load(said["per_second"], said["p50_us"], said["p99_us"], refused=0)


def _settings(stack: Stack) -> dict[str, str]:
    """Return the figures with one more agent in the region."""
    settings = {
        "REGION": REGION,
        "COORDINATOR_URL": stack["coordinator"],
        "COORDINATOR_TOKEN": stack["tokens"][f"region:{REGION}"],
        "STORE_URL": stack["stores"][REGION],
        "DECISION_TIMEOUT_MS": DECISION_TIMEOUT_MS,  # as the stack's own agents have it, on the same shared cores
    }
    return {f"LEASEHOLD_AGENT_{name}": value for name, value in settings.items()}


# --- services


Service = tuple[Sequence[str | Path], Mapping[str, str]]


def _leasehold_service(stack: Stack) -> Service:
    return [sys.executable, "-m", "uvicorn", "benchmarks.peers.leasehold_service:app"], _settings(stack)


def _slowapi(stack: Stack, python: Path) -> Service:
    command: list[str | Path] = [python, "-m", "uvicorn", "--app-dir", HERE, "slowapi_service:app"]
    return command, {"STORE_URL": stack["stores"][REGION]}


@asynccontextmanager
async def _service(service: Service, port: int, measure: Callable[[int], None]) -> AsyncIterator[Server]:
    """Run the library on the measured core, as an agent would; the load has the other."""
    command, environ = service
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--port", str(port), "--no-access-log", "--log-level", "warning"),
        cwd=ROOT,
        env={**os.environ, **environ},
    )
    measure(process.pid)
    try:
        await _answers(f"http://127.0.0.1:{port}/benchmark")
        yield Server(*host_and_port(f"http://127.0.0.1:{port}"), http_is_whole)
    finally:
        process.terminate()
        await process.wait()


async def _answers(url: str) -> None:
    """Check that it limits: admitting without a policy would be no comparison."""
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as client:
        while True:
            try:
                answer = await client.get(url)
                if answer.status_code == 200 and "x-ratelimit-limit" in answer.headers:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
