"""Whether the coordinator answers this agent's exchanges, and since when it does not.

Time is an argument, in milliseconds of any clock that does not go back.
"""

from dataclasses import dataclass

KNOWN_AFTER_MS = 1_000  # one lost reply, or a coordinator that restarts, is not an outage yet


@dataclass(slots=True)
class CoordinatorContact:
    """The outcome of the latest exchanges."""

    failing_since_ms: int | None = None
    is_refused: bool = False  # the coordinator answers, and refuses the exchange
    reason: str = ""
    is_draining: bool = False  # the region is drained

    def failed(self, now_ms: int, reason: str, *, is_refused: bool) -> None:
        if self.failing_since_ms is None:
            self.failing_since_ms = now_ms
        self.is_refused, self.reason = is_refused, reason

    def reached(self, now_ms: int) -> int | None:
        """Note an exchange that was answered. Return how long exchanges had failed before it; None if they had not."""
        failing_since_ms, self.failing_since_ms = self.failing_since_ms, None
        self.is_refused, self.reason = False, ""
        return None if failing_since_ms is None else now_ms - failing_since_ms

    def failing_ms(self, now_ms: int) -> int:
        return 0 if self.failing_since_ms is None else now_ms - self.failing_since_ms

    def is_lost(self, now_ms: int) -> bool:
        """Return whether the region is known to be cut off: exchanges have failed for longer than a hiccup lasts."""
        return self.failing_ms(now_ms) >= KNOWN_AFTER_MS
