"""A check that waits for the store, and the callers that get its verdict."""

from collections.abc import Sequence
from typing import Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from protocol.traces.trace_context import TraceContext
from regional_agent.admission.answers import Verdict
from regional_agent.admission.denial_cache import Circumstances
from regional_agent.admission.plan import CheckPlan
from regional_agent.store.types import Outcome, StoreRequest

log = structlog.get_logger()


class Caller(Protocol):
    """The receiver of a check's verdict: a connection, a batch, or a coroutine that waits."""

    @property
    def has_disconnected(self) -> bool:
        """Return whether no answer reaches the client any more, so that no units are spent for it."""

    @property
    def trace_context(self) -> TraceContext | None:
        """Return the span of the request, if it is sampled."""

    def on_verdict(self, verdict: Verdict | Exception, /) -> None:
        """Take a verdict, or OperationConflict, or a bug."""


class Decider(Protocol):
    """The part that turns the store's outcomes of a check into a verdict."""

    def on_outcomes(self, pending: "PendingCheck", outcomes: Sequence[Outcome], /) -> None: ...


class PendingCheck(Struct, eq=False):
    """Equal checks of one turn of the event loop. The batcher queues it, and it is completed with their outcomes."""

    decider: Decider
    plan: CheckPlan
    request: StoreRequest
    callers: list[Caller]
    times: int  # callers, each of whom gets an outcome
    asked_at_ms: int
    started_s: float
    circumstances: Circumstances
    attempts: int = 1
    answered: int = 0

    def complete(self, outcomes: Sequence[Outcome]) -> None:
        try:
            self.decider.on_outcomes(self, outcomes)
        except Exception:
            log.exception("outcomes of the store could not be handled")

    def join(self, caller: Caller, times: int) -> None:
        self.callers += [caller] * times
        self.times += times

    def trace_contexts(self) -> list[TraceContext]:
        return [each.trace_context for each in self.callers if each.trace_context is not None]

    def alone(self) -> "PendingCheck":
        """Take the next caller out, to be answered by itself."""
        return self if self.times == 1 else self._next_caller(self.asked_at_ms, self.attempts)

    def retry(self, now_ms: int) -> "PendingCheck":
        """Take the next caller out, to ask the store for it once more."""
        return self._next_caller(now_ms, self.attempts + 1)

    def _next_caller(self, now_ms: int, attempts: int) -> "PendingCheck":
        caller = self.callers[self.answered]
        self.answered += 1
        return replace(self, callers=[caller], times=1, asked_at_ms=now_ms, attempts=attempts, answered=0)

    def answer(self, verdict: Verdict | Exception) -> None:
        """Answer the next caller. A fault of one caller must not harm the others."""
        self.answered += 1
        try:
            self.callers[self.answered - 1].on_verdict(verdict)
        except Exception:
            log.exception("a verdict could not be delivered")

    def is_cancelled(self) -> bool:
        """Return whether the next caller has disconnected."""
        return self.callers[self.answered].has_disconnected
