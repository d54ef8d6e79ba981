"""The relay of `--wan` delivers bytes late, complete and in order, and ends a connection when either end does."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from leasehold.local_stack.embedded import LOOPBACK
from leasehold.local_stack.relay import relay
from tests.conftest import free_port

pytestmark = pytest.mark.anyio

DELAY_MS = 30


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def relay_to(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Run a server behind a relay, and yield the relay's port."""
    port = free_port()
    async with everything_ended(), await asyncio.start_server(serve, LOOPBACK, 0) as server:
        relaying = asyncio.create_task(relay(server.sockets[0].getsockname()[1], {port: DELAY_MS}))
        try:
            yield port
        finally:
            relaying.cancel()


@asynccontextmanager
async def everything_ended() -> AsyncIterator[None]:
    """Wait for the tasks of each connection, which end by themselves when the client has left."""
    before = asyncio.all_tasks()
    yield
    _, unfinished = await asyncio.wait(
        asyncio.all_tasks() - before | {asyncio.create_task(asyncio.sleep(0))}, timeout=20
    )
    assert not unfinished


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Ends]:
    reader, writer = await _connect(port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _connect(port: int) -> Ends:
    """Connect as soon as the relay has opened its port."""
    while True:
        try:
            return await asyncio.open_connection(LOOPBACK, port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes, until the client has left, which may reset the connection."""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_bytes_arrive_late_and_complete() -> None:
    sent = bytes(range(256)) * 4000
    now = asyncio.get_running_loop().time
    async with relay_to(echo) as port, connected(port) as (reader, writer):
        began = now()
        writer.write(sent)
        writer.write_eof()
        received = await reader.read(-1)
        took_ms = (now() - began) * 1000
    assert received == sent
    assert took_ms >= 2 * DELAY_MS + 2 * DELAY_MS  # a round trip to connect, and one for the bytes


async def test_bytes_sent_close_together_arrive_in_order() -> None:
    async with relay_to(echo) as port, connected(port) as (reader, writer):
        for number in range(20):
            writer.write(f"{number:05}".encode())
            await asyncio.sleep(0.001)
        assert await reader.readexactly(100) == b"".join(f"{number:05}".encode() for number in range(20))


async def test_the_end_of_the_far_connection_is_passed_on() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no")
        writer.close()

    async with relay_to(hang_up) as port, connected(port) as (reader, _):
        assert await reader.read(-1) == b"no"


async def test_without_a_coordinator_the_connection_is_reset() -> None:
    port = free_port()
    relaying = asyncio.create_task(relay(free_port(), {port: DELAY_MS}))
    async with connected(port) as (reader, _):
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
    relaying.cancel()


@asynccontextmanager
async def process_to_echo(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    async with everything_ended(), await asyncio.start_server(echo, LOOPBACK, 0) as server:
        behind = server.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "leasehold.local_stack.relay", str(behind), f"{port}:1"
        )
        try:
            yield process
        finally:
            process.terminate()
            await process.wait()


async def test_it_runs_as_a_process() -> None:
    port = free_port()
    async with process_to_echo(port), connected(port) as (reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"


async def test_a_stopped_relay_passes_nothing_and_delivers_late_when_it_continues() -> None:
    """A stopped relay is like a partition, with neither refusal nor end. The benchmark partitions regions this way."""
    port = free_port()
    async with process_to_echo(port) as process, connected(port) as (reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            writer.write(b"again")
            silent = asyncio.create_task(reader.readexactly(5))
            async with connected(port) as (_, newcomer):  # accepted by the kernel, and read by nothing
                newcomer.write(b"too")
            await asyncio.wait([silent], timeout=0.2)
            assert not silent.done()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert await silent == b"again"
