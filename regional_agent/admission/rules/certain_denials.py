"""Denials that are certain to be repeated until a known moment.

A rate that denied a cost says when it will have it again. Until then it denies the same cost whatever happens, for
others can only take from a rate. The time counts from the moment *before* the store was asked, so a denial from here
never outlasts the store's own by more than a millisecond's rounding would. Two things make a rate give sooner: a larger
share, and another incarnation of the store. Then the owner calls `clear`. Another agent of the region may have got the
larger share, so no denial is kept for longer than the interval at which shares are refreshed.
"""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from regional_agent.admission.rules.generational_cache import GenerationalCache

MAX_DENIALS = 10_000
MAX_AGE_MS = 5_000

D = TypeVar("D")


class CertainDenial(NamedTuple, Generic[D]):
    decision: D
    asked_at_ms: int
    until_ms: int


class CertainDenials(Generic[D]):
    """The last decision for each set of charges that was denied."""

    def __init__(self) -> None:
        self._denials: GenerationalCache[Hashable, CertainDenial[D]] = GenerationalCache(MAX_DENIALS)

    def keep(self, charges: Hashable, decision: D, asked_at_ms: int, retry_after_ms: int) -> None:
        """Keep a denial for `retry_after_ms`, which is rounded up by less than 1 ms, from when the store was asked."""
        until_ms = asked_at_ms + min(retry_after_ms - 1, MAX_AGE_MS)
        self._denials.put(charges, CertainDenial(decision, asked_at_ms, until_ms))

    def find(self, charges: Hashable, now_ms: int) -> CertainDenial[D] | None:
        denial = self._denials.get(charges)
        return denial if denial is not None and now_ms < denial.until_ms else None

    def __bool__(self) -> bool:
        return bool(self._denials)

    def clear(self) -> None:
        self._denials.clear()
