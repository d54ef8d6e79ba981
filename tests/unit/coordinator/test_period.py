"""Periods of the calendar: their ids, their first and last minutes, and no moment without one."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain.period import minute_of, moment_of, next_period, period_at, period_of
from protocol.policy import PeriodKind

moments = st.datetimes(datetime(1971, 1, 1), datetime(2999, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
kinds = st.sampled_from(PeriodKind)


@given(kinds, moments)
def test_every_moment_is_in_its_period(kind: PeriodKind, moment: datetime) -> None:
    period = period_at(kind, moment)
    assert period.starts_at <= moment < period.ends_at
    assert period_of(period.id) == period
    assert period_at(kind, period.starts_at) == period
    assert period_at(kind, period.ends_at - timedelta(microseconds=1)) == period


@given(kinds, moments)
def test_the_next_one_begins_where_this_one_ends(kind: PeriodKind, moment: datetime) -> None:
    period = period_at(kind, moment)
    following = next_period(period)
    assert following.starts_at == period.ends_at
    assert following.first_minute == period.last_minute + 1


@pytest.mark.parametrize(
    ("kind", "moment", "period_id", "ends_at"),
    [
        (PeriodKind.HOUR, datetime(2026, 11, 18, 9, 59, 59, tzinfo=UTC), "2026-11-18T09", "2026-11-18T10:00"),
        (PeriodKind.DAY, datetime(2024, 2, 28, 23, 59, tzinfo=UTC), "2024-02-28", "2024-02-29T00:00"),
        (PeriodKind.DAY, datetime(2024, 2, 29, tzinfo=UTC), "2024-02-29", "2024-03-01T00:00"),
        (PeriodKind.MONTH, datetime(2024, 2, 29, 12, tzinfo=UTC), "2024-02", "2024-03-01T00:00"),
        (PeriodKind.MONTH, datetime(2026, 1, 31, 23, tzinfo=UTC), "2026-01", "2026-02-01T00:00"),
        (PeriodKind.MONTH, datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), "2026-12", "2027-01-01T00:00"),
        # Another zone's midnight is not UTC's.
        (PeriodKind.MONTH, datetime(2026, 12, 1, tzinfo=timezone(timedelta(hours=1))), "2026-11", "2026-12-01T00:00"),
    ],
)
def test_boundaries(kind: PeriodKind, moment: datetime, period_id: str, ends_at: str) -> None:
    period = period_at(kind, moment)
    assert (period.id, period.ends_at) == (period_id, datetime.fromisoformat(ends_at).replace(tzinfo=UTC))


@pytest.mark.parametrize(
    "text", ["", "2026", "2026-1", "2026-13", "2026-00", "2026-11-31", "2026-11-18T24", "2026-11-18T9", "26-11", "x"]
)
def test_what_names_no_period(text: str) -> None:
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
