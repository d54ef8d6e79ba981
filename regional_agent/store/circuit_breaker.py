"""The store's circuit breaker: after several failed calls in a row the store gets no calls for a while.

It counts calls, not requests: the requests of one batch fail together. A failure is what shows that the store cannot
decide: no connection, no reply in time, or an error of the store's own, such as OOM. An error of a script is about
its request, and the store that reports it works.

The breaker closes after a probe of its own has succeeded: a write on which nothing depends. A request that probed
would be at risk, for without a reply it may or may not have been spent.
"""

import asyncio
from collections.abc import Callable

import structlog

from protocol.circuit_breaker import BreakerState, CircuitBreaker
from protocol.clock import Clock
from regional_agent.metrics import AgentMetrics
from regional_agent.store.connection import OnReply, Reply, StoreError, StoreUnavailable

log = structlog.get_logger()

REQUEST_ERRORS = {"ERR", "WRONGTYPE"}  # codes of errors about a command; all others are the store's state


class StoreCircuitBreaker:
    def __init__(
        self,
        breaker: CircuitBreaker,
        clock: Clock,
        metrics: AgentMetrics,
        probe: Callable[[OnReply], None],
        pause_ms: int,
    ) -> None:
        """`probe` sends a call that a store which can decide answers. `pause_ms`: between the probes while open."""
        self._breaker = breaker
        self._probe = probe
        self._pause_s = pause_ms / 1000
        self._timer: asyncio.TimerHandle | None = None
        self._is_probing = False
        self._clock = clock
        self._metrics = metrics
        self._degraded_at_ms: int | None = None
        self._degraded_before_ms = 0
        self._is_watching = False
        self.reason = ""  # of the last failure
        self.is_failing = False  # the last call of the watch failed
        self.calls = 0  # whose outcome is known

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def allows_calls(self) -> bool:
        return self._breaker.state is BreakerState.CLOSED

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def record_reply(self, reply: Reply | Exception) -> None:
        """Count the outcome of a call."""
        self.calls += 1
        if isinstance(reply, Exception) and is_store_failure(reply):
            self._record_failure(str(reply))
        elif self._breaker.failures_in_a_row or self._degraded_at_ms is not None:
            self.record_success()

    def record_success(self) -> None:
        """Close the breaker: the store has answered, this or another caller."""
        self._breaker.succeeded()
        if self._degraded_at_ms is not None:
            now_ms, began_at_ms, self._degraded_at_ms = self._clock.monotonic_ms(), self._degraded_at_ms, None
            self._degraded_before_ms += now_ms - began_at_ms
            log.info("store circuit breaker closed", degraded_ms=now_ms - began_at_ms)

    def degraded_ms(self) -> int:
        """Return how long the breaker has been open, all times together."""
        began_at_ms = self._degraded_at_ms
        so_far_ms = 0 if began_at_ms is None else self._clock.monotonic_ms() - began_at_ms
        return self._degraded_before_ms + so_far_ms

    def watch(self) -> None:
        """Probe a store that gets no requests, so that its failure is noticed.

        Only a failure counts: calls of services may fail where this one, which is small, succeeds.
        """
        if self._breaker.state is BreakerState.CLOSED and not self._is_watching:
            self._is_watching = True
            self._probe(self._on_watch_reply)

    def _on_watch_reply(self, reply: Reply | Exception) -> None:
        self._is_watching = False
        self.is_failing = is_store_failure(reply)
        if self.is_failing:
            self._record_failure(str(reply))

    def _record_failure(self, reason: str) -> None:
        now_ms = self._clock.monotonic_ms()
        self.reason = reason
        self._breaker.failed(now_ms)
        if self._breaker.state is BreakerState.OPEN and self._degraded_at_ms is None:
            self._degraded_at_ms = now_ms
            self._metrics.degraded_entries.inc()
            log.warning("store circuit breaker opened: policies apply on_store_failure", reason=reason)
        if self._breaker.state is BreakerState.OPEN:
            self._schedule_probe()

    def _schedule_probe(self) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._send_probe)

    def _send_probe(self) -> None:
        """Send one probe at a time: the next follows a pause after this one has failed, whatever else fails meanwhile.

        Calls that were under way when the breaker opened may fail long after that.
        """
        if self._is_probing or self._breaker.state is BreakerState.CLOSED:
            return
        if self._breaker.may_call(self._clock.monotonic_ms()):
            self._is_probing = True
            self._probe(self._on_probe_reply)
        else:  # the two clocks do not round alike
            self._schedule_probe()

    def _on_probe_reply(self, reply: Reply | Exception) -> None:
        self._is_probing = False
        self.record_reply(reply)


def is_store_failure(reply: Reply | Exception) -> bool:
    """Return whether a reply shows that the store cannot decide, and not that a request was wrong."""
    if isinstance(reply, StoreError):
        return str(reply).partition(" ")[0] not in REQUEST_ERRORS
    return isinstance(reply, StoreUnavailable)
