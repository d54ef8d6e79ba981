"""Messages between regions and whoever decides, on virtual time: late, sometimes lost or doubled, none over a cut.

Where a trace says how far its regions are, they are so far, and what is sent arrives: as on one machine.
"""

import heapq
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from benchmarks.allocation.traces import Trace

ROUND_TRIP_MS = (80, 200)
LOST = 0.005
DOUBLED = 0.005
BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


class Network:
    """The network, and the clock of everything that is connected to it."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.now_ms = 0
        self.cut = trace.cut
        self.messages = 0
        self._lost, self._doubled = (LOST, DOUBLED) if trace.round_trips_ms is None else (0.0, 0.0)
        self._chance = random.Random(f"{name}/{trace.name}/{trace.seed}")  # noqa: S311
        nearness = random.Random(f"{trace.name}/{trace.seed}/nearness")  # noqa: S311
        by_chance = [nearness.uniform(*ROUND_TRIP_MS) for _ in range(trace.regions)]
        self.round_trips_ms = trace.round_trips_ms or by_chance
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._made = 0

    def now(self) -> datetime:
        return BEGINNING + timedelta(milliseconds=self.now_ms)

    def monotonic_ms(self) -> int:
        return self.now_ms

    def later(self, in_ms: float, what: Callable[[], None]) -> None:
        self._made += 1
        heapq.heappush(self._due, (self.now_ms + max(1, round(in_ms)), self._made, what))

    def run_until(self, end_ms: int) -> None:
        while self._due and self._due[0][0] <= end_ms:
            self.now_ms, _, what = heapq.heappop(self._due)
            what()
        self.now_ms = end_ms

    def send(self, region: int, arrives: Callable[[], None]) -> None:
        """Deliver one message, from the region or to it."""
        self.messages += 1
        if self.is_cut(region) or self._chance.random() < self._lost:
            return
        copies = 2 if self._chance.random() < self._doubled else 1
        for _ in range(copies):
            self.later(
                self.round_trips_ms[region] / 2 * self._chance.uniform(0.9, 1.1), lambda: self._arrive(region, arrives)
            )

    def is_cut(self, region: int) -> bool:
        cut = self.cut
        return cut is not None and region == cut.region and cut.from_ms <= self.now_ms < cut.to_ms

    def _arrive(self, region: int, arrives: Callable[[], None]) -> None:
        if not self.is_cut(region):
            arrives()
