"""Questions about usage: over which time, in which buckets, by which dimensions.

Usage is kept by the minute, and a minute belongs to the bucket in which it begins. Buckets follow the calendar of the
requested time zone: a day has 23 or 25 hours where clocks change, and an hour that occurs twice is two buckets. The
boundaries are computed here and handed to the database as instants, so that two time zone tables need not agree.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import StrEnum
from typing import NamedTuple

MAX_BUCKETS = 50_000  # one month by the minute
FIRST_YEAR, LAST_YEAR = 1900, 9000  # well within the range of calendars

_TIME = re.compile(r"^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)$", re.ASCII)
_DATE = re.compile(r"^\d{4}-\d\d-\d\d$", re.ASCII)


class Dimension(StrEnum):
    """The dimensions that usage can be grouped by. A label is one as well, and is named `labels.model`."""

    TENANT = "tenant"
    QUOTA = "quota"
    QUOTA_KEY = "quota_key"  # the quota and the values that it is counted by
    REGION = "region"
    POLICY = "policy"
    ROUTE_CLASS = "route_class"  # of policies with `usage_by`
    API_KEY = "api_key"  # a hash of it, likewise
    PERIOD = "period"  # in which it is booked and billed
    DEGRADED = "degraded"  # the failure mode that admitted it during a store outage
    COUNTED_AS = "counted_as"  # included: within the limit of its period; overage: beyond it
    CHARGE_PERIOD = "charge_period"  # in which it was used; differs from `period` if that was closed already


# Dimensions of pools and of leases, which have units that no report accounts for yet.
OF_POOLS = (Dimension.TENANT, Dimension.QUOTA, Dimension.QUOTA_KEY, Dimension.PERIOD)
OF_LEASES = (*OF_POOLS, Dimension.REGION, Dimension.CHARGE_PERIOD)


class Granularity(StrEnum):
    MINUTE = "PT1M"
    HOUR = "PT1H"
    DAY = "P1D"
    MONTH = "P1M"


class StoredUsage(StrEnum):
    """The granularities in which usage is stored: as it was booked, by the minute, and rolled up."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


class UsageQuestion(NamedTuple):
    """A question. `boundaries` are the beginnings of the buckets and, last, the end of the whole."""

    boundaries: list[datetime]
    group_by: Sequence[str]  # dimensions and labels
    filters: Mapping[str, Sequence[str]]  # by dimension or label; any of the values
    zeros: bool = False  # include buckets without usage

    @property
    def read_from(self) -> StoredUsage:
        """Return the coarsest rollup that all buckets can be put together from. Rollups have hours and days in UTC."""
        for kept, length in ((StoredUsage.DAY, timedelta(days=1)), (StoredUsage.HOUR, timedelta(hours=1))):
            if not any((cut - _MIDNIGHT) % length for cut in self.boundaries):
                return kept
        return StoredUsage.MINUTE


_MIDNIGHT = datetime(1970, 1, 1, tzinfo=UTC)


def parse_instant(text: str, zone: tzinfo) -> datetime:
    """Parse an RFC 3339 time, or a date as midnight in the zone. Raises ValueError for anything else."""
    is_date = _DATE.fullmatch(text)
    if not is_date and not _TIME.fullmatch(text):
        raise ValueError("write it as 2026-11-18 or 2026-11-18T09:30:00Z (a + of an offset as %2B)")
    if not FIRST_YEAR <= int(text[:4]) <= LAST_YEAR:
        raise ValueError(f"its year is not within {FIRST_YEAR} and {LAST_YEAR}")
    if is_date:
        return _local_midnight(date.fromisoformat(text), zone)
    return datetime.fromisoformat(text.upper()).astimezone(UTC)


def month_around(now: datetime, zone: tzinfo) -> tuple[datetime, datetime]:
    first = now.astimezone(zone).date().replace(day=1)
    return _local_midnight(first, zone), _local_midnight(_next_month(first), zone)


def boundaries(start: datetime, end: datetime, granularity: Granularity | None, zone: tzinfo) -> list[datetime]:
    """Return the bucket boundaries by the zone's calendar. Raises ValueError for more than MAX_BUCKETS buckets."""
    cuts = [start]
    for cut in _cuts_after(start, granularity, zone):
        if cut >= end:
            break
        if cut == cuts[-1]:  # the calendar skipped a whole day, as in Samoa in 2011
            continue
        if len(cuts) == MAX_BUCKETS:
            raise ValueError(f"more than {MAX_BUCKETS} pieces of {granularity}; ask for a coarser one or less time")
        cuts.append(cut)
    return [*cuts, end]


def _cuts_after(start: datetime, granularity: Granularity | None, zone: tzinfo) -> Iterator[datetime]:
    if granularity is None:
        return iter(())
    if granularity in (Granularity.MINUTE, Granularity.HOUR):
        return _even_cuts(start, timedelta(minutes=1 if granularity is Granularity.MINUTE else 60), zone)
    return _calendar_cuts(start, granularity, zone)


def _even_cuts(start: datetime, step: timedelta, zone: tzinfo) -> Iterator[datetime]:
    """Return full minutes or hours of the zone's clock. Offsets are not always whole hours, and they change."""
    cut = start
    while True:
        local = cut.astimezone(zone)
        into = timedelta(minutes=local.minute if step > timedelta(minutes=1) else 0, seconds=local.second)
        whole = cut - into - timedelta(microseconds=local.microsecond)
        cut = whole + step
        yield cut


def _calendar_cuts(start: datetime, granularity: Granularity, zone: tzinfo) -> Iterator[datetime]:
    day = start.astimezone(zone).date()
    while True:
        day = _next_month(day) if granularity is Granularity.MONTH else day + timedelta(days=1)
        yield _local_midnight(day, zone)


def _next_month(day: date) -> date:
    return day.replace(year=day.year + day.month // 12, month=day.month % 12 + 1, day=1)


def _local_midnight(day: date, zone: tzinfo) -> datetime:
    """Return the beginning of a local day. Where clocks skip midnight, the day begins when they go on."""
    return datetime.combine(day, time(), zone).astimezone(UTC)
