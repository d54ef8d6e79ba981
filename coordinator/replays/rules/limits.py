"""What a document admits for one quota key: its limit for the customer, as a capacity.

Plans, overrides, blocks and weights are those of now. Overrides are found for hashed keys by their hashes.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from coordinator.limits.rules.entitlement import Catalogue, RegionShare, override_of_key
from coordinator.replays.rules.bounds import Capacity
from coordinator.replays.rules.matching import Met, UnknownReason
from protocol.limits.document import (
    UNLIMITED,
    AllowanceQuota,
    LimitsDocument,
    LimitValue,
    Mode,
    RateQuota,
    extension_of,
    limit_of,
    sharing_of,
)
from protocol.limits.rates import Rate, Sharing, base_rate, parse_rate
from protocol.periods import calendar_of, period_at


class Limited(NamedTuple):
    """A counter of its own: of a key and, where they are apart, of a region or a period."""

    counter: str
    capacity: Capacity
    is_partial: bool = False  # a period that began before the traffic that is known


class Circumstances(NamedTuple):
    """The plans, overrides and weights that are in force beside the document."""

    plans: Mapping[str, str]
    began_at: Mapping[str, datetime]  # of subscriptions
    overrides: Mapping[str, LimitValue]  # by key, and by hashed key
    regions: Mapping[str, RegionShare]


class Limits:
    """The limits of one document."""

    def __init__(self, document: LimitsDocument, around: Circumstances, start: datetime, end: datetime) -> None:
        quotas = {quota.name: quota for quota in document.quotas}
        self._catalogue = Catalogue(0, quotas, document.default_plan, around.plans, around.regions, around.overrides)
        self._around = around
        self._start, self._end = start, end
        self._parsed: dict[tuple[str, LimitValue], Rate] = {}
        self._total_weight = sum(region.weight for region in self._catalogue.active) or 1

    def of(self, met: Met, tenant: str, region: str, at: datetime) -> Limited | UnknownReason | None:
        """Return the counter of a check, why there is none, or None for what has no limit."""
        quota, value = met.policy.quota, self._value(met, tenant)
        if value == UNLIMITED:
            return None
        if isinstance(quota, AllowanceQuota):
            return self._allowance(quota, met.key, value, tenant, region, at)
        assert isinstance(quota, RateQuota)
        return self._rate(quota, met.key, value, region)

    def _value(self, met: Met, tenant: str) -> LimitValue | None:
        overridden = override_of_key(self._catalogue, met.key)
        if overridden is not None:
            return self._around.overrides[overridden]
        return limit_of(met.policy.quota, self._around.plans.get(tenant, self._catalogue.default_plan))

    def _rate(self, quota: RateQuota, key: str, value: LimitValue | None, region: str) -> Limited | UnknownReason:
        if value is None:
            return Limited(key, Capacity(0, 0))
        rate, counter = self._parsed.get((quota.name, value)), key
        if rate is None:  # at most one for each limit of the document and each override
            rate = self._parsed[quota.name, value] = parse_rate(value, quota.algorithm)
        if sharing_of(quota) is Sharing.REGIONAL and len(self._catalogue.active) > 1:
            weight = self._catalogue.regions[region].weight if self._catalogue.is_active(region) else 0
            if not weight:
                return UnknownReason.INACTIVE_REGION
            rate, counter = base_rate(rate, weight, self._total_weight), f"{key} {region}"
        return Limited(counter, Capacity(rate.rate_micro / 1_000_000, rate.burst))

    def _allowance(
        self, quota: AllowanceQuota, key: str, value: LimitValue | None, tenant: str, region: str, at: datetime
    ) -> Limited:
        period = period_at(calendar_of(quota, self._around.began_at.get(tenant)), at)
        limit = (value if isinstance(value, int) else 0) + extension_of(quota)
        counter = f"{key} {period.id}" + (f" {region}" if quota.mode is Mode.REGIONAL else "")
        return Limited(counter, Capacity(0, limit), period.starts_at < self._start)
