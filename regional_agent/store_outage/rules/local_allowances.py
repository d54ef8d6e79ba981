"""What an agent may admit of allowances by itself: a fraction of what its region's leases had left when last seen.

It does not know what the region's other agents admit meanwhile. What it admitted counts against its fraction until it
is booked; by then the store's lease has less.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from regional_agent.admission.rules.generational_cache import GenerationalCache
from regional_agent.store_outage.rules.local_rates import fraction_of

MOST_LEASES = 10_000


class SeenLease(NamedTuple):
    available: int
    until_ms: int  # when its period ends


class AllowanceRequest(NamedTuple):
    quota: str
    cost: int
    fraction_micro: int


class LocalAllowances:
    def __init__(self) -> None:
        self._seen: GenerationalCache[str, SeenLease] = GenerationalCache(MOST_LEASES)
        self._given: Counter[str] = Counter()

    def note(self, quota: str, available: int, until_ms: int) -> None:
        """Remember what the store reported of a lease."""
        self._seen.put(quota, SeenLease(max(0, available), until_ms))

    def left(self, asks: Iterable[AllowanceRequest], now_ms: int) -> list[int]:
        """Return what each ask leaves of its fraction, after those before it; below zero it does not fit."""
        needed: Counter[str] = Counter()
        left = []
        for ask in asks:
            needed[ask.quota] += ask.cost
            left.append(self.budget(ask, now_ms) - self._given[ask.quota] - needed[ask.quota])
        return left

    def budget(self, ask: AllowanceRequest, now_ms: int) -> int:
        seen = self._seen.get(ask.quota)
        return 0 if seen is None or now_ms >= seen.until_ms else fraction_of(seen.available, ask.fraction_micro)

    def give(self, quota: str, units: int) -> None:
        self._given[quota] += units

    def take_back(self, quota: str, units: int) -> None:
        """Return units that were booked, or were not admitted after all."""
        self._given[quota] -= units
        if self._given[quota] <= 0:
            del self._given[quota]
