"""A check that waits for the store, and the callers that get its verdict."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import structlog

from regional_agent.admission.answers import Verdict
from regional_agent.admission.denial_cache import Circumstances
from regional_agent.admission.plan import CheckPlan
from regional_agent.store.types import Outcome

log = structlog.get_logger()

OnVerdict = Callable[[Verdict | Exception], None]


class Client(Protocol):
    """The connection that a check came over."""

    @property
    def has_disconnected(self) -> bool: ...


class PendingCheck:
    """Equal checks of one turn of the event loop. The batcher calls it with their outcomes."""

    __slots__ = (
        "_answered",
        "_clients",
        "_on_outcomes",
        "asked_at_ms",
        "attempts",
        "batch",
        "circumstances",
        "on_verdicts",
        "plan",
        "started_s",
    )

    def __init__(
        self,
        plan: CheckPlan,
        on_outcomes: "Callable[[PendingCheck, Sequence[Outcome]], None]",
        now_ms: int,
        circumstances: Circumstances,
        batch: int = -1,
    ) -> None:
        """`batch`: the batcher's number, as long as equal checks may join."""
        self._on_outcomes = on_outcomes
        self.asked_at_ms = now_ms
        self.circumstances = circumstances
        self.plan = plan
        self.batch = batch
        self.on_verdicts: list[OnVerdict] = []
        self._clients: list[Client | None] = []
        self._answered = 0
        self.attempts = 1
        self.started_s = perf_counter()

    def add(self, on_verdict: OnVerdict, client: Client | None, times: int) -> None:
        self.on_verdicts += [on_verdict] * times
        self._clients += [client] * times

    def alone(self) -> "PendingCheck":
        """Take the next caller out, to be answered by itself."""
        if len(self.on_verdicts) == 1:
            return self
        alone = self.retry(self.asked_at_ms)
        alone.attempts = self.attempts
        return alone

    def retry(self, now_ms: int) -> "PendingCheck":
        """Take the next caller out, to ask the store for it once more."""
        retry = PendingCheck(self.plan, self._on_outcomes, now_ms, self.circumstances)
        retry.add(self.on_verdicts[self._answered], self._clients[self._answered], 1)
        self._answered += 1
        retry.attempts, retry.started_s = self.attempts + 1, self.started_s
        return retry

    def answer(self, verdict: Verdict | Exception) -> None:
        """Answer the next caller. A fault of one caller's callback must not harm the others."""
        self._answered += 1
        try:
            self.on_verdicts[self._answered - 1](verdict)
        except Exception:
            log.exception("a verdict could not be delivered")

    def is_cancelled(self) -> bool:
        """Return whether the next caller has disconnected, so that no units are spent for it."""
        client = self._clients[self._answered]
        return client is not None and client.has_disconnected

    def __call__(self, outcomes: Sequence[Outcome]) -> None:
        try:
            self._on_outcomes(self, outcomes)
        except Exception:
            log.exception("outcomes of the store could not be handled")
