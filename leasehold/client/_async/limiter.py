"""Context managers and decorators over checks and holds, for a client and for an engine.

A context manager holds units or a slot while its block runs, and gives back what was not used whatever happens in the
block. A decorator puts such a block around each call of a function, and makes the subject from the call's arguments.
"""

import functools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from leasehold.client.agent_protocol import (
    AgentUnavailable,
    Costs,
    Decision,
    Denied,
    Explanation,
    HeldUnits,
    Patience,
    RequestRejected,
    Subject,
)
from leasehold.client.asyncio_io import repeating, sleep
from protocol.check import Mode

DEFAULT_TTL_MS = 60_000
SLOT_TTL_MS = 600_000  # the quota's `slot_ttl` shortens it
RENEWALS_PER_TTL = 3

P = ParamSpec("P")
R = TypeVar("R")


class AsyncLimiter(ABC):
    """The interface that a client, an engine and a fake client of the tests share."""

    @abstractmethod
    async def check(
        self,
        subject: Subject,
        *,
        cost: int | None = None,
        costs: Costs | None = None,
        operation_id: str | None = None,
        mode: Mode = "enforce",
    ) -> Decision:
        """Decide whether a request may happen now, and consume its cost if it may."""

    @abstractmethod
    async def check_batch(self, checks: Sequence[Mapping[str, Any]]) -> list[Decision | RequestRejected]:
        """Decide up to 1,000 checks in order, each as it would be in a call of its own.

        If one check is rejected, its place in the result has the `RequestRejected`, which is not raised: others may
        have been charged, and the caller has to see them.
        """

    @abstractmethod
    async def explain(self, subject: Subject, *, cost: int | None = None, costs: Costs | None = None) -> Explanation:
        """Tell for every policy whether it matches a request and, if not, why. Nothing is consumed."""

    async def wait(
        self,
        subject: Subject,
        *,
        timeout_s: float,
        cost: int | None = None,
        costs: Costs | None = None,
        operation_id: str | None = None,
    ) -> Decision:
        """Repeat a check when the denials say so, until it is allowed or `timeout_s` is over. Return the last answer.

        A request that can never pass is not repeated.
        """
        patience = Patience(timeout_s, self._now_s)
        while True:
            decision = await self.check(subject, cost=cost, costs=costs, operation_id=operation_id)
            pause_s = patience.pause_before_retry_s(decision)
            if pause_s is None:
                return decision
            await self._pause(pause_s)

    def _now_s(self) -> float:
        return time.monotonic()

    async def _pause(self, seconds: float) -> None:
        await sleep(seconds)

    @abstractmethod
    async def hold(
        self,
        subject: Subject,
        *,
        units: int | None = None,
        costs: Costs | None = None,
        ttl_ms: int = DEFAULT_TTL_MS,
        operation_id: str,
    ) -> HeldUnits:
        """Reserve units for work whose cost is not known yet. Raise Denied if there are not enough."""

    @abstractmethod
    async def commit(self, hold: HeldUnits, units: int | None = None, *, costs: Costs | None = None) -> None:
        """Consume units of a hold and release the rest. Repeating it changes nothing; another number is rejected."""

    @abstractmethod
    async def extend(self, hold: HeldUnits, ttl_ms: int) -> None:
        """Let a hold last at least `ttl_ms` from now on; a slot lasts at most as long as its quota says."""

    @abstractmethod
    async def release(self, hold: HeldUnits) -> None:
        """Give all units of a hold back."""

    @asynccontextmanager
    async def holding(
        self,
        subject: Subject,
        *,
        units: int | None = None,
        costs: Costs | None = None,
        ttl_ms: int = DEFAULT_TTL_MS,
        operation_id: str | None = None,
    ) -> AsyncIterator["AsyncOpenHold"]:
        """Hold units while the block runs. What the block did not commit is released, also if the block fails."""
        held = await self.hold(
            subject, units=units, costs=costs, ttl_ms=ttl_ms, operation_id=operation_id or uuid.uuid4().hex
        )
        hold = AsyncOpenHold(self, held)
        try:
            yield hold
        finally:
            if not hold.is_committed:
                await self.release(held)

    @asynccontextmanager
    async def slot(
        self, subject: Subject, *, units: int = 1, ttl_ms: int = SLOT_TTL_MS, operation_id: str | None = None
    ) -> AsyncIterator["AsyncOpenHold"]:
        """Occupy a slot of a concurrency quota while the block runs. Raise Denied if none is free.

        If an allowance limits the subject as well, the block consumes `units` of it, and none if the block fails.
        """
        async with self.holding(subject, units=units, ttl_ms=ttl_ms, operation_id=operation_id) as hold:
            yield hold
            if not hold.is_committed:
                await hold.commit(units)

    def limited(
        self, subject: Callable[P, Subject], *, cost: int | None = None
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
        """Decorate a function so that each call is checked first. Denied is raised in place of a denied call."""

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
            @functools.wraps(function)
            async def limited_function(*args: P.args, **kwargs: P.kwargs) -> R:
                decision = await self.check(subject(*args, **kwargs), cost=cost)
                if not decision.allowed:
                    raise Denied(decision)
                return await function(*args, **kwargs)

            return limited_function

        return decorate

    def in_slot(
        self, subject: Callable[P, Subject], *, units: int = 1, ttl_ms: int = SLOT_TTL_MS
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
        """Decorate a function so that each call occupies a slot while it runs. Raise Denied if none is free."""

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
            @functools.wraps(function)
            async def limited_function(*args: P.args, **kwargs: P.kwargs) -> R:
                async with self.slot(subject(*args, **kwargs), units=units, ttl_ms=ttl_ms) as hold, hold.renewed():
                    return await function(*args, **kwargs)

            return limited_function

        return decorate


class AsyncOpenHold:
    """A hold inside its `holding` or `slot` block."""

    def __init__(self, limiter: AsyncLimiter, held: HeldUnits) -> None:
        self._limiter = limiter
        self.held = held
        self.is_committed = False

    async def commit(self, units: int | None = None, *, costs: Costs | None = None) -> None:
        """Consume units of the hold and release the rest. Repeating it changes nothing; another number is rejected."""
        await self._limiter.commit(self.held, units, costs=costs)
        self.is_committed = True

    async def extend(self, ttl_ms: int = SLOT_TTL_MS) -> None:
        """Let the hold last at least `ttl_ms` from now on; a slot lasts at most as long as its quota says."""
        await self._limiter.extend(self.held, ttl_ms)

    def renewed(self) -> AbstractAsyncContextManager[None]:
        """Extend the hold in time, again and again, while the block runs."""
        return repeating(self._renew, lambda: self.held.expires_in_ms / 1000 / RENEWALS_PER_TTL)

    async def _renew(self) -> bool:
        try:
            await self.extend(self.held.expires_in_ms)
        except AgentUnavailable:
            return True  # the hold has not expired yet: the next renewal may succeed
        except RequestRejected:
            return False  # the hold has ended
        return True
