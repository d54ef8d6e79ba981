"""Periods of calendars cover time without gap or overlap, whatever clocks do, and have complete names."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from importlib import resources
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import periods
from protocol.limits.document import AllowanceQuota, PeriodKind
from protocol.periods import (
    LONGEST_ID,
    Calendar,
    Period,
    calendar_of,
    minute_of,
    moment_of,
    next_period,
    period_at,
    period_named_outside,
    period_of,
)
from protocol.zones import why_not_for_periods, zone_of

# Offsets of half and quarter hours; changes at midnight, by half an hour and of the date; and no changes.
ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Sao_Paulo",
    "America/Caracas",
    "America/St_Johns",
    "Asia/Kolkata",
    "Asia/Kathmandu",
    "Asia/Beirut",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Pacific/Chatham",
    "Africa/Casablanca",
    "America/Argentina/Buenos_Aires",
)
HOUR, MICROSECOND = timedelta(hours=1), timedelta(microseconds=1)


def transitions(zone: tzinfo, first: int, last: int) -> Iterator[datetime]:
    """Yield the half days within which a zone's clock changes, where mistakes are likely."""
    hour = datetime(first, 1, 1, tzinfo=UTC)
    offset = hour.astimezone(zone).utcoffset()
    while hour.year <= last:
        following = hour + 12 * HOUR
        if (following_offset := following.astimezone(zone).utcoffset()) != offset:
            yield hour
        hour, offset = following, following_offset


CHANGES = [each for name in ZONES for each in transitions(zone_of(name), 2005, 2027)]

moments = st.datetimes(datetime(1973, 1, 1), datetime(2999, 1, 1), timezones=st.just(UTC)) | st.builds(  # noqa: DTZ001
    lambda change, minutes: change + timedelta(minutes=minutes), st.sampled_from(CHANGES), st.integers(-2000, 2000)
)
calendars = st.builds(
    lambda kind, zone, day: Calendar(kind, zone, day if kind is PeriodKind.ANNIVERSARY else 1),
    st.sampled_from(PeriodKind),
    st.sampled_from(ZONES),
    st.integers(1, 31),
)


@given(calendars, moments)
def test_every_moment_is_in_its_period(calendar: Calendar, moment: datetime) -> None:
    period = period_at(calendar, moment)
    assert period.holds(moment)
    assert period_at(calendar, period.starts_at) == period
    assert period_at(calendar, period.ends_at - MICROSECOND) == period


@given(calendars, moments)
def test_the_next_one_begins_where_this_one_ends(calendar: Calendar, moment: datetime) -> None:
    period = period_at(calendar, moment)
    following = next_period(period)
    assert following.starts_at == period.ends_at
    assert following.first_minute == period.last_minute + 1
    assert period_at(calendar, period.starts_at - MICROSECOND).ends_at == period.starts_at
    assert following.id != period.id


@given(calendars, moments, moments)
def test_a_later_moment_is_in_no_earlier_period(calendar: Calendar, one: datetime, other: datetime) -> None:
    earlier, later = (period_at(calendar, moment) for moment in sorted((one, other)))
    assert earlier == later or earlier.ends_at <= later.starts_at
    assert (earlier.id == later.id) == (earlier == later)


@given(calendars, moments)
def test_a_period_is_restored_from_its_name(calendar: Calendar, moment: datetime) -> None:
    period = period_at(calendar, moment)
    assert period_of(period.id) == period
    assert len(period.id) <= 54
    assert set(period.id) <= set("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz:_-")


@given(calendars, moments)
def test_a_period_begins_at_midnight_of_its_zone_or_at_a_full_hour(calendar: Calendar, moment: datetime) -> None:
    period, zone = period_at(calendar, moment), zone_of(calendar.zone)
    begin, before = (each.astimezone(zone) for each in (period.starts_at, period.starts_at - MICROSECOND))
    if calendar.kind is PeriodKind.HOUR:
        assert (begin.minute, begin.second, begin.microsecond) == (0, 0, 0)
    else:
        assert begin.date() > before.date() or begin.hour == 0  # clocks that skip or repeat midnight
    if calendar.kind is PeriodKind.ANNIVERSARY and begin.date().day != calendar.day:
        is_last = (begin.date() + timedelta(days=1)).day == 1
        assert is_last or before.date() < begin.date() - timedelta(days=1)  # a skipped date: Samoa in 2011
        assert begin.date().day < calendar.day or not is_last


@pytest.mark.parametrize(
    ("kind", "moment", "period_id", "ends_at"),
    [
        (PeriodKind.HOUR, datetime(2026, 11, 18, 9, 59, 59, tzinfo=UTC), "2026-11-18T09", "2026-11-18T10:00"),
        (PeriodKind.DAY, datetime(2024, 2, 28, 23, 59, tzinfo=UTC), "2024-02-28", "2024-02-29T00:00"),
        (PeriodKind.DAY, datetime(2024, 2, 29, tzinfo=UTC), "2024-02-29", "2024-03-01T00:00"),
        (PeriodKind.MONTH, datetime(2024, 2, 29, 12, tzinfo=UTC), "2024-02", "2024-03-01T00:00"),
        (PeriodKind.MONTH, datetime(2026, 1, 31, 23, tzinfo=UTC), "2026-01", "2026-02-01T00:00"),
        (PeriodKind.MONTH, datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), "2026-12", "2027-01-01T00:00"),
        # Midnight of another zone is not that of UTC.
        (PeriodKind.MONTH, datetime(2026, 12, 1, tzinfo=timezone(timedelta(hours=1))), "2026-11", "2026-12-01T00:00"),
    ],
)
def test_boundaries(kind: PeriodKind, moment: datetime, period_id: str, ends_at: str) -> None:
    period = period_at(Calendar(kind), moment)
    assert (period.id, period.ends_at) == (period_id, datetime.fromisoformat(ends_at).replace(tzinfo=UTC))


@pytest.mark.parametrize(
    ("kind", "zone", "moment", "period_id", "minutes"),
    [
        ("day", "Europe/Berlin", "2026-03-29T10:00", "2026-03-29_Europe:Berlin_60_120", 23 * 60),
        ("day", "Europe/Berlin", "2026-10-25T10:00", "2026-10-25_Europe:Berlin_120_60", 25 * 60),
        ("day", "Europe/Berlin", "2026-10-25T23:00", "2026-10-26_Europe:Berlin_60", 24 * 60),
        ("month", "Asia/Kolkata", "2026-01-31T18:30", "2026-02_Asia:Kolkata_330", 28 * 1440),
        # Two o'clock occurs twice, and half a year later is skipped.
        ("hour", "Europe/Berlin", "2026-10-25T00:30", "2026-10-25T02_Europe:Berlin_120", 60),
        ("hour", "Europe/Berlin", "2026-10-25T01:30", "2026-10-25T02_Europe:Berlin_60", 60),
        ("hour", "Europe/Berlin", "2026-03-29T00:30", "2026-03-29T01_Europe:Berlin_60", 60),
        ("hour", "Europe/Berlin", "2026-03-29T01:30", "2026-03-29T03_Europe:Berlin_120", 60),
        # Clocks change by half an hour, which lengthens the hour of the change.
        ("hour", "Australia/Lord_Howe", "2026-04-04T15:10", "2026-04-05T01_Australia:Lord_Howe_660_630", 90),
        # Midnight is skipped, and the day begins at one.
        ("day", "America/Sao_Paulo", "2018-11-04T03:00", "2018-11-04_America:Sao_Paulo_-180_-120", 23 * 60),
        # Samoa skipped 30 December 2011.
        ("day", "Pacific/Apia", "2011-12-30T10:00", "2011-12-31_Pacific:Apia_840", 24 * 60),
    ],
)
def test_clocks_that_change(kind: str, zone: str, moment: str, period_id: str, minutes: int) -> None:
    period = period_at(Calendar(PeriodKind(kind), zone), datetime.fromisoformat(moment).replace(tzinfo=UTC))
    assert (period.id, (period.ends_at - period.starts_at) // timedelta(minutes=1)) == (period_id, minutes)


@pytest.mark.parametrize(
    ("day", "begins"),
    [
        (29, ["2025-12-29", "2026-01-29", "2026-02-28", "2026-03-29", "2026-04-29"]),
        (30, ["2025-12-30", "2026-01-30", "2026-02-28", "2026-03-30", "2026-04-30"]),
        (31, ["2025-12-31", "2026-01-31", "2026-02-28", "2026-03-31", "2026-04-30"]),
    ],
)
def test_an_anniversary_that_a_month_lacks_is_its_last_day(day: int, begins: list[str]) -> None:
    zone = zone_of("Europe/Berlin")
    period = period_at(Calendar(PeriodKind.ANNIVERSARY, "Europe/Berlin", day), datetime(2026, 1, 10, tzinfo=UTC))
    found: list[date] = []
    for _ in begins:
        found.append(period.starts_at.astimezone(zone).date())
        period = next_period(period)
    assert found == [date.fromisoformat(each) for each in begins]


def test_an_anniversary_is_on_the_day_on_which_the_subscription_began_in_its_zone() -> None:
    began_at = datetime(2026, 1, 30, 23, 30, tzinfo=UTC)
    quota = AllowanceQuota(name="exports", limit=1, period=PeriodKind.ANNIVERSARY, time_zone="Europe/Berlin")
    assert calendar_of(quota, began_at) == Calendar(PeriodKind.ANNIVERSARY, "Europe/Berlin", 31)
    assert calendar_of(quota, None) == Calendar(PeriodKind.MONTH, "Europe/Berlin")


# --- rules that change ------------------------------------------------------------------------------------------------

BERLIN = Calendar(PeriodKind.MONTH, "Europe/Berlin")
shifts = st.integers(-240, 240).map(lambda quarters: timedelta(minutes=quarters))


def written_until(period: Period, shift: timedelta) -> Period:
    """Return a period written under other time zone rules, which ends earlier or later than by today's."""
    return periods._between(period.calendar, period.starts_at, period.ends_at + shift)


@given(calendars.filter(lambda each: each.kind is not PeriodKind.HOUR and each.zone != "UTC"), moments, shifts)
def test_written_periods_keep_their_bounds_and_do_not_overlap(
    calendar: Calendar, moment: datetime, shift: timedelta
) -> None:
    regular = period_at(calendar, moment)
    written = (written_until(regular, shift),)
    (old,) = written
    assert period_of(old.id) == old
    found, at = [period_at(calendar, old.starts_at, written)], old.ends_at
    for _ in range(3):
        found.append(period_at(calendar, at, written))
        at = found[-1].ends_at
    assert found[0] == old
    assert [each.starts_at for each in found[1:]] == [each.ends_at for each in found[:-1]]
    assert len({each.id for each in found}) == len(found)
    # There is no stub of a few hours with a whole limit of its own; afterwards the rules apply.
    assert found[1].ends_at == next_period(period_at(calendar, regular.ends_at)).starts_at
    assert found[2] == period_at(calendar, found[1].ends_at)


def test_a_period_ends_before_one_that_is_written_ahead() -> None:
    now = period_at(BERLIN, datetime(2026, 11, 18, tzinfo=UTC))
    ahead = periods._between(BERLIN, now.ends_at - HOUR, next_period(now).ends_at)
    assert period_at(BERLIN, datetime(2026, 11, 18, tzinfo=UTC), (ahead,)).ends_at == ahead.starts_at
    assert period_at(BERLIN, now.ends_at - HOUR, (ahead,)) == ahead


def test_periods_written_long_ago_change_nothing() -> None:
    old = written_until(period_at(BERLIN, datetime(2025, 11, 18, tzinfo=UTC)), HOUR)
    now = datetime(2026, 11, 18, tzinfo=UTC)
    assert period_at(BERLIN, now, (old,)) == period_at(BERLIN, now)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", "2026", "2026-1", "2026-13", "2026-00", "2026-11-31", "2026-11-18T24", "2026-11-18T9", "26-11", "x"),
        *("2026-11a31", "2026-03-28a31", "2026-02-28a32", "2026-02-28a5", "2026-02-28a00", "2026-11_Europe:Berlin"),
        *("2026-11_Europe:Berlin_060", "2026-11_Europe:Berlin_60_60", "2026-11_Europe/Berlin_60", "2026-11_UTC_0"),
        *("2026-11-18T09_Europe:Berlin_60_120", "2026-11_Europe:Berlin_-0", "2026-11_Europe:Berlin_9999"),
    ],
)
def test_invalid_names_of_periods_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no period"):
        period_of(text)


@given(st.integers(0, 10**8))
def test_minutes_and_moments(minute: int) -> None:
    assert minute_of(moment_of(minute)) == minute


def test_the_time_that_is_left() -> None:
    period = period_of("2026-11")
    assert period.ends_in_ms(datetime(2026, 11, 30, 23, 59, 59, 500_000, tzinfo=UTC)) == 500
    assert period.ends_in_ms(datetime(2026, 12, 2, tzinfo=UTC)) == 0
    assert period.starts_in_ms(datetime(2026, 10, 31, 23, 59, 59, tzinfo=UTC)) == 1000
    assert period.starts_in_ms(datetime(2026, 11, 2, tzinfo=UTC)) == 0


def test_the_rules_are_those_of_the_package_and_not_of_the_machine() -> None:
    zone = zone_of("Europe/Berlin")
    assert isinstance(zone, ZoneInfo)
    assert "from_file" in repr(zone) or zone is not ZoneInfo("Europe/Berlin")
    assert zone_of("UTC") is UTC


@pytest.mark.parametrize("name", ["Europe", "Nowhere/City", "../etc/passwd", "", "zones", "Europe/Berlin "])
def test_invalid_zones_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="there is no time zone"):
        zone_of(name)


def test_zones_unfit_for_names_of_tables_are_refused() -> None:
    assert why_not_for_periods("America/Argentina/Buenos_Aires") is None
    assert "at most 30" in str(why_not_for_periods("America/Argentina/ComodRivadavia"))
    assert "name a place" in str(why_not_for_periods("Etc/GMT+5"))


# --- names of tables --------------------------------------------------------------------------------------------------


def test_every_period_that_a_quota_can_have_names_a_table_of_its_own() -> None:
    """A table's name has at most 63 bytes; the rest would be cut off, and two periods could share one."""
    zones = resources.files("tzdata").joinpath("zones").read_text().split()
    longest, moment = 0, datetime(2026, 11, 18, 9, tzinfo=UTC)
    for zone in (each for each in zones if why_not_for_periods(each) is None):
        for kind in PeriodKind:
            suffix = "a31" if kind is PeriodKind.ANNIVERSARY else ""
            period = period_at(Calendar(kind, zone, 31 if kind is PeriodKind.ANNIVERSARY else 1), moment)
            assert period_named_outside(period.id) == period
            # At its longest an id has a sign and three digits for each of both offsets.
            longest = max(longest, len(f"{period.label}{suffix}_{zone}_-840_-840"))
    assert longest <= LONGEST_ID == 63 - len("transfer_")


@pytest.mark.parametrize("zone", ["Foo:Bar", "America:Argentina:ComodRivadavia", "America:Argentina:Buenos_Airesxx"])
def test_a_zone_that_no_quota_can_have_names_no_period(zone: str) -> None:
    with pytest.raises(ValueError, match="names no period"):
        period_named_outside(f"2026-10_{zone}_120_60")
