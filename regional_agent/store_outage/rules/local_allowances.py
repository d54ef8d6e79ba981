"""What an agent may admit of allowances by itself: a fraction of what its region's leases had left when last seen.

It does not know what the region's other agents admit meanwhile. What it admitted counts against its fraction until it
is booked; by then the store's lease has less.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from regional_agent.store_outage.rules.local_rates import fraction_of


class SeenLease(NamedTuple):
    """The state of a lease that the store reported last."""

    available: int
    until_ms: int  # when its period ends


class AllowanceRequest(NamedTuple):
    quota: str
    cost: int
    fraction_micro: int
    lease: SeenLease | None


class LocalAllowances:
    def __init__(self) -> None:
        self._given: Counter[str] = Counter()

    def left(self, asks: Iterable[AllowanceRequest], now_ms: int) -> list[int]:
        """Return what each ask leaves of its fraction, after those before it; below zero it does not fit."""
        needed: Counter[str] = Counter()
        left = []
        for ask in asks:
            needed[ask.quota] += ask.cost
            left.append(local_budget(ask, now_ms) - self._given[ask.quota] - needed[ask.quota])
        return left

    def give(self, quota: str, units: int) -> None:
        self._given[quota] += units

    def take_back(self, quota: str, units: int) -> None:
        """Return units that were booked, or were not admitted after all."""
        self._given[quota] -= units
        if self._given[quota] <= 0:
            del self._given[quota]


def local_budget(ask: AllowanceRequest, now_ms: int) -> int:
    lease = ask.lease
    return 0 if lease is None or now_ms >= lease.until_ms else fraction_of(max(0, lease.available), ask.fraction_micro)
