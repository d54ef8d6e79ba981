"""A closed loop of callers, each of which sends a request when it has its reply; prints the figures."""

import asyncio
import gc
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable

Ask = Callable[[], Awaitable[bool]]


async def measure(ask: Ask) -> None:
    if not await ask():
        raise SystemExit("the first request was denied, under a limit that is never reached")
    seconds, callers = float(os.environ["PEER_SECONDS"]), int(os.environ["PEER_CALLERS"])
    latencies_ns: list[int] = []
    gc.freeze()  # what a library imported is not looked through again: it says nothing about its limits
    begun_ns = time.perf_counter_ns()
    end_ns = begun_ns + int(seconds * 1e9)
    await asyncio.gather(*(_call(ask, end_ns, latencies_ns) for _ in range(callers)))
    elapsed_s = (time.perf_counter_ns() - begun_ns) / 1e9
    cuts = statistics.quantiles(latencies_ns, n=100)
    print(json.dumps({"per_second": len(latencies_ns) / elapsed_s, "p50_us": cuts[49] / 1e3, "p99_us": cuts[98] / 1e3}))


async def _call(ask: Ask, end_ns: int, latencies_ns: list[int]) -> None:
    sent_ns = time.perf_counter_ns()
    while sent_ns < end_ns:
        if not await ask():
            raise SystemExit("denied, under a limit that is never reached")
        done_ns = time.perf_counter_ns()
        latencies_ns.append(done_ns - sent_ns)
        sent_ns = done_ns
