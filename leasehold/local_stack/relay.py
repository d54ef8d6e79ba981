"""Simulate a wide-area network on one machine: every byte between an agent and its coordinator is delayed.

    python -m leasehold.local_stack.relay COORDINATOR_PORT PORT:DELAY_MS ...

Each PORT leads to the coordinator with its own delay, the same in both directions. The bandwidth is not limited: many
bytes may be in flight at once, in order, up to a bound after which the sender has to wait, as in a real network. A new
connection costs a round trip before it carries anything. While the process is stopped (SIGSTOP), its regions are cut
off: nothing is refused and no connection ends; what was sent arrives late when the process continues.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

from leasehold.local_stack.embedded import LOOPBACK

CHUNK_BYTES = 65536
CHUNKS_IN_FLIGHT = 256

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
InFlight = asyncio.Queue[tuple[float, bytes]]


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
    """Carry one direction of a connection until its sender closes it or its receiver is gone."""
    in_flight: InFlight = asyncio.Queue(CHUNKS_IN_FLIGHT)
    sending = asyncio.create_task(_send(reader, in_flight, delay_s))
    try:
        await _deliver(in_flight, writer)
    except OSError:
        writer.transport.abort()
    finally:
        sending.cancel()


async def _send(reader: asyncio.StreamReader, in_flight: InFlight, delay_s: float) -> None:
    now = asyncio.get_running_loop().time
    data = b"not yet"
    while data:
        try:
            data = await reader.read(CHUNK_BYTES)
        except OSError:
            data = b""
        await in_flight.put((now() + delay_s, data))


async def _deliver(in_flight: InFlight, writer: asyncio.StreamWriter) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due, data = await in_flight.get()
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
