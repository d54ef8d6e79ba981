"""When a region reports its demand for a shared rate, and what it requests. Pure: times are arguments.

Rates are in millionths of a unit per second (`micro`), what a bucket holds in billionths of a unit (`nano_units`).
"""

import math
from dataclasses import dataclass

from msgspec import Struct

from protocol.units import MAX_UNITS
from regional_agent.leasing.rules.demand import moving_average

AVERAGES_MS = (3_000, 1_000, 300, 100)
FOLD_MS = 20
SILENCE_MS = 200  # slices record their demand in lumps, a tenth of a second apart
SIGMAS = 4
SIZE_WEIGHT = 15 / 16  # of the average size of earlier requests, when another one comes
PLENTY_MS = 5_000  # a bucket that has the demand of so long needs no share of others
URGENT_AFTER_MS = 100  # between two reports that could not wait
CHECK_FALL_MS = 200  # while others want more: a region whose demand ended gets no request that would show it
HALF_FULL_IN_MS = 2_000  # a bucket is filled or emptied to its half in the time from one report to the next
NANO_UNITS = 1_000_000_000


def needs_no_report(demand_micro: int, base_share_micro: float, nano_units: int) -> bool:
    """Return whether a region needs no more than it has anyway.

    Its demand is under half of the base share, which is reserved for it, or is in its bucket for some seconds. Each
    single request for a slow rate is a demand beyond the base share, and its bucket has it.
    """
    return 2 * demand_micro < base_share_micro or demand_micro * PLENTY_MS < nano_units


def is_urgent(nano_units: int, burst: int, demand_micro: int, share_micro: int) -> bool:
    """Return whether the bucket is under 30 %, and demand has grown by a fifth beyond the share."""
    return 10 * nano_units < 3 * burst * NANO_UNITS and 5 * demand_micro > 6 * share_micro


def has_fallen(requested_micro: int, reported_micro: int, share_micro: int) -> bool:
    """Return whether a region needs a fifth less than it reported, and than it may use: others could use it now."""
    return 5 * requested_micro < 4 * min(reported_micro, share_micro)


def requested_micro(demand_micro: int, nano_units: int, burst: int, is_contended: bool) -> int:
    """Return the rate to request: the demand and, where others want more, what brings the bucket to its half.

    So an error of the estimate is not lost: it is in the bucket, and is used before a share is. A bucket that lacks
    much is filled by an eighth of the demand at most, for it may hold what comes in an hour.
    """
    if not is_contended:
        return demand_micro
    half = burst * NANO_UNITS // 2
    surplus_micro, lacking_micro = (max(0, each) // HALF_FULL_IN_MS for each in (nano_units - half, half - nano_units))
    return max(0, demand_micro - surplus_micro) + min(demand_micro // 8, lacking_micro)


def needs_confirmation(previous_share_micro: int, share_micro: int, is_contended: bool) -> bool:
    """Return whether the coordinator lowered a share by more than a 64th.

    Until the region confirms that, its previous share stays reserved, and other regions wait.
    """
    return is_contended and 64 * (previous_share_micro - share_micro) > previous_share_micro


@dataclass(slots=True)
class DeniedUnits:
    """The units that were denied in this second, or in the one before if those are more.

    A caller that waits for a slot tries again once a second.
    """

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


class RateDemand(Struct, gc=False):
    """Units per second that are requested, whether they are admitted or not.

    It is the slowest average that no quicker one contradicts by more than chance would explain: independent requests
    form a Poisson process, and an average then has the deviation that is computed here. After a jump the quickest
    average, which is also the noisiest, is believed first, and then one after the other.
    """

    since_ms: int
    units: int = 0  # that are not in the averages yet
    size: float = 1.0  # of a request: larger ones make for more chance
    averages: tuple[float, ...] = (0.0,) * len(AVERAGES_MS)

    def note(self, units: int, now_ms: int, size: int) -> bool:
        """Count units, in requests of a size. Return True if the averages have changed."""
        self.units += units
        if self.size != size:
            self.size = size + (self.size - size) * SIZE_WEIGHT ** max(1, units // size)
        if now_ms - self.since_ms < FOLD_MS:
            return False
        self._fold(now_ms)
        return True

    def per_second_micro(self, now_ms: int) -> int:
        if now_ms - self.since_ms >= (FOLD_MS if self.units else SILENCE_MS):
            self._fold(now_ms)
        return min(MAX_UNITS, round(self._believed() * 1_000_000))

    def _believed(self) -> float:
        believed = self.averages[0]
        for quicker, over_ms in zip(self.averages[1:], AVERAGES_MS[1:], strict=True):
            sigma = math.sqrt(max(quicker, believed) * self.size * 500 / over_ms)
            if abs(quicker - believed) > SIGMAS * sigma:
                believed = quicker
        return believed

    def _fold(self, now_ms: int) -> None:
        elapsed_ms, averages = now_ms - self.since_ms, zip(self.averages, AVERAGES_MS, strict=True)
        self.averages = tuple(moving_average(each, self.units, elapsed_ms, over_ms) for each, over_ms in averages)
        self.units, self.since_ms = 0, now_ms
