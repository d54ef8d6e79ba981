"""Calls to an agent over kept connections: HTTP/1.1 on TCP or a unix socket, for threads and for event loops.

A call costs tens of microseconds, where a general HTTP client takes hundreds: it stands before each request of a
service. What a connection may do is little on purpose: one request at a time, a body with a length, no redirects, no
proxies, no cookies. Plain HTTP: the agent is on the same machine, or on the same private network.

An agent may take its time: a policy's `wait` lets a request wait for units. So an answer that does not come within the
time-out is no failure yet: a second connection asks `/healthz`, and while the agent answers that, or anything else, the
call goes on waiting, up to `longest_wait_s`.

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

from leasehold.asking import AgentSilent, AgentUnavailable, Call, Response

IDLE_S = 60.0  # the agent keeps connections for 75
MAX_BODY_BYTES = 16 * 1024 * 1024
_CHUNK = 65_536
_SIGN_OF_LIFE = Call("GET", "/healthz", b"", repeatable=True)


class Patience(NamedTuple):
    """How long an agent may be silent, and how long an answer may take while it is not."""

    silence_s: float
    longest_wait_s: float


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
            raise AgentSilent("the agent closed the connection before it had answered")
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

    def __init__(self, address: Address, token: str | None, patience: Patience, most: int) -> None:
        self._address = address
        self._token = token
        self._patience = patience
        self._places = threading.BoundedSemaphore(most)
        self._idle: list[Idle] = []
        self._heard_at_s = float("-inf")

    def call(self, call: Call) -> Response:
        deadline_s = time.monotonic() + self._patience.longest_wait_s
        if not self._places.acquire(timeout=self._patience.silence_s):
            raise AgentUnavailable("all connections to the agent were busy for the whole time")
        try:
            return self._call(call, deadline_s)
        except OSError as error:
            raise _silent(error) from error
        finally:
            self._places.release()

    def _call(self, call: Call, deadline_s: float) -> Response:
        try:
            return self._exchange(self._take() or self._connect(), call, deadline_s)
        except (OSError, AgentSilent):
            if not call.repeatable:
                raise
        return self._exchange(self._connect(), call, deadline_s)

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

    def _connect(self) -> socket.socket:
        if self._address.uds is None:
            address = (self._address.host, self._address.port)
            connection = socket.create_connection(address, timeout=self._patience.silence_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._patience.silence_s)
        try:
            connection.connect(self._address.uds)
        except OSError:
            connection.close()
            raise
        return connection

    def _exchange(self, connection: socket.socket, call: Call, deadline_s: float) -> Response:
        reading = Reading()
        try:
            connection.settimeout(self._patience.silence_s)
            connection.sendall(request_bytes(call, self._address.head, self._token))
            while not reading.is_complete:
                reading.feed(self._receive(connection, deadline_s))
        except BaseException:
            connection.close()
            raise
        self._heard_at_s = time.monotonic()
        if reading.keeps_alive:
            self._idle.append(Idle(connection, self._heard_at_s))
        else:
            connection.close()
        return reading.response()

    def _receive(self, connection: socket.socket, deadline_s: float) -> bytes:
        """Wait for bytes: as long as the agent gives signs of life, and no longer than the deadline."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            connection.settimeout(min(self._patience.silence_s, left_s))
            try:
                return connection.recv(_CHUNK)
            except TimeoutError:
                self._require_sign_of_life()
        raise AgentUnavailable("the agent is alive, and did not answer in time")

    def _require_sign_of_life(self) -> None:
        if time.monotonic() - self._heard_at_s < self._patience.silence_s:
            return
        reading = Reading()
        with self._connect() as connection:
            connection.sendall(request_bytes(_SIGN_OF_LIFE, self._address.head, None))
            while not reading.is_complete:
                reading.feed(connection.recv(_CHUNK))
        self._heard_at_s = time.monotonic()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().connection.close()


def _silent(error: OSError) -> AgentSilent:
    if isinstance(error, TimeoutError):
        return AgentSilent("the agent did not answer in time")
    return AgentSilent(str(error) or type(error).__name__)


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

    def __init__(self, address: Address, token: str | None, patience: Patience, most: int) -> None:
        self._address = address
        self._token = token
        self._patience = patience
        self._places = asyncio.BoundedSemaphore(most)
        self._idle: list[Stream] = []
        self._heard_at_s = float("-inf")

    async def call(self, call: Call) -> Response:
        try:
            async with asyncio.timeout(self._patience.silence_s):
                await self._places.acquire()
        except TimeoutError:
            raise AgentUnavailable("all connections to the agent were busy for the whole time") from None
        try:
            async with asyncio.timeout(self._patience.longest_wait_s) as whole:
                return await self._call(call)
        except OSError as error:
            if isinstance(error, TimeoutError) and whole.expired():
                raise AgentUnavailable("the agent is alive, and did not answer in time") from None
            raise _silent(error) from error
        finally:
            self._places.release()

    async def _call(self, call: Call) -> Response:
        try:
            return await self._exchange(self._take() or await self._connect(), call)
        except (OSError, AgentSilent):
            if not call.repeatable:
                raise
        return await self._exchange(await self._connect(), call)

    def _take(self) -> Stream | None:
        while self._idle:
            stream = self._idle.pop()
            if stream.is_usable:
                return stream
            stream.writer.close()
        return None

    async def _connect(self) -> Stream:
        async with asyncio.timeout(self._patience.silence_s):
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
                reading.feed(await self._receive(stream))
        except BaseException:
            stream.writer.close()
            raise
        self._heard_at_s = time.monotonic()
        if reading.keeps_alive:
            self._idle.append(stream._replace(since_s=self._heard_at_s))
        else:
            stream.writer.close()
        return reading.response()

    async def _receive(self, stream: Stream) -> bytes:
        """Wait for bytes as long as the agent gives signs of life."""
        while True:
            try:
                async with asyncio.timeout(self._patience.silence_s) as silence:
                    return await stream.reader.read(_CHUNK)
            except TimeoutError:
                if not silence.expired():
                    raise
            await self._require_sign_of_life()

    async def _require_sign_of_life(self) -> None:
        if time.monotonic() - self._heard_at_s < self._patience.silence_s:
            return
        stream, reading = await self._connect(), Reading()
        try:
            stream.writer.write(request_bytes(_SIGN_OF_LIFE, self._address.head, None))
            async with asyncio.timeout(self._patience.silence_s):
                while not reading.is_complete:
                    reading.feed(await stream.reader.read(_CHUNK))
        finally:
            stream.writer.close()
        self._heard_at_s = time.monotonic()

    async def close(self) -> None:
        while self._idle:
            stream = self._idle.pop()
            stream.writer.close()
            with contextlib.suppress(OSError):
                await stream.writer.wait_closed()
