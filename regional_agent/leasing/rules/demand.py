"""The demand for a quota in units per second, by which the coordinator divides an allowance.

It is the higher of two moving averages, a quick and a slow one: a rise counts within a second, and a short silence is
not taken for an end.
"""

import math
from collections.abc import Iterable
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from protocol.units import MAX_UNITS

QUICK_MS = 1_000
SLOW_MS = 5_000


def moving_average(per_second: float, units: int, elapsed_ms: int, over_ms: int) -> float:
    """Return an exponentially weighted average of units per second, with time constant `over_ms`."""
    keep = math.exp(-elapsed_ms / over_ms)
    return per_second * keep + (units * 1000 / elapsed_ms) * (1 - keep)


class Demand(Struct, gc=False):
    since_ms: int
    units: int = 0  # that are not in the averages yet
    quick: float = 0.0
    slow: float = 0.0

    def note(self, units: int, limit: int = MAX_UNITS) -> None:
        """Count requested units. No grant can exceed `limit`, so more than that at once is not demand."""
        self.units += min(units, limit)

    def per_second_milli(self, now_ms: int) -> int:
        """Return thousandths of a unit per second, including what was counted since the last call.

        It is at most MAX_UNITS, which is the most that a message carries.
        """
        elapsed_ms = now_ms - self.since_ms
        if elapsed_ms > 0:
            self.quick = moving_average(self.quick, self.units, elapsed_ms, QUICK_MS)
            self.slow = moving_average(self.slow, self.units, elapsed_ms, SLOW_MS)
            self.units, self.since_ms = 0, now_ms
        return min(MAX_UNITS, round(max(self.quick, self.slow) * 1000))


class HotKey(NamedTuple):
    quota: str
    demand_milli: int


def hottest(demands: Iterable[tuple[str, Demand]], now_ms: int, most: int) -> list[HotKey]:
    """Return the keys with the highest demand, the hottest first."""
    keys = (HotKey(name, demand.per_second_milli(now_ms)) for name, demand in demands)
    return nlargest(most, (key for key in keys if key.demand_milli), key=attrgetter("demand_milli"))
