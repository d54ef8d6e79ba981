"""How many units a second are asked for: what the coordinator divides by.

Two moving averages, one quick and one slow, and the higher of them: a rise is believed within a second, a short
silence is not taken for an end.
"""

import math
from dataclasses import dataclass, field

QUICK_MS = 1_000
SLOW_MS = 5_000


@dataclass(slots=True)
class Average:
    """Exponentially weighted units per second, with time constant `over_ms`."""

    over_ms: int
    per_second: float = 0.0

    def observe(self, units: int, elapsed_ms: int) -> None:
        keep = math.exp(-elapsed_ms / self.over_ms)
        self.per_second = self.per_second * keep + (units * 1000 / elapsed_ms) * (1 - keep)


@dataclass(slots=True)
class Demand:
    since_ms: int
    _units: int = 0
    _quick: Average = field(default_factory=lambda: Average(QUICK_MS))
    _slow: Average = field(default_factory=lambda: Average(SLOW_MS))

    def note(self, units: int) -> None:
        self._units += units

    def per_second_milli(self, now_ms: int) -> int:
        """Thousandths of a unit per second, what was noted since the last call included."""
        elapsed_ms = now_ms - self.since_ms
        if elapsed_ms > 0:
            self._quick.observe(self._units, elapsed_ms)
            self._slow.observe(self._units, elapsed_ms)
            self._units, self.since_ms = 0, now_ms
        return round(max(self._quick.per_second, self._slow.per_second) * 1000)
