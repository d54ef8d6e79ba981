"""A circuit breaker, for callers of a server that may be down: the agent's of its store, and a client's of its agent.

Time is an argument, in milliseconds of any clock that does not go back. Threads may share a breaker.
"""

import threading
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # one call is on trial


class CircuitBreaker:
    """Allow calls while they succeed, and stop them for `pause_ms` after `failures` in a row.

    After the pause one call at a time is let through on trial. A trial whose outcome is never reported does not keep
    the breaker open: after another pause the next call is the trial.
    """

    def __init__(self, failures: int = 5, pause_ms: float = 1000) -> None:
        self._failures = failures
        self._pause_ms = pause_ms
        self.failures_in_a_row = 0
        self._open_until_ms = 0.0
        self._lock = threading.Lock()
        self.state = BreakerState.CLOSED

    def may_call(self, now_ms: float) -> bool:
        """Return whether to call the server now. After the pause one caller gets True, and makes the trial call."""
        if self.state is BreakerState.CLOSED:
            return True
        with self._lock:
            if now_ms < self._open_until_ms:
                return False
            self.state = BreakerState.HALF_OPEN  # this call is the trial; others are refused until the next pause ends
            self._open_until_ms = now_ms + self._pause_ms
            return True

    def succeeded(self) -> None:
        """Record that a call was answered, which closes the breaker."""
        if self.failures_in_a_row == 0:  # every call of a healthy server comes through here
            return
        with self._lock:
            self.failures_in_a_row = 0
            self.state = BreakerState.CLOSED

    def failed(self, now_ms: float) -> None:
        """Record that a call failed, which opens the breaker after enough of them in a row."""
        with self._lock:
            self.failures_in_a_row += 1
            if self.failures_in_a_row >= self._failures:
                self.state = BreakerState.OPEN
                self._open_until_ms = now_ms + self._pause_ms
