"""Requests that wait in a region for a unit, in the order in which they came."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

WAIT_MS = 400


@dataclass(slots=True)
class Cohort:
    """The requests that came in one tick."""

    units: int
    tick: int
    deadline_ms: int


@dataclass(slots=True)
class Queue:
    cohorts: deque[Cohort] = field(default_factory=deque)

    @property
    def units(self) -> int:
        return sum(each.units for each in self.cohorts)

    def put(self, units: int, tick: int, now_ms: int) -> None:
        self.cohorts.append(Cohort(units, tick, now_ms + WAIT_MS))

    def take(self, available: int) -> int:
        """Admit as many waiting requests as units allow. Return how many were admitted."""
        taken = 0
        while self.cohorts and taken < available:
            first = self.cohorts[0]
            units = min(first.units, available - taken)
            first.units, taken = first.units - units, taken + units
            if not first.units:
                self.cohorts.popleft()
        return taken

    def overdue(self, now_ms: int) -> Iterator[Cohort]:
        while self.cohorts and self.cohorts[0].deadline_ms <= now_ms:
            yield self.cohorts.popleft()
