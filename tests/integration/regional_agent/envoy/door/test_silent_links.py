"""A link that loses its packets ends within a stated time, and nothing that was sent arrives after that."""

import asyncio
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from regional_agent.envoy.door import frames, links
from tests.chaos.network.namespaces import NamespaceWan
from tests.chaos.network.wan import CORE, CUT
from tests.integration.regional_agent.envoy.door.test_door import (
    DELIVER,
    HELD,
    LINK_MS,
    Door,
    RawClient,
    anyio_backend,
    serving,
)
from tests.waiting import until

__all__ = ["anyio_backend"]  # a fixture
pytestmark = pytest.mark.anyio

PROXY = "proxy"  # the place of the client


@pytest.fixture
def wan() -> Iterator[NamespaceWan]:
    """Yield two places whose packets a test may drop."""
    try:
        found = NamespaceWan([PROXY])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces take root and /dev/net/tun: {error}")
    yield found
    found.close()


@asynccontextmanager
async def connected(wan: NamespaceWan) -> AsyncIterator[tuple[Door, RawClient]]:
    """Serve a door at one place, and connect a client at the other."""
    host = wan.address_of_core(PROXY, 0).rpartition(":")[0]
    serving_there = serving(host=host)
    with wan.inside(CORE):
        door = await serving_there.__aenter__()
    try:
        with wan.inside(PROXY):
            connection = socket.socket()
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(door.address.rpartition(":")[2])))
        client = RawClient(*await asyncio.open_connection(sock=connection))
        yield door, client
        client.writer.transport.abort()
    finally:
        await serving_there.__aexit__(None, None, None)


async def read_message(client: RawClient, *, confirms: bool = True) -> bytes:
    """Return the next message, and answer the PING behind it."""
    message = b""
    while True:
        kind, flags, _, payload = await client.frame()
        if kind == frames.DATA:
            message += payload
        if kind == frames.PING and not flags & frames.ACK:
            if confirms:
                client.writer.write(frames.frame(frames.PING, frames.ACK, 0, payload))
            return message[5:]


async def test_what_a_silent_link_has_swallowed_never_arrives(wan: NamespaceWan) -> None:
    async with connected(wan) as (door, client):
        number = client.open(path=DELIVER)
        client.send(number, b"first")
        assert await read_message(client) == b"first"
        wan.shape(PROXY, back=CUT)  # packets of the client arrive, and none reach it
        client.send(number, b"second")
        await until(lambda: door.service.lost and not door.door.clients())
        wan.shape(PROXY)
        received = b""
        try:
            while True:
                client.writer.write(frames.frame(frames.PING, 0, 0, bytes(8)))
                received += await asyncio.wait_for(client.reader.read(1000), 60) or pytest.fail("closed, not reset")
        except ConnectionError:
            pass
        assert b"second" not in received


async def test_a_response_that_is_not_acknowledged_ends_the_connection(wan: NamespaceWan) -> None:
    async with connected(wan) as (door, client):
        client.call(path=HELD)
        await until(lambda: door.service.held)
        wan.shape(PROXY, out=CUT, back=CUT)
        door.service.held[0].respond(b"nowhere")
        await until(lambda: not door.door.clients())


def unacknowledged(connection: socket.socket) -> int:
    """Return how many packets of a connection are on the way (`tcpi_unacked`)."""
    found: int = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)[0]
    return found


async def test_an_idle_link_is_probed(wan: NamespaceWan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "IDLE_S", 1)
    async with connected(wan) as (door, client):
        assert (await client.frame())[0] == frames.SETTINGS
        [connection] = door.door._connections
        await until(lambda: not unacknowledged(connection.transport.get_extra_info("socket")))
        wan.shape(PROXY, out=CUT, back=CUT)
        await until(lambda: not door.door.clients())


async def test_a_client_that_confirms_nothing_is_dropped() -> None:
    async with serving() as door:
        host, _, port = door.address.rpartition(":")
        client = RawClient(*await asyncio.open_connection(host, int(port)))
        number = client.open(path=DELIVER)
        client.send(number, b"first")
        assert await read_message(client) == b"first"
        client.send(number, b"second")
        assert await read_message(client, confirms=False) == b"second"
        await until(lambda: door.service.lost == 1 and not door.door.clients())
        client.writer.close()


async def test_connections_inherit_the_time_out() -> None:
    async with serving() as door:
        host, _, port = door.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await until(door.door.clients)
        [connection] = door.door._connections
        own = connection.transport.get_extra_info("socket")
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LINK_MS
        writer.close()
