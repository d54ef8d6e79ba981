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

What is asked and what an answer means is decided in `leasehold/asking.py`; here the talks are only walked through.
"""

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from leasehold.asking import (
    AgentUnavailable,
    Asking,
    Breaker,
    Call,
    Decision,
    Denied,
    Held,
    OnFailure,
    Pause,
    Refused,
    Response,
    Subject,
    Talk,
    go_on,
)
from leasehold.wire import AsyncConnections, Connections, address_of

__all__ = ["AgentUnavailable", "AsyncClient", "Breaker", "Client", "Decision", "Denied", "Held", "Refused"]

DEFAULT_URL = "http://127.0.0.1:8411"
DEFAULT_TTL_MS = 60_000
SLOT_TTL_MS = 600_000  # at most: the quota says how long a slot is held

P = ParamSpec("P")
R = TypeVar("R")
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


class Client:
    """For threads. Any number of them may share one."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_ms: int = 1000,
        connections: int = 32,
        on_failure: OnFailure = "closed",
        breaker: Breaker | None = None,
    ) -> None:
        self._asking = Asking(on_failure, breaker or Breaker(), time.monotonic)
        self._connections = Connections(address_of(url), token, timeout_ms / 1000, connections)

    check = _walked(Asking.check)
    check_batch = _walked(Asking.check_batch)
    wait = _walked(Asking.wait)
    hold = _walked(Asking.hold)
    commit = _walked(Asking.commit)
    extend = _walked(Asking.extend)
    release = _walked(Asking.release)

    @contextmanager
    def holding(
        self, subject: Subject, *, units: int, ttl_ms: int = DEFAULT_TTL_MS, operation_id: str | None = None
    ) -> Iterator["Holding"]:
        """Units set aside while the block runs; what it did not commit is released, also if it failed."""
        held = self.hold(subject, units=units, ttl_ms=ttl_ms, operation_id=operation_id or uuid.uuid4().hex)
        holding = Holding(self, held)
        try:
            yield holding
        finally:
            if not holding.is_committed:
                self.release(held)

    @contextmanager
    def slot(
        self, subject: Subject, *, units: int = 1, ttl_ms: int = SLOT_TTL_MS, operation_id: str | None = None
    ) -> Iterator["Holding"]:
        """A place among those who may run at once, while the block runs. Raises Denied where there is none.

        Where an allowance limits the subject as well, the block uses so many `units` of it, and none if it fails.
        """
        with self.holding(subject, units=units, ttl_ms=ttl_ms, operation_id=operation_id) as holding:
            yield holding
            if not holding.is_committed:
                holding.commit(units)

    def limited(
        self, subject: Callable[P, Subject], *, cost: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator: the function is called only if its arguments' subject may; else Denied is raised."""

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            @functools.wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
                _insist(self.check(subject(*args, **kwargs), cost=cost))
                return function(*args, **kwargs)

            return guarded

        return decorate

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


class AsyncClient:
    """For an event loop; otherwise the same."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_ms: int = 1000,
        connections: int = 32,
        on_failure: OnFailure = "closed",
        breaker: Breaker | None = None,
    ) -> None:
        self._asking = Asking(on_failure, breaker or Breaker(), time.monotonic)
        self._connections = AsyncConnections(address_of(url), token, timeout_ms / 1000, connections)

    check = _awaited(Asking.check)
    check_batch = _awaited(Asking.check_batch)
    wait = _awaited(Asking.wait)
    hold = _awaited(Asking.hold)
    commit = _awaited(Asking.commit)
    extend = _awaited(Asking.extend)
    release = _awaited(Asking.release)

    @asynccontextmanager
    async def holding(
        self, subject: Subject, *, units: int, ttl_ms: int = DEFAULT_TTL_MS, operation_id: str | None = None
    ) -> AsyncIterator["AsyncHolding"]:
        held = await self.hold(subject, units=units, ttl_ms=ttl_ms, operation_id=operation_id or uuid.uuid4().hex)
        holding = AsyncHolding(self, held)
        try:
            yield holding
        finally:
            if not holding.is_committed:
                await self.release(held)

    @asynccontextmanager
    async def slot(
        self, subject: Subject, *, units: int = 1, ttl_ms: int = SLOT_TTL_MS, operation_id: str | None = None
    ) -> AsyncIterator["AsyncHolding"]:
        async with self.holding(subject, units=units, ttl_ms=ttl_ms, operation_id=operation_id) as holding:
            yield holding
            if not holding.is_committed:
                await holding.commit(units)

    def limited(
        self, subject: Callable[P, Subject], *, cost: int | None = None
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
            @functools.wraps(function)
            async def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
                _insist(await self.check(subject(*args, **kwargs), cost=cost))
                return await function(*args, **kwargs)

            return guarded

        return decorate

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


class Holding:
    """A hold within its block."""

    def __init__(self, client: Client, held: Held) -> None:
        self._client = client
        self.held = held
        self.is_committed = False

    def commit(self, units: int) -> None:
        self._client.commit(self.held, units)
        self.is_committed = True

    def extend(self, ttl_ms: int = SLOT_TTL_MS) -> None:
        """It lasts at least so long from now on; with a slot in it, at most as long as its quota says."""
        self._client.extend(self.held, ttl_ms)


class AsyncHolding:
    def __init__(self, client: AsyncClient, held: Held) -> None:
        self._client = client
        self.held = held
        self.is_committed = False

    async def commit(self, units: int) -> None:
        await self._client.commit(self.held, units)
        self.is_committed = True

    async def extend(self, ttl_ms: int = SLOT_TTL_MS) -> None:
        await self._client.extend(self.held, ttl_ms)


def _insist(decision: Decision) -> None:
    if not decision.allowed:
        raise Denied(decision)
