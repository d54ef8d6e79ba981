"""What a store remembers of very many callers once they have gone: nothing, and its memory is what it was.

Random tenants ask once each, by every algorithm, some with an operation's id, and some take a slot. `--seconds 600` is
a million of them in ten minutes. Then as much time passes again; who has longer to live loses the rest of ten minutes
at once, so that a short run shows the same as a long one.
"""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import httpx

from benchmarks.agent import the_store
from benchmarks.frame import Fact, Lines, facts
from benchmarks.stack import PLANS, REGION, local_stack, put_limits
from protocol.limits.rates import RateAlgorithm
from regional_agent.store.connection import StoreConnection

KEYS_A_SECOND = 1_700
BATCH = 500
HOLDS = 5  # with each batch: every other is given back, the rest of the holders are gone
TURNS = 5
LONGEST_MS = 11 * 60_000  # what an operation is remembered for, and some
# Accounting and configuration (lua/README.md): all else has a time to live.
KEPT = re.compile(rb"lh:fence|lh:epochs|lh:libraries|lh:\{\d+\}:(lane|dirty|lease|lines|holds|due):.*")

LIMITS: dict[str, Any] = {
    "plans": PLANS,
    "quotas": [
        {"name": algorithm.value, "kind": "rate", "limit": "10/minute", "algorithm": algorithm.value}
        for algorithm in RateAlgorithm
    ]
    + [{"name": "slots", "kind": "concurrency", "limit": 10, "slot_ttl": "10s"}],
    "policies": [
        {"name": algorithm.value, "match": {"route": f"/{algorithm}"}, "by": ["tenant"], "quota": algorithm.value}
        for algorithm in RateAlgorithm
    ]
    + [{"name": "slots", "match": {"route": "/slots"}, "by": ["tenant"], "quota": "slots"}],
}
Post = Callable[[str, dict[str, Any]], Awaitable[httpx.Response]]


class Survey(NamedTuple):
    """The keys and bytes of a store at one moment, beside accounting and configuration."""

    keys: int
    used_bytes: int  # of all of it
    for_ever: Sequence[bytes]  # the keys that nothing forgets


async def run(_: int, seconds: float, port: int) -> dict[str, Lines]:
    async with local_stack(port) as stack, the_store(stack["stores"][REGION]) as connection:
        await put_limits(stack, LIMITS, {"subject": {"tenant": "acme", "route": f"/{RateAlgorithm.GCRA}"}})
        async with httpx.AsyncClient(base_url=stack["agents"][REGION], timeout=30) as client:
            return {f"bytes of a store, {KEYS_A_SECOND:,} new keys a second": await _seen(connection, client, seconds)}


async def _seen(connection: StoreConnection, client: httpx.AsyncClient, seconds: float) -> list[Fact]:
    async def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return await client.post(path, json=body)

    await ask(post, BATCH, 0)  # so that what is made once is there
    await age(connection, LONGEST_MS)
    before = await survey(connection)
    await ask(post, round(KEYS_A_SECOND * seconds), seconds)
    full = await survey(connection)
    for _ in range(TURNS):  # the agent may report what it has just seen of callers, and so write of them once more
        await asyncio.sleep(seconds)
        await age(connection, LONGEST_MS)
        after = await survey(connection)
        if after.keys <= before.keys:
            break
    assert not full.for_ever, f"nothing forgets {full.for_ever[:5]}"
    assert after.keys <= before.keys, f"{after.keys - before.keys} keys are left"
    return facts({name: [each.used_bytes] for name, each in {"before": before, "full": full, "after": after}.items()})


async def ask(post: Post, keys: int, seconds: float) -> None:
    """Send requests of new callers, evenly over the time."""
    begun = time.monotonic()
    for done in range(0, keys, BATCH):
        await asyncio.sleep(max(0, begun + seconds * done / keys - time.monotonic()))
        answer = await post("/v1/check:batch", {"checks": [_check(done + each) for each in range(BATCH)]})
        assert all(item["status"] == 200 for item in answer.json()["items"]), answer.text[:300]
        for number in range(HOLDS):
            await _hold(post, is_given_back=number % 2 == 0)


async def _hold(post: Post, *, is_given_back: bool) -> None:
    subject = {"tenant": f"tenant-{random.getrandbits(64):x}", "route": "/slots"}
    body = {"subject": subject, "units": 1, "ttl_ms": 10_000, "operation_id": f"{random.getrandbits(64):x}"}
    answer = await post("/v1/holds", body)
    assert answer.status_code == 201, answer.text
    if is_given_back:
        assert (await post(f"/v1/holds/{answer.json()['hold_id']}:release", {})).status_code == 200


def _check(number: int) -> dict[str, Any]:
    algorithms = list(RateAlgorithm)
    subject = {"tenant": f"tenant-{random.getrandbits(64):x}", "route": f"/{algorithms[number % len(algorithms)]}"}
    return {"subject": subject} | ({} if number % 10 else {"operation_id": f"{random.getrandbits(64):x}"})


async def survey(connection: StoreConnection) -> Survey:
    names = await _each(connection, "found[#found + 1] = key")
    for_ever = await _each(connection, "if redis.call('PTTL', key) == -1 then found[#found + 1] = key end")
    memory: bytes = await connection.call("INFO", "memory")
    (used,) = re.findall(rb"used_memory:(\d+)", memory)
    passing, lasting = ([name for name in each if not KEPT.fullmatch(name)] for each in (names, for_ever))
    return Survey(len(passing), int(used), lasting)


async def age(connection: StoreConnection, ms: int) -> None:
    """Let time pass until everything has expired."""
    step = "local left = redis.call('PTTL', key) if left >= 0 then redis.call('PEXPIRE', key, left - %d) end"
    await _each(connection, step % ms)


async def _each(connection: StoreConnection, step: str) -> list[bytes]:
    """Do this for every key; gives what it has found."""
    script = f"local found = {{}} for _, key in ipairs(KEYS) do {step} end return found"
    found: list[bytes] = []
    cursor = b"0"
    while True:
        cursor, names = await connection.call("SCAN", cursor, "COUNT", 1000)
        found += await connection.call("EVAL", script, len(names), *names)
        if cursor == b"0":
            return found
