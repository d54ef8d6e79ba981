"""When to leave somebody alone who does not answer.

Time is an argument, in milliseconds of any clock that does not go back. Nothing here is locked: whoever shares a
breaker between threads does that.
"""

from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # one call tries


class Breaker:
    """Closed while calls succeed. Open after `failures` in a row, for `pause_ms`; then one call at a time may try.

    A call that tries and is never heard of does not leave it open for ever: after another pause the next one tries.
    """

    def __init__(self, failures: int, pause_ms: float) -> None:
        self._failures = failures
        self._pause_ms = pause_ms
        self._in_a_row = 0
        self._open_until_ms = 0.0
        self.state = BreakerState.CLOSED

    def may_call(self, now_ms: float) -> bool:
        if self.state is BreakerState.CLOSED:
            return True
        if now_ms < self._open_until_ms:
            return False
        self.state = BreakerState.HALF_OPEN  # this call tries, the others do without
        self._open_until_ms = now_ms + self._pause_ms
        return True

    def succeeded(self) -> None:
        self._in_a_row = 0
        self.state = BreakerState.CLOSED

    def failed(self, now_ms: float) -> None:
        self._in_a_row += 1
        if self._in_a_row >= self._failures:
            self.state = BreakerState.OPEN
            self._open_until_ms = now_ms + self._pause_ms
