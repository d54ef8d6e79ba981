"""Batch the checks of one turn of the event loop into one call of the store.

A script that decides 64 requests costs the store a third of 64 scripts, and one reply costs this process less to read
than many. No request waits for others: a single one is sent at the end of the same turn.

In a Cluster one call serves one slot, so each cell has a batcher of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from regional_agent.store.circuit_breaker import StoreCircuitBreaker
from regional_agent.store.connection import Reply, StoreUnavailable, set_result_of
from regional_agent.store.types import (
    RequestRun,
    Run,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
)

MAX_REQUESTS = 64  # in one call: the store serves no other client meanwhile


class SendsChecks(Protocol):
    """The scripts, or what traces their calls."""

    def send_check(
        self, incarnation: StoreIncarnation, runs: Sequence[Run], on_call: Callable[[Reply | Exception], None], /
    ) -> None: ...


class CheckBatcher:
    def __init__(self, scripts: SendsChecks, breaker: StoreCircuitBreaker) -> None:
        self._scripts = scripts
        self._breaker = breaker
        self._incarnation: StoreIncarnation | None = None
        self._runs: list[Run] = []
        self._size = 0  # requests of all runs
        self.newest: Run | None = None  # which was queued last, and has not been sent

    @property
    def room(self) -> int:
        """Return how many requests the next run may have: those that the call has room for, or a whole call's."""
        return MAX_REQUESTS - self._size or MAX_REQUESTS

    def submit(self, incarnation: StoreIncarnation, run: Run) -> None:
        """Queue a run of at most `room` requests. It is completed in a later turn, with all of its outcomes at once."""
        if self._incarnation is not incarnation or self._size + run.times > MAX_REQUESTS:
            self._send()
        if not self._runs:
            self._incarnation = incarnation
            asyncio.get_running_loop().call_soon(self._send)
        self._runs.append(run)
        self._size += run.times
        self.newest = run

    def extend(self, times: int) -> int:
        """Decide the newest run more often, as far as its call has room. Return how often, which its owner counts."""
        fitting = min(times, MAX_REQUESTS - self._size)
        self._size += fitting
        return fitting

    def _send(self) -> None:
        runs, self._runs, self._size, self.newest = self._runs, [], 0, None
        if not runs or self._incarnation is None:
            return
        if self._breaker.allows_calls():
            self._scripts.send_check(self._incarnation, runs, self._breaker.record_reply)
            return
        reason = StoreUnavailable("the store's circuit breaker is open")
        for run in runs:
            run.complete([reason] * run.times)

    async def decide(self, incarnation: StoreIncarnation, request: StoreRequest) -> StoreDecision:
        """Submit one request, and await its decision."""
        future: asyncio.Future[StoreDecision] = asyncio.get_running_loop().create_future()
        on_outcome = set_result_of(future)
        self.submit(incarnation, RequestRun(request, 1, lambda outcomes: on_outcome(outcomes[0])))
        return await future
