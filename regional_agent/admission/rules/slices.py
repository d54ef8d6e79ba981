"""Slices: units of a hot rate, taken from the store in one call, and given out here without it.

A slice is spent in the store when it is taken, so all agents together never admit more than the rate: what lies in a
slice can only be missing elsewhere. How much, and for how long, is bounded: at most a `PART`th of the burst in each
agent, never more than a `LEAVES`th of what is there, and what is not used within its `LIFE_MS` goes back.

Nor does a slice admit anything at a moment when the bucket itself would not. A bucket that runs full loses what comes
after, but for a slice that lies beside it: units that would be kept beyond the burst. So a slice melts as the bucket
beside it fills: the two together never hold more than the burst. What an agent alone answers from slices is therefore
what the store would have answered, to the unit. That holds for token bucket and GCRA, which this arithmetic is about.
Units of a window belong to the window in which they were counted, a log remembers each moment, and a leaky bucket
gives each request its own turn: none of them can be handed out later than it was taken.
"""

from typing import Generic, TypeVar

PARTS = 1_000_000_000  # of a unit, as the store counts a bucket
LIFE_MS = 100
HOT = 10  # requests within a slice's lifetime: it costs a call to take, and another if some of it has to go back
FEWEST = 8  # requests that a slice must be good for
PART = 8
LEAVES = 4
LOW_WATER_PERCENT = 30  # what is left when the next is asked for, so that nobody waits for it
MOST_COUNTED = 10_000

C = TypeVar("C")


class Slice(Generic[C]):
    """Of one key. `of` is what its owner takes it by."""

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
        "_unnoted",
        "is_under_way",
        "left",
        "limit",
        "low_water",
        "of",
        "returned_at_ms",
    )

    def __init__(self, of: C, now_ms: int) -> None:
        self.of = of
        self.left = self.limit = self.low_water = 0
        self.is_under_way = False  # more of it
        self.returned_at_ms = -1  # when something of it went back last
        self._full = self._level = self._beside = self._rate_micro = 0
        self._at_ms = self._since_ms = now_ms
        self._looked_ms = -1
        self._served = self._spent = self._unnoted = 0

    # --- told by the store -------------------------------------------------------------------------------------------

    def heard(self, limit: int, level: int, rate_micro: int, asked_at_ms: int) -> None:
        """What is in the bucket beside it, in parts, at a moment that is no earlier than when it was asked."""
        self.limit, self._full, self._level, self._rate_micro = limit, limit * PARTS, level, rate_micro
        self._at_ms, self._looked_ms = asked_at_ms, -1

    def add(self, units: int, now_ms: int) -> None:
        self.left += units
        self.low_water = self.left * LOW_WATER_PERCENT // 100
        self._begin(now_ms)

    # --- asked by requests -------------------------------------------------------------------------------------------

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
        """A request that took it takes nothing after all."""
        self.left += cost
        self._spent -= cost
        self._served -= 1

    def taken_back(self, now_ms: int) -> int:
        """All that is left."""
        self._melt(now_ms)
        units, self.left = self.left, 0
        if units:
            self.returned_at_ms = now_ms
        return units

    def told(self, now_ms: int) -> tuple[int, int]:
        """What the store would say if all that is left here were still there: `remaining` and `reset_ms`."""
        if now_ms != self._looked_ms:
            self._melt(now_ms)
        there = self._beside + self.left * PARTS
        return there // PARTS if there > 0 else 0, -((there - self._full) // (self._rate_micro or 1))

    def _melt(self, now_ms: int) -> None:
        """The part of a millisecond that clocks do not count may have passed: the bucket may be fuller by that."""
        self._looked_ms = now_ms
        filled = self._level + (now_ms - self._at_ms) * self._rate_micro
        self._beside = min(self._full, filled)
        self.left = max(0, min(self.left, (self._full - filled - self._rate_micro) // PARTS))

    # --- how much to ask for, and when to stop -----------------------------------------------------------------------

    def wants(self, cost: int, now_ms: int) -> int:
        """Units to ask for now; 0 where a slice would not pay."""
        self._melt(now_ms)
        lasts = max(self._demand(now_ms), HOT * cost)
        melts = self._rate_micro * LIFE_MS // PARTS - (self._full - self._beside) // PARTS
        units = min(max(lasts, melts), self.limit // PART - self.left, self._beside // PARTS // LEAVES)
        return units if units >= FEWEST * cost and self._rate_micro else 0

    def is_hot(self, now_ms: int) -> bool:
        return self._served * LIFE_MS >= HOT * max(LIFE_MS // HOT, now_ms - self._since_ms)

    def is_over(self, now_ms: int) -> bool:
        """Nobody needs it any more. One that is still hot lives on."""
        if self.is_under_way or now_ms - self._since_ms < LIFE_MS:
            return False
        is_hot = self.is_hot(now_ms)
        self._begin(now_ms)
        return not is_hot or self.left == 0

    def spent_since_asked(self) -> int:
        """Units that nobody has been told of yet."""
        units, self._unnoted = self._unnoted + self._spent, -self._spent
        return units

    def _begin(self, now_ms: int) -> None:
        self._unnoted += self._spent
        self._spent = self._served = 0
        self._since_ms = now_ms

    def _demand(self, now_ms: int) -> int:
        """What would be spent in the lifetime of a slice if it went on like this."""
        return self._spent * LIFE_MS // max(1, now_ms - self._since_ms)


class Heat:
    """How often each key was asked for, in windows as long as a slice lives."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._until_ms = 0

    def note(self, key: str, now_ms: int, times: int = 1) -> int:
        """The requests of this window, these included."""
        if now_ms >= self._until_ms or len(self._counts) >= MOST_COUNTED:
            self._counts, self._until_ms = {}, now_ms + LIFE_MS
        count = self._counts[key] = self._counts.get(key, 0) + times
        return count
