"""Bound the number of batches that are kept as evidence that a ledger lost data."""

from datetime import timedelta

from coordinator.epochs.rules.lost_ledger import KEPT_AT_ONCE, may_keep_another
from tests.integration.coordinator.fixtures import NOON


def test_a_new_number_every_minute_for_half_a_year_needs_few_rows() -> None:
    kept = [NOON] * KEPT_AT_ONCE
    for minute in range(180 * 24 * 60):
        now = NOON + timedelta(minutes=minute)
        if may_keep_another(kept, now):
            kept.append(now)
    assert KEPT_AT_ONCE + 10 < len(kept) < KEPT_AT_ONCE + 20


def test_another_number_is_kept_within_a_year_however_many_there_are() -> None:
    kept = [NOON] * 5_000
    assert not may_keep_another(kept, NOON + timedelta(days=180))
    assert may_keep_another(kept, NOON + timedelta(days=365))
