"""Rates that an agent counts in memory while its store is unavailable: a bucket for each key.

It does not know what the region's other agents admit meanwhile, so it admits a fraction of the region's share only.
Whatever algorithm a rate has in the store, here it is a bucket: at most its burst at once, and its rate after that. The
buckets are lost with the agent, and the least recently used one is dropped when there are very many.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from regional_agent.admission.rules.generational_cache import GenerationalCache
from regional_agent.admission.rules.modes import BEYOND_LIMITS, LOOKS

MOST_BUCKETS = 10_000
PARTS = 1_000_000_000  # of a unit: what a rate of millionths a second brings in a millisecond is a whole number of them


class RateRequest(NamedTuple):
    """Units of a key's rate, of this agent's fraction."""

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
    """Return a fraction, rounded down: all fractions together never exceed the whole."""
    return units * fraction_micro // 1_000_000


class LocalRates:
    def __init__(self) -> None:
        self._buckets: GenerationalCache[Hashable, _Bucket] = GenerationalCache(MOST_BUCKETS)

    def decide(self, asks: Sequence[RateRequest], now_ms: int, mode: str) -> list[LocalAnswer]:
        """Decide all asks, and take all or none. A `peek` takes nothing; an `adjust` or `refund` is always admitted."""
        needed: Counter[Hashable] = Counter()
        answers = []
        for ask in asks:
            needed[ask.key] += ask.cost
            answers.append(self._answer(ask, needed[ask.key], now_ms, mode))
        if mode not in LOOKS and all(answer.allowed for answer in answers):
            for ask in asks:
                self._take(ask, now_ms)
        return answers

    def forget(self, key: Hashable) -> None:
        self._buckets.forget(key)

    def _answer(self, ask: RateRequest, needed: int, now_ms: int, mode: str) -> LocalAnswer:
        there = self._parts(ask, now_ms)
        left = there - needed * PARTS
        allowed = left >= 0 or mode in BEYOND_LIMITS
        after = min(ask.burst * PARTS, max(0, left if allowed else there))
        retry_ms = 0 if allowed or needed > ask.burst else _ms_to_gain(-left, ask.rate_micro)
        return LocalAnswer(allowed, after // PARTS, _ms_to_gain(ask.burst * PARTS - after, ask.rate_micro), retry_ms)

    def _take(self, ask: RateRequest, now_ms: int) -> None:
        self._buckets.put(ask.key, _Bucket(self._parts(ask, now_ms) - ask.cost * PARTS, now_ms))

    def _parts(self, ask: RateRequest, now_ms: int) -> int:
        full = ask.burst * PARTS
        bucket = self._buckets.get(ask.key)
        if bucket is None:
            return full
        return min(full, bucket.parts + (now_ms - bucket.at_ms) * ask.rate_micro)


def _ms_to_gain(parts: int, rate_micro: int) -> int:
    return -(-parts // rate_micro) if rate_micro > 0 else 0
