"""The store's own load generator, where the machine has one: written in C, it shows what the store itself can do.

It comes with Redis and with Valkey and is not among our packages, because no wheel has it.
"""

import asyncio
import csv
import shutil
from collections.abc import Sequence
from urllib.parse import urlsplit

from benchmarks.frame import Load
from benchmarks.load import RefusedError

_NAMES = ("valkey-benchmark", "redis-benchmark")
_FIRST_GUESS = 20_000  # requests of the first turn, which only tells how many make up the wanted time


def found() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


class RedisBenchmark:
    """A turn of it, over and over; it counts requests, so each turn learns from the one before how many it needs."""

    def __init__(
        self, store_url: str, call: Sequence[str], *, connections: int, seconds: float, pipeline: int = 1
    ) -> None:
        url = urlsplit(store_url)
        where = ("-h", url.hostname or "", "-p", str(url.port), *(("-a", url.password) if url.password else ()))
        self._command = [found() or "", *where, "-c", str(connections), "-P", str(pipeline), "-e", "--csv"]
        self._call = call
        self._seconds = seconds
        self._requests = _FIRST_GUESS

    async def __call__(self) -> Load:
        command = (*self._command, "-n", str(self._requests), *self._call)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        output, _ = await process.communicate()
        load = read(output.decode())
        self._requests = max(1, int(load.per_second * self._seconds))
        return load


def read(output: str) -> Load:
    """Parse its CSV: a line of names and a line of figures, latencies in milliseconds."""
    lines = output.splitlines()
    if errors := [line for line in lines if line.startswith("Error")]:
        raise RefusedError(f"redis-benchmark was told {errors[0]!r}")
    (figures,) = csv.DictReader(lines[-2:])
    p50_us, p99_us = (1_000 * float(figures[f"{name}_latency_ms"]) for name in ("p50", "p99"))
    return Load(float(figures["rps"]), p50_us, p99_us, refused=0)
