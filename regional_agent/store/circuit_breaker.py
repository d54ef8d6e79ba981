"""Whether the store is asked at all: it is left alone for a while after several calls in a row that it failed.

A call counts, not a request: sixty-four that were gathered fail together. What counts is what says that the store
cannot decide: no connection, no answer in time, or an error of the store's own, such as OOM. An error of the script
is about what it was asked, and whoever answers so is there.

Whether it is back is found out by a call of the guard's own, a write that nobody depends on. A request that tried would
be put at risk: unanswered, it may have been spent.
"""

import asyncio
from collections.abc import Callable

import structlog

from protocol.circuit_breaker import BreakerState, CircuitBreaker
from protocol.clock import Clock
from regional_agent.metrics import Metrics
from regional_agent.store.connection import OnReply, Reply, StoreError, StoreUnavailable

log = structlog.get_logger()

# How the store calls errors of a command or a script; all others tell of a state that it is in.
ABOUT_THE_QUESTION = {"ERR", "WRONGTYPE", "NOSCRIPT"}


class Guard:
    def __init__(
        self, breaker: CircuitBreaker, clock: Clock, metrics: Metrics, probe: Callable[[OnReply], None], pause_ms: int
    ) -> None:
        """`probe` makes a call that a store which can decide answers."""
        self._breaker = breaker
        self._probe = probe
        self._pause_s = pause_ms / 1000
        self._timer: asyncio.TimerHandle | None = None
        self._is_trying = False
        self._clock = clock
        self._metrics = metrics
        self._degraded_at_ms: int | None = None
        self._degraded_before_ms = 0
        self._is_watching = False
        self.reason = ""  # of the last failure
        self.is_failing = False  # the last call of the watch failed
        self.calls = 0  # of which it was heard what came of them

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def may_ask(self) -> bool:
        return self._breaker.state is BreakerState.CLOSED

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def heard(self, reply: Reply | Exception) -> None:
        """What came of a call."""
        self.calls += 1
        if says_that_it_cannot(reply):
            self._failed(str(reply))
        else:
            self.answered()

    def answered(self) -> None:
        """The store is there; who heard it otherwise than by a call of its own says so, too."""
        self._breaker.succeeded()
        if self._degraded_at_ms is not None:
            now_ms, began_at_ms, self._degraded_at_ms = self._clock.monotonic_ms(), self._degraded_at_ms, None
            self._degraded_before_ms += now_ms - began_at_ms
            log.info("store circuit breaker closed", degraded_ms=now_ms - began_at_ms)

    def degraded_ms(self) -> int:
        """How long it was left alone, all times together."""
        began_at_ms = self._degraded_at_ms
        so_far_ms = 0 if began_at_ms is None else self._clock.monotonic_ms() - began_at_ms
        return self._degraded_before_ms + so_far_ms

    def watch(self) -> None:
        """Find out whether the store decides, though no request asks it: a write that nothing depends on.

        Only a failure counts for the breaker. Calls of services may fail where this one, which is small, does not.
        """
        if self._breaker.state is BreakerState.CLOSED and not self._is_watching:
            self._is_watching = True
            self._probe(self._watched)

    def _watched(self, reply: Reply | Exception) -> None:
        self._is_watching = False
        self.is_failing = says_that_it_cannot(reply)
        if self.is_failing:
            self._failed(str(reply))

    def _failed(self, reason: str) -> None:
        now_ms = self._clock.monotonic_ms()
        self.reason = reason
        self._breaker.failed(now_ms)
        if self._breaker.state is BreakerState.OPEN and self._degraded_at_ms is None:
            self._degraded_at_ms = now_ms
            self._metrics.degraded_entries.inc()
            log.warning("store circuit breaker opened: each policy's failure mode answers", reason=reason)
        if self._breaker.state is BreakerState.OPEN:
            self._try_later()

    def _try_later(self) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._try)

    def _try(self) -> None:
        """One call at a time: the next comes a pause after this one has failed, whatever else fails meanwhile.

        Calls that were on their way when the store was left alone may fail long after that.
        """
        if self._is_trying or self._breaker.state is BreakerState.CLOSED:
            return
        if self._breaker.may_call(self._clock.monotonic_ms()):
            self._is_trying = True
            self._probe(self._tried)
        else:  # the two clocks do not round alike
            self._try_later()

    def _tried(self, reply: Reply | Exception) -> None:
        self._is_trying = False
        self.heard(reply)


def says_that_it_cannot(reply: Reply | Exception) -> bool:
    if isinstance(reply, StoreError):
        return str(reply).partition(" ")[0] not in ABOUT_THE_QUESTION
    return isinstance(reply, StoreUnavailable)
