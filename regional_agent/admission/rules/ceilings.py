"""Ceilings of adjustments, and of commits beyond their hold.

Both report work that was done, so no limit binds them. But an absurd number is a caller's mistake, and what it books is
billed, so there is a ceiling: a factor of the limit.
"""

from protocol.units import MAX_UNITS

HOUR_S = 3_600


class AboveCeiling(Exception):
    """The units of one adjustment are above the ceiling. `field` is the request field that has them."""

    def __init__(self, field: str, policy: str, ceiling: int) -> None:
        super().__init__(f"one adjustment may book at most {ceiling} units of {policy!r}: see adjust_ceiling")
        self.field = field
        self.ceiling = ceiling


def allowance_ceiling(limit: int, factor: int) -> int:
    return min(MAX_UNITS, max(1, limit) * factor)


def rate_ceiling(rate_micro: float, burst: int, factor: int) -> int:
    """Return the ceiling of a rate: a factor of what passes in an hour, for nothing is booked of it."""
    return min(MAX_UNITS, max(1, burst, int(rate_micro) * HOUR_S // 1_000_000) * factor)
