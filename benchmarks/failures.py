"""What services notice of a store that hangs: SIGSTOP under 5,000 requests a second, for each failure mode.

The load comes on a schedule, so what waits is counted from when it was due. A third of the time the store is there, a
third it is not, a third it is back. A goal of 10 ms for the latest answer while it is away is the first row.
"""

import asyncio
import json
import os
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import httpx

from benchmarks.frame import Lines, facts
from benchmarks.load import Server, http_is_whole, post
from benchmarks.open_loop import Moment, Sample, open_load, percentile_us
from benchmarks.picture import Points, picture, save
from benchmarks.stack import PATIENCE_S, PLANS, REGION, Stack, host_and_port, local_stack, pinned, put_limits

PER_SECOND = 5_000
GOAL_MS = 10.0
BUCKET_S = 0.05
DECISION_TIMEOUT_MS = 5  # the default; `leasehold up` gives a store more, for it shares its cores with everybody
MODES = {"closed": "calls", "open": "calls", "local": "calls", "journal": "exports"}  # and whose units they take
ANSWERS = {b"HTTP/1.1 200": "allowed", b"HTTP/1.1 429": "denied", b"HTTP/1.1 503": "closed"}


def limits() -> dict[str, object]:
    """A third of the calls is this region's share, and a fifth of that is what is local: a third of what is asked."""
    return {
        "plans": PLANS,
        "quotas": [
            {"name": "calls", "kind": "rate", "limit": "24000/second", "slices": False},
            {"name": "exports", "kind": "allowance", "limit": 10**9, "period": "month"},
        ],
        "policies": [
            {
                "name": mode,
                "match": {"route": f"/{mode}"},
                "by": ["tenant"],
                "quota": quota,
                "on_store_failure": "open" if mode == "journal" else mode,
            }
            for mode, quota in MODES.items()
        ],
    }


def check(mode: str) -> dict[str, object]:
    return {"subject": {"tenant": mode, "route": f"/{mode}", "method": "GET"}}


async def run(repeats: int, seconds: float, port: int) -> dict[str, Lines]:
    latest_ms: dict[str, list[float]] = {"the goal": [GOAL_MS]}
    in_time: dict[str, list[float]] = {"the goal": [10_000.0]}
    with _told_to_the_agents(LEASEHOLD_AGENT_DECISION_TIMEOUT_MS=str(DECISION_TIMEOUT_MS)):
        async with local_stack(port) as stack:
            await put_limits(stack, limits(), check("open"))
            with pinned(stack):
                for mode in MODES:
                    await _lease(stack, mode)
                    for _ in range(repeats):
                        samples = await _stalled(stack, mode, seconds)
                        away = [each for each in samples if seconds <= each.due_s < 2 * seconds]
                        latest_ms.setdefault(mode, []).append(max(each.latency_us for each in away) / 1000)
                        own_ms = max(each.own_us for each in away) / 1000
                        latest_ms.setdefault(f"{mode}: of that at most the load generator's own", []).append(own_ms)
                        in_time.setdefault(mode, []).append(in_time_of_10_000(away))
                    _draw(mode, samples)
    return {
        f"ms to the latest answer while the store hangs, {PER_SECOND} requests a second": facts(latest_ms),
        f"of 10,000 requests, those answered within {GOAL_MS:g} ms while the store hangs": facts(in_time),
    }


def in_time_of_10_000(samples: Sequence[Sample]) -> float:
    """Return the latency without the delay of the load generator itself."""
    return 10_000 * sum(each.latency_us - each.own_us <= 1000 * GOAL_MS for each in samples) / len(samples)


async def _stalled(stack: Stack, mode: str, seconds: float) -> Sequence[Sample]:
    server = Server(*host_and_port(stack["agents"][REGION]), http_is_whole)
    request = post("/v1/check", json.dumps(check(mode)).encode())
    store = stack["pids"][f"store-{REGION}"]
    hangs = Moment(seconds, partial(os.kill, store, signal.SIGSTOP))
    is_back = Moment(2 * seconds, partial(os.kill, store, signal.SIGCONT))
    async with _back_at_the_end(stack, store):
        return await open_load(server, request, per_second=PER_SECOND, seconds=3 * seconds, at=[hangs, is_back])


@asynccontextmanager
async def _back_at_the_end(stack: Stack, store: int) -> AsyncIterator[None]:
    try:
        yield
    finally:
        os.kill(store, signal.SIGCONT)
        await _until_it_decides(stack)


async def _until_it_decides(stack: Stack) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for _ in range(10 * PATIENCE_S):
            status = await client.get(f"{stack['agents'][REGION]}/v1/status")
            if status.is_success and status.json()["store_breaker"] == "closed":
                return
            await asyncio.sleep(0.1)
    raise SystemExit("the agent does not find its store again")


async def _lease(stack: Stack, mode: str) -> None:
    """Enough of an allowance for the whole run: a peek asks for what it would need."""
    body = check(mode) | {"cost": 1_000_000 if MODES[mode] == "exports" else 1, "mode": "peek"}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for _ in range(10 * PATIENCE_S):
            if (await client.post(f"{stack['agents'][REGION]}/v1/check", json=body)).is_success:
                return
            await asyncio.sleep(0.1)
    raise SystemExit("the agent is granted no lease")


@contextmanager
def _told_to_the_agents(**environ: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- pictures ---------------------------------------------------------------------------------------------------------


def _draw(mode: str, samples: Sequence[Sample]) -> None:
    about = f"The store hangs in the middle third: {mode}"
    save(f"failures-{mode}-latency", picture(f"{about}, latency", "seconds", "ms", latencies(samples)))
    save(f"failures-{mode}-decisions", picture(f"{about}, answers", "seconds", "a second", decisions(samples)))


def latencies(samples: Sequence[Sample]) -> Mapping[str, Points]:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for begun_s, each in _buckets(samples):
        lines["p50"].append((begun_s, percentile_us(each, 0.5) / 1000))
        lines["p99"].append((begun_s, percentile_us(each, 0.99) / 1000))
        lines["latest"].append((begun_s, percentile_us(each, 1) / 1000))
    return lines


def decisions(samples: Sequence[Sample]) -> Mapping[str, Points]:
    """Return the reply of each request, by the time when it was due."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for begun_s, each in _buckets(samples):
        told = Counter(ANSWERS.get(sample.beginning, "other") for sample in each)
        for answer, count in told.items():
            lines[answer].append((begun_s, count / BUCKET_S))
    return lines


def _buckets(samples: Sequence[Sample]) -> Iterator[tuple[float, Sequence[Sample]]]:
    buckets: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        buckets[int(sample.due_s / BUCKET_S)].append(sample)
    return ((number * BUCKET_S, each) for number, each in sorted(buckets.items()))
