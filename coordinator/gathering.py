"""Exchanges that wait at the same time are applied in one transaction.

A call that finds a place free goes at once, alone. While all places are taken calls pile up, and the next place takes
as many of them as it may, so the busier it is, the less a call costs. Whoever was answered together is likely to ask
again soon, one after the other as the network brings them: whoever comes first waits for the others, at most for as
long as their gather took. Or it would go alone, and they without it, for ever, in twice the transactions. In one
transaction there is at most one call of each lane; whoever comes second stays in line, and nobody of that lane
overtakes it. A call about a quota that another transaction is at stays in line as well: there it would wait for the
pool's lock, and here it is gathered with all others that do.

If a gather fails, its members run singly, so that a call that is malformed or in trouble is nobody else's trouble. An
outage is everybody's: then nothing is tried again.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from coordinator.domain.exchange import Call
from coordinator.operations.apply_exchange import Applied
from coordinator.outages import DatabaseUnavailable

PLACES = 2  # one decides while the other waits for the database
MOST_CALLS = 64
MOST_EXCHANGES = 256
PATIENCE = 1.0  # times what a gather took: so long whoever was answered may take to ask again

Apply = Callable[[Sequence[Call]], Awaitable[Sequence[Applied]]]


class _Waiting(NamedTuple):
    call: Call
    answer: asyncio.Future[Applied]
    lanes: frozenset[tuple[int, int]]
    quotas: frozenset[str]


def _waiting(call: Call, answer: asyncio.Future[Applied]) -> _Waiting:
    lanes = frozenset((each.batch.epoch, each.batch.lane) for each in call.incoming)
    frozen = (lease.quota for each in call.incoming for lease in each.batch.leases)
    wanted = (want.quota for each in call.incoming for want in each.live.wants)
    return _Waiting(call, answer, lanes, frozenset((*frozen, *wanted)))


class Gathering:
    def __init__(self, apply: Apply, places: int = PLACES, patience: float = PATIENCE) -> None:
        self._apply = apply
        self._patience = patience
        self._free = places
        self._line: deque[_Waiting] = deque()
        self._running: dict[asyncio.Task[None], frozenset[str]] = {}  # and the quotas that each is at
        self._spoken_for: set[str] = set()  # quotas that a transaction is at, or that somebody in line waits for
        self._company = 0  # so many are likely to be in line soon
        self._patience_s = 0.0
        self._pause: asyncio.TimerHandle | None = None  # while they are waited for

    async def apply(self, call: Call) -> Applied:
        """Whoever gives up waiting undoes nothing: what is under way is booked, and told to the next try."""
        waiting = _waiting(call, asyncio.get_running_loop().create_future())
        may_go = self._free and self._spoken_for.isdisjoint(waiting.quotas)
        self._line.append(waiting)
        self._spoken_for |= waiting.quotas
        if self._pause:
            if len(self._line) >= self._company:
                self._go_on()
        elif may_go:  # or else nobody may: who is in line was looked at when the last transaction ended
            self._start()
        return await waiting.answer

    def _start(self) -> None:
        self._company = 0
        while self._free and (gathered := self._take()):
            self._free -= 1
            task = asyncio.create_task(self._run(gathered))
            self._running[task] = frozenset[str]().union(*(waiting.quotas for waiting in gathered))
            task.add_done_callback(self._ended)
        self._spoken_for = set[str]().union(*self._running.values(), *(waiting.quotas for waiting in self._line))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._free += 1
        self._stop_waiting()
        if len(self._line) < self._company:
            self._pause = asyncio.get_running_loop().call_later(self._patience_s, self._go_on)
        else:
            self._start()

    def _expect(self, answered: int, took_s: float) -> None:
        """Of one alone nothing is known: it may not come again for long."""
        self._company = min(len(self._line) + answered, MOST_CALLS) if answered > 1 else 0
        self._patience_s = took_s * self._patience

    def _go_on(self) -> None:
        self._stop_waiting()
        self._start()

    def _stop_waiting(self) -> None:
        if self._pause:
            self._pause.cancel()
            self._pause = None

    def _take(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        lanes: set[tuple[int, int]] = set()
        busy: set[str] = set().union(*self._running.values())
        exchanges = 0
        while self._line and len(taken) < MOST_CALLS and exchanges < MOST_EXCHANGES:
            waiting = self._line.popleft()
            if waiting.answer.cancelled():
                continue
            if is_busy := not busy.isdisjoint(waiting.quotas):
                busy |= waiting.quotas  # nobody overtakes it, or it might wait for ever
            if is_busy or not lanes.isdisjoint(waiting.lanes):
                left.append(waiting)
            else:
                taken.append(waiting)
                exchanges += len(waiting.call.incoming)
            lanes |= waiting.lanes
        self._line.extendleft(reversed(left))
        return taken

    async def _run(self, gathered: Sequence[_Waiting]) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            answers = await self._apply([waiting.call for waiting in gathered])
        except Exception as error:
            if len(gathered) == 1 or isinstance(error, DatabaseUnavailable):
                _fail(gathered, error)
            else:
                for waiting in gathered:
                    await self._run([waiting])
        else:
            self._expect(len(gathered), clock() - began_s)
            for waiting, answer in zip(gathered, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)


def _fail(gathered: Sequence[_Waiting], error: Exception) -> None:
    for waiting in gathered:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
