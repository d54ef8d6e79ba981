"""What a region may use of a rate that is shared over regions, and when it speaks of it. Pure: times are arguments.

A share has three lives, all by the store's own clock, counted from before it was asked for: it is in force until
`until_us`; if nothing is heard by then, the region has what it falls back to; and after `kept_until_us` its safe share,
as if nothing had ever been said. In force is what `lua/parts/share.lua` says, by the same rules; `Share` is for who
reasons about them without a store (tests of the coordinator, benchmarks), and a test lays one beside the other.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.units import MAX_UNITS
from regional_agent.leasing.rules.demand import Average

LATEST_REPLY_MS = 5_000  # what took longer is not heard: it may be older than what was decided since
KEPT_MS = 40_000
AVERAGES_MS = (3_000, 1_000, 300, 100)
FOLD_MS = 20
SILENCE_MS = 200  # slices are noted in lumps, a tenth of a second apart
SIGMAS = 4
OTHERS_COUNT = 15 / 16  # how much of the average size of a request is left when another one comes
URGENT_AFTER_MS = 100  # between two reports that could not wait
LOOK_EVERY_MS = 200  # while others want more: nobody asks where demand has ended, so nothing else would tell
HALF_FULL_IN_MS = 2_000  # a bucket; as long as it is from one report to the next


class Share(NamedTuple):
    """As it is in the store."""

    number: int = 0  # 0: none was given
    rate_micro: int = 0
    after_micro: int = 0
    until_us: int = 0
    kept_until_us: int = 0

    def in_force_micro(self, mono_us: int, safe_micro: int) -> int:
        if not self.number or mono_us >= self.kept_until_us:
            return safe_micro
        return self.rate_micro if mono_us < self.until_us else self.after_micro

    def number_at(self, mono_us: int) -> int:
        """What a report says: a share that is over was never given."""
        return self.number if mono_us < self.kept_until_us else 0

    def heard(self, given: "Share", sent_us: int, mono_us: int) -> "Share":
        """A newer one, unless it comes too late."""
        is_late = mono_us - sent_us > LATEST_REPLY_MS * 1000
        return self if is_late or given.number <= self.number_at(mono_us) else given

    def lowered(self, rate_micro: int) -> "Share":
        """The region gives up what it does not use, first here and then by saying so. Never the other way."""
        return self._replace(rate_micro=min(self.rate_micro, rate_micro), after_micro=min(self.after_micro, rate_micro))


def share_of_grant(number: int, rate_micro: int, after_micro: int, expires_in_ms: int, sent_us: int) -> Share:
    return Share(number, rate_micro, after_micro, sent_us + expires_in_ms * 1000, sent_us + KEPT_MS * 1000)


# --- when it speaks, and what it says ---------------------------------------------------------------------------------


def needs_no_message(demand_micro: int, safe_micro: int) -> bool:
    """Under half of what is reserved for it anyway."""
    return 2 * demand_micro < safe_micro


def cannot_wait(available: int, burst: int, demand_micro: int, rate_micro: int) -> bool:
    """The bucket is under 30 %, and demand has grown by a fifth beyond the share. Parts, like the bucket's."""
    return 10 * available < 3 * burst * 1_000_000_000 and 5 * demand_micro > 6 * rate_micro


def has_fallen(wanted_micro: int, told_micro: int, rate_micro: int) -> bool:
    """By a fifth below what was told, and below what may be used: others could use it now."""
    return 5 * wanted_micro < 4 * min(told_micro, rate_micro)


def wanted_micro(demand_micro: int, available: int, burst: int, is_contended: bool) -> int:
    """What is asked for; and where others want more, what brings the bucket to its half, from above or from below.

    So what was estimated wrongly is not lost: it is in the bucket, and is used before a share is. In parts, as buckets
    are. One that lacks much is filled by an eighth of the demand at most, for it may hold what comes in an hour.
    """
    if not is_contended:
        return demand_micro
    half = burst * 1_000_000_000 // 2
    over_micro, lacking_micro = (max(0, each) // HALF_FULL_IN_MS for each in (available - half, half - available))
    return max(0, demand_micro - over_micro) + min(demand_micro // 8, lacking_micro)


def is_to_confirm(had_micro: int, rate_micro: int, is_contended: bool) -> bool:
    """A share was lowered from outside: until that is confirmed, what it was before is reserved, and others wait."""
    return is_contended and 64 * (had_micro - rate_micro) > had_micro


def kept_micro(wanted_micro: int, rate_micro: int, is_contended: bool) -> int:
    """What it keeps of its share where others want more: what it wants itself."""
    return min(wanted_micro, rate_micro) if is_contended else rate_micro


@dataclass(slots=True)
class InVain:
    """What was asked for in vain in this second, or in the one before if that is more: who waits asks once a second."""

    _second: int = 0
    _units: int = 0
    _before: int = 0

    def note(self, units: int, now_ms: int) -> None:
        self._turn(now_ms)
        self._units += units

    def recent(self, now_ms: int) -> int:
        self._turn(now_ms)
        return max(self._units, self._before)

    def _turn(self, now_ms: int) -> None:
        passed = now_ms // 1000 - self._second
        if passed:
            self._before, self._units = self._units if passed == 1 else 0, 0
            self._second += passed


# --- demand -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RateDemand:
    """Units a second that are asked for, whether they are had or not.

    The slowest average that no quicker one contradicts by more than chance would explain: requests that come by
    themselves are Poisson's, and an average then has the deviation that is computed here. After a jump the quickest is
    believed first, which is also the noisiest, and then one after the other.
    """

    since_ms: int
    _units: int = 0
    _size: float = 1.0  # of a request: bigger ones make for more chance
    _averages: list[Average] = field(default_factory=lambda: [Average(each) for each in AVERAGES_MS])

    def note(self, units: int, now_ms: int, size: int) -> bool:
        """So many units, in requests of that size. True if it is worth while to look at what it comes to."""
        self._units += units
        self._size = size + (self._size - size) * OTHERS_COUNT ** max(1, units // size)
        if now_ms - self.since_ms < FOLD_MS:
            return False
        self._fold(now_ms)
        return True

    def per_second_micro(self, now_ms: int) -> int:
        if now_ms - self.since_ms >= (FOLD_MS if self._units else SILENCE_MS):
            self._fold(now_ms)
        return min(MAX_UNITS, round(self._believed() * 1_000_000))

    def _believed(self) -> float:
        believed = self._averages[0].per_second
        for quicker in self._averages[1:]:
            sigma = math.sqrt(max(quicker.per_second, believed) * self._size * 500 / quicker.over_ms)
            if abs(quicker.per_second - believed) > SIGMAS * sigma:
                believed = quicker.per_second
        return believed

    def _fold(self, now_ms: int) -> None:
        elapsed_ms = now_ms - self.since_ms
        for each in self._averages:
            each.observe(self._units, elapsed_ms)
        self._units, self.since_ms = 0, now_ms
