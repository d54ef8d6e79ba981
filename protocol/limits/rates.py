"""Rates and durations as people write them, and the share of a rate that each region may use."""

import re
from enum import StrEnum
from typing import NamedTuple

# Buckets count billionths of a unit, so that no refill is ever rounded; that many fit Lua's numbers.
MAX_BURST = 9_000_000
MAX_RATE_MICRO = MAX_BURST * 1_000_000
MAX_LOG = 10_000  # entries of a sliding log

_RATE = re.compile(r"^(\d+)\s*/\s*(second|minute|hour)(?:\s*,\s*burst\s+(\d+))?$")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}
_DURATION = re.compile(r"^(\d+)(ms|s|m|h|d)$")
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class RateAlgorithm(StrEnum):
    """How a rate is counted: one file each in lua/algorithms."""

    TOKEN_BUCKET = "token_bucket"  # noqa: S105  (no password)
    GCRA = "gcra"
    LEAKY_BUCKET = "leaky_bucket"
    FIXED_WINDOW = "fixed_window"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_LOG = "sliding_log"


# An agent may take units of these ahead of requests. The others count by the moment at which a request arrives.
SLICED = {RateAlgorithm.TOKEN_BUCKET, RateAlgorithm.GCRA}
WINDOWS = {RateAlgorithm.FIXED_WINDOW, RateAlgorithm.SLIDING_WINDOW, RateAlgorithm.SLIDING_LOG}


class Sharing(StrEnum):
    """How a rate, or the slots of a concurrency, are divided over regions."""

    ADAPTIVE = "adaptive"  # by demand, at once: what may be admitted beyond the limit is bounded, and published
    STRICT = "strict"  # by demand, but a region gets a share only after another has confirmed giving it up
    REGIONAL = "regional"  # each region has its base share, whatever the demand


class Rate(NamedTuple):
    """`rate_micro` millionths of a unit a second, and up to `burst` units at once.

    For an algorithm that counts windows, `burst` is what may pass in one window: a share of the burst is a share of
    the window.
    """

    rate_micro: int
    burst: int
    window_ms: int = 0


def parse_rate(text: int | str, algorithm: str = RateAlgorithm.TOKEN_BUCKET) -> Rate:
    """Parse `100/second, burst 200`. Without a burst, the burst is one second's worth, and at least one unit.

    An algorithm that counts windows has no burst: `100/minute` names the window and what may pass in it.
    """
    found = _RATE.match(text) if isinstance(text, str) else None
    if not found:
        raise ValueError(f"{text!r} is not a rate; write it as '100/second' or '1000/minute, burst 200'")
    if algorithm in WINDOWS:
        return _parse_windowed_rate(text, found, algorithm)
    rate_micro = int(found[1]) * 1_000_000 // _SECONDS[found[2]]
    burst = int(found[3]) if found[3] else max(1, rate_micro // 1_000_000)
    if not 0 < rate_micro <= MAX_RATE_MICRO or not 0 < burst <= MAX_BURST:
        raise ValueError(f"{text!r}: rate and burst must be above zero and at most {MAX_BURST}")
    return Rate(rate_micro, burst)


def _parse_windowed_rate(text: int | str, found: re.Match[str], algorithm: str) -> Rate:
    units, window_s = int(found[1]), _SECONDS[found[2]]
    if found[3]:
        raise ValueError(f"{text!r}: a rate that is counted by {algorithm} has no burst; write '100/minute' alone")
    most = MAX_LOG if algorithm == RateAlgorithm.SLIDING_LOG else MAX_BURST
    if not 0 < units <= most:
        raise ValueError(f"{text!r}: a rate that is counted by {algorithm} is above zero and at most {most} a window")
    return Rate(units * 1_000_000 // window_s, units, window_s * 1000)


def parse_duration_ms(text: str) -> int:
    """Parse a duration such as `10s` into milliseconds. Raises ValueError for anything but a number and a unit."""
    found = _DURATION.match(text)
    if not found:
        raise ValueError(f"{text!r} is not a duration; write it as 500ms, 10s, 5m, 1h or 1d")
    return int(found[1]) * _MILLISECONDS[found[2]]


def base_rate(limit: Rate, weight: int, total_weight: int) -> Rate:
    """Return a region's base share of a rate: what it may always use, and all that it may use while disconnected.

    All base shares together never exceed the rate, nor the burst. There is one exception: a burst so small that a
    region's part of it would be less than one unit. Such a region has a burst of one, or it would never admit anything.
    """
    if weight <= 0 or limit.burst == 0:
        return Rate(0, 0)
    burst = share_of(limit.burst, weight, total_weight)
    return Rate(limit.rate_micro * weight // total_weight, burst, limit.window_ms)


def share_of(units: int, weight: int, total_weight: int) -> int:
    """Return a region's part of a burst or of slots by weight: at least one unit, if there are any."""
    return max(1, units * weight // total_weight) if units and weight > 0 else 0


def base_slots(units: int, weight: int, total_weight: int) -> int:
    """Return a region's part of slots that are shared by demand: all parts together never exceed the limit."""
    return units * weight // total_weight
