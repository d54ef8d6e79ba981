"""Token slices: units of a hot rate that an agent takes from the store in one call, and hands out by itself.

The store counts a slice as spent when it is taken, so all agents together never admit more than the rate; units of a
slice can only be missing elsewhere. How many, and for how long, is bounded: an agent takes at most one `MAX_SHARE`th of
the burst, and one `LEVEL_SHARE`th of the bucket's level, and returns what it did not use within `LIFETIME_MS`.

Nor does a slice admit a request at a moment when the bucket itself would not. A full bucket loses further refills; a
slice beside it would keep units beyond the burst. So a slice melts as its bucket fills: the two together never hold
more than the burst. An agent that is alone therefore answers from slices exactly what the store would have answered.
That holds for token bucket and GCRA, which this arithmetic is about. Units of a window belong to the window in which
they were counted, a log remembers each moment, and a leaky bucket gives each request its own turn: none of them can be
handed out later than it was taken.
"""

from typing import Generic, TypeVar

NANO_UNITS = 1_000_000_000  # in a unit: the store counts buckets in nano-units
LIFETIME_MS = 100
HOT = 10  # requests within a slice's lifetime: a slice costs one call to take, and another to return
MIN_REQUESTS = 8  # that a slice must be good for
MAX_SHARE = 8
LEVEL_SHARE = 4
LOW_WATER_PERCENT = 30  # the next slice is asked for when so much is left, so that no request waits for it

C = TypeVar("C")


class Slice(Generic[C]):
    """The units of one key that lie in this agent. `charge` is what it was taken by."""

    __slots__ = (
        "_at_ms",
        "_beside",
        "_full",
        "_level",
        "_looked_ms",
        "_rate_micro",
        "_served",
        "_since_ms",
        "_spent",
        "_uncounted",
        "charge",
        "is_under_way",
        "left",
        "limit",
        "low_water",
        "returned_at_ms",
    )

    def __init__(self, charge: C, now_ms: int) -> None:
        self.charge = charge
        self.left = self.limit = self.low_water = 0
        self.is_under_way = False  # a refill
        self.returned_at_ms = -1  # the last time that units were returned
        self._full = self._level = self._beside = self._rate_micro = 0
        self._at_ms = self._since_ms = now_ms
        self._looked_ms = -1
        self._served = self._spent = self._uncounted = 0

    # --- replies of the store -----------------------------------------------------------------------------------------

    def update(self, limit: int, level: int, rate_micro: int, asked_at_ms: int) -> None:
        """Set the bucket's level, in nano-units, at a moment that is no earlier than when the store was asked."""
        self.limit, self._full, self._level, self._rate_micro = limit, limit * NANO_UNITS, level, rate_micro
        self._at_ms, self._looked_ms = asked_at_ms, -1

    def add(self, units: int, now_ms: int) -> None:
        self.left += units
        self.low_water = self.left * LOW_WATER_PERCENT // 100
        self._begin(now_ms)

    # --- requests -----------------------------------------------------------------------------------------------------

    def take(self, cost: int, now_ms: int) -> bool:
        if now_ms != self._looked_ms:
            self._melt(now_ms)
        if cost > self.left:
            return False
        self.left -= cost
        self._spent += cost
        self._served += 1
        return True

    def put_back(self, cost: int) -> None:
        """Undo a take: the request is not admitted after all."""
        self.left += cost
        self._spent -= cost
        self._served -= 1

    def take_rest(self, now_ms: int) -> int:
        """Take everything that is left, to return it to the store."""
        self._melt(now_ms)
        units, self.left = self.left, 0
        if units:
            self.returned_at_ms = now_ms
        return units

    def remaining(self, now_ms: int) -> tuple[int, int]:
        """Return `remaining` and `reset_ms` as the store would report them if it still had the units of this slice."""
        if now_ms != self._looked_ms:
            self._melt(now_ms)
        there = self._beside + self.left * NANO_UNITS
        return there // NANO_UNITS if there > 0 else 0, -((there - self._full) // (self._rate_micro or 1))

    def _melt(self, now_ms: int) -> None:
        """Let the slice melt as its bucket fills. Clocks round down, so one more millisecond may have passed."""
        self._looked_ms = now_ms
        filled = self._level + (now_ms - self._at_ms) * self._rate_micro
        self._beside = min(self._full, filled)
        self.left = max(0, min(self.left, (self._full - filled - self._rate_micro) // NANO_UNITS))

    # --- refill and expiry --------------------------------------------------------------------------------------------

    def refill_units(self, cost: int, now_ms: int) -> int:
        """Return the units to ask for now; 0 where a slice would not pay."""
        self._melt(now_ms)
        lasting = max(self._expected_units(now_ms), HOT * cost)
        melting = self._rate_micro * LIFETIME_MS // NANO_UNITS - (self._full - self._beside) // NANO_UNITS
        units = min(
            max(lasting, melting), self.limit // MAX_SHARE - self.left, self._beside // NANO_UNITS // LEVEL_SHARE
        )
        return units if units >= MIN_REQUESTS * cost and self._rate_micro else 0

    def is_hot(self, now_ms: int) -> bool:
        return self._served * LIFETIME_MS >= HOT * max(LIFETIME_MS // HOT, now_ms - self._since_ms)

    def is_over(self, now_ms: int) -> bool:
        """Return whether the slice has expired. A hot one gets another lifetime."""
        if self.is_under_way or now_ms - self._since_ms < LIFETIME_MS:
            return False
        is_hot = self.is_hot(now_ms)
        self._begin(now_ms)
        return not is_hot or self.left == 0

    def uncounted_units(self) -> int:
        """Return the units spent that were not counted as demand yet, and count them."""
        units, self._uncounted = self._uncounted + self._spent, -self._spent
        return units

    def _begin(self, now_ms: int) -> None:
        self._uncounted += self._spent
        self._spent = self._served = 0
        self._since_ms = now_ms

    def _expected_units(self, now_ms: int) -> int:
        """Return the units that are spent in the lifetime of a slice at the present rate."""
        return self._spent * LIFETIME_MS // max(1, now_ms - self._since_ms)
