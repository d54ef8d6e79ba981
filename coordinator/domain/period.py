"""Periods follow the calendar: an hour, a day or a month in UTC. The id says which, and is what leases are named by."""

import functools
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from protocol.periods import PERIOD_FORMATS, period_id
from protocol.policy import PeriodKind

_MINUTE = timedelta(minutes=1)
_MILLISECOND = timedelta(milliseconds=1)
PERIODS_REMEMBERED = 1_000  # parsed: the same few are named again and again
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Period(NamedTuple):
    id: str
    kind: PeriodKind
    starts_at: datetime
    ends_at: datetime  # the first moment after it

    @property
    def first_minute(self) -> int:
        return minute_of(self.starts_at)

    @property
    def last_minute(self) -> int:
        return minute_of(self.ends_at) - 1

    def starts_in_ms(self, now: datetime) -> int:
        return max(0, (self.starts_at - now) // _MILLISECOND)

    def ends_in_ms(self, now: datetime) -> int:
        return max(0, (self.ends_at - now) // _MILLISECOND)


def minute_of(moment: datetime) -> int:
    """Minutes since 1970: the label of a usage line."""
    return (moment - _EPOCH) // _MINUTE


def moment_of(minute: int) -> datetime:
    return _EPOCH + minute * _MINUTE


@functools.lru_cache(maxsize=PERIODS_REMEMBERED)
def period_at(kind: PeriodKind, moment: datetime) -> Period:
    """The period of that kind which holds the moment. All exchanges of a gather ask about the same one."""
    return _period(kind, _start(kind, moment.astimezone(UTC)))


@functools.lru_cache(maxsize=PERIODS_REMEMBERED)
def _period(kind: PeriodKind, starts_at: datetime) -> Period:
    return Period(period_id(kind, starts_at), kind, starts_at, _end(kind, starts_at))


def current_ids(now: datetime) -> set[str]:
    """Of the periods that hold the moment, of each kind."""
    return {period_at(kind, now).id for kind in PERIOD_FORMATS}


def is_over(period_id: str, now: datetime) -> bool:
    return period_of(period_id).ends_at <= now


def next_period(period: Period) -> Period:
    return period_at(period.kind, period.ends_at)


@functools.lru_cache(maxsize=PERIODS_REMEMBERED)
def period_of(period_id: str) -> Period:
    """The period that an id names. Raises ValueError for what `period_at` would never name."""
    for kind, shape in PERIOD_FORMATS.items():
        period = _parsed(kind, shape, period_id)
        if period is not None:
            return period
    raise ValueError(f"{period_id!r} names no period; write it as 2026-11-18T09, 2026-11-18 or 2026-11")


def _parsed(kind: PeriodKind, shape: str, period_id: str) -> Period | None:
    try:
        period = period_at(kind, datetime.strptime(period_id, shape).replace(tzinfo=UTC))
    except (ValueError, OverflowError):
        return None
    # strptime is lenient with leading zeros: only the canonical spelling is an id.
    return period if period.id == period_id else None


def _start(kind: PeriodKind, moment: datetime) -> datetime:
    hour = moment.replace(minute=0, second=0, microsecond=0)
    if kind is PeriodKind.HOUR:
        return hour
    day = hour.replace(hour=0)
    return day if kind is PeriodKind.DAY else day.replace(day=1)


def _end(kind: PeriodKind, starts_at: datetime) -> datetime:
    if kind is PeriodKind.HOUR:
        return starts_at + timedelta(hours=1)
    if kind is PeriodKind.DAY:
        return starts_at + timedelta(days=1)
    # The 1st plus 32 days is always in the next month.
    return (starts_at + timedelta(days=32)).replace(day=1)
