"""Max-min fairness: divide a rate among members by weight, each within its bounds. Pure, and integers only.

The coordinator divides a rate among regions by it, and an agent divides its region's share among proxies.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.limits.rates import MAX_RATE_MICRO


class Bound(NamedTuple):
    low: int
    high: int
    weight: int


def fill(limit: int, bounds: Sequence[Bound]) -> list[int]:
    """Return one level for all members, times each weight and within each one's bounds, so that the sum is the limit.

    Members outside of their bounds are put at them, and the rest is divided anew: first all that are below, if together
    they lack more than those above have too much, else all that are above. So each round settles at least one.
    """
    lows = sum(each.low for each in bounds)
    if lows >= limit:
        return [limit * each.low // max(1, lows) for each in bounds]
    filled = [each.low for each in bounds]
    free, left = [place for place, each in enumerate(bounds) if each.weight], limit
    left -= sum(each.low for each in bounds if not each.weight)
    while free:
        total = sum(bounds[place].weight for place in free)
        levels = {place: left * bounds[place].weight // total for place in free}
        settled = _outside(levels, bounds)
        for place in settled or free:
            filled[place] = _within(levels[place], bounds[place])
        left -= sum(filled[place] for place in settled)
        free = [place for place in free if place not in settled] if settled else []
    return filled


def _within(units: int, bound: Bound) -> int:
    return max(bound.low, min(bound.high, units))


def _outside(levels: Mapping[int, int], bounds: Sequence[Bound]) -> set[int]:
    """Return members whose bounds exclude this level, whatever the others get."""
    low = {place: bounds[place].low - level for place, level in levels.items() if level < bounds[place].low}
    high = {place: level - bounds[place].high for place, level in levels.items() if level > bounds[place].high}
    return set(low) if sum(low.values()) > sum(high.values()) else set(high or low)


class Member(NamedTuple):
    """A region or a proxy that shares a limit."""

    weight: int
    floor_micro: int = 0
    ceiling_micro: int = MAX_RATE_MICRO


def fair_shares(limit_micro: int, members: Sequence[Member], demands_micro: Sequence[int]) -> list[int]:
    """Return shares that are max-min fair by weight: a member gets more than it needs only if no other lacks any.

    What is left when all demands are met is lent as well, so that each member can use more without another message.
    """
    wanted = [_wanted(each, demand) for each, demand in zip(members, demands_micro, strict=True)]
    if sum(each.high for each in wanted) >= limit_micro:
        return fill(limit_micro, wanted)
    ceilings = [max(each.ceiling_micro, want.high) for each, want in zip(members, wanted, strict=True)]
    return fill(limit_micro, [Bound(want.high, most, want.weight) for want, most in zip(wanted, ceilings, strict=True)])


def _wanted(member: Member, demand_micro: int) -> Bound:
    most = min(demand_micro, member.ceiling_micro) if member.weight else 0
    return Bound(member.floor_micro, max(member.floor_micro, most), member.weight)
