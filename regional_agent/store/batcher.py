"""Batch the checks of one turn of the event loop into one call of the store.

A script that decides 64 requests costs the store a third of 64 scripts, and one reply costs this process less to read
than many. No request waits for others: a single one is sent at the end of the same turn.

In a Cluster one call serves one slot, so each cell has a batcher of its own.
"""

import asyncio
from collections.abc import Callable, Sequence

from regional_agent.store.circuit_breaker import StoreCircuitBreaker
from regional_agent.store.connection import StoreUnavailable, set_result_of
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import (
    OnDecisions,
    Outcome,
    RequestRun,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
    split_runs,
)

MAX_REQUESTS = 64  # in one call: the store serves no other client meanwhile


class CheckBatcher:
    def __init__(self, scripts: Scripts, breaker: StoreCircuitBreaker) -> None:
        self._scripts = scripts
        self._breaker = breaker
        self._incarnation: StoreIncarnation | None = None
        self._runs: list[RequestRun] = []
        self._size = 0  # requests of all runs
        self.calls = 0  # batches so far: requests that are submitted at the same number leave together

    def submit(
        self, incarnation: StoreIncarnation, request: StoreRequest, on_decisions: OnDecisions, times: int = 1
    ) -> None:
        """Queue a request `times` times. `on_decisions` gets the outcomes in a later turn, those of one call at once.

        `on_decisions` must not raise. Equal requests with the same callback are merged into one run: of a hot key that
        is nearly every request.
        """
        while times:
            if (self._incarnation is not incarnation and self._incarnation != incarnation) or (
                self._size == MAX_REQUESTS
            ):
                self._send()
            if not self._runs:
                self._incarnation = incarnation
                asyncio.get_running_loop().call_soon(self._send)
            fitting = min(times, MAX_REQUESTS - self._size)
            self._add(request, fitting, on_decisions)
            self._size += fitting
            times -= fitting

    def _add(self, request: StoreRequest, times: int, on_decisions: OnDecisions) -> None:
        last = self._runs[-1] if self._runs else None
        if last and last.request is request and last.on_decisions is on_decisions and request.is_repeatable:
            self._runs[-1] = RequestRun(request, last.times + times, on_decisions)
        elif times == 1:
            self._runs.append(RequestRun(request, 1, on_decisions))
        else:
            self._runs += split_runs(request, times, on_decisions)

    def _send(self) -> None:
        runs, self._runs, self._size = self._runs, [], 0
        if not runs or self._incarnation is None:
            return
        self.calls += 1
        if self._breaker.allows_calls():
            self._scripts.send_check(self._incarnation, runs, self._breaker.record_reply)
            return
        reason = StoreUnavailable("the store's circuit breaker is open")
        for run in runs:
            run.on_decisions([reason] * run.times)

    async def decide(self, incarnation: StoreIncarnation, request: StoreRequest) -> StoreDecision:
        """Submit one request, and await its decision."""
        future: asyncio.Future[StoreDecision] = asyncio.get_running_loop().create_future()
        self.submit(incarnation, request, for_each_outcome(set_result_of(future)))
        return await future


def for_each_outcome(on_outcome: Callable[[Outcome], None]) -> OnDecisions:
    """Return a callback for a batcher that passes each outcome on by itself."""

    def on_decisions(outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            on_outcome(outcome)

    return on_decisions
