"""Denials that are certain to be repeated, so that whoever asks too often does not cost the store a call each time.

A rate that denied a cost says when it will have it again. Until then the same cost is denied whatever happens: others
can only take from a rate. The time counts from the moment *before* the store was asked, so a denial from here never
outlasts the store's own by more than a millisecond's rounding would. Two things can make a rate give sooner: a larger
share, and another incarnation of the store. Whoever hears of them calls `clear`; but another agent of the region may
have heard of the share, so nothing is kept for longer than shares are refreshed in.
"""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from regional_agent.admission.rules.generational_cache import Remembered

MOST_DENIALS = 10_000
LONGEST_MS = 5_000

D = TypeVar("D")


class Kept(NamedTuple, Generic[D]):
    decision: D
    asked_at_ms: int
    until_ms: int


class Denials(Generic[D]):
    """The last decision for each demand that was denied."""

    def __init__(self) -> None:
        self._kept: Remembered[Hashable, Kept[D]] = Remembered(MOST_DENIALS)

    def keep(self, demand: Hashable, decision: D, asked_at_ms: int, retry_after_ms: int) -> None:
        """Certain for `retry_after_ms` from when it was asked."""
        until_ms = asked_at_ms + min(retry_after_ms, LONGEST_MS)
        self._kept.put(demand, Kept(decision, asked_at_ms, until_ms))

    def find(self, demand: Hashable, now_ms: int) -> Kept[D] | None:
        kept = self._kept.get(demand)
        return kept if kept is not None and now_ms < kept.until_ms else None

    def __bool__(self) -> bool:
        return bool(self._kept)

    def clear(self) -> None:
        self._kept.clear()
