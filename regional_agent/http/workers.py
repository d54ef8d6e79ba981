"""An agent's workers: processes that answer on one port. Whichever is asked of the whole agent asks the others.

Each is an agent of its own, and they share what all agents of a region share, the store. What one of them knows alone
(what it counted, why it cannot enforce) it tells the others at a socket of its own, in a directory that only their user
can enter. Who dies takes its counts along: they begin anew with its next process, as those of any process do.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client import Gauge
from prometheus_client.exposition import generate_latest

from regional_agent.agent import Region
from regional_agent.health import able_to_enforce
from regional_agent.health import merged as merged_health
from web.health import Health
from web.metrics import merged

HEALTH, METRICS = b"health\n", b"metrics\n"
ANSWER_S = 0.4
READY_S = 2.0
BEAT_S = 1.0
LENGTH_BYTES = 4


class Worker(NamedTuple):
    """One of several."""

    number: int
    workers: int
    directory: Path
    beat: Callable[[], None]  # says that it gets on

    def socket(self, number: int) -> Path:
        return self.directory / f"{number}.sock"


class Workers:
    """Seen from one of them; or from the only process there is, which asks nobody."""

    def __init__(self, region: Region, worker: Worker | None) -> None:
        self._region = region
        self._worker = worker

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """From its beginning to its last words: so long its parent hears that its loop turns."""
        beating = None if self._worker is None else asyncio.create_task(_beat(self._worker.beat))
        try:
            yield
        finally:
            if beating is not None:
                beating.cancel()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Who comes back among others takes no requests before it can decide them, if that is soon."""
        if self._worker is None:
            yield
            return
        await able_to_enforce(self._region.health, READY_S)
        # What an earlier life has left at that path is replaced.
        server = await asyncio.start_unix_server(self._answer, self._worker.socket(self._worker.number))
        try:
            yield
        finally:
            server.close()

    async def metrics(self) -> bytes:
        """Of all workers; of a single one, as it counts."""
        if self._worker is None:
            return self._tell(METRICS)
        told = await self._told_by_all(self._worker, METRICS)
        up = Gauge("leasehold_worker_up", "Whether a worker of this agent answers.", ["worker"], registry=None)
        for number in range(self._worker.workers):
            up.labels(number).set(number in told)
        return merged({str(number): text.decode() for number, text in told.items()}, "worker", up)

    async def health(self) -> Health:
        """Return the health of all workers that answer: one that does not takes no requests either."""
        if self._worker is None:
            return self._region.health.health()
        told = await self._told_by_all(self._worker, HEALTH)
        return merged_health({number: msgspec.json.decode(text, type=Health) for number, text in told.items()})

    # --- between workers ----------------------------------------------------------------------------------------------

    def _tell(self, what: bytes) -> bytes:
        if what == HEALTH:
            return msgspec.json.encode(self._region.health.health())
        self._region.measure()
        return generate_latest(self._region.metrics.registry)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                told = self._tell(await reader.readline())
                writer.write(len(told).to_bytes(LENGTH_BYTES) + told)
                await writer.drain()
        except OSError:
            pass  # it has gone, or takes too long
        finally:
            writer.close()

    async def _told_by_all(self, worker: Worker, what: bytes) -> dict[int, bytes]:
        """What those say that answer in time."""
        others = [number for number in range(worker.workers) if number != worker.number]
        answers = await asyncio.gather(*(_ask(worker.socket(number), what) for number in others))
        told = {worker.number: self._tell(what)} | dict(zip(others, answers, strict=True))
        return {number: text for number, text in sorted(told.items()) if text is not None}


async def _beat(beat: Callable[[], None]) -> None:
    while True:
        beat()
        await asyncio.sleep(BEAT_S)


async def _ask(socket: Path, what: bytes) -> bytes | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(what)
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
                return await reader.readexactly(length)
            finally:
                writer.close()
    except (OSError, EOFError):  # a TimeoutError is the former; who dies over its answer, the latter
        return None
