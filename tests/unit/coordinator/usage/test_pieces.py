"""A range of time is divided at the boundaries of a calendar, on which every sum of finance depends."""

from datetime import UTC, datetime, timedelta, tzinfo
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.usage.rules.usage import MAX_BUCKETS, Granularity, boundaries, month_around, parse_instant
from protocol.zones import zone_of

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "Asia/Beirut")
HOUR = timedelta(hours=1)


def instant(text: str, zone: str = "UTC") -> datetime:
    return parse_instant(text, zone_of(zone))


def pieces(start: str, end: str, granularity: Granularity | None, zone: str = "UTC") -> list[datetime]:
    return boundaries(instant(start, zone), instant(end, zone), granularity, zone_of(zone))


def test_without_granularity_the_whole_is_one_piece() -> None:
    assert pieces("2026-11-01", "2026-12-01", None) == [instant("2026-11-01"), instant("2026-12-01")]


def test_pieces_begin_where_the_range_does_and_go_on_where_the_calendar_says() -> None:
    cuts = pieces("2026-11-18T09:10:30Z", "2026-11-18T11:20:00Z", Granularity.HOUR)
    assert [f"{cut:%H:%M:%S}" for cut in cuts] == ["09:10:30", "10:00:00", "11:00:00", "11:20:00"]


@pytest.mark.parametrize(
    ("day", "after", "hours"),
    [("2026-10-25", "2026-10-26", 25), ("2026-03-29", "2026-03-30", 23), ("2026-11-18", "2026-11-19", 24)],
)
def test_a_day_has_as_many_hours_as_its_clocks_say(day: str, after: str, hours: int) -> None:
    by_hour = pieces(day, after, Granularity.HOUR, "Europe/Berlin")
    assert len(by_hour) == hours + 1
    assert pieces(day, after, Granularity.DAY, "Europe/Berlin") == [by_hour[0], by_hour[-1]]
    assert by_hour[-1] - by_hour[0] == hours * HOUR


def test_the_hour_that_happens_twice_is_two_pieces() -> None:
    berlin = zone_of("Europe/Berlin")
    cuts = pieces("2026-10-25", "2026-10-26", Granularity.HOUR, "Europe/Berlin")
    assert [cut.astimezone(berlin).hour for cut in cuts[:5]] == [0, 1, 2, 2, 3]


def test_half_an_hour_of_summer_time_makes_one_short_piece() -> None:
    cuts = pieces("2026-04-05", "2026-04-06", Granularity.HOUR, "Australia/Lord_Howe")
    assert sorted({after - before for before, after in pairwise(cuts)}) == [HOUR / 2, HOUR]


def test_a_day_without_midnight_begins_when_clocks_go_on() -> None:
    cuts = pieces("2026-03-28", "2026-03-30", Granularity.DAY, "Asia/Beirut")
    assert [after - before for before, after in pairwise(cuts)] == [24 * HOUR, 23 * HOUR]


def test_a_skipped_day_is_no_piece() -> None:
    cuts = pieces("2011-12-29", "2012-01-01", Granularity.DAY, "Pacific/Apia")
    assert len(cuts) == 3  # the 29th and the 31st


def test_months_are_those_of_the_zone() -> None:
    cuts = pieces("2026-11-30T23:30:00Z", "2027-01-31T23:30:00Z", Granularity.MONTH, "Europe/Berlin")
    assert [f"{cut:%m-%dT%H:%M}" for cut in cuts] == ["11-30T23:30", "12-31T23:00", "01-31T23:00", "01-31T23:30"]


@given(
    start=st.integers(0, 47 * 365 * 24 * 60).map(lambda minutes: instant("1990-01-01") + timedelta(minutes=minutes)),
    length=st.timedeltas(timedelta(seconds=1), timedelta(days=5)),
    granularity=st.sampled_from(Granularity),
    zone=st.sampled_from(ZONES).map(zone_of),
)
def test_pieces_are_the_range_without_gap_or_overlap(
    start: datetime, length: timedelta, granularity: Granularity, zone: tzinfo
) -> None:
    cuts = boundaries(start, start + length, granularity, zone)
    assert (cuts[0], cuts[-1]) == (start, start + length)
    assert all(before < after for before, after in pairwise(cuts))
    for cut in cuts[1:-1]:
        local, before = cut.astimezone(zone), (cut - timedelta(microseconds=1)).astimezone(zone)
        assert (local.second, local.microsecond) == (0, 0)
        if granularity is Granularity.DAY:
            assert local.date() != before.date()
        if granularity is Granularity.MONTH:
            assert local.month != before.month


def test_a_range_with_too_many_pieces_is_refused() -> None:
    assert len(pieces("2026-01-01", "2026-02-01", Granularity.MINUTE)) == 31 * 24 * 60 + 1
    with pytest.raises(ValueError, match=str(MAX_BUCKETS)):
        pieces("2026-01-01", "2026-03-01", Granularity.MINUTE)
    with pytest.raises(ValueError, match="coarser"):
        pieces("1900-01-01", "9000-01-01", Granularity.DAY)


def test_the_month_around_now_is_the_month_of_the_zone() -> None:
    now = datetime(2026, 11, 30, 23, 30, tzinfo=UTC)
    assert month_around(now, zone_of("UTC")) == (instant("2026-11-01"), instant("2026-12-01"))
    assert month_around(now, zone_of("Europe/Berlin"))[0] == instant("2026-12-01", "Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-11-18", "2026-11-18T00:00:00+00:00"),
        ("2026-11-18T09:30:00Z", "2026-11-18T09:30:00+00:00"),
        ("2026-11-18t09:30:00.5z", "2026-11-18T09:30:00.500000+00:00"),
        ("2026-11-18T09:30:00+05:45", "2026-11-18T03:45:00+00:00"),
    ],
)
def test_rfc_3339_times_are_parsed(text: str, utc: str) -> None:
    assert instant(text).isoformat() == utc


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026",
        "2026-11",
        "20261118",
        "2026-11-18T09:30:00",  # without a time zone
        "2026-11-18T09:30:00 01:00",  # a + that became a space
        "2026-11-18T09:30Z",
        "2026-02-30",
        "2026-11-18T24:30:00Z",
        "2026-11-18T09:30:60Z",
        "2026-11-18T09:30:00+99:00",
        "2026-11-18\n",
        "0001-01-01T00:00:00+23:00",
        "9999-12-31",
        "\u0662\u0660\u0662\u0666-11-18",
        "1" * 10_000,
    ],
)
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        instant(text)


@pytest.mark.parametrize("text", ["", "Mars/Olympus", "Europe", "../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000])
def test_other_zones_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        zone_of(text)
