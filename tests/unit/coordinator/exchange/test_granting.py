"""Check when the next period's lease is granted ahead, and when a low pool recalls idle units."""

from datetime import UTC, datetime, timedelta

import pytest

from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.signals import has_fallen
from protocol.limits.document import PeriodKind
from protocol.periods import Calendar, period_at

NOW = datetime(2026, 11, 18, 9, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "lease_ms", "lead"),
    [
        (PeriodKind.MONTH, 60_000, timedelta(minutes=1)),
        (PeriodKind.HOUR, 60_000, timedelta(minutes=1)),
        (PeriodKind.HOUR, 86_400_000, timedelta(minutes=15)),  # never longer than a quarter of the period
    ],
)
def test_a_lease_is_given_ahead_for_as_long_as_one_lasts(kind: PeriodKind, lease_ms: int, lead: timedelta) -> None:
    terms, period = LeaseTerms(lease_ms), period_at(Calendar(kind), NOW)
    assert terms.is_near_its_end(period, period.ends_at - lead)
    assert not terms.is_near_its_end(period, period.ends_at - lead - timedelta(microseconds=1))


@pytest.mark.parametrize(
    ("was", "units", "fell"),
    [
        (1000, 251, False),
        (1000, 250, False),
        (251, 249, True),
        (250, 249, True),
        (249, 63, False),
        (249, 61, True),  # a sixteenth
        (1000, 1, True),
        (249, 260, False),
        (1, 0, False),  # an empty pool has a rule of its own
        (0, 0, False),
    ],
)
def test_a_pool_falls_through_a_quarter_and_a_quarter_of_that(was: int, units: int, fell: bool) -> None:
    assert has_fallen(was, units, 1000) is fell
