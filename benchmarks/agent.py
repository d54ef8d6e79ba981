"""What an agent adds to its store: `POST /v1/check` beside the same script called in the same store by hand.

Both decide on the same bucket, under a limit that is never reached, and the agent decides in the store every time. What
is between them is the agent alone: HTTP, matching of policies, the way to the store.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.frame import Row, Turn, compare
from benchmarks.load import Server, http_is_whole, load, post, resp, store
from protocol.identifiers import quota_key
from regional_agent.store.connection import Argument, Reply, StoreConnection
from regional_agent.store.scripts import Life, RateCharge, Scripts

ABOUT = "one check in one region, {connections} at once"
REGION = "us-east"
LIMIT_PER_SECOND = 1_000_000
CHECK = {"subject": {"tenant": "acme", "route": "/benchmark", "method": "GET"}}
LIMITS = {
    "plans": {"free": {}, "pro": {}, "enterprise": {}},  # those of the tenants that a new stack has
    "quotas": [
        {
            "name": "benchmark",
            "kind": "rate",
            "limit": f"{LIMIT_PER_SECOND}/second, burst {LIMIT_PER_SECOND}",
            "algorithm": "token_bucket",
        }
    ],
    "policies": [{"name": "benchmark", "match": {"route": "/benchmark"}, "by": ["tenant"], "quota": "benchmark"}],
}
PATIENCE_S = 60
CONNECTIONS = (1, 64)


@asynccontextmanager
async def local_stack(port: int) -> AsyncIterator[dict[str, Any]]:
    """`leasehold up` in a directory that is thrown away; what it says when it is ready."""
    with TemporaryDirectory() as data:
        command = [
            sys.executable,
            "-m",
            "leasehold.cli",
            "up",
            "--json",
            "--port",
            str(port),
            "--data",
            f"{data}/stack",
        ]
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


async def put_limits(stack: dict[str, Any]) -> None:
    """Our own limits, and wait until the agent has heard of them: the check is then decided by its policy."""
    authorisation = {"Authorization": f"Bearer {stack['tokens']['quota:write']}"}
    async with httpx.AsyncClient() as client:
        put = await client.put(f"{stack['coordinator']}/v1/limits", json=LIMITS, headers=authorisation)
        if put.status_code != 200:
            raise SystemExit(f"the limits were refused: {put.text}")
        for _ in range(100):
            answer = await client.post(f"{stack['agents'][REGION]}/v1/check", json=CHECK)
            if answer.status_code == 200 and answer.json()["policies"]:
                return
            await asyncio.sleep(0.1)
    raise SystemExit("the agent did not hear of the limits")


class Recorder(StoreConnection):
    """A connection that remembers what it was asked last."""

    last: tuple[Argument, ...] = ()

    async def call(self, *arguments: Argument) -> Reply:
        self.last = arguments
        return await super().call(*arguments)


async def the_same_call(url: str) -> bytes:
    """The bytes that the agent sends to its store for the check."""
    connected = asyncio.Event()
    recorder = Recorder(url, timeout_ms=1_000, on_connected=connected.set)
    recorder.keep()
    try:
        await asyncio.wait_for(connected.wait(), PATIENCE_S)
        scripts = Scripts(recorder)
        fence = await scripts.read_fence()
        assert fence.fingerprint is not None
        assert fence.epoch is not None
        assert fence.lanes is not None
        charge = RateCharge(quota_key("benchmark", [("tenant", "acme")]), 1, LIMIT_PER_SECOND * 1_000, LIMIT_PER_SECOND)
        await scripts.check(Life(fence.fingerprint, fence.epoch, fence.lanes), "enforce", [charge])
        return resp(*(str(part) if isinstance(part, int) else part for part in recorder.last))
    finally:
        await recorder.close()


def turns(stack: dict[str, Any], by_hand: bytes, connections: int, seconds: float) -> dict[str, Turn]:
    store_url, agent_url = urlsplit(stack["stores"][REGION]), urlsplit(stack["agents"][REGION])
    the_store = store(store_url.hostname or "", store_url.port or 0, store_url.password or "")
    the_agent = Server(agent_url.hostname or "", agent_url.port or 0, http_is_whole)
    check = post("/v1/check", json.dumps(CHECK).encode())
    measured = partial(load, connections=connections, seconds=seconds)
    return {
        "EVALSHA check.lua by hand": partial(measured, the_store, by_hand, accepted=b"$"),
        "EVAL of nothing": partial(measured, the_store, resp("EVAL", "return 1", "0"), accepted=b":1"),
        "POST /v1/check": partial(measured, the_agent, check, accepted=b"HTTP/1.1 200"),
    }


async def run(repeats: int, seconds: float, port: int) -> dict[str, list[Row]]:
    """One table for each number of connections."""
    async with local_stack(port) as stack:
        await put_limits(stack)
        by_hand = await the_same_call(stack["stores"][REGION])
        return {
            ABOUT.format(connections=connections): await compare(turns(stack, by_hand, connections, seconds), repeats)
            for connections in CONNECTIONS
        }
