"""How many units a limit cannot admit, whatever the order in which requests arrived.

No algorithm admits more than `burst + per_second * t` units in any time of t seconds. So of a demand that is counted in
windows, at least what exceeds a bucket that is filled and emptied a window at a time is denied. This holds for each of
the algorithms, and for regions that share a limit, which together admit no more than one that has it alone.

The demand is estimated from a sample: an admission of weight w adds w(w - 1) times its squared cost to the variance. A
window is so long that at the limit the standard error is a tenth of what the limit admits, and never shorter than a
second, for which the log merges equal denials. What happens within a window is not seen: denials of short bursts come
on top.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

RESOLUTION_S = 1
ERROR = 0.1  # of the demand of a window at the limit
Z = 1.96  # 95 of 100 cases
FEWEST_SAMPLES = 30  # fewer are no base for an interval
_CERTAIN_Z, _UNSEEN = 3.0, 4.0  # what a few samples make unlikely by far


class Capacity(NamedTuple):
    """The units that a limit admits: `burst` at once, and so many more each second."""

    per_second: float
    burst: float


class Estimate(NamedTuple):
    """A number that is estimated, and where it lies in 95 of 100 cases."""

    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0

    def plus(self, other: "Estimate", part: float = 1.0) -> "Estimate":
        """Add a part of another one. Both intervals are added up, which is wider than needed and never too narrow."""
        return Estimate(self.low + part * other.low, self.middle + part * other.middle, self.high + part * other.high)


class Demand:
    """The demand for one quota key, by the second."""

    def __init__(self) -> None:
        self.units = 0.0
        self.variance = 0.0
        self.samples = 0  # rows that stand for more than themselves
        self._seconds: dict[int, tuple[float, float]] = {}

    def add(self, second: int, units: float, variance: float) -> None:
        self.units += units
        self.variance += variance
        self.samples += variance > 0
        before = self._seconds.get(second, (0.0, 0.0))
        self._seconds[second] = before[0] + units, before[1] + variance

    def window_s(self, capacity: Capacity, whole_s: int) -> int:
        """Return how long windows have to be for this sample. An exact log has the shortest."""
        if not self.variance:
            return RESOLUTION_S
        needed = self.variance / self.units / ERROR**2  # units at the limit, for that error
        if capacity.burst >= needed:
            return RESOLUTION_S
        if not capacity.per_second:
            return whole_s
        return min(whole_s, max(RESOLUTION_S, math.ceil((needed - capacity.burst) / capacity.per_second)))

    def beyond(self, capacity: Capacity, whole_s: int) -> Estimate | None:
        """Return the units beyond the limit, of a time of so many seconds; None if there are too few samples."""
        if 0 < self.samples < FEWEST_SAMPLES:
            possible = self.units + _CERTAIN_Z * math.sqrt(self.variance) + _UNSEEN * self.variance / self.units
            return Estimate() if possible <= capacity.burst + capacity.per_second * whole_s else None
        window_s = self.window_s(capacity, whole_s)
        windows = self._windows(window_s)
        refill = capacity.per_second * window_s
        return Estimate(*(_beyond(windows, by, capacity.burst, refill) for by in (-Z, 0.0, Z)))

    def _windows(self, window_s: int) -> dict[int, tuple[float, float]]:
        """Return units and variance of each window that has any, in order."""
        found: dict[int, tuple[float, float]] = {}
        for second in sorted(self._seconds):
            units, variance = self._seconds[second]
            before = found.get(second // window_s, (0.0, 0.0))
            found[second // window_s] = before[0] + units, before[1] + variance
        return found


def _beyond(windows: Mapping[int, tuple[float, float]], errors: float, burst: float, refill: float) -> float:
    """Return what a bucket that begins full cannot admit, of a demand that is so many standard errors higher."""
    level, beyond, last = burst, 0.0, -1
    for number, (units, variance) in windows.items():
        level = min(burst, level + refill * (number - last - 1))
        demand = max(0.0, units + errors * math.sqrt(variance))
        admitted = min(demand, level + refill)
        level = min(burst, level + refill - admitted)
        beyond, last = beyond + demand - admitted, number
    return beyond
