"""What a quota key is entitled to: its quota's rules, and the limit of its tenant's plan or of an override."""

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from coordinator.rebalancing.rules.region_settings import NOTHING_SET, FloorHold, Holds, Setting, Settings, amount
from coordinator.shared_limits.rules import SLOT_MICRO, SharingTerms, terms_of, terms_of_slots
from protocol.identifiers import parse_quota_key, wider_keys
from protocol.limits.document import (
    UNLIMITED,
    AllowanceQuota,
    ConcurrencyQuota,
    Horizon,
    LimitsDocument,
    LimitValue,
    Mode,
    Quota,
    RateQuota,
    extension_of,
    horizon_of,
    limit_of,
    mode_of,
    sharing_of,
    slot_ttl_ms,
)
from protocol.limits.fair_shares import Member
from protocol.limits.rates import MAX_RATE_MICRO, Sharing, parse_rate
from protocol.outcomes import GrantRefusal
from protocol.periods import Calendar, Period, calendar_of


class RegionShare(NamedTuple):
    status: str
    weight: int

    @property
    def is_active(self) -> bool:
        return self.status == "active"


class Catalogue(NamedTuple):
    """The limits in force at one moment, as far as some quota keys need them."""

    version: int
    quotas: Mapping[str, Quota]
    default_plan: str | None
    plans: Mapping[str, str]  # of the tenants in question
    regions: Mapping[str, RegionShare]
    overrides: Mapping[str, LimitValue] = MappingProxyType({})  # in force now, and relevant for the keys in question
    block_version: int = 0
    settings: Settings = MappingProxyType({})  # all settings
    began_at: Mapping[str, datetime] = MappingProxyType({})  # of the subscriptions of the tenants in question
    written: Mapping[Calendar, tuple[Period, ...]] = MappingProxyType(
        {}
    )  # stored periods of zones whose rules may change
    holds: Holds = MappingProxyType({})  # all floors that end by themselves

    @property
    def active(self) -> list[RegionShare]:
        return [region for region in self.regions.values() if region.is_active]

    def decides_like(self, other: "Catalogue") -> bool:
        """Compare all but the version numbers: most changes are about other tenants and other quotas."""
        return self._replace(version=0, block_version=0) == other._replace(version=0, block_version=0)

    def settings_of(self, quota_key: str) -> dict[str, Setting]:
        """Return the settings by region. Each setting is taken from the narrowest key that has it."""
        found: dict[str, Setting] = {}
        for key in reversed(wider_keys(quota_key)) if self.settings else ():
            for region, setting in self.settings.get(key, {}).items():
                found[region] = setting.beside(found.get(region, NOTHING_SET))
        return found

    def hold_of(self, quota_key: str, period: str, region: str) -> FloorHold | None:
        """Return what is kept for a region in a period until a time, if there is such a hold."""
        hold = self.holds.get(quota_key, {}).get(region)
        return hold if hold is not None and hold.period == period else None

    def weights_of(self, quota_key: str) -> dict[str, int]:
        """Return the weights of active regions: the setting for the quota, else the region's own weight."""
        settings = self.settings_of(quota_key)
        weights = {name: settings.get(name, NOTHING_SET).weight for name in self.regions if self.is_active(name)}
        return {name: self.regions[name].weight if weight is None else weight for name, weight in weights.items()}

    def mode_of(self, quota_key: str) -> Mode:
        return mode_of(self.spec_of(quota_key))

    def spec_of(self, quota_key: str) -> Quota | None:
        return self.quotas.get(parse_quota_key(quota_key)[0])

    def allowance_of(self, quota_key: str) -> AllowanceQuota | None:
        """Return the quota of the key, or None if there is no such quota or it is no allowance."""
        spec = self.spec_of(quota_key)
        return spec if isinstance(spec, AllowanceQuota) else None

    def is_active(self, region: str) -> bool:
        return region in self.regions and self.regions[region].is_active

    def must_return(self, region: str) -> bool:
        """Return whether the region returns its units and is granted nothing: it is draining, or down."""
        return region in self.regions and not self.regions[region].is_active


class Entitlement(NamedTuple):
    """An allowance of which leases may be granted."""

    calendar: Calendar
    limit: int
    horizon: Horizon
    is_overridden: bool = False  # the override may have ended when the next period begins
    written: tuple[Period, ...] = ()  # the newest stored periods of the calendar
    extension: int = 0  # units that may be admitted beyond the limit
    mode: Mode = Mode.LEASED


def quotas_of(document: LimitsDocument) -> dict[str, Quota]:
    return {quota.name: quota for quota in document.quotas}


def tenant_of(quota_key: str) -> str | None:
    return parse_quota_key(quota_key)[1].get("tenant")


def entitlement(catalogue: Catalogue, quota_key: str) -> Entitlement | GrantRefusal:
    spec = catalogue.spec_of(quota_key)
    if spec is None:
        return GrantRefusal.UNKNOWN_QUOTA
    if not isinstance(spec, AllowanceQuota):
        return GrantRefusal.NOT_LEASED
    limit = limit_of_key(catalogue, spec, quota_key)
    if not isinstance(limit, int):
        return GrantRefusal.NO_LIMIT
    is_overridden = override_of_key(catalogue, quota_key) is not None
    calendar = calendar_of_key(catalogue.began_at, spec, quota_key)
    written = catalogue.written.get(calendar, ())
    return Entitlement(calendar, limit, horizon_of(spec), is_overridden, written, extension_of(spec), spec.mode)


def calendar_of_key(began_at: Mapping[str, datetime], spec: AllowanceQuota, quota_key: str) -> Calendar:
    """Return the calendar of a key. `began_at` has the subscriptions of the tenants in question."""
    return calendar_of(spec, began_at.get(tenant_of(quota_key) or ""))


def rate_terms(catalogue: Catalogue, quota_key: str) -> SharingTerms | GrantRefusal:
    """Return the terms of a rate that is shared by demand: its limit, its regions, their weights and bounds."""
    spec = catalogue.spec_of(quota_key)
    if spec is None:
        return GrantRefusal.UNKNOWN_QUOTA
    if not isinstance(spec, RateQuota) or sharing_of(spec) is Sharing.REGIONAL:
        return GrantRefusal.NOT_LEASED
    limit = limit_of_key(catalogue, spec, quota_key)
    if limit is None:
        return GrantRefusal.NO_LIMIT
    if limit == UNLIMITED:
        return GrantRefusal.NOT_LEASED
    rate = parse_rate(limit, spec.algorithm)
    if rate.is_slow:
        return GrantRefusal.NOT_LEASED
    return terms_of(int(rate.rate_micro), sharing_of(spec), *_who_shares(catalogue, spec, quota_key), rate.burst)


def slot_terms(catalogue: Catalogue, quota_key: str) -> SharingTerms | GrantRefusal:
    """Return the terms of slots that are shared by demand."""
    spec = catalogue.spec_of(quota_key)
    if spec is None:
        return GrantRefusal.UNKNOWN_QUOTA
    if not isinstance(spec, ConcurrencyQuota) or sharing_of(spec) is Sharing.REGIONAL:
        return GrantRefusal.NOT_LEASED
    limit = limit_of_key(catalogue, spec, quota_key)
    if not isinstance(limit, int):
        return GrantRefusal.NO_LIMIT
    return terms_of_slots(limit, slot_ttl_ms(spec), *_who_shares(catalogue, spec, quota_key))


def _who_shares(catalogue: Catalogue, spec: Quota, quota_key: str) -> tuple[dict[str, Member], dict[str, int]]:
    """Return the active regions with their settings, and the weights that their base shares are computed from."""
    settings, weights = catalogue.settings_of(quota_key), catalogue.weights_of(quota_key)
    members = {name: _member(spec, weight, settings.get(name, NOTHING_SET)) for name, weight in weights.items()}
    return members, {name: catalogue.regions[name].weight for name in weights}


def _member(spec: Quota, weight: int, setting: Setting) -> Member:
    micro = SLOT_MICRO if isinstance(spec, ConcurrencyQuota) else 1
    floor_micro = 0 if setting.floor is None else amount(spec, setting.floor) * micro
    ceiling_micro = MAX_RATE_MICRO if setting.ceiling is None else amount(spec, setting.ceiling) * micro
    return Member(weight, floor_micro, ceiling_micro)


def limit_of_key(catalogue: Catalogue, spec: Quota, quota_key: str) -> LimitValue | None:
    """Return the limit of the narrowest override, else that of the plan."""
    overridden = override_of_key(catalogue, quota_key)
    return limit_of(spec, plan_of_key(catalogue, quota_key)) if overridden is None else catalogue.overrides[overridden]


def override_of_key(catalogue: Catalogue, quota_key: str) -> str | None:
    """Return the key of the override that applies, if there is one."""
    if not catalogue.overrides:
        return None
    return next((key for key in wider_keys(quota_key) if key in catalogue.overrides), None)


def plan_of_key(catalogue: Catalogue, quota_key: str) -> str | None:
    counted_by = parse_quota_key(quota_key)[1]
    if "plan" in counted_by:
        return counted_by["plan"] or None
    tenant = counted_by.get("tenant")
    subscribed = catalogue.plans.get(tenant) if tenant is not None else None
    return subscribed or catalogue.default_plan
