"""Apply exchanges that wait at the same time in one transaction.

A call that finds a free slot is applied at once, alone. While all slots are taken calls queue up, and the next free
slot takes as many of them as it may, so the busier it is, the less a call costs. Regions that were answered together
are likely to send their next calls soon, one after the other as the network brings them: the first of them waits for
the others, at most as long as their batch took. Otherwise it would go alone and they without it, in twice the
transactions. One transaction has at most one call of each lane; the second one stays in the queue, and no call of that
lane overtakes it. A call about a quota that another transaction works on stays in the queue as well: it would wait
there for the pool's lock, and here it is batched with all others that do.

If a batch fails, each of its members goes on alone, in slots of their own, so that the next batch does not wait for
them. A call that fails alone is split into its exchanges, and an exchange that fails alone is answered as refused, with
`contention` or `internal` as the rule: the others are booked. For a while, calls about its lane run alone from the
start, so that it cannot fail one batch after the other. An outage of Postgres concerns all calls: then all fail, and
nothing is tried again.

The time of a call counts from its arrival. One that is still queued when it is over leaves the queue, so a lane that
waits for a Postgres that hangs answers all its calls in the time of one.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import structlog
from msgspec import structs

from coordinator.exchange.rules.submissions import ExchangeCall
from coordinator.exchange.rules.suspects import Suspects
from coordinator.exchange.transaction import Applied
from coordinator.outages import DatabaseUnavailable, TransactionFailed
from protocol.messages import ExchangeFault, ExchangeReply
from protocol.outcomes import ExchangeOutcome

SLOTS = 2  # one decides while the other waits for the database
SLOTS_ALONE = 2  # beside those, for calls that run alone
LOG_EVERY_S = 10.0
MOST_CALLS = 64
MOST_EXCHANGES = 256
ANSWER_WITHIN_S = 10.0  # twice as long as agents wait for a reply
PATIENCE = 1.0  # times what a batch took: so long regions that were answered may take to send their next call

CONTENTION = ExchangeFault(
    field="",
    rule="contention",
    reason="Another transaction holds what this exchange needs. Send it again.",
    again_in_ms=1_000,
)
INTERNAL = ExchangeFault(
    field="",
    rule="internal",
    reason="The coordinator failed to book this exchange. Its log says why.",
    again_in_ms=30_000,
)

log = structlog.get_logger("coordinator.exchange.batcher")
Apply = Callable[[Sequence[ExchangeCall]], Awaitable[Sequence[Applied]]]


class _Waiting(NamedTuple):
    call: ExchangeCall
    answer: asyncio.Future[Applied]
    lanes: frozenset[tuple[int, int]]
    quotas: frozenset[str]


def _waiting(call: ExchangeCall, answer: asyncio.Future[Applied]) -> _Waiting:
    lanes = frozenset((each.batch.epoch, each.batch.lane) for each in call.submissions)
    frozen = (lease.quota for each in call.submissions for lease in each.batch.leases)
    wanted = (want.quota for each in call.submissions for want in each.demands)
    return _Waiting(call, answer, lanes, frozenset((*frozen, *wanted)))


class ExchangeBatcher:
    def __init__(
        self,
        apply: Apply,
        slots: int = SLOTS,
        patience: float = PATIENCE,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._apply = apply
        self._patience = patience
        self._answer_within_s = answer_within_s
        self._free = slots
        self._queue: deque[_Waiting] = deque()
        self._running: dict[asyncio.Task[None], frozenset[str]] = {}  # with the quotas that each works on
        self._busy_or_queued: set[str] = set()  # quotas that a transaction works on, or that a queued call waits for
        self._expected = 0  # so many calls are likely to be queued soon
        self._patience_s = 0.0
        self._pause: asyncio.TimerHandle | None = None  # set while they are waited for
        self._alone: deque[_Waiting] = deque()
        self._free_alone = SLOTS_ALONE
        self._tasks: set[asyncio.Task[None]] = set()  # of calls that run alone, or wait for their parts
        self._suspects = Suspects()
        self._log_again_s = 0.0

    async def apply(self, call: ExchangeCall) -> Applied:
        """Apply a call, or raise DatabaseUnavailable if that takes too long.

        A transaction that has begun goes on without its caller: the exchanges are booked, and replayed later.
        """
        waiting = _waiting(call, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self._answer_within_s):
                self._enqueue(waiting)
                return await waiting.answer
        except TimeoutError as error:
            raise DatabaseUnavailable(f"no answer within {self._answer_within_s:g} s") from error

    def _enqueue(self, waiting: _Waiting) -> None:
        if self._suspects.includes(waiting.call.region, waiting.lanes, asyncio.get_running_loop().time()):
            self._alone.append(waiting)
            self._start_alone()
            return
        may_go = self._free and self._busy_or_queued.isdisjoint(waiting.quotas)
        self._queue.append(waiting)
        self._busy_or_queued |= waiting.quotas
        if self._pause:
            if len(self._queue) >= self._expected:
                self._resume()
        elif may_go:  # otherwise no call may: those queued were looked at when the last transaction ended
            self._start()

    def _start(self) -> None:
        self._expected = 0
        while self._free and (batch := self._take()):
            self._free -= 1
            task = asyncio.create_task(self._run(batch))
            self._running[task] = frozenset[str]().union(*(waiting.quotas for waiting in batch))
            task.add_done_callback(self._ended)
        self._busy_or_queued = set[str]().union(*self._running.values(), *(waiting.quotas for waiting in self._queue))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._free += 1
        self._cancel_pause()
        if len(self._queue) < self._expected:
            self._pause = asyncio.get_running_loop().call_later(self._patience_s, self._resume)
        else:
            self._start()

    def _expect(self, answered: int, took_s: float) -> None:
        """Expect those that were answered together. A call that was alone may not come again for long."""
        self._expected = min(len(self._queue) + answered, MOST_CALLS) if answered > 1 else 0
        self._patience_s = took_s * self._patience

    def _resume(self) -> None:
        self._cancel_pause()
        self._start()

    def _cancel_pause(self) -> None:
        if self._pause:
            self._pause.cancel()
            self._pause = None

    def _take(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        lanes: set[tuple[int, int]] = set()
        busy: set[str] = set().union(*self._running.values())
        exchanges = 0
        while self._queue and len(taken) < MOST_CALLS and exchanges < MOST_EXCHANGES:
            waiting = self._queue.popleft()
            if waiting.answer.cancelled():
                continue
            if is_busy := not busy.isdisjoint(waiting.quotas):
                busy |= waiting.quotas  # no call overtakes it, or it might wait for ever
            if is_busy or not lanes.isdisjoint(waiting.lanes):
                left.append(waiting)
            else:
                taken.append(waiting)
                exchanges += len(waiting.call.submissions)
            lanes |= waiting.lanes
        self._queue.extendleft(reversed(left))
        return taken

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            answers = await self._apply([waiting.call for waiting in batch])
        except Exception as error:
            if _is_outage(error):
                _fail(batch, error)
            else:
                self._alone.extendleft(reversed(batch))  # before suspects: most of them fail no more
                self._start_alone()
        else:
            self._expect(len(batch), clock() - began_s)
            for waiting, answer in zip(batch, answers, strict=True):
                _answer(waiting, answer)

    # --- alone --------------------------------------------------------------------------------------------------------

    def _start_alone(self) -> None:
        while self._free_alone and self._alone:
            waiting = self._alone.popleft()
            if not waiting.answer.cancelled():
                self._free_alone -= 1
                self._begin(self._run_alone(waiting)).add_done_callback(self._ended_alone)

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _ended_alone(self, _: "asyncio.Task[None]") -> None:
        self._free_alone += 1
        self._start_alone()

    async def _run_alone(self, waiting: _Waiting) -> None:
        try:
            (answer,) = await self._apply([waiting.call])
        except Exception as error:
            if _is_outage(error):
                _fail([waiting], error)
            elif len(waiting.call.submissions) > 1:
                self._split(waiting)
            else:
                await self._refuse(waiting, error)
        else:
            self._suspects.clear(waiting.call.region, waiting.lanes)
            _answer(waiting, answer)

    def _split(self, waiting: _Waiting) -> None:
        """Run each exchange of a call as a call of its own."""
        call, loop = waiting.call, asyncio.get_running_loop()
        parts = [
            _waiting(call._replace(submissions=[each], refused=()), loop.create_future()) for each in call.submissions
        ]
        self._alone.extend(parts)
        self._begin(_answer_by_parts(waiting, parts))

    async def _refuse(self, waiting: _Waiting, error: Exception) -> None:
        """Answer the one exchange that failed as refused, by a call that applies nothing."""
        loop, call = asyncio.get_running_loop(), waiting.call
        self._suspects.add(call.region, waiting.lanes, loop.time())
        fault = CONTENTION if isinstance(error, TransactionFailed) else INTERNAL
        self._log(call, fault, error, loop.time())
        replies = [
            ExchangeReply(outcome=ExchangeOutcome.REFUSED, lane=each.batch.lane, seq=each.batch.seq, fault=fault)
            for each in call.submissions
        ]
        places = set(range(len(call.refused) + len(replies))) - {place for place, _ in call.refused}
        refused = sorted([*call.refused, *zip(sorted(places), replies, strict=True)], key=itemgetter(0))
        try:
            (answer,) = await self._apply([call._replace(submissions=(), refused=refused)])
        except Exception:
            _fail([waiting], error)
        else:
            _answer(waiting, answer)

    def _log(self, call: ExchangeCall, fault: ExchangeFault, error: Exception, now_s: float) -> None:
        """Log a traceback at most once in a while. Each refusal is counted where it is answered."""
        if now_s >= self._log_again_s:
            self._log_again_s = now_s + LOG_EVERY_S
            lanes = [(each.batch.epoch, each.batch.lane) for each in call.submissions]
            exc_info = None if fault is CONTENTION else error
            log.error("exchange failed", region=call.region, lanes=lanes, error=str(error), exc_info=exc_info)


def _is_outage(error: Exception) -> bool:
    return isinstance(error, DatabaseUnavailable) and not isinstance(error, TransactionFailed)


async def _answer_by_parts(waiting: _Waiting, parts: Sequence[_Waiting]) -> None:
    answers = await asyncio.gather(*(part.answer for part in parts), return_exceptions=True)
    applied = [answer for answer in answers if not isinstance(answer, BaseException)]
    for answer in answers:
        if isinstance(answer, Exception):
            _fail([waiting], answer)  # what was booked is replayed when it is sent again
            return
    _answer(waiting, _merged(waiting.call, applied))


def _merged(call: ExchangeCall, parts: Sequence[Applied]) -> Applied:
    replies = [reply for part in parts for reply in part.response.replies]
    for place, reply in call.refused:
        replies.insert(place, reply)
    return Applied(
        structs.replace(parts[-1].response, replies=replies),
        [report for part in parts for report in part.reports],
        sum(part.quarantined for part in parts),
        [notice for part in parts for notice in part.notices],
        [epoch for part in parts for epoch in part.lost],
        all(part.is_authentic for part in parts),
    )


def _answer(waiting: _Waiting, answer: Applied) -> None:
    if not waiting.answer.done():
        waiting.answer.set_result(answer)


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
