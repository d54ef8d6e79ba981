"""Rates that an agent counts by itself while its region's store cannot be asked: a bucket for each key, in memory.

It knows nothing of what the other agents of the region admit meanwhile, so it gives a fraction of the region's share
only. However a rate is counted in the store, here it is a bucket: at most its burst at once, and its rate after that.
What it admitted is forgotten with the agent, or with the key that was used least of very many.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from regional_agent.admission.rules.generational_cache import GenerationalCache
from regional_agent.admission.rules.modes import BEYOND_LIMITS, LOOKS

MOST_BUCKETS = 10_000
PARTS = 1_000_000_000  # of a unit: what a rate of millionths a second brings in a millisecond is a whole number of them


class Ask(NamedTuple):
    """Units of a key's rate, already no more than this agent may give."""

    key: Hashable
    cost: int
    rate_micro: int
    burst: int


class LocalAnswer(NamedTuple):
    allowed: bool
    remaining: int
    reset_ms: int
    retry_after_ms: int  # 0 also where this cost never passes here


class _Bucket(NamedTuple):
    parts: int
    at_ms: int


def fraction_of(units: int, fraction_micro: int) -> int:
    """Rounded down: all fractions together are never more than the whole."""
    return units * fraction_micro // 1_000_000


class LocalRates:
    def __init__(self) -> None:
        self._buckets: GenerationalCache[Hashable, _Bucket] = GenerationalCache(MOST_BUCKETS)

    def decide(self, asks: Sequence[Ask], now_ms: int, mode: str) -> list[LocalAnswer]:
        """Each of them; if all may pass, all are taken. A `peek` takes nothing, and an `adjust` always passes."""
        needed: Counter[Hashable] = Counter()
        answers = []
        for ask in asks:
            needed[ask.key] += ask.cost
            answers.append(self._answer(ask, needed[ask.key], now_ms, mode))
        if mode not in LOOKS and all(answer.allowed for answer in answers):
            for ask in asks:
                self._take(ask, now_ms)
        return answers

    def _answer(self, ask: Ask, needed: int, now_ms: int, mode: str) -> LocalAnswer:
        there = self._parts(ask, now_ms)
        left = there - needed * PARTS
        allowed = left >= 0 or mode in BEYOND_LIMITS
        after = max(0, left if allowed else there)
        retry_ms = 0 if allowed or needed > ask.burst else _ms_to_gain(-left, ask.rate_micro)
        return LocalAnswer(allowed, after // PARTS, _ms_to_gain(ask.burst * PARTS - after, ask.rate_micro), retry_ms)

    def _take(self, ask: Ask, now_ms: int) -> None:
        self._buckets.put(ask.key, _Bucket(self._parts(ask, now_ms) - ask.cost * PARTS, now_ms))

    def _parts(self, ask: Ask, now_ms: int) -> int:
        full = ask.burst * PARTS
        bucket = self._buckets.get(ask.key)
        if bucket is None:
            return full
        return min(full, bucket.parts + (now_ms - bucket.at_ms) * ask.rate_micro)


def _ms_to_gain(parts: int, rate_micro: int) -> int:
    return -(-parts // rate_micro) if rate_micro > 0 else 0
