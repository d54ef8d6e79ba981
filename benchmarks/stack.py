"""`leasehold up` for a benchmark: in a directory that is thrown away, under the benchmark's own limits.

Where there are two cores, what is measured has the first alone (an agent *and* its store, so that what one takes the
other lacks), and the load and all the rest have the second: else the load generator's own hunger would be measured.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx

REGION = "us-east"
PLANS: dict[str, object] = {"free": {}, "pro": {}, "enterprise": {}}  # those of the tenants that a new stack has
PATIENCE_S = 60
_MEASURED = (f"agent-{REGION}", f"store-{REGION}")
_LEASEHOLD = (sys.executable, "-m", "leasehold.cli")

Stack = Mapping[str, Any]


@asynccontextmanager
async def local_stack(port: int, *options: str) -> AsyncIterator[Stack]:
    """Parse what `leasehold up` prints when it is ready."""
    with TemporaryDirectory() as data:
        command = (*_LEASEHOLD, "up", "--json", "--port", str(port), "--data", f"{data}/stack", *options)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
            if not line:
                raise SystemExit("leasehold up did not become ready")
            yield json.loads(line)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            await process.wait()


async def put_limits(stack: Stack, limits: object, check: object, regions: Sequence[str] = (REGION,)) -> None:
    """Our own limits, and wait until these agents have heard of them: the check is then decided by its policy."""
    authorisation = {"Authorization": f"Bearer {stack['tokens']['quota:write']}"}
    async with httpx.AsyncClient() as client:
        put = await client.put(f"{stack['coordinator']}/v1/limits", json=limits, headers=authorisation)
        if put.status_code != 200:
            raise SystemExit(f"the limits were refused: {put.text}")
        for region in regions:
            await _until_heard(client, stack["agents"][region], check)


async def _until_heard(client: httpx.AsyncClient, agent: str, check: object) -> None:
    for _ in range(100):
        answer = await client.post(f"{agent}/v1/check", json=check)
        if answer.status_code == 200 and answer.json()["policies"]:
            return
        await asyncio.sleep(0.1)
    raise SystemExit("the agent did not hear of the limits")


def host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0


# --- cores


def can_be_pinned() -> bool:
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


@contextmanager
def pinned(stack: Stack) -> Iterator[Callable[[int], None]]:
    """The measured agent and its store on the first core; we, our children and the rest of the stack on the second.

    What it gives puts one process more beside the measured ones.
    """
    if not can_be_pinned():
        yield lambda _pid: None
        return
    before = os.sched_getaffinity(0)
    first, second = sorted(before)[:2]
    pids: Mapping[str, int] = stack["pids"]
    for name, pid in pids.items():
        _put(pid, first if name in _MEASURED else second)
    os.sched_setaffinity(0, {second})
    try:
        yield lambda pid: _put(pid, first)
    finally:
        os.sched_setaffinity(0, before)


def _put(pid: int, core: int) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
