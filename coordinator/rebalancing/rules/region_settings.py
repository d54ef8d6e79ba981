"""Settings of a region's part of a quota: its weight, its floor and its ceiling.

The weight multiplies the region's demand. A floor is kept for the region before it asks for it, and above a ceiling it
is granted nothing. Both are units of the period for an allowance, and a rate such as `100/minute` for a rate. A region
whose floor equals its ceiling is pinned. What is not set follows from the region's own weight and from demand.

A setting is for a quota and a subject, like an override, and applies to every key with these values.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple, TypeAlias

from coordinator.limits.rules.validation import DocumentFault, faults_of_value
from protocol.limits.document import UNLIMITED, LimitValue, Quota, RateQuota
from protocol.limits.rates import parse_rate

MAX_WEIGHT = 1_000_000
MAX_SETTINGS = 10_000


class Setting(NamedTuple):
    """The setting of one region and one key. None stands for a value that is not set."""

    weight: int | None = None
    floor: LimitValue | None = None
    ceiling: LimitValue | None = None

    def beside(self, wider: "Setting") -> "Setting":
        """Return this setting, with the values of a wider one where it has none."""
        return wider._replace(**{name: value for name, value in self._asdict().items() if value is not None})


NOTHING_SET = Setting()


class FloorHold(NamedTuple):
    """Units that are kept for a region in one period, like a floor, until a time: it ends by itself."""

    period: str
    units: int
    until: datetime


Holds: TypeAlias = Mapping[str, Mapping[str, FloorHold]]  # by quota key and region
Settings: TypeAlias = Mapping[str, Mapping[str, Setting]]  # by key and region


def faults_of_settings(
    spec: Quota, limits: Collection[LimitValue], settings: Mapping[str, Setting]
) -> list[DocumentFault]:
    """Return what is wrong with the settings of a key, by region. `limits` are the limits that the key may have."""
    faults = [fault for region, setting in settings.items() for fault in _faults_of_values(spec, region, setting)]
    return faults or [*_crossed(spec, settings), *_too_much(spec, limits, settings)]


def _faults_of_values(spec: Quota, region: str, setting: Setting) -> Iterator[DocumentFault]:
    for name, value in (("floor", setting.floor), ("ceiling", setting.ceiling)):
        if value == UNLIMITED:
            yield DocumentFault(f"settings.{region}.{name}", "units", f"A {name} is a number or a rate.")
        elif value is not None:
            yield from faults_of_value(f"settings.{region}.{name}", spec, value)


def _crossed(spec: Quota, settings: Mapping[str, Setting]) -> Iterator[DocumentFault]:
    for region, (_, floor, ceiling) in settings.items():
        if floor is not None and ceiling is not None and amount(spec, floor) > amount(spec, ceiling):
            yield DocumentFault(
                f"settings.{region}.floor", "ceiling", f"The floor {floor} is above the region's ceiling, {ceiling}."
            )


def _too_much(spec: Quota, limits: Iterable[LimitValue], settings: Mapping[str, Setting]) -> Iterator[DocumentFault]:
    """Return the fault of floors that add up to more than the smallest limit."""
    floors = [each.floor for each in settings.values() if each.floor is not None]
    kept = sum(amount(spec, floor) for floor in floors)
    if too_small := [limit for limit in limits if limit != UNLIMITED and kept > amount(spec, limit)]:
        reason = f"The floors ({', '.join(map(str, floors))}) add up to more than the limit of a plan, {too_small[0]}."
        yield DocumentFault("settings", "floors", reason)


def amount(spec: Quota, value: LimitValue) -> int:
    """Return a value as a number to compare: units, or millionths of a unit per second."""
    if isinstance(spec, RateQuota):
        return int(parse_rate(value, spec.algorithm).rate_micro)
    return int(value)
