"""Late usage of a closed period goes to the correction that is open for it."""

from datetime import timedelta

from coordinator.exchange.rules.balances import Correction, Key, Pool
from coordinator.exchange.rules.posting import Report
from coordinator.exchange.rules.settlement import Quarantined, QuarantineReason
from coordinator.periods.rules.closing import Late, settle_late
from protocol.lease import LeaseState
from tests.unit.coordinator.exchange.test_balances import KEY, NOW, frozen_lease, new_lease

LATE_DAYS = 30


def test_later_reports_for_a_quarantined_correction_wait_for_people_too() -> None:
    """Quarantine the report even if it is consistent by itself: an earlier one was not, and only the totals show how it
    ends.
    """
    lease, open_key = new_lease("us-east", 1, LeaseState.CLOSED), Key(KEY.quota, "2026-12")
    lease.granted = lease.suspense_carried_out = 10
    pool = Pool(open_key, suspense_carried_in=10, suspense_carried=10)
    book = Correction(open_key, 1, KEY.period, "us-east", suspense_carried_in=10, suspense_carried=10, quarantined=True)
    late = Late(lease, NOW, (), book, pool, Pool(KEY, funded=10, suspense_carried_out=10), returns_count=True)
    frozen, report = frozen_lease(10, 0, consumed=4, returned=0, units=4), Report("us-east", 1, 0, 1)

    kept = settle_late(report, [frozen], {KEY: late}, LATE_DAYS, NOW + timedelta(days=1))
    assert kept == [Quarantined(KEY, QuarantineReason.QUARANTINED_BEFORE, frozen)]
    assert not report.transfers
    assert (book.suspense_carried, book.consumed, book.region_consumed) == (10, 0, 4)
    assert book.quarantined
