"""Calls to an agent over kept connections, on TCP or a unix socket.

A call costs tens of microseconds where a general HTTP client takes hundreds (docs/performance.md): it is made before
each request of a service.

An agent may take its time: a policy's `wait` lets a request wait for units. So an answer that does not come within the
time-out is not a failure yet: a second connection asks `/healthz`, and while the agent answers that, or anything else,
the call goes on waiting, up to `longest_wait_s`.

A connection that the agent closed while it was idle is noticed before it is used where that is possible. Otherwise the
call is sent again on a new connection only if it may be (`Call.repeatable`).
"""

import time
from typing import NamedTuple

from leasehold.client.agent_protocol import AgentSilent, AgentUnavailable, Call, Response
from leasehold.client.asyncio_io import AsyncSemaphore, AsyncStream
from leasehold.client.http1 import HEALTH_CHECK, ResponseReader, ServerAddress, Timeouts, request_bytes
from leasehold.client.tokens import Token, token_source

IDLE_S = 60.0  # the agent keeps connections for 75


class IdleConnection(NamedTuple):
    """A connection that waits for its next call."""

    stream: AsyncStream
    since_s: float

    @property
    def is_usable(self) -> bool:
        return time.monotonic() - self.since_s < IDLE_S and not self.stream.is_ended


class AsyncConnectionPool:
    """Connections to one agent, at most `size` at the same time. Other calls wait for one of them."""

    def __init__(self, address: ServerAddress, token: Token | None, timeouts: Timeouts, size: int) -> None:
        self._address = address
        self._token = token_source(token)
        self._timeouts = timeouts
        self._places = AsyncSemaphore(size)
        self._idle: list[IdleConnection] = []
        self._alive_at_s = float("-inf")

    async def call(self, call: Call) -> Response:
        deadline_s = time.monotonic() + self._timeouts.longest_wait_s
        if not await self._places.acquire(self._timeouts.silence_s):
            raise AgentUnavailable("all connections to the agent were busy for the whole time")
        try:
            return await self._call(call, deadline_s)
        except OSError as error:
            raise _silent(error) from error
        finally:
            self._places.release()

    async def _call(self, call: Call, deadline_s: float) -> Response:
        try:
            return await self._exchange(self._take_idle() or await self._connect(), call, deadline_s)
        except (OSError, AgentSilent):
            if not call.repeatable:
                raise
        return await self._exchange(await self._connect(), call, deadline_s)

    def _take_idle(self) -> AsyncStream | None:
        while self._idle:
            try:
                idle = self._idle.pop()
            except IndexError:  # another thread was quicker
                return None
            if idle.is_usable:
                return idle.stream
            idle.stream.close()
        return None

    async def _connect(self) -> AsyncStream:
        return await AsyncStream.connect(self._address, self._timeouts.silence_s)

    async def _exchange(self, stream: AsyncStream, call: Call, deadline_s: float) -> Response:
        reader = ResponseReader()
        try:
            await stream.write(request_bytes(call, self._address.host_header, self._token()), self._timeouts.silence_s)
            while not reader.is_complete:
                reader.feed(await self._receive(stream, deadline_s))
        except BaseException:
            stream.close()
            raise
        self._alive_at_s = time.monotonic()
        if reader.keeps_alive:
            self._idle.append(IdleConnection(stream, self._alive_at_s))
        else:
            stream.close()
        return reader.response()

    async def _receive(self, stream: AsyncStream, deadline_s: float) -> bytes:
        """Wait for bytes while the agent gives signs of life, and no longer than the deadline."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                return await stream.read(min(self._timeouts.silence_s, left_s))
            except TimeoutError:
                await self._require_sign_of_life()
        raise AgentUnavailable("the agent is alive, and did not answer in time")

    async def _require_sign_of_life(self) -> None:
        if time.monotonic() - self._alive_at_s < self._timeouts.silence_s:
            return
        stream, reader = await self._connect(), ResponseReader()
        try:
            await stream.write(request_bytes(HEALTH_CHECK, self._address.host_header, None), self._timeouts.silence_s)
            while not reader.is_complete:
                reader.feed(await stream.read(self._timeouts.silence_s))
        finally:
            stream.close()
        self._alive_at_s = time.monotonic()

    async def close(self) -> None:
        while self._idle:
            stream = self._idle.pop().stream
            stream.close()
            await stream.wait_closed()


def _silent(error: OSError) -> AgentSilent:
    if isinstance(error, TimeoutError):
        return AgentSilent("the agent did not answer in time")
    return AgentSilent(str(error) or type(error).__name__)
