"""A loop on which nothing ever waits: when all that can run has run, the clock jumps to the next timer.

One thread, no sockets, no signals, timers in the order of their moments and then of their making: the same code with
the same seed does the same things in the same order.
"""

import asyncio
from asyncio import base_events
from datetime import UTC, datetime, timedelta
from typing import Any

LONGEST_S = 100_000.0
MOST_TURNS = 20_000  # of the loop at one moment


class NothingLeftToDo(RuntimeError):
    """Everybody waits for somebody else: in life this would hang for ever."""


class Spinning(RuntimeError):
    """Something is done again and again without a pause: in life this would eat a processor."""


class _Jump:
    """In the place of a selector: it waits by moving the clock."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop
        self._turns = 0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingLeftToDo
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > MOST_TURNS:
            raise Spinning
        if timeout > 0:
            self._loop.jump(timeout)
        return []

    def close(self) -> None:
        pass


class VirtualLoop(base_events.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = _Jump(self)

    def time(self) -> float:
        return self._now

    def jump(self, timeout_s: float) -> None:
        """To the next timer exactly, so that no rounding depends on how far away it is."""
        scheduled: list[Any] = getattr(self, "_scheduled", [])
        self._now = max(self._now, scheduled[0].when()) if scheduled else self._now + timeout_s
        if self._now > LONGEST_S:
            raise NothingLeftToDo

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class VirtualClock:
    """What everybody but the stores goes by; `start` is where on the calendar a run begins."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: datetime) -> None:
        self._loop = loop
        self.start = start.astimezone(UTC)

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self._loop.time())

    def monotonic_ms(self) -> int:
        return round(self._loop.time() * 1000)

    def us(self) -> int:
        """Microseconds since 1970."""
        return (self.now() - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
