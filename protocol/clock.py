"""Time is an argument. What needs the time is handed a clock, and tests hand it theirs."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """The time of day, with its zone: for people, records and calendars."""

    def monotonic_ms(self) -> int:
        """Milliseconds that never go back: for durations."""


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
