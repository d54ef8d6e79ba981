"""The wide network of `--wan`: late, whole, in order, and gone when either end is."""

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
    """A server behind a relay; yields the relay's port."""
    port = free_port()
    async with everything_ended(), await asyncio.start_server(serve, LOOPBACK, 0) as server:
        relaying = asyncio.create_task(relay(server.sockets[0].getsockname()[1], {port: DELAY_MS}))
        try:
            yield port
        finally:
            relaying.cancel()


@asynccontextmanager
async def everything_ended() -> AsyncIterator[None]:
    """Each connection has a task at either end; when the client has left, they come to their end by themselves."""
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
    """The relay's task opens its port a moment after it is made."""
    while True:
        try:
            return await asyncio.open_connection(LOOPBACK, port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_bytes_arrive_late_and_whole() -> None:
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


async def test_what_follows_on_the_heels_arrives_in_order() -> None:
    async with relay_to(echo) as port, connected(port) as (reader, writer):
        for number in range(20):
            writer.write(f"{number:05}".encode())
            await asyncio.sleep(0.001)
        assert await reader.readexactly(100) == b"".join(f"{number:05}".encode() for number in range(20))


async def test_the_far_end_hanging_up_is_heard() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no")
        writer.close()

    async with relay_to(hang_up) as port, connected(port) as (reader, _):
        assert await reader.read(-1) == b"no"


async def test_without_a_coordinator_the_connection_is_cut() -> None:
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


async def test_it_is_a_process_of_its_own() -> None:
    port = free_port()
    async with process_to_echo(port), connected(port) as (reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"


async def test_nothing_goes_through_one_that_is_stopped_and_it_is_late_when_it_goes_on() -> None:
    """As a network that is cut: no refusal, no end, only silence. So regions are cut off in the benchmark."""
    port = free_port()
    async with process_to_echo(port) as process, connected(port) as (reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            writer.write(b"again")
            silent = asyncio.create_task(reader.readexactly(5))
            async with connected(port) as (_, newcomer):  # whom nobody refuses, and nobody hears
                newcomer.write(b"too")
            await asyncio.wait([silent], timeout=0.2)
            assert not silent.done()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert await silent == b"again"
