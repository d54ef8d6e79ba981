"""Relays of TCP connections between regions and the coordinator, for machines without the rights for namespaces.

A relay has no packets to lose. Cut, it holds what it has read, and continues when it is mended, as TCP does once it
repeats. A lost part of a stream is late by a time after which TCP would have sent it again.
"""

import asyncio
import random
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from leasehold.local_stack.embedded import LOOPBACK
from tests.chaos.network.wan import CORE, Wan

PART = 65_536
LOOK_EVERY_S = 0.02
REPEATED_AFTER_S = (0.2, 1.0)


class RelayWan(Wan):
    kind = "relays of TCP connections, because network namespaces take root and /dev/net/tun"

    def __init__(self, regions: Iterable[str], seed: int = 0) -> None:
        super().__init__(regions)
        self._random = random.Random(seed)
        self._ports: dict[tuple[str, int], int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._thread.start()

    @contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """Stay where this thread is: all places are one."""
        yield

    def address_of_core(self, region: str, port: int) -> str:
        if (region, port) not in self._ports:
            self._ports[region, port] = self._call(self._listen(region, port))
        return f"{LOOPBACK}:{self._ports[region, port]}"

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # --- in the loop of the relays -----------------------------------------------------------------------------------

    async def _listen(self, region: str, port: int) -> int:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._relay(region, port, reader, writer)

        server = await asyncio.start_server(relay, LOOPBACK, 0)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def _end(self) -> None:
        connections = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _relay(self, region: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            further = await asyncio.open_connection(LOOPBACK, port)
        except OSError:
            writer.close()
            return
        ends = [
            asyncio.ensure_future(self._carry((region, CORE), reader, further[1])),
            asyncio.ensure_future(self._carry((CORE, region), further[0], writer)),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            writer.close()
            further[1].close()

    async def _carry(self, way: tuple[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while part := await reader.read(PART):
                while self._ways[way].is_cut:  # noqa: ASYNC110 - another thread mends it
                    await asyncio.sleep(LOOK_EVERY_S)
                is_lost = self._random.random() < self._ways[way].loss
                await asyncio.sleep(
                    self._ways[way].delay_s + (self._random.uniform(*REPEATED_AFTER_S) if is_lost else 0)
                )
                writer.write(part)
                await writer.drain()
