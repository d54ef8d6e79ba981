"""Work that asks first: blocks and decorators around what a client, or an engine, can do.

A block has what it asked for while it runs, and gives it back whatever happens in it. A decorator is such a block
around each call of a function, whose arguments say for whom it is.
"""

import asyncio
import functools
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ParamSpec, TypeVar

from leasehold.asking import AgentUnavailable, Decision, Denied, Held, Mode, Refused, Subject

DEFAULT_TTL_MS = 60_000
SLOT_TTL_MS = 600_000  # at most: the quota says how long a slot is held
KEPT_TIMES = 3  # in the time that a hold lasts it is extended so often

P = ParamSpec("P")
R = TypeVar("R")


class Guarding(ABC):
    """For threads."""

    @abstractmethod
    def check(
        self, subject: Subject, *, cost: int | None = None, operation_id: str | None = None, mode: Mode = "enforce"
    ) -> Decision: ...
    @abstractmethod
    def hold(self, subject: Subject, *, units: int, ttl_ms: int, operation_id: str) -> Held: ...
    @abstractmethod
    def commit(self, hold: Held, units: int) -> None: ...
    @abstractmethod
    def extend(self, hold: Held, ttl_ms: int) -> None: ...
    @abstractmethod
    def release(self, hold: Held) -> None: ...

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

    def in_slot(
        self, subject: Callable[P, Subject], *, units: int = 1, ttl_ms: int = SLOT_TTL_MS
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator: each call has a slot for as long as it runs; Denied is raised where none is free."""

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            @functools.wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
                with self.slot(subject(*args, **kwargs), units=units, ttl_ms=ttl_ms) as slot, slot.kept():
                    return function(*args, **kwargs)

            return guarded

        return decorate


class AsyncGuarding(ABC):
    """For an event loop; otherwise the same."""

    @abstractmethod
    def check(
        self, subject: Subject, *, cost: int | None = None, operation_id: str | None = None, mode: Mode = "enforce"
    ) -> Awaitable[Decision]: ...
    @abstractmethod
    def hold(self, subject: Subject, *, units: int, ttl_ms: int, operation_id: str) -> Awaitable[Held]: ...
    @abstractmethod
    def commit(self, hold: Held, units: int) -> Awaitable[None]: ...
    @abstractmethod
    def extend(self, hold: Held, ttl_ms: int) -> Awaitable[None]: ...
    @abstractmethod
    def release(self, hold: Held) -> Awaitable[None]: ...

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

    def in_slot(
        self, subject: Callable[P, Subject], *, units: int = 1, ttl_ms: int = SLOT_TTL_MS
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
            @functools.wraps(function)
            async def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
                async with self.slot(subject(*args, **kwargs), units=units, ttl_ms=ttl_ms) as slot, slot.kept():
                    return await function(*args, **kwargs)

            return guarded

        return decorate


class Holding:
    """A hold within its block."""

    def __init__(self, client: Guarding, held: Held) -> None:
        self._client = client
        self.held = held
        self.is_committed = False

    def commit(self, units: int) -> None:
        self._client.commit(self.held, units)
        self.is_committed = True

    def extend(self, ttl_ms: int = SLOT_TTL_MS) -> None:
        """It lasts at least so long from now on; with a slot in it, at most as long as its quota says."""
        self._client.extend(self.held, ttl_ms)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """It does not run out while the block runs: a thread of its own extends it in time."""
        is_over = threading.Event()
        keeping = threading.Thread(target=self._keep, args=(is_over,), name="leasehold-keeping", daemon=True)
        keeping.start()
        try:
            yield
        finally:
            is_over.set()
            keeping.join()

    def _keep(self, is_over: threading.Event) -> None:
        while not is_over.wait(_pause_s(self.held)):
            try:
                self.extend(self.held.expires_in_ms)
            except AgentUnavailable:
                continue  # it lasts for a while yet
            except Refused:
                return  # it has ended


class AsyncHolding:
    def __init__(self, client: AsyncGuarding, held: Held) -> None:
        self._client = client
        self.held = held
        self.is_committed = False

    async def commit(self, units: int) -> None:
        await self._client.commit(self.held, units)
        self.is_committed = True

    async def extend(self, ttl_ms: int = SLOT_TTL_MS) -> None:
        await self._client.extend(self.held, ttl_ms)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_pause_s(self.held))
            try:
                await self.extend(self.held.expires_in_ms)
            except AgentUnavailable:
                continue
            except Refused:
                return


def _pause_s(held: Held) -> float:
    return held.expires_in_ms / 1000 / KEPT_TIMES


def _insist(decision: Decision) -> None:
    if not decision.allowed:
        raise Denied(decision)
