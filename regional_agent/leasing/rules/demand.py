"""The demand for a quota in units per second, by which the coordinator divides an allowance.

It is the higher of two moving averages, a quick and a slow one: a rise counts within a second, and a short silence is
not taken for an end.
"""

import math
from dataclasses import dataclass, field

from protocol.units import MAX_UNITS

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

    def note(self, units: int, limit: int = MAX_UNITS) -> None:
        """Count requested units. No grant can exceed `limit`, so more than that at once is not demand."""
        self._units += min(units, limit)

    def per_second_milli(self, now_ms: int) -> int:
        """Return thousandths of a unit per second, including what was counted since the last call.

        It is at most MAX_UNITS, which is the most that a message carries.
        """
        elapsed_ms = now_ms - self.since_ms
        if elapsed_ms > 0:
            self._quick.observe(self._units, elapsed_ms)
            self._slow.observe(self._units, elapsed_ms)
            self._units, self.since_ms = 0, now_ms
        return min(MAX_UNITS, round(max(self._quick.per_second, self._slow.per_second) * 1000))
