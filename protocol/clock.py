"""Time is an argument. What needs the time is handed a clock, and tests hand it theirs."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """The time of day, with its zone: for people, records and calendars."""

    def monotonic_ms(self) -> int:
        """Milliseconds that never go back: for durations. They count on while the machine sleeps."""


# On Linux CLOCK_MONOTONIC stands still while the machine sleeps: a pause until the end of an hour would outlast it.
_COUNTS_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_ms(self) -> int:
        return time.clock_gettime_ns(_COUNTS_SLEEP) // 1_000_000
