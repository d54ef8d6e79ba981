"""Which reports of usage are booked at once, and which wait in quarantine for people.

Work that was done is booked, late and above a grant as well. But a report comes from outside, and what its quota, its
calendar or its limit cannot make possible must not move the books of others:

    unknown_quota        never granted, and no allowance of the limits document: there is no pool to book it in
    implausible_period   never granted, and no period of the quota's calendar between the time allowed for late usage
                         and the period after the next one: a region must not invent periods
    implausible          more usage beyond its grants than `ClaimBounds` allow one region of one quota in one period

The first two are kept as rows of the quarantine table and make no period, pool or lease. The third puts its lease in
quarantine. People end all three by an approved resolution.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import NamedTuple

from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.settlement import QuarantineReason
from coordinator.limits.rules.entitlement import Catalogue, calendar_of_key
from protocol.limits.document import AllowanceQuota
from protocol.periods import next_period, period_at, period_of
from protocol.units import MAX_UNITS

PERIODS_AHEAD = 2


class ClaimBounds(NamedTuple):
    """The usage beyond its grants that one region may report of one quota in one period without people's approval."""

    limit_factor: int = 10
    floor_units: int = 1_000_000

    def most_overage(self, limit: int) -> int:
        return min(MAX_UNITS, self.limit_factor * limit + self.floor_units)


def reason_to_hold(
    catalogue: Catalogue, key: Key, known_periods: Collection[str], late_days: int, now: datetime
) -> QuarantineReason | None:
    """Return why usage of a quota key without a pool is not booked, or None if it is."""
    spec = catalogue.allowance_of(key.quota)
    if spec is None:
        return QuarantineReason.UNKNOWN_QUOTA
    if key.period in known_periods or _is_of_its_calendar(catalogue, spec, key, late_days, now):
        return None
    return QuarantineReason.IMPLAUSIBLE_PERIOD


def _is_of_its_calendar(catalogue: Catalogue, spec: AllowanceQuota, key: Key, late_days: int, now: datetime) -> bool:
    period = period_of(key.period)
    calendar = calendar_of_key(catalogue.began_at, spec, key.quota)
    if period.calendar != calendar or period.ends_at < now - timedelta(days=late_days):
        return False
    written = catalogue.written.get(calendar, ())
    last = period_at(calendar, now, written)
    for _ in range(PERIODS_AHEAD):
        last = next_period(last, written)
    return period.starts_at <= last.starts_at and period == period_at(calendar, period.starts_at, written)
