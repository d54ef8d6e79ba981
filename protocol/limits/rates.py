"""Rates and durations as people write them, and the share of a rate that each region may use."""

import re
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

# Buckets count billionths of a unit, so that no refill is ever rounded; that many fit Lua's numbers.
MAX_BURST = 9_000_000
MAX_RATE_MICRO = MAX_BURST * 1_000_000
MAX_LOG = 10_000  # entries of a sliding log
MAX_WEEKS = 53  # of a window
MAX_REFILL_S = 10 * 365 * 86_400  # of the whole burst of a slow rate
SLOW_MICRO = 250  # slower rates (0.9 an hour) are counted in fractions of a millionth a second
FINEST = 20  # the smallest such fraction is 2^-20: see `_rounded_down`

_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_RATE = re.compile(
    r"(?P<units>\d{1,18}(?:\.\d{1,6})?)\s*(?:/|per\b)\s*"
    rf"(?:(?P<times>\d{{1,9}})\s+)?(?P<unit>{'|'.join(_SECONDS)})s?"
    r"(?:\s*,\s*burst\s+(?P<burst>\d{1,18}))?",
    re.ASCII,
)
_UNITS = "second, minute, hour, day and week"
_DURATION = re.compile(r"^(\d+)(ms|s|m|h|d)$")
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class RateAlgorithm(StrEnum):
    """The algorithms that count a rate: one file each in lua/algorithms."""

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
    """The ways to divide a rate, or the slots of a concurrency, over regions."""

    ADAPTIVE = "adaptive"  # by demand, at once: what may be admitted beyond the limit is bounded, and published
    STRICT = "strict"  # by demand, but a region gets a share only after another has confirmed giving it up
    REGIONAL = "regional"  # each region has its base share, whatever the demand


class Rate(NamedTuple):
    """`rate_micro` millionths of a unit a second, and up to `burst` units at once.

    For an algorithm that counts windows, `burst` is what may pass in one window: a share of the burst is a share of
    the window. The rate is an integer, except for a rate that is slow.
    """

    rate_micro: float
    burst: int
    window_ms: int = 0

    @property
    def is_slow(self) -> bool:
        """Return whether the rate is counted in fractions, because a whole number would be too coarse.

        Regions do not share such a rate by demand: shares follow what was requested in the last seconds, and nothing
        comes back in these. Nor is it taken in slices.
        """
        return isinstance(self.rate_micro, float)


def parse_rate(text: int | str, algorithm: str = RateAlgorithm.TOKEN_BUCKET) -> Rate:
    """Parse `100/second, burst 200` or `10 per 10 minutes`. Without a burst, it is one second's worth, at least a unit.

    An algorithm that counts windows has no burst: `100/minute` names the window and what may pass in it.
    """
    found = _RATE.fullmatch(text) if isinstance(text, str) else None
    if not found:
        reason = f"write 100/second, 10 per 10 minutes, or 1000/minute, burst 200; units are {_UNITS}, up to 53 weeks"
        raise ValueError(f"{text!r} is not a rate; {reason}")
    window_s = int(found["times"] or 1) * _SECONDS[found["unit"]]
    if not 0 < window_s <= MAX_WEEKS * _SECONDS["week"]:
        raise ValueError(f"{text!r}: the time of a rate is above zero and at most {MAX_WEEKS} weeks")
    if algorithm in WINDOWS:
        return _parse_windowed_rate(text, found, window_s, algorithm)
    micro = Fraction(found["units"]) * 1_000_000 / window_s
    burst = int(found["burst"]) if found["burst"] else max(1, int(micro) // 1_000_000)
    if not 0 < burst <= MAX_BURST or not 0 < micro <= MAX_RATE_MICRO:
        raise ValueError(
            f"{text!r}: a rate and its burst are above zero, and at most {MAX_BURST} (of a rate: a second)"
        )
    if micro >= SLOW_MICRO:
        return Rate(int(micro), burst)
    if micro * MAX_REFILL_S < burst * 1_000_000:
        raise ValueError(f"{text!r}: at this rate the burst takes more than 10 years to come back: lower the burst")
    return Rate(_rounded_down(micro, burst), burst)


def _rounded_down(micro: Fraction, burst: int) -> float:
    """Return a slow rate in binary fractions that are so small that a bucket still counts exactly.

    Lua's numbers have 53 bits. The units of the burst, in billionths, take some of these, and fractions get the rest.
    So such a rate is wrong by less than one in 10,000.
    """
    left = 2**53 // (burst * 1_000_000_000)
    steps: int = 2 ** min(FINEST, left.bit_length() - 1)
    return int(micro * steps) / steps


def _parse_windowed_rate(text: int | str, found: re.Match[str], window_s: int, algorithm: str) -> Rate:
    if found["burst"]:
        raise ValueError(f"{text!r}: a rate that is counted by {algorithm} has no burst; write '100/minute' alone")
    if "." in found["units"]:
        raise ValueError(f"{text!r}: {algorithm} counts whole units in a window; write 1 per 2 seconds for 0.5/second")
    units = int(found["units"])
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
    if limit.is_slow:
        return Rate(_rounded_down(Fraction(limit.rate_micro) * weight / total_weight, burst), burst)
    return Rate(int(limit.rate_micro) * weight // total_weight, burst, limit.window_ms)


def share_of(units: int, weight: int, total_weight: int) -> int:
    """Return a region's part of a burst or of slots by weight: at least one unit, if there are any."""
    return max(1, units * weight // total_weight) if units and weight > 0 else 0


def base_slots(units: int, weight: int, total_weight: int) -> int:
    """Return a region's part of slots that are shared by demand: all parts together never exceed the limit."""
    return units * weight // total_weight
