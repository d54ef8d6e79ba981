"""What it is compared with, each from its idea and no more: a static split, fixed chunks, loans between regions."""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.allocation.network import Network
from benchmarks.allocation.score import Score
from benchmarks.allocation.traces import Trace
from benchmarks.allocation.waiting import Queue

ASK_AGAIN_MS = 400
CHUNK = 5_000


@dataclass(slots=True)
class Holder:
    """A region with units of its own, and at most one question about more under way."""

    number: int
    left: int
    queue: Queue = field(default_factory=Queue)
    question: int = 0  # the one that is under way; 0: none
    asked: int = 0
    is_over: bool = False  # nothing is left to ask for


class Limiter:
    """A region admits while it has units; a request waits for an answer for at most 0.4 s."""

    def __init__(self, trace: Trace, score: Score, first: int) -> None:
        self.network, self.score = Network(trace, type(self).__name__), score
        self.holders = [Holder(number, first) for number in range(trace.regions)]
        self._answers: dict[tuple[int, int], int] = {}  # what was given: a question that comes twice gets no more

    @property
    def messages(self) -> int:
        return self.network.messages

    @property
    def asking(self) -> int:
        return self.network.messages

    def arrive(self, region: int, units: int, tick: int) -> None:
        holder = self.holders[region]
        taken = min(units, holder.left)
        holder.left -= taken
        self.score.admit(region, taken)
        self.low(holder)
        if taken < units and holder.question:
            holder.queue.put(units - taken, tick, self.network.now_ms)
        else:
            self.score.deny(region, units - taken, tick)

    def turn(self) -> None:
        for holder in self.holders:
            for cohort in holder.queue.overdue(self.network.now_ms):
                self.score.deny(holder.number, cohort.units, cohort.tick)

    def low(self, holder: Holder) -> None:
        """Units were taken: is it time to ask?"""

    def ask(self, holder: Holder, give: Callable[[], int]) -> None:
        """Somebody who gives; again until there is an answer."""
        holder.asked += 1
        holder.question = holder.asked
        self._send(holder, holder.asked, give)

    def _send(self, holder: Holder, question: int, give: Callable[[], int]) -> None:
        if holder.question != question:
            return
        name = holder.number, question

        def answer() -> None:
            if name not in self._answers:
                self._answers[name] = give()
            self.network.send(holder.number, lambda: self._hear(holder, question, self._answers[name]))

        self.network.send(holder.number, answer)
        self.network.later(ASK_AGAIN_MS, lambda: self._send(holder, question, give))

    def _hear(self, holder: Holder, question: int, units: int) -> None:
        if holder.question == question:
            holder.question, holder.left = 0, holder.left + units
            taken = holder.queue.take(holder.left)
            holder.left -= taken
            self.score.admit(holder.number, taken)
            self.heard(holder, units)

    def heard(self, holder: Holder, units: int) -> None:
        holder.is_over = not units
        for cohort in holder.queue.overdue(self.network.now_ms + 10**9) if not units else ():
            self.score.deny(holder.number, cohort.units, cohort.tick)


class StaticSplit(Limiter):
    """Each region has its part from the beginning, and that is all."""

    def __init__(self, trace: Trace, score: Score) -> None:
        super().__init__(trace, score, trace.limit // trace.regions)


class Chunks(Limiter):
    """A region that has less than half a chunk requests a chunk. Nothing is ever returned."""

    def __init__(self, trace: Trace, score: Score) -> None:
        super().__init__(trace, score, 0)
        self._pool = trace.limit

    def low(self, holder: Holder) -> None:
        if holder.left < CHUNK // 2 and not holder.question and not holder.is_over:
            self.ask(holder, self._give)

    def _give(self) -> int:
        units = min(CHUNK, self._pool)
        self._pool -= units
        return units


class Loans(Limiter):
    """Each region has its part from the beginning; who runs low is lent half of what the next one has."""

    def __init__(self, trace: Trace, score: Score) -> None:
        self._part = trace.limit // trace.regions
        super().__init__(trace, score, self._part)
        self._next = list(range(trace.regions))
        self._refused = [0] * trace.regions

    def low(self, holder: Holder) -> None:
        if holder.left < self._part // 20 and not holder.question and not holder.is_over:
            self._borrow(holder)

    def _borrow(self, holder: Holder) -> None:
        self._next[holder.number] = (self._next[holder.number] + 1) % len(self.holders)
        if self._next[holder.number] == holder.number:
            self._next[holder.number] = (holder.number + 1) % len(self.holders)
        lender = self.holders[self._next[holder.number]]

        def give() -> int:
            if self.network.is_cut(lender.number):
                return 0
            units = lender.left // 2
            lender.left -= units
            return units

        self.ask(holder, give)

    def heard(self, holder: Holder, units: int) -> None:
        """A region without units forwards the request to the next one; when no region has any, it is denied."""
        self._refused[holder.number] = 0 if units else self._refused[holder.number] + 1
        if self._refused[holder.number] >= len(self.holders) - 1:
            super().heard(holder, 0)
        elif holder.left < self._part // 20:
            self._borrow(holder)
