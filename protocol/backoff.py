"""Exponential back-off, as one object for every loop that retries. Pure: the time is an argument."""

import math

MOST_DOUBLINGS = 60  # beyond these, any pause is the longest


class Backoff:
    """A pause after each failure: `first`, then doubled with every further failure in a row, up to `longest`.

    All durations and times are in one unit, which the caller chooses.
    """

    # No dataclass: its module loads fifteen others, and the client is to load few.
    __slots__ = ("first", "longest", "pause", "until")

    def __init__(self, first: float, longest: float, pause: float = 0) -> None:
        self.first = first
        self.longest = longest
        self.pause = pause  # after the latest failure; 0 after a success
        self.until: float = 0  # when that pause is over

    def pause_after(self, failures: int) -> float:
        """Return the pause after so many failures in a row, whatever happened before."""
        return min(self.longest, self.first * (1 << min(failures - 1, MOST_DOUBLINGS)))

    @property
    def next_pause(self) -> float:
        return min(self.longest, max(self.first, 2 * self.pause))

    def failed(self, now: float, at_most: float = math.inf) -> float:
        """Begin the next pause, which ends after `at_most` at the latest. Return its length."""
        self.pause = self.next_pause
        self.until = now + min(self.pause, at_most)
        return self.pause

    def succeeded(self) -> None:
        self.pause = self.until = 0

    def is_pausing(self, now: float) -> bool:
        return now < self.until
