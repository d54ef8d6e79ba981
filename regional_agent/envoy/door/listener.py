"""The gRPC door of an agent: it listens, bounds what clients may do, and drains when the agent shuts down."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import NamedTuple

import structlog
from prometheus_client import CollectorRegistry

from regional_agent.envoy.door.callers import DoorCallers
from regional_agent.envoy.door.clients import GrpcClient
from regional_agent.envoy.door.connection import GrpcConnection
from regional_agent.envoy.door.links import watch_links
from regional_agent.envoy.door.metrics import GrpcMetrics
from web.connections import SILENT, ConnectionLimits
from web.serving import GRACE_S, TLS_SHUTDOWN_S

SWEEP_S = 1.0

log = structlog.get_logger()


class DoorLimits(NamedTuple):
    max_streams: int  # of a connection
    max_message_bytes: int
    max_header_bytes: int
    unacknowledged_ms: int  # a client that acknowledges nothing for so long loses its connection


class GrpcDoor:
    """The parts that all connections share."""

    def __init__(
        self,
        callers: DoorCallers,
        own: DoorLimits,
        limits: ConnectionLimits,
        registry: CollectorRegistry,
    ) -> None:
        """`limits` are those of the HTTP door: both doors share the process's file descriptors."""
        self.callers = callers
        self.limits = limits
        self.max_streams, self.max_message_bytes, self.max_header_bytes, self._unacknowledged_ms = own
        self.stream_window = self.max_message_bytes + (1 << 16)  # so that the window never holds up one message
        self.metrics = GrpcMetrics(registry)
        self.metrics.count_connections = lambda: len(self._connections)
        self.metrics.count_streams = lambda: sum(each.open_streams for each in self._connections)
        self._connections: set[GrpcConnection] = set()
        self._are_all_lost = asyncio.Event()
        callers.on_change(self._forget_heads)

    def opened(self, connection: GrpcConnection) -> None:
        self._connections.add(connection)
        self._are_all_lost.clear()
        self.limits.opened(connection)

    def lost(self, connection: GrpcConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._are_all_lost.set()
        self.limits.lost(connection)

    def clients(self) -> Sequence[GrpcClient]:
        now_s = perf_counter()
        return [
            GrpcClient(each.peer, now_s - each.opened_s, each.calls, each.open_streams) for each in self._connections
        ]

    def _forget_heads(self) -> None:
        for each in self._connections:
            each.forget_heads()

    @asynccontextmanager
    async def serving(self, listener: socket.socket, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
        """Serve on a socket that is open already, and drain at the end."""
        watch_links(listener, self._unacknowledged_ms)
        server = await asyncio.get_running_loop().create_server(
            lambda: GrpcConnection(self),
            sock=listener,
            ssl=tls,
            backlog=2048,
            ssl_handshake_timeout=None if tls is None else self.limits.request_timeout_s,
            ssl_shutdown_timeout=None if tls is None else TLS_SHUTDOWN_S,
        )
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            server.close()
            await self._drain()

    async def _sweep(self) -> None:
        """Drop silent clients, and cancel requests that do not arrive."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s, timeout_s = perf_counter(), self.limits.request_timeout_s
            for each in list(self._connections):
                if each.sweep(now_s, timeout_s):
                    each.drop(SILENT)

    async def _drain(self) -> None:
        """Let calls end, for a bounded time. Each connection closes when its last call has ended."""
        for each in self._connections:
            each.drain()
        try:
            async with asyncio.timeout(GRACE_S):
                if self._connections:
                    await self._are_all_lost.wait()
        except TimeoutError:
            for each in list(self._connections):
                each.transport.abort()
