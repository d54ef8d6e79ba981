"""Calls to an agent over kept connections: HTTP/1.1 on TCP or a unix socket, for threads and for event loops.

A call costs tens of microseconds, where a general HTTP client takes hundreds: it stands before each request of a
service. What a connection may do is little on purpose: one request at a time, a body with a length, no redirects, no
proxies, no cookies. Plain HTTP: the agent is on the same machine, or on the same private network.

A connection that the agent closed while it was idle is noticed before it is used where that is possible; else the call
is sent again on a fresh one only if it may be (`Call.repeatable`).
"""

import asyncio
import contextlib
import select
import socket
import threading
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from leasehold.asking import AgentUnavailable, Call, Response

IDLE_S = 60.0  # the agent keeps connections for 75
MAX_BODY_BYTES = 16 * 1024 * 1024
_CHUNK = 65_536


class Address(NamedTuple):
    host: str
    port: int
    uds: str | None

    @property
    def head(self) -> str:
        name = "agent" if self.uds else f"[{self.host}]" if ":" in self.host else self.host
        return f"{name}:{self.port}"


def address_of(url: str) -> Address:
    """`http://host:port` or `unix:///path`."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path:
        return Address("", 0, parts.path)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"url: {url!r} is neither http://host:port nor unix:///path/of/a/socket")
    return Address(parts.hostname, parts.port or 80, None)


def request_bytes(call: Call, host: str, token: str | None) -> bytes:
    authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
    head = (
        f"{call.method} {call.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"{authorization}Content-Length: {len(call.body)}\r\n\r\n"
    )
    return head.encode("latin-1") + call.body


class Reading:
    """One response on its way in."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self.is_complete = self.keeps_alive = False

    def feed(self, data: bytes) -> None:
        if not data:
            raise AgentUnavailable("the agent closed the connection before it had answered")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise AgentUnavailable(f"the agent's answer is no HTTP: {error}") from None
        if len(self._body) > MAX_BODY_BYTES:
            raise AgentUnavailable("the agent's answer is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self.is_complete = True
        self.keeps_alive = bool(self._parser.should_keep_alive())  # it forgets as soon as this returns

    def response(self) -> Response:
        return Response(self._parser.get_status_code(), self._headers, bytes(self._body))


# --- for threads ------------------------------------------------------------------------------------------------------


class Idle(NamedTuple):
    """A connection that waits for its next call."""

    connection: socket.socket
    since_s: float

    @property
    def is_usable(self) -> bool:
        """Nothing arrives on an idle connection but its end."""
        return time.monotonic() - self.since_s < IDLE_S and not select.select([self.connection], [], [], 0)[0]


class Connections:
    """Any number of threads may call at once; `most` connections are open at the same time, and others wait."""

    def __init__(self, address: Address, token: str | None, timeout_s: float, most: int) -> None:
        self._address = address
        self._token = token
        self._timeout_s = timeout_s
        self._places = threading.BoundedSemaphore(most)
        self._idle: list[Idle] = []

    def call(self, call: Call) -> Response:
        deadline_s = time.monotonic() + self._timeout_s
        if not self._places.acquire(timeout=self._timeout_s):
            raise AgentUnavailable("all connections to the agent were busy for the whole time")
        try:
            return self._call(call, deadline_s)
        except OSError as error:
            raise _unavailable(error) from error
        finally:
            self._places.release()

    def _call(self, call: Call, deadline_s: float) -> Response:
        try:
            return self._exchange(self._take() or self._connect(deadline_s), call, deadline_s)
        except (OSError, AgentUnavailable):
            if not call.repeatable:
                raise
        return self._exchange(self._connect(deadline_s), call, deadline_s)

    def _take(self) -> socket.socket | None:
        while self._idle:
            try:
                idle = self._idle.pop()
            except IndexError:  # another thread was quicker
                return None
            if idle.is_usable:
                return idle.connection
            idle.connection.close()
        return None

    def _connect(self, deadline_s: float) -> socket.socket:
        if self._address.uds is None:
            address = (self._address.host, self._address.port)
            connection = socket.create_connection(address, timeout=_left_s(deadline_s))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_left_s(deadline_s))
        try:
            connection.connect(self._address.uds)
        except OSError:
            connection.close()
            raise
        return connection

    def _exchange(self, connection: socket.socket, call: Call, deadline_s: float) -> Response:
        reading = Reading()
        try:
            connection.settimeout(_left_s(deadline_s))
            connection.sendall(request_bytes(call, self._address.head, self._token))
            while not reading.is_complete:
                connection.settimeout(_left_s(deadline_s))
                reading.feed(connection.recv(_CHUNK))
        except BaseException:
            connection.close()
            raise
        if reading.keeps_alive:
            self._idle.append(Idle(connection, time.monotonic()))
        else:
            connection.close()
        return reading.response()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().connection.close()


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the agent did not answer in time")
    return left_s


def _unavailable(error: OSError) -> AgentUnavailable:
    return AgentUnavailable(str(error) or type(error).__name__)


# --- for event loops --------------------------------------------------------------------------------------------------


class Stream(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    since_s: float

    @property
    def is_usable(self) -> bool:
        return time.monotonic() - self.since_s < IDLE_S and not self.reader.at_eof() and not self.writer.is_closing()


class AsyncConnections:
    """The same for one event loop."""

    def __init__(self, address: Address, token: str | None, timeout_s: float, most: int) -> None:
        self._address = address
        self._token = token
        self._timeout_s = timeout_s
        self._places = asyncio.BoundedSemaphore(most)
        self._idle: list[Stream] = []

    async def call(self, call: Call) -> Response:
        try:
            async with asyncio.timeout(self._timeout_s), self._places:
                try:
                    return await self._exchange(self._take() or await self._connect(), call)
                except (OSError, AgentUnavailable):
                    if not call.repeatable:
                        raise
                return await self._exchange(await self._connect(), call)
        except TimeoutError:
            raise AgentUnavailable("the agent did not answer in time") from None
        except OSError as error:
            raise _unavailable(error) from error

    def _take(self) -> Stream | None:
        while self._idle:
            stream = self._idle.pop()
            if stream.is_usable:
                return stream
            stream.writer.close()
        return None

    async def _connect(self) -> Stream:
        if self._address.uds is None:
            reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        else:
            reader, writer = await asyncio.open_unix_connection(self._address.uds)
        return Stream(reader, writer, time.monotonic())

    async def _exchange(self, stream: Stream, call: Call) -> Response:
        reading = Reading()
        try:
            stream.writer.write(request_bytes(call, self._address.head, self._token))
            while not reading.is_complete:
                reading.feed(await stream.reader.read(_CHUNK))
        except BaseException:
            stream.writer.close()
            raise
        if reading.keeps_alive:
            self._idle.append(stream._replace(since_s=time.monotonic()))
        else:
            stream.writer.close()
        return reading.response()

    async def close(self) -> None:
        while self._idle:
            stream = self._idle.pop()
            stream.writer.close()
            with contextlib.suppress(OSError):
                await stream.writer.wait_closed()
