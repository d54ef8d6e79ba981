"""What the client needs of an event loop. `thread_io` has the same names for threads."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

from leasehold.client.http1 import ServerAddress

CHUNK_BYTES = 65_536
TLS_SHUTDOWN_S = 1.0  # how long to wait for the agent's half of the end of a connection
sleep = asyncio.sleep


class AsyncStream:
    """One connection to the agent. Each operation raises OSError, and TimeoutError after its time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: ServerAddress, timeout_s: float) -> Self:
        """Open a connection; over TLS, the agent's certificate has been verified then."""
        async with asyncio.timeout(timeout_s):
            if address.uds is not None:
                return cls(*await asyncio.open_unix_connection(address.uds))
            if address.tls is None:
                return cls(*await asyncio.open_connection(address.host, address.port))
            return cls(
                *await asyncio.open_connection(
                    address.host, address.port, ssl=address.tls, ssl_shutdown_timeout=TLS_SHUTDOWN_S
                )
            )

    @property
    def is_ended(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    async def write(self, data: bytes, timeout_s: float) -> None:  # noqa: ARG002 - the loop's buffer takes it at once
        self._writer.write(data)

    async def read(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s) as waiting:
                return await self._reader.read(CHUNK_BYTES)
        except TimeoutError:
            if waiting.expired():
                raise
            raise ConnectionResetError("the connection timed out") from None

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class AsyncSemaphore:
    def __init__(self, size: int) -> None:
        self._semaphore = asyncio.BoundedSemaphore(size)

    async def acquire(self, timeout_s: float) -> bool:
        """Return whether a place came free in time."""
        if not self._semaphore.locked():
            return await self._semaphore.acquire()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._semaphore.acquire()
        except TimeoutError:
            return False

    def release(self) -> None:
        self._semaphore.release()


@contextlib.asynccontextmanager
async def repeating(action: Callable[[], Awaitable[bool]], pause_s: Callable[[], float]) -> AsyncIterator[None]:
    """Run an action after each pause while the block runs, until the action returns False."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(pause_s())
            if not await action():
                return

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
