"""Ask a region's agent from Python: `Client` for threads, `AsyncClient` for event loops.

    client = Client("http://127.0.0.1:8411")
    export = {"tenant": "acme", "route": "/v1/exports", "method": "POST"}
    decision = client.check(export)
    if not decision.allowed:
        ...  # decision.retry_after_ms says when to come back

    @client.limited(lambda tenant: {"tenant": tenant, "route": "/v1/exports"})
    def make_export(tenant: str) -> None: ...  # Denied is raised in place of the call

    with client.holding(export, units=40) as holding:
        holding.commit(units=make(...))  # what it did cost; without a commit it is released

    @client.in_slot(lambda tenant: {"tenant": tenant, "route": "/v1/reports"})
    def make_report(tenant: str) -> None: ...  # has a slot while it runs, and gives it back

What is asked and what an answer means is decided in `leasehold/asking.py`; here the talks are only walked through.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from leasehold.asking import (
    AgentUnavailable,
    Asking,
    Call,
    Decision,
    Denied,
    Held,
    OnFailure,
    Pause,
    Refused,
    Response,
    Talk,
    go_on,
)
from leasehold.holding import AsyncGuarding, Guarding
from leasehold.wire import AsyncConnections, Connections, Patience, address_of
from protocol.circuit_breaker import CircuitBreaker

__all__ = ["AgentUnavailable", "AsyncClient", "CircuitBreaker", "Client", "Decision", "Denied", "Held", "Refused"]

DEFAULT_URL = "http://127.0.0.1:8411"
LONGEST_WAIT_MS = 60_000  # for an answer, while the agent gives signs of life
P = ParamSpec("P")
T = TypeVar("T")


def _walked(talk: Callable[Concatenate[Asking, P], Talk[T]]) -> "Callable[Concatenate[Client, P], T]":
    """A talk as a method that blocks."""

    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._walk(talk(self._asking, *args, **kwargs))

    method.__doc__ = talk.__doc__
    return method


def _awaited(talk: Callable[Concatenate[Asking, P], Talk[T]]) -> "Callable[Concatenate[AsyncClient, P], Awaitable[T]]":
    """A talk as a method to be awaited."""

    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._walk(talk(self._asking, *args, **kwargs))

    method.__doc__ = talk.__doc__
    return method


class Client(Guarding):
    """For threads. Any number of them may share one.

    An agent that gives no sign of life for `timeout_ms` is unavailable. While it is alive a call waits for its answer,
    as a policy's `wait` asks for, up to `longest_wait_ms`.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_ms: int = 1000,
        longest_wait_ms: int = LONGEST_WAIT_MS,
        connections: int = 32,
        on_failure: OnFailure = "closed",
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._asking = Asking(on_failure, breaker or CircuitBreaker(), time.monotonic)
        patience = Patience(timeout_ms / 1000, max(timeout_ms, longest_wait_ms) / 1000)
        self._connections = Connections(address_of(url), token, patience, connections)

    check = _walked(Asking.check)
    check_batch = _walked(Asking.check_batch)
    wait = _walked(Asking.wait)
    hold = _walked(Asking.hold)
    commit = _walked(Asking.commit)
    extend = _walked(Asking.extend)
    release = _walked(Asking.release)

    def _walk(self, talk: Talk[T]) -> T:
        came = None
        try:
            while True:
                came = self._do(go_on(talk, came))
        except StopIteration as end:
            result: T = end.value
            return result

    def _do(self, step: Call | Pause) -> Response | AgentUnavailable | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return self._connections.call(step)
        except AgentUnavailable as error:
            return error

    def close(self) -> None:
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(AsyncGuarding):
    """For an event loop; otherwise the same."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_ms: int = 1000,
        longest_wait_ms: int = LONGEST_WAIT_MS,
        connections: int = 32,
        on_failure: OnFailure = "closed",
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._asking = Asking(on_failure, breaker or CircuitBreaker(), time.monotonic)
        patience = Patience(timeout_ms / 1000, max(timeout_ms, longest_wait_ms) / 1000)
        self._connections = AsyncConnections(address_of(url), token, patience, connections)

    check = _awaited(Asking.check)
    check_batch = _awaited(Asking.check_batch)
    wait = _awaited(Asking.wait)
    hold = _awaited(Asking.hold)
    commit = _awaited(Asking.commit)
    extend = _awaited(Asking.extend)
    release = _awaited(Asking.release)

    async def _walk(self, talk: Talk[T]) -> T:
        came = None
        try:
            while True:
                came = await self._do(go_on(talk, came))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _do(self, step: Call | Pause) -> Response | AgentUnavailable | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return await self._connections.call(step)
        except AgentUnavailable as error:
            return error

    async def close(self) -> None:
        await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
