"""What a limiter did with a trace, beside what one could have done that knows everything at once.

The omniscient limiter admits whatever comes, wherever it comes, until the limit is spent. A denial is *wrong* if the
omniscient limiter would have admitted that request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.allocation.traces import TICK_MS, Trace


class Score:
    """Note units that a limiter decided on, by region and by the tick in which they were requested."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now_ms = 0
        self.due = omniscient(trace)
        self.last_tick = last_tick(trace)
        self.admitted = [0] * trace.regions
        self.by_second: list[list[int]] = [[0] * (trace.length_ms // 1000 + 2) for _ in range(trace.regions)]
        self.wrong = 0
        self.wrong_by_second = [[0] * len(each) for each in self.by_second]
        self.longest_ms = 0  # of wrong denials, with no admission in between
        self.admitted_before_settlement = 0
        self._wrong_since_ms: list[int | None] = [None] * trace.regions

    def admit(self, region: int, units: int) -> None:
        if units:
            self.admitted[region] += units
            self.by_second[region][self.now_ms // 1000] += units
            self._wrong_since_ms[region] = None
            if self.now_ms < (self.trace.settled_at_ms or 0):
                self.admitted_before_settlement += units

    def deny(self, region: int, units: int, tick: int) -> None:
        if units and tick < self.last_tick:
            self.wrong += units
            self.wrong_by_second[region][tick * TICK_MS // 1000] += units
            since_ms = self._wrong_since_ms[region]
            if since_ms is None:
                since_ms = self._wrong_since_ms[region] = tick * TICK_MS
            self.longest_ms = max(self.longest_ms, tick * TICK_MS - since_ms)


@dataclass(frozen=True)
class Measured:
    """One run. All but the counts are parts of what the omniscient limiter did."""

    utilisation: float
    before_settlement: float
    wrong_per_1000: float
    longest_ms: int
    over: int
    messages: int
    asking: int  # of the messages, those that are about units: the others only book what was used
    bound: float  # of them, by the design
    per_1000: float
    jain: float
    by_second: Sequence[Sequence[int]] = field(repr=False)
    wrong_by_second: Sequence[Sequence[int]] = field(repr=False)


def measured(score: Score, messages: int, asking: int) -> Measured:
    admitted, due, regions = sum(score.admitted), sum(score.due), score.trace.regions
    return Measured(
        utilisation=admitted / due,
        before_settlement=score.admitted_before_settlement / due,
        wrong_per_1000=1000 * score.wrong / due,
        longest_ms=score.longest_ms,
        over=max(0, admitted - score.trace.limit),
        messages=messages,
        asking=asking,
        bound=admitted / 1000 + 80 * regions,
        per_1000=1000 * asking / max(1, admitted),
        jain=jain([min(1.0, has / wanted) for has, wanted in zip(score.admitted, score.due, strict=True) if wanted]),
        by_second=score.by_second,
        wrong_by_second=score.wrong_by_second,
    )


def jain(parts: Sequence[float]) -> float:
    squares = sum(part * part for part in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 0.0


def last_tick(trace: Trace) -> int:
    """Return the tick in which the omniscient limiter admits its last unit."""
    asked = 0
    for tick, arrivals in enumerate(trace.ticks):
        asked += sum(units for _, units in arrivals)
        if asked >= trace.limit:
            return tick
    return len(trace.ticks)


def omniscient(trace: Trace) -> list[int]:
    admitted, left = [0] * trace.regions, trace.limit
    for arrivals in trace.ticks:
        for region, units in arrivals:
            taken = min(units, left)
            admitted[region] += taken
            left -= taken
    return admitted
