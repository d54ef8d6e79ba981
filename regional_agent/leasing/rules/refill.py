"""When to ask for more of an allowance, and when to stop asking.

The low water mark is what the region will spend while a refill is under way. It is asked for before it is needed, so
that no request waits; only at the very end of an allowance, when nothing is left to ask for in advance, does a request
wait for its own unit, for as long as its policy says.
"""

from dataclasses import dataclass

FIRST_PAUSE_MS = 500
LONGEST_PAUSE_MS = 30_000
# Between a short grant and the next attempt, while others are asked to give back. A signal comes sooner.
RETRY_MS = 250


# A grant that lasts for longer than this is refilled at its half: it is asked for rarely anyway, and what is left has
# to outlast an outage of the coordinator. A month's grant lasts for 120 s, so a minute's demand is always left of it.
LONG_GRANT_MS = 30_000


def low_water(last_grant: int, demand_milli: int, round_trip_ms: int) -> int:
    """Return at how many units left of a lease more is asked for."""
    if 1_000_000 * last_grant >= demand_milli * LONG_GRANT_MS:
        return last_grant // 2
    spent_meanwhile = demand_milli * (1.5 * round_trip_ms + 550) / 1_000_000
    return int(min(last_grant / 2, max(spent_meanwhile, last_grant / 4)))


@dataclass(slots=True)
class Patience:
    """Backs off from asking for what is not there: 0.5 s, doubling to 30 s, until something comes."""

    pause_ms: int = 0
    until_ms: int = 0

    def lost(self, now_ms: int, ends_in_ms: int = LONGEST_PAUSE_MS) -> None:
        """Nothing came: ask again later, and later still the next time. While it pauses it is not lost anew.

        It pauses no longer than the period lasts, for the next one is another matter.
        """
        if not self.is_pausing(now_ms):
            self.pause_ms = min(LONGEST_PAUSE_MS, max(FIRST_PAUSE_MS, 2 * self.pause_ms))
            self.until_ms = now_ms + min(self.pause_ms, ends_in_ms)

    def restored(self) -> None:
        self.pause_ms = self.until_ms = 0

    def is_pausing(self, now_ms: int) -> bool:
        return now_ms < self.until_ms
