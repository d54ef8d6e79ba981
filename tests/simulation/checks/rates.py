"""Bounds of rates: what a store admits of a key, against an ideal bucket or window that is told of the same requests.

They know what is certain whatever the algorithm does in detail: in any time t a bucket gives at most its burst and what
its rate brings in t, and a window of its length has at most its limit (a fixed one that begins at any moment: twice).
Refunds give units back, up to the burst. A reset gives everything back, once in each store.

The clock is the store's as its scripts keep it. If the store's data goes back, nothing is known any more, and a key
begins with everything; so it does in other terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from tests.simulation.simulated.scripted_store import Charged

BOUNDED = "tries:"  # the keys of the quota whose regions have their base shares alone
TOLERATED = Fraction(1, 1_000)  # of a unit: the store counts in floating point numbers
WINDOWS = {"sliding_log": 1, "fixed_window": 2}  # how many limits are admitted in the length of a window


class Bound(Protocol):
    def take(self, units: int, mono_us: int) -> bool:
        """Take units, or give them back. Return False if there were not that many."""


@dataclass
class Bucket:
    rate_micro: Fraction
    burst: int
    level: Fraction
    since_us: int

    def take(self, units: int, mono_us: int) -> bool:
        gained = self.rate_micro * max(0, mono_us - self.since_us) / 10**12
        self.level = min(Fraction(self.burst), min(Fraction(self.burst), self.level + gained) - units)
        self.since_us = max(self.since_us, mono_us)
        return self.level >= -TOLERATED


@dataclass
class Window:
    most: int
    length_us: int
    taken: list[tuple[int, int]] = field(default_factory=list)  # when, and how many units

    def take(self, units: int, mono_us: int) -> bool:
        self.taken = [(at_us, taken) for at_us, taken in self.taken if at_us + self.length_us > mono_us]
        if units < 0:
            self._give_back(-units)
        else:
            self.taken.append((mono_us, units))
        return sum(taken for _, taken in self.taken) <= self.most

    def _give_back(self, units: int) -> None:
        while units and self.taken:
            at_us, taken = self.taken.pop()
            if taken > units:
                self.taken.append((at_us, taken - units))
            units -= min(units, taken)


@dataclass
class RateBounds:
    """The rates of one store, and what it admitted beyond their bounds."""

    beyond: list[str] = field(default_factory=list)
    _bounds: dict[str, tuple[Sequence[str], Bound]] = field(default_factory=dict)  # with their terms
    _resets: set[tuple[int, str]] = field(default_factory=set)

    def take(self, charged: Charged, mono_us: int) -> None:
        if not charged.key.partition(":rate:")[2].startswith(BOUNDED):
            return
        terms = (charged.algorithm, *charged.arguments)
        known = self._bounds.get(charged.key)
        if known is None or known[0] != terms:
            if (bound := _bound_of(charged, mono_us)) is None:
                return
            known = self._bounds[charged.key] = terms, bound
        if not known[1].take(charged.cost, mono_us):
            self.beyond.append(f"{charged} at {mono_us} us: {known[1]}")

    def reset(self, resets: Sequence[tuple[int, str]]) -> None:
        """Forget what was counted of keys, unless this reset was done before."""
        for each in resets:
            if each not in self._resets:
                self._resets.add(each)
                self._bounds.pop(each[1], None)

    def forget(self) -> None:
        """Forget everything: the store has other data than before."""
        self._bounds.clear()
        self._resets.clear()


def _bound_of(charged: Charged, mono_us: int) -> Bound | None:
    rate_micro, burst, *rest = charged.arguments
    if charged.algorithm in WINDOWS:
        return Window(WINDOWS[charged.algorithm] * int(burst), int(rest[0]) * 1_000)
    if charged.algorithm in ("token_bucket", "gcra"):
        return Bucket(Fraction(rate_micro), int(burst), Fraction(int(burst)), mono_us)
    return None
