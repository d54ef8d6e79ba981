"""Clocks. Code that needs the time takes a clock as an argument, so that tests can supply their own."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """Return the time of day, with its zone: for people, records and calendars."""

    def monotonic_ms(self) -> int:
        """Return milliseconds that never go back, for durations. They continue while the machine sleeps."""


# On Linux CLOCK_MONOTONIC stands still while the machine sleeps: a pause until the end of an hour would outlast it.
_COUNTS_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_ms(self) -> int:
        return time.clock_gettime_ns(_COUNTS_SLEEP) // 1_000_000
