"""What is asked in one turn of the event loop goes to the store as one call.

A script that decides sixty-four requests costs the store a third of sixty-four scripts, and a reply that is read once
costs this process less still. Nobody waits for company: who asks alone is sent at the end of the same turn.

In a Cluster one call serves one slot; then there is a gatherer for each, and nothing here changes.
"""

import asyncio

from regional_agent.store.connection import StoreUnavailable, told_by
from regional_agent.store.guard import Guard
from regional_agent.store.scripts import Decision, Life, OnDecision, Request, Scripts

MOST_REQUESTS = 64  # in one call: the store serves nobody else meanwhile


class Gatherer:
    def __init__(self, scripts: Scripts, guard: Guard) -> None:
        self._scripts = scripts
        self._guard = guard
        self._life: Life | None = None
        self._requests: list[Request] = []
        self._on_decisions: list[OnDecision] = []

    def submit(self, life: Life, request: Request, on_decision: OnDecision, times: int = 1) -> None:
        """Each decision, or why there is none, is told in a later turn; `on_decision` must not raise."""
        while times:
            if self._life != life or len(self._requests) == MOST_REQUESTS:
                self._send()
            if not self._requests:
                self._life = life
                asyncio.get_running_loop().call_soon(self._send)
            fitting = min(times, MOST_REQUESTS - len(self._requests))
            self._requests += [request] * fitting
            self._on_decisions += [on_decision] * fitting
            times -= fitting

    def _send(self) -> None:
        requests, on_decisions = self._requests, self._on_decisions
        self._requests, self._on_decisions = [], []
        if not requests or self._life is None:
            return
        if self._guard.may_ask():
            self._scripts.send_check(self._life, requests, on_decisions, self._guard.heard)
        else:
            for on_decision in on_decisions:
                on_decision(StoreUnavailable("the store failed several times in a row, and is left alone for a moment"))

    async def decide(self, life: Life, request: Request) -> Decision:
        """The same for whoever would rather wait."""
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self.submit(life, request, told_by(future))
        return await future
