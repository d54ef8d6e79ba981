"""The workers of an agent: processes that share one port. A request about the whole agent asks all of them.

Each worker is an agent of its own, and they share the store, as all agents of a region do. What a worker alone knows
(its metrics, its health, its proxies) it serves at a unix socket of its own, in a directory that only their user can
enter. A worker that dies loses its counters: they begin again with its successor, as those of any process do.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client import Gauge
from prometheus_client.exposition import generate_latest

from regional_agent.agent import RegionalAgent
from regional_agent.envoy.status import DoorStatus, door_status, merge_doors
from regional_agent.health import able_to_enforce
from regional_agent.health import merged as merged_health
from web.health import Health, HealthStatus
from web.metrics import merged

HEALTH, METRICS, DOOR = b"health\n", b"metrics\n", b"door\n"
ANSWER_S = 0.4
READY_S = 2.0
BEAT_S = 1.0
LENGTH_BYTES = 4


class Worker(NamedTuple):
    """The place of one worker among all."""

    number: int
    workers: int
    directory: Path
    beat: Callable[[], None]  # tells the parent that the worker makes progress

    def socket(self, number: int) -> Path:
        return self.directory / f"{number}.sock"


class Workers:
    """All workers as one of them sees them; a single process asks no others."""

    def __init__(self, region: RegionalAgent, worker: Worker | None) -> None:
        self._region = region
        self._worker = worker

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Tell the parent regularly that the event loop runs, from start to shutdown."""
        beating = None if self._worker is None else asyncio.create_task(_beat(self._worker.beat))
        try:
            yield
        finally:
            if beating is not None:
                beating.cancel()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve what other workers ask of this one. A restarted worker waits, for a short time, until it can decide."""
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
        """Return the metrics of all workers, or of the only process."""
        if self._worker is None:
            return self._report(METRICS)
        texts = await self._ask_all(self._worker, METRICS)
        up = Gauge("leasehold_worker_up", "Whether a worker of this agent answers.", ["worker"], registry=None)
        for number in range(self._worker.workers):
            up.labels(number).set(number in texts)
        return merged({str(number): text.decode() for number, text in texts.items()}, "worker", up)

    async def health(self) -> Health:
        """Return the health of all workers that answer: one that does not takes no requests either."""
        if self._worker is None:
            return self._region.health.health()
        texts = await self._ask_all(self._worker, HEALTH)
        return merged_health({number: msgspec.json.decode(text, type=Health) for number, text in texts.items()})

    async def are_ready(self) -> bool:
        """Return whether requests may be sent here."""
        return (await self.health()).status is not HealthStatus.NOT_READY

    async def door(self) -> DoorStatus:
        """Return the clients and proxies of all workers that answer."""
        if self._worker is None:
            return door_status(self._region)
        texts = await self._ask_all(self._worker, DOOR)
        doors = [msgspec.json.decode(text, type=DoorStatus) for text in texts.values()]
        return merge_doors(doors, self._worker.workers)

    # --- between workers ----------------------------------------------------------------------------------------------

    def _report(self, what: bytes) -> bytes:
        if what == HEALTH:
            return msgspec.json.encode(self._region.health.health())
        if what == DOOR:
            return msgspec.json.encode(door_status(self._region))
        self._region.measure()
        return generate_latest(self._region.metrics.registry)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                text = self._report(await reader.readline())
                writer.write(len(text).to_bytes(LENGTH_BYTES) + text)
                await writer.drain()
        except OSError:
            pass  # the other worker has ended, or is too slow
        finally:
            writer.close()

    async def _ask_all(self, worker: Worker, what: bytes) -> dict[int, bytes]:
        """Return the answers of all workers that reply in time."""
        others = [number for number in range(worker.workers) if number != worker.number]
        answers = await asyncio.gather(*(_ask(worker.socket(number), what) for number in others))
        texts = {worker.number: self._report(what)} | dict(zip(others, answers, strict=True))
        return {number: text for number, text in sorted(texts.items()) if text is not None}


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
    except (OSError, EOFError):  # the worker has ended, or is too slow
        return None
