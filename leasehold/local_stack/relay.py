"""A wide network for one machine: every byte between an agent and its coordinator arrives late.

    python -m leasehold.local_stack.relay COORDINATOR_PORT PORT:DELAY_MS ...

Each PORT leads to the coordinator with its own delay, the same in both directions. Bytes are delayed and not slowed
down: many may be under way at once, in their order, up to a bound after which the sender has to wait, as in a real
network. A new connection costs a round trip before it carries anything. Stop it (SIGSTOP), and its regions are cut off:
nothing is refused, nothing ends, nothing comes; what was sent arrives late once it goes on.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

from leasehold.local_stack.embedded import LOOPBACK

CHUNK_BYTES = 65536
CHUNKS_UNDER_WAY = 256

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
UnderWay = asyncio.Queue[tuple[float, bytes]]


async def relay(coordinator_port: int, delay_ms_by_port: dict[int, int]) -> None:
    """Serve until cancelled."""
    servers = [
        await asyncio.start_server(_leading_to(coordinator_port, delay_ms / 1000), LOOPBACK, port)
        for port, delay_ms in delay_ms_by_port.items()
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def _leading_to(port: int, delay_s: float) -> Accept:
    async def accept(near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * delay_s)
        try:
            far, far_writer = await asyncio.open_connection(LOOPBACK, port)
        except OSError:
            near_writer.transport.abort()
            return
        try:
            await asyncio.gather(_carry(near, far_writer, delay_s), _carry(far, near_writer, delay_s))
        finally:
            far_writer.close()
            near_writer.close()

    return accept


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """One direction of one connection, until its sender is done or its receiver is gone."""
    under_way: UnderWay = asyncio.Queue(CHUNKS_UNDER_WAY)
    sending = asyncio.create_task(_send(reader, under_way, delay_s))
    try:
        await _deliver(under_way, writer)
    except OSError:
        writer.transport.abort()
    finally:
        sending.cancel()


async def _send(reader: asyncio.StreamReader, under_way: UnderWay, delay_s: float) -> None:
    now = asyncio.get_running_loop().time
    data = b"not yet"
    while data:
        try:
            data = await reader.read(CHUNK_BYTES)
        except OSError:
            data = b""
        await under_way.put((now() + delay_s, data))


async def _deliver(under_way: UnderWay, writer: asyncio.StreamWriter) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due, data = await under_way.get()
        await asyncio.sleep(due - now())
        if not data:
            writer.write_eof()
            return
        writer.write(data)
        await writer.drain()


def main(arguments: list[str]) -> None:
    coordinator_port, *routes = arguments
    delay_ms_by_port = {int(port): int(delay_ms) for port, _, delay_ms in (route.partition(":") for route in routes)}
    with suppress(KeyboardInterrupt):
        asyncio.run(relay(int(coordinator_port), delay_ms_by_port))


if __name__ == "__main__":
    main(sys.argv[1:])
