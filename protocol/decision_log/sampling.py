"""How admissions are sampled for the decision log.

A request is sampled with the rate of its policy, independently of all others. Drawing a random number for each request
would cost more than the rest of the log: so the log draws how far it is to the next sample, from the exponential
distribution, and each request takes off its *hazard*, -ln(1 - rate). That distribution has no memory. Hence a request
of rate r is sampled with the probability r, whatever the rates of those before it were. The hazard of the rate 1 is
infinite: each of them is sampled.

A request with an operation id is sampled by a hash of it instead, so that its retries are, too, on any agent.
"""

import math
import re
from typing import Annotated

from msgspec import Meta

DEFAULT_RATE = 0.001
OTHER_POLICIES = "*"  # in a table of rates: all policies that it does not name, and requests that none matches
_DIGITS = 12  # of a hexadecimal digest that are compared
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", re.ASCII)

SampleRate = Annotated[float, Meta(ge=0, le=1)]


def parse_sample(text: str | float) -> float:
    """Parse `0.1%`, or a fraction such as 0.001. Raises ValueError."""
    found = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    rate = float(found[1]) / 100 if found else text
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f"{text!r} is no sample; write a percentage such as 0.1%, from 0% to 100%")
    return float(rate)


def hazard_of(rate: float) -> float:
    return math.inf if rate >= 1 else -math.log1p(-rate)


def rate_of(hazard: float) -> float:
    return -math.expm1(-hazard)


def is_sampled(digest: str, rate: float) -> bool:
    """Return whether an operation is sampled, by the hexadecimal digest of its id: equal for each of its retries."""
    return int(digest[:_DIGITS], 16) < rate * float(16**_DIGITS)
