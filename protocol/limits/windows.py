"""Windows of a rate that begin with the calendar.

Windows of seconds, minutes and hours are counted from 1970 in UTC, so `10 per 15 minutes` begins at full quarters of an
hour. Windows of days begin at the midnight of a time zone, those of weeks on its Monday.
"""

from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from protocol.zones import zone_of

DAY_MS = 86_400_000
_WEEK = 7  # days
_EPOCH = date(1970, 1, 1)
_FIRST_MONDAY = 4  # days after the epoch


class CalendarWindow(NamedTuple):
    """One window, in milliseconds since 1970. Those after it follow, each as long as the limit says."""

    begins_ms: int
    ends_ms: int


def calendar_window(window_ms: int, zone: str, moment: datetime) -> CalendarWindow:
    """Return the window of a moment. Clocks that change make a day of 23 or 25 hours."""
    days, rest_ms = divmod(window_ms, DAY_MS)
    if rest_ms:
        return CalendarWindow(0, window_ms)
    today = (moment.astimezone(zone_of(zone)).date() - _EPOCH).days
    shift = 0 if days % _WEEK else _FIRST_MONDAY
    first = (today - shift) // days * days + shift
    return CalendarWindow(_midnight_ms(first, zone), _midnight_ms(first + days, zone))


def _midnight_ms(day: int, zone: str) -> int:
    """Return when a day begins: at midnight or, if clocks skip it, when they continue."""
    midnight = datetime.combine(_EPOCH + timedelta(days=day), datetime.min.time(), zone_of(zone))
    return int(midnight.astimezone(UTC).timestamp()) * 1000
