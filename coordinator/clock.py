"""A clock that decides only as long as it agrees with the database's (docs/adr/0057).

Which period runs, when a lease expires and when a period may be closed follow from the coordinator's clock. A single
coordinator that runs three hours ahead would move whole regions into periods that have not begun. All coordinators
share one database, so its clock is what each of them is compared with.
"""

from datetime import datetime, timedelta

from coordinator.outages import ClockNotTrusted
from protocol.clock import Clock

_MILLISECOND = timedelta(milliseconds=1)


class ComparedClock:
    """Tell the time, or raise ClockNotTrusted. `limit_ms` of 0: it is trusted without a comparison."""

    def __init__(self, clock: Clock, limit_ms: int) -> None:
        self._clock = clock
        self._limit_ms = limit_ms
        self.difference_ms: int | None = None  # ahead of the database's; None until it was compared
        self._compared_at = clock.now()
        self._compared_at_ms = clock.monotonic_ms()

    def now(self) -> datetime:
        now = self._clock.now()
        if reason := self._why_not_trusted(now):
            raise ClockNotTrusted(reason)
        return now

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def untrusted_now(self) -> datetime:
        """The time for logs and reports, which decide nothing."""
        return self._clock.now()

    @property
    def is_compared_with_the_database(self) -> bool:
        return self._limit_ms > 0

    @property
    def why_not_trusted(self) -> str | None:
        return self._why_not_trusted(self._clock.now())

    def compare(self, asked_at: datetime, database_now: datetime, answered_at: datetime) -> None:
        """Note what the database's clock said between two moments of this one.

        Only a difference that the round trip cannot explain counts, so a slow database is no difference of clocks.
        """
        if database_now < asked_at:
            self.difference_ms = (asked_at - database_now) // _MILLISECOND
        else:
            self.difference_ms = -(max(database_now - answered_at, timedelta()) // _MILLISECOND)
        self._compared_at, self._compared_at_ms = answered_at, self._clock.monotonic_ms()

    def _why_not_trusted(self, now: datetime) -> str | None:
        if not self._limit_ms:
            return None
        if self.difference_ms is None:
            return "the coordinator's clock has not been compared with the database's yet"
        elapsed_ms = self._clock.monotonic_ms() - self._compared_at_ms
        jumped_ms = (now - self._compared_at) // _MILLISECOND - elapsed_ms  # set by somebody since the comparison
        ahead_ms = self.difference_ms + jumped_ms
        if abs(ahead_ms) <= self._limit_ms:
            return None
        direction = "ahead of" if ahead_ms > 0 else "behind"
        return (
            f"the coordinator's clock is {abs(ahead_ms) / 1000:.1f} s {direction} the database's, "
            f"and at most {self._limit_ms / 1000:g} s are tolerated"
        )
