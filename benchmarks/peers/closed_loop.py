"""A closed loop of callers in a process that limits itself: one measurement for each line of standard input.

A line such as `{"keys": 100000, "first": 0, "seconds": 2, "callers": 64}` is answered with one line of figures.
"""

import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

Ask = Callable[[str], Awaitable[bool]]  # takes a key


async def serve(ask: Ask) -> None:
    if not await ask("key-000000"):
        raise SystemExit("the first request was denied, under a limit that is never reached")
    gc.freeze()  # the collector need not look through what was imported
    print(json.dumps({"ready": True}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await _measure(ask, **json.loads(line))), flush=True)


async def _measure(ask: Ask, keys: int, first: int, seconds: float, callers: int) -> dict[str, float]:
    names = [f"key-{first + number:06}" for number in range(keys)]
    latencies_ns: list[int] = []
    begun_ns = time.perf_counter_ns()
    end_ns = begun_ns + int(seconds * 1e9)
    await asyncio.gather(*(_call(ask, names, end_ns, latencies_ns) for _ in range(callers)))
    elapsed_s = (time.perf_counter_ns() - begun_ns) / 1e9
    cuts = statistics.quantiles(latencies_ns, n=100)
    return {
        "per_second": len(latencies_ns) / elapsed_s,
        "decisions": len(latencies_ns),
        "p50_us": cuts[49] / 1e3,
        "p99_us": cuts[98] / 1e3,
    }


async def _call(ask: Ask, names: list[str], end_ns: int, latencies_ns: list[int]) -> None:
    number = len(names)
    sent_ns = time.perf_counter_ns()
    while sent_ns < end_ns:
        if not await ask(names[int(random.random() * number)]):  # noqa: S311
            raise SystemExit("denied, under a limit that is never reached")
        done_ns = time.perf_counter_ns()
        latencies_ns.append(done_ns - sent_ns)
        sent_ns = done_ns
