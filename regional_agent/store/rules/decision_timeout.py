"""How long a decision may take in the store: the time-out that is set, or longer where the store itself is slower.

A store that fsyncs every write answers as fast as its disk. With a time-out below that, calls fail that were executed.
So the round trips of decisions are measured, late ones as well, and the time-out is twice what 99 of 100 took, within
a bound.
"""

from collections import deque
from collections.abc import Iterable

WINDOW = 256  # round trips
ENOUGH = 8  # before anything is concluded
MARGIN = 2


class DecisionTimeout:
    def __init__(self, shortest_ms: int, longest_ms: int) -> None:
        self._shortest_s = shortest_ms / 1000
        self._longest_s = max(shortest_ms, longest_ms) / 1000
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self.seconds = self._shortest_s

    def note(self, round_trips_s: Iterable[float]) -> None:
        """Take round trips into account, and reckon the time-out anew once there are enough."""
        self._latest.extend(round_trips_s)
        if len(self._latest) >= ENOUGH:
            self.seconds = min(self._longest_s, max(self._shortest_s, MARGIN * self.quantile_s(99)))

    @property
    def count(self) -> int:
        """Return how many recent round trips are known."""
        return len(self._latest)

    def quantile_s(self, percent: int) -> float:
        """Return how long so many of 100 recent round trips took at most; 0 before there are any."""
        ordered = sorted(self._latest)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0

    @property
    def is_too_short(self) -> bool:
        """Return whether one of 100 decisions takes longer than the time-out that was set."""
        return len(self._latest) >= ENOUGH and self.quantile_s(99) > self._shortest_s
