"""Denials that are certain to be repeated until a known moment.

A rate that denied a cost says when it will have it again. Until then it denies the same cost, for others mostly take
from a rate. The time counts from the moment *before* the store was asked, so a denial from here never outlasts the
store's own by more than a millisecond's rounding would. What makes a rate give at another moment: a larger share, or
another incarnation of the store, which change the circumstances that a denial belongs to; and an adjustment, a refund
or a reset, after which the agent forgets the key's denials. Another agent of the region may have got one of these, so
no denial is kept for longer than a second.
"""

from typing import Generic, TypeVar

from msgspec import Struct

MAX_AGE_MS = 1_000

D = TypeVar("D")


class CertainDenial(Struct, Generic[D], frozen=True, gc=False):
    decision: D
    circumstances: object  # compared by value
    asked_at_ms: int
    until_ms: int


def certain_denial(decision: D, circumstances: object, asked_at_ms: int, retry_after_ms: int) -> CertainDenial[D]:
    """Return a denial for `retry_after_ms`, which is rounded up by less than 1 ms, from when the store was asked."""
    until_ms = asked_at_ms + min(retry_after_ms - 1, MAX_AGE_MS)
    return CertainDenial(decision, circumstances, asked_at_ms, until_ms)
