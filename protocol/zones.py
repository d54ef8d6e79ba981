"""Time zones as one release of their rules has them, on all machines alike, whatever these have of their own."""

import functools
import importlib.resources
from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo

MAX_LENGTH = 30  # of one that periods follow: its name is in theirs, and that is the name of a table


@functools.cache
def zone_of(name: str) -> tzinfo:
    """An IANA time zone by name. Raises ValueError if there is none."""
    if name == "UTC":
        return UTC
    if name not in _names():
        raise ValueError(f"there is no time zone {name!r}; write it as UTC or Europe/Berlin")
    with importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as rules:
        return ZoneInfo.from_file(rules, key=name)


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(importlib.resources.files("tzdata").joinpath("zones").read_text().split())


def why_not_for_periods(name: str) -> str | None:
    """None: periods can follow it."""
    try:
        zone_of(name)
    except ValueError as error:
        return str(error)
    if len(name) > MAX_LENGTH or "+" in name:
        return f"periods cannot be called after {name!r}: name a place, in at most {MAX_LENGTH} characters"
    return None
