"""An event loop on virtual time: when everything that can run has run, the clock jumps to the next timer.

It has one thread, no sockets and no signals. Timers run in the order of their times and then of their creation, so the
same code with the same seed does the same things in the same order.
"""

import asyncio
import heapq
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVarTuple, Unpack

Ts = TypeVarTuple("Ts")

LONGEST_S = 100_000.0
MOST_TURNS = 20_000  # of the loop without a jump of the clock


class NothingLeftToDo(RuntimeError):
    """Every task waits for another one: in production this would hang forever."""


class Spinning(RuntimeError):
    """Something repeats without a pause: in production this would use up a processor."""


class _Soon(asyncio.Handle):
    """A handle. A hundred thousand are made in a run, so it leaves out asyncio's debug checks."""

    def __init__(
        self,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr = False, None


class VirtualLoop(base_events.BaseEventLoop):
    """A loop with its own turns: asyncio's would ask a selector each time, and compare handles instead of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._turns = 0  # since the last jump
        self._made = 0  # number of timers so far
        self._due: deque[asyncio.Handle] = deque()
        self._ready = self._due  # where asyncio itself puts callbacks of finalizers
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Soon(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._made += 1
        heapq.heappush(self._timers, (when, self._made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when its time comes."""

    def _run_once(self) -> None:
        """Run all turns until the loop is stopped."""
        self._turn()
        while not self._is_stopping:
            self._turn()

    def _turn(self) -> None:
        """Run what can run once. If nothing can, jump to the next timer exactly."""
        timers, due = self._timers, self._due
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        self._turns += 1
        if not due and not self._is_stopping:
            self._jump()
        while timers and timers[0][0] <= self._now:
            due.append(heapq.heappop(timers)[2])
        for _ in range(len(due)):
            handle = due.popleft()
            if not handle._cancelled:
                handle._run()
        if self._turns > MOST_TURNS:
            raise Spinning

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps, so it need not be woken."""

    @property
    def _is_stopping(self) -> bool:
        return bool(getattr(self, "_stopping", False))

    def _jump(self) -> None:
        if not self._timers:
            raise NothingLeftToDo
        when = self._timers[0][0]
        if when > self._now:
            self._now, self._turns = when, 0
        if self._now > LONGEST_S:
            raise NothingLeftToDo


class VirtualClock:
    """The clock of everything but the stores; `start` is the date at which a run begins."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: datetime) -> None:
        self._loop = loop
        self.start = start.astimezone(UTC)
        self.start_us = int(start.timestamp()) * 1_000_000
        self.slept = timedelta()  # time that passed while everything was suspended

    def now(self) -> datetime:
        return self.start + self.slept + timedelta(seconds=self._loop.time())

    def monotonic_ms(self) -> int:
        """Return the time of a system clock that counts on while the machine sleeps, unlike the loop's timers."""
        return round(self._loop.time() * 1000) + self.slept // timedelta(milliseconds=1)

    def run_us(self) -> int:
        """Return the microseconds in which something could happen."""
        return round(self._loop.time() * 1_000_000)

    def us(self) -> int:
        """Return microseconds since 1970."""
        return self.start_us + self.slept // timedelta(microseconds=1) + self.run_us()
