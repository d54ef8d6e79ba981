"""What is asked in one turn of the event loop goes to the store as one call.

A script that decides sixty-four requests costs the store a third of sixty-four scripts, and a reply that is read once
costs this process less still. Nobody waits for company: who asks alone is sent at the end of the same turn.

In a Cluster one call serves one slot; then there is a gatherer for each, and nothing here changes.
"""

import asyncio
from collections.abc import Callable, Sequence

from regional_agent.store.circuit_breaker import Guard
from regional_agent.store.connection import StoreUnavailable, told_by
from regional_agent.store.scripts import (
    Decision,
    OnDecisions,
    Outcome,
    Request,
    Run,
    Scripts,
    StoreIncarnation,
    runs_of,
)

MOST_REQUESTS = 64  # in one call: the store serves nobody else meanwhile


class Gatherer:
    def __init__(self, scripts: Scripts, guard: Guard) -> None:
        self._scripts = scripts
        self._guard = guard
        self._incarnation: StoreIncarnation | None = None
        self._runs: list[Run] = []
        self._gathered = 0  # requests, of all runs
        self.calls = 0  # that were sent, or would have been: what is submitted at the same number leaves together

    def submit(
        self, incarnation: StoreIncarnation, request: Request, on_decisions: OnDecisions, times: int = 1
    ) -> None:
        """The decisions, or why there are none, are told in a later turn, those of one call at once.

        `on_decisions` must not raise. Whoever asks the same again for the same hearer hears of all of it together: of a
        hot key that is nearly everything.
        """
        while times:
            if (
                self._incarnation is not incarnation and self._incarnation != incarnation
            ) or self._gathered == MOST_REQUESTS:
                self._send()
            if not self._runs:
                self._incarnation = incarnation
                asyncio.get_running_loop().call_soon(self._send)
            fitting = min(times, MOST_REQUESTS - self._gathered)
            self._add(request, fitting, on_decisions)
            self._gathered += fitting
            times -= fitting

    def _add(self, request: Request, times: int, on_decisions: OnDecisions) -> None:
        before = self._runs[-1] if self._runs else None
        if before and before.request is request and before.on_decisions is on_decisions and request.may_repeat:
            self._runs[-1] = Run(request, before.times + times, on_decisions)
        elif times == 1:
            self._runs.append(Run(request, 1, on_decisions))
        else:
            self._runs += runs_of(request, times, on_decisions)

    def _send(self) -> None:
        runs, self._runs, self._gathered = self._runs, [], 0
        if not runs or self._incarnation is None:
            return
        self.calls += 1
        if self._guard.may_ask():
            self._scripts.send_check(self._incarnation, runs, self._guard.heard)
            return
        why = StoreUnavailable("the store failed several times in a row, and is left alone for a moment")
        for run in runs:
            run.on_decisions([why] * run.times)

    async def decide(self, incarnation: StoreIncarnation, request: Request) -> Decision:
        """The same for whoever would rather wait."""
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self.submit(incarnation, request, one_by_one(told_by(future)))
        return await future


def one_by_one(on_decision: Callable[[Outcome], None]) -> OnDecisions:
    """For whoever asks once, or looks at each by itself."""

    def on_decisions(decisions: Sequence[Outcome]) -> None:
        for decision in decisions:
            on_decision(decision)

    return on_decisions
