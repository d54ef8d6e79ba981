"""Periods follow calendars: hours, days, months or the anniversaries of a subscription, in a time zone.

Periods of a calendar tile time: each begins where the one before ends, so every moment is in exactly one. Days begin at
the midnight of the zone or, if clocks skip it, when they continue; a day may have 23 or 25 hours. Hours begin with the
full hours of the zone's clock: an hour that occurs twice is two periods, and one that is skipped is none. An
anniversary on a day that a month does not have is on its last day, and on its own day again in the next month.

Leases are named by the period's id, which is complete: no zone rules are needed to interpret it.

    2026-11-18T09   2026-11-18   2026-11       an hour, a day, a month in UTC
    2026-02-28a31                              the anniversary month of a 31st
    2026-10_Europe:Berlin_120_60               in a zone: its offset from UTC in minutes at the beginning, and at the
                                               end if that differs

So a period keeps its bounds when the rules of its zone change. The next period begins where it ends, and from the next
regular boundary on all periods follow the new rules: see `period_at`.
"""

import calendar as months
import functools
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import NamedTuple

from protocol.limits.document import AllowanceQuota, PeriodKind
from protocol.zones import why_not_for_periods, zone_of

LONGEST_ID = 54  # characters; the database checks it as well
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
MOST_AHEAD = 26 * 60  # minutes ahead of UTC, by any rules
PERIODS_REMEMBERED = 1_000  # the same few periods are used again and again
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_SHAPES = {
    PeriodKind.HOUR: "%Y-%m-%dT%H",
    PeriodKind.DAY: "%Y-%m-%d",
    PeriodKind.MONTH: "%Y-%m",
    PeriodKind.ANNIVERSARY: "%Y-%m-%d",
}
_ID = re.compile(
    r"(?P<label>\d{4}-\d\d(?:-\d\d)?(?:T\d\d)?)(?:a(?P<day>0[1-9]|[12]\d|3[01]))?"
    r"(?:_(?P<zone>[A-Z][A-Za-z0-9:_-]*?)_(?P<begin>-?\d{1,4})(?:_(?P<end>-?\d{1,4}))?)?"
)


class Calendar(NamedTuple):
    """A calendar. `day` is the day of the month of an anniversary."""

    kind: PeriodKind
    zone: str = "UTC"
    day: int = 1

    def __str__(self) -> str:
        day = f"_{self.day:02}" if self.kind is PeriodKind.ANNIVERSARY else ""
        return f"{self.kind}_{self.zone}{day}"


def calendar_of(quota: AllowanceQuota, began_at: datetime | None) -> Calendar:
    """Return the calendar of an allowance. Without a subscription (`began_at`) an anniversary is a calendar month."""
    kind = quota.period
    if kind is not PeriodKind.ANNIVERSARY:
        return Calendar(kind, quota.time_zone)
    if began_at is None:
        return Calendar(PeriodKind.MONTH, quota.time_zone)
    return Calendar(kind, quota.time_zone, began_at.astimezone(zone_of(quota.time_zone)).day)


class Period(NamedTuple):
    id: str
    calendar: Calendar
    starts_at: datetime
    ends_at: datetime  # exclusive

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

    @property
    def label(self) -> str:
        """Return the period's name on its calendar."""
        return re.split("[a_]", self.id, maxsplit=1)[0]

    def holds(self, moment: datetime) -> bool:
        return self.starts_at <= moment < self.ends_at


def minute_of(moment: datetime) -> int:
    """Return the minutes since 1970, which label a usage line."""
    return (moment - _EPOCH) // MINUTE


def moment_of(minute: int) -> datetime:
    return _EPOCH + minute * MINUTE


# --- the period of a time ---------------------------------------------------------------------------------------------


def period_at(calendar: Calendar, moment: datetime, written: Sequence[Period] = ()) -> Period:
    """Return the period of the calendar that contains the time.

    `written` are stored periods, which keep their bounds whatever the zone's rules are now.

    """
    # Bounds are whole minutes, so that the cache is keyed by the minute.
    return _period_at(calendar, moment.replace(second=0, microsecond=0), written)


@functools.lru_cache(maxsize=PERIODS_REMEMBERED)
def _period_at(calendar: Calendar, moment: datetime, written: Sequence[Period]) -> Period:
    holding = [each for each in written if each.holds(moment)]
    if holding:
        return min(holding, key=lambda each: each.starts_at)
    found = _after_the_last_written(calendar, moment, written) or _regular(calendar, moment)
    ahead = [each.starts_at for each in written if moment < each.starts_at < found.ends_at]
    return _between(calendar, found.starts_at, min(ahead)) if ahead else found


def is_over(period_id: str, now: datetime) -> bool:
    return period_of(period_id).ends_at <= now


def next_period(period: Period, written: Sequence[Period] = ()) -> Period:
    return period_at(period.calendar, period.ends_at, written)


def _after_the_last_written(calendar: Calendar, moment: datetime, written: Sequence[Period]) -> Period | None:
    """Return the period after the last stored one: it ends with the regular period whose begin is nearest."""
    ends_at = max((each.ends_at for each in written if each.ends_at <= moment), default=None)
    if ends_at is None:
        return None
    around = _regular(calendar, ends_at)
    is_nearer_its_end = around.ends_at - ends_at < ends_at - around.starts_at
    until = _regular(calendar, around.ends_at).ends_at if is_nearer_its_end else around.ends_at
    return _between(calendar, ends_at, until) if moment < until else None


def _between(calendar: Calendar, starts_at: datetime, ends_at: datetime) -> Period:
    """Return a period named after the regular one that it covers most of."""
    most = _regular(calendar, starts_at + (ends_at - starts_at) / 2)
    return _period(calendar, starts_at, ends_at, most.label)


@functools.lru_cache(maxsize=PERIODS_REMEMBERED)
def _regular(calendar: Calendar, moment: datetime) -> Period:
    """Return the period by the zone's current rules."""
    starts_at, ends_at = _bounds(calendar, moment)
    label = starts_at.astimezone(zone_of(calendar.zone)).strftime(_SHAPES[calendar.kind])
    return _period(calendar, starts_at, ends_at, label)


def _bounds(calendar: Calendar, moment: datetime) -> tuple[datetime, datetime]:
    """Return the bounds. Clocks that go back at midnight show yesterday's date, so neighbouring dates are tried as
    well.
    """
    zone = zone_of(calendar.zone)
    if calendar.kind is PeriodKind.HOUR:
        begins = list(_hours_around(zone, moment))
    else:
        begins = [_midnight(day, zone) for day in _days_around(calendar, moment.astimezone(zone).date())]
    return max(begin for begin in begins if begin <= moment), min(begin for begin in begins if begin > moment)


def _days_around(calendar: Calendar, day: date) -> Iterator[date]:
    for step in (-2, -1, 0, 1, 2):
        if calendar.kind is PeriodKind.DAY:
            yield day + step * DAY
        else:
            yield _day_of_month(day.year * 12 + day.month - 1 + step, calendar.day)


def _day_of_month(month: int, day: int) -> date:
    """Return the anniversary's day in a month, which is counted from the year 0."""
    year, number = month // 12, month % 12 + 1
    return date(year, number, min(day, months.monthrange(year, number)[1]))


def _midnight(day: date, zone: tzinfo) -> datetime:
    """Return the beginning of a day. Where clocks skip midnight, the day begins when they continue."""
    return datetime.combine(day, time(), zone).astimezone(UTC)


def _hours_around(zone: tzinfo, moment: datetime) -> Iterator[datetime]:
    """Return the times at which the zone's clock shows a full hour. Offsets change, and are not always whole hours."""
    for step in (-2, -1, 0, 1, 2):
        local = (moment + step * HOUR).astimezone(zone)
        into = timedelta(minutes=local.minute, seconds=local.second, microseconds=local.microsecond)
        full = moment + step * HOUR - into
        yield from (each for each in (full, full + HOUR) if not each.astimezone(zone).minute)


# --- ids -----------------------------------------------------------------------------------------------


def _period(calendar: Calendar, starts_at: datetime, ends_at: datetime, label: str) -> Period:
    if calendar.zone == "UTC":
        return Period(_labelled(calendar, label), calendar, starts_at, ends_at)
    begin, end = (
        (nominal - at.replace(tzinfo=None)) // MINUTE
        for nominal, at in zip(_nominal(calendar, label), (starts_at, ends_at), strict=True)
    )
    ahead = (begin,) if begin == end else (begin, end)
    id_ = "_".join(map(str, (_labelled(calendar, label), calendar.zone.replace("/", ":"), *ahead)))
    return Period(id_, calendar, starts_at, ends_at)


def _labelled(calendar: Calendar, label: str) -> str:
    return f"{label}a{calendar.day:02}" if calendar.kind is PeriodKind.ANNIVERSARY else label


def _nominal(calendar: Calendar, label: str) -> tuple[datetime, datetime]:
    """Return the bounds on the zone's clock, as if its offset never changed."""
    starts = datetime.strptime(label, _SHAPES[calendar.kind])  # noqa: DTZ007 - a clock's time, of whatever zone
    if calendar.kind in (PeriodKind.HOUR, PeriodKind.DAY):
        return starts, starts + (HOUR if calendar.kind is PeriodKind.HOUR else DAY)
    month = starts.year * 12 + starts.month - 1
    if starts.date() != _day_of_month(month, calendar.day):
        raise ValueError(f"no period of {calendar} begins on {label}")
    return starts, datetime.combine(_day_of_month(month + 1, calendar.day), time())


@functools.lru_cache(maxsize=PERIODS_REMEMBERED)
def period_of(period_id: str) -> Period:
    """Return the period that an id names, whatever the zone's rules are now. Raises ValueError."""
    found = _ID.fullmatch(period_id)
    named = found.groupdict() if found else {}
    for kind in PeriodKind if named else ():
        try:
            period = _read(kind, **named)
        except (ValueError, OverflowError):
            continue
        # int() accepts leading zeros, but only the canonical spelling is an id.
        if period.id == period_id and period.starts_at < period.ends_at:
            return period
    raise ValueError(f"{period_id!r} names no period; write it as 2026-11-18T09, 2026-11-18 or 2026-11")


def period_named_outside(period_id: str) -> Period:
    """Return the period that a region or a person names. Raises ValueError also for a zone that no quota can have.

    Booked periods keep their names, whatever zones exist now: see `period_of`. The length of an id is bounded so that
    "transfer_" and the id fit into the 63 bytes of a table's name: no two ids share a table.

    """
    period = period_of(period_id)
    reason = why_not_for_periods(period.calendar.zone)
    if len(period_id) > LONGEST_ID:
        reason = f"at most {LONGEST_ID} characters"
    if reason:
        raise ValueError(f"{period_id!r} names no period: {reason}")
    return period


def _read(
    kind: PeriodKind, label: str, day: str | None, zone: str | None, begin: str | None, end: str | None
) -> Period:
    calendar = Calendar(kind, (zone or "UTC").replace(":", "/"), int(day or 1))
    starts, ends = (each.replace(tzinfo=UTC) for each in _nominal(calendar, label))
    ahead = [int(begin or 0), int(end or begin or 0)]
    if max(map(abs, ahead)) > MOST_AHEAD:
        raise ValueError("no zone is so far from UTC")
    return _period(calendar, starts - ahead[0] * MINUTE, ends - ahead[1] * MINUTE, label)
