"""The policies that a request meets, and what each of them charges.

The document is compiled once, when it arrives, so a request costs the same under ten policies and under ten thousand:
a route finds its policies by hash and bisection (protocol/limits/route_table.py), the limit of a quota on a plan is
computed once, and the most frequent routes are cached. All caches belong to one bundle and go with it; anything else
that changes a limit (an override that begins or ends) makes new Policies.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeGuard

from msgspec import Struct
from msgspec.structs import replace

from protocol.addresses import Network, parse_network
from protocol.check import NO_COSTS, Hold, RequestExplanation, Unmatched
from protocol.clock import SystemClock
from protocol.decision_log.sampling import DEFAULT_RATE, OTHER_POLICIES, hazard_of
from protocol.identifiers import (
    ESCAPE,
    MAX_QUOTA_KEY_LENGTH,
    name_of_quota,
    parse_quota_key,
    quota_key,
    wider_keys,
)
from protocol.limits.descriptors import DescriptorMapping
from protocol.limits.document import (
    LABEL_PREFIX,
    OTHER_CLASSES,
    UNLIMITED,
    Alignment,
    AllowanceQuota,
    ConcurrencyQuota,
    Costs,
    LimitValue,
    Mode,
    OverrideTerm,
    PeriodKind,
    PolicyBundle,
    PolicySpec,
    Quota,
    RateQuota,
    SharedQuota,
    as_list,
    costs_of,
    envoy_rules_of,
    is_label,
    limit_of,
    limits_of,
    mode_of,
    sharing_of,
    slot_ttl_ms,
)
from protocol.limits.explain import Explainer
from protocol.limits.rates import SLICED, Rate, Sharing, base_rate, base_slots, parse_duration_ms, parse_rate, share_of
from protocol.limits.route_table import Routes
from protocol.limits.routes import RouteNormalizer
from protocol.limits.subjects import (
    NO_CLASS,
    NO_PLAN,
    PLAIN_FIELDS,
    InvalidAddress,
    InvalidSubjectValue,
    RouteClasses,
    check_values,
    has_labels,
    is_within,
    usage_dimensions,
    value_of,
)
from protocol.limits.windows import DAY_MS, CalendarWindow, calendar_window
from protocol.units import MAX_UNITS
from regional_agent.admission.key_states import KeyState, KeyStates
from regional_agent.admission.rules.generational_cache import GenerationalCache
from regional_agent.store.types import AllowanceCharge, Charge, RateCharge, SlotCharge

Subject = dict[str, str]

HOUR_MS = 3_600_000
MAX_HEADER_INTEGER = 999_999_999_999_999  # of structured fields (RFC 9651)
MAX_ROUTES = 10_000  # pairs of route and method that are cached with their policies


class UnknownSubjectField(Exception):
    """A policy counts by a field that the request's subject does not have."""

    def __init__(self, policy: str, field: str) -> None:
        super().__init__(f"policy {policy!r} counts by {field!r}, which the subject does not have")
        self.field = field


class HoldNeeded(Exception):
    """A policy limits concurrency: a slot must be released, and a check has no way to do that."""

    def __init__(self, policy: str) -> None:
        super().__init__(f"policy {policy!r} limits concurrency: use POST /v1/holds, or a check with mode 'peek'")


class Window(Struct, frozen=True, gc=False):
    """The time window of a limit, for the RateLimit headers."""

    parameters: str  # of RateLimit-Policy: the limit, and its window in seconds; slots have none, and say what they are
    seconds: int = 0  # 0: it has none
    refills: bool = False  # its units come back one by one, and not all at once

    @classmethod
    def of(cls, limit: int, seconds: int, *, refills: bool = False) -> "Window":
        """Return the window of a limit. One of no seconds is none."""
        window = f";w={seconds}" if seconds else ""
        return cls(f";q={min(limit, MAX_HEADER_INTEGER)}{window}", seconds, refills)

    @classmethod
    def of_slots(cls, limit: int) -> "Window":
        return cls(f';q={min(limit, MAX_HEADER_INTEGER)};qu="concurrent-requests"')


class RegionalLimit(NamedTuple):
    """A limit in all regions, and of a rate this region's base share of it."""

    units: int
    share: int | Rate | str  # or UNLIMITED
    window: Window


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    spec: PolicySpec
    quota: Quota
    methods: frozenset[str]  # empty: every method
    route_classes: frozenset[str]  # empty: every class, and no class
    networks: tuple[Network, ...]  # empty: every address, and no address
    labels: tuple[tuple[str, frozenset[str]], ...]  # each of them has one of these values
    costs: Costs  # by route class
    is_plain: bool  # all fields that it counts by are plain fields of the subject
    wait_ms: int
    may_slice: bool
    is_shadow: bool  # it never denies
    is_shared: bool
    is_central: bool  # each request asks the coordinator
    place: int  # in the document
    name: str
    quota_name: str
    kind: str  # the quota's
    dimensions: str  # of its usage, beyond tenant, quota and region, which the lease has
    hazard: float  # of an admission, to be a sample of the decision log: see protocol/decision_log/sampling.py

    def cost(self, route_class: str) -> int:
        return self.costs.get(route_class) or self.costs[OTHER_CLASSES]

    def key(self, subject: Subject, route_class: str = NO_CLASS, plan: str | None = None) -> str:
        """Raises UnknownSubjectField, InvalidAddress or InvalidSubjectValue."""
        by = self.spec.by
        try:
            if self.is_plain:
                values = [(field, subject[field]) for field in by]
            else:
                prefix = self.spec.ip_prefix
                values = [(field, value_of(field, subject, route_class, plan or NO_PLAN, prefix)) for field in by]
        except KeyError as missing:
            raise UnknownSubjectField(self.spec.name, str(missing.args[0])) from None
        try:
            key = quota_key(self.quota.name, values)
        except UnicodeEncodeError:  # half of a surrogate pair
            key = ESCAPE
        # Only a value that was percent-encoded can hold a character that is refused.
        if len(key) > MAX_QUOTA_KEY_LENGTH or ESCAPE in key:
            check_values(self.quota.name, values)
        return key

    def usage_dimensions(self, subject: Subject, route_class: str) -> str:
        """Return what finance groups usage by: JSON, keys in order, for it names a usage line."""
        if not self.spec.usage_by:
            return self.dimensions
        return usage_dimensions(self.spec.name, self.spec.usage_by, subject, route_class)


NORMAL: Subject = {}


def _spelt(route: str, method: str) -> Subject:
    return {name: value for name, value in (("route", route), ("method", method)) if value}


class RoutePolicies(NamedTuple):
    """The policies that may apply to a route and a method, whatever the other fields are."""

    route_class: str
    policies: list[CompiledPolicy]
    is_conditional: bool  # some apply only to certain addresses or labels
    normal: Subject  # route and method in their normal form, where the request spells them otherwise


class UnmatchedRequest(NamedTuple):
    """A request that no enforced policy matches, and what the document says of such requests."""

    answer: Unmatched
    route_class: str
    route: str
    method: str


class PolicyCharge(Struct, frozen=True, eq=False, gc=False):
    """The charge of one policy for one request, and the record of the key that it charges."""

    policy: CompiledPolicy
    charge: Charge
    state: KeyState
    limit: int  # of all regions together
    window: Window
    began_at: datetime | None = None  # the tenant's subscription, where that says when periods begin

    @property
    def is_shadow(self) -> bool:
        return self.policy.is_shadow

    def for_hold(self, hold: Hold) -> "PolicyCharge":
        """Return the charge of a hold: of allowances its units, of anything else what a check costs."""
        is_named = self.policy.quota_name in (hold.costs or NO_COSTS)
        if hold.units is None or is_named or not isinstance(self.charge, AllowanceCharge):
            return self
        return replace(self, charge=replace(self.charge, cost=hold.units))


class Policies:
    """The policies of one bundle, at an age of it: with the overrides that are in force then."""

    def __init__(
        self, bundle: PolicyBundle, age_ms: int = 0, keys: KeyStates | None = None, now: datetime | None = None
    ) -> None:
        """`keys`: the records of the agent's keys, which outlive a bundle. `now` says which days it has windows of."""
        self._now = SystemClock().now() if now is None else now
        self._windows: dict[tuple[str, int], CalendarWindow] = {}
        self._keys = keys if keys is not None else KeyStates(SystemClock())
        self.version = bundle.version
        self.count = len(bundle.document.policies)
        self._bundle = bundle
        self._normalizer = RouteNormalizer(bundle.document.routes)
        self._routes = Routes(
            (self._normalizer.pattern(policy.spec.match.route), policy) for policy in _compiled(bundle)
        )
        self._classes = RouteClasses(bundle.document.route_classes, self._normalizer)
        self._has_others = bundle.weight < bundle.total_weight
        self.descriptors = DescriptorMapping(envoy_rules_of(bundle.document))
        self._matches: GenerationalCache[tuple[str, str], RoutePolicies] = GenerationalCache(MAX_ROUTES)
        self._limits: dict[tuple[str, str | None], RegionalLimit] = {}
        self._overrides = self._in_force(age_ms)
        self._overridden = {name_of_quota(key) for key in self._overrides}
        self.quotas = frozenset(each.name for each in bundle.document.quotas)
        self.has_unlimited = any(UNLIMITED in limits_of(quota) for quota in bundle.document.quotas) or any(
            limit.share == UNLIMITED for limit in self._overrides.values()
        )
        self.central = frozenset(each.name for each in bundle.document.quotas if mode_of(each) is Mode.CENTRAL)

    def match(self, subject: Subject) -> list[CompiledPolicy]:
        """Return the policies that a request meets, in the document's order for each kind of route."""
        return _meeting_conditions(self._match_route(subject), subject)

    def _match_route(self, subject: Subject) -> RoutePolicies:
        route = subject.get("route", ""), subject.get("method", "")
        match = self._matches.get(route)
        if match is None:
            match = self._find_policies(*route)
            self._matches.put(route, match)
        return match

    def _find_policies(self, written_route: str, written_method: str) -> RoutePolicies:
        route, method = self._normalizer.normalize(written_route), written_method.upper()
        is_normal = route == written_route and method == written_method
        match_form = self._normalizer.match_form(route)
        route_class = self._classes.of(match_form, method)
        by_wildcard = sorted(self._routes.by_wildcard(match_form), key=lambda policy: policy.place)
        found = [
            policy
            for policy in (*self._routes.exactly(match_form), *by_wildcard)
            if (not policy.methods or method in policy.methods)
            and (not policy.route_classes or route_class in policy.route_classes)
        ]
        is_conditional = any(policy.networks or policy.labels for policy in found)
        return RoutePolicies(route_class, found, is_conditional, NORMAL if is_normal else _spelt(route, method))

    def charges_for(
        self,
        subject: Subject,
        cost: int | None,
        costs: Mapping[str, int] = NO_COSTS,
        *,
        may_lack_fields: bool = False,
    ) -> list[PolicyCharge]:
        """Return what each policy that the request meets charges. Shadows ignore a subject that they cannot read.

        A subject that `may_lack_fields` does not meet policies that count by a field which it lacks.

        `costs` has the units of each quota that it names. Others charge `cost`, or what their policy says.
        Policies whose quota is unlimited for the subject charge nothing: see `unlimited_for`.
        """
        match, charges = self._match_route(subject), []
        if match.normal:
            subject = subject | match.normal
        plan = self._plan_of(subject)
        for policy in _meeting_conditions(match, subject):
            try:
                units = costs.get(policy.quota_name, cost) if costs else cost
                charge = self._charge(policy, subject, match.route_class, plan, units)
                if charge is not None:
                    charges.append(charge)
            except UnknownSubjectField:
                if not (policy.is_shadow or may_lack_fields):
                    raise
            except (InvalidAddress, InvalidSubjectValue):
                if not policy.is_shadow:
                    raise
        return charges

    def unlimited_for(self, subject: Subject) -> tuple[CompiledPolicy, ...]:
        """Return the policies that the request meets, and whose quota has no limit for it.

        It raises nothing, so it is called after `charges_for`, which refuses a subject that cannot be read.
        """
        match, plan, found = self._match_route(subject), self._plan_of(subject), []
        subject = subject | match.normal
        for policy in _meeting_conditions(match, subject):
            with suppress(UnknownSubjectField, InvalidAddress, InvalidSubjectValue):  # of a shadow
                if self._limit(policy.quota, plan, policy.key(subject, match.route_class, plan)).share == UNLIMITED:
                    found.append(policy)
        return tuple(found)

    def unmatched(self, subject: Subject) -> UnmatchedRequest:
        """Return the request as one that no enforced policy matches."""
        match = self._match_route(subject)
        subject = subject | match.normal
        answer = self._bundle.document.unmatched
        return UnmatchedRequest(answer, match.route_class, subject.get("route", ""), subject.get("method", ""))

    def normalize(self, subject: Subject) -> Subject:
        """Return the subject with route and method in the form in which policies compare them."""
        return subject | self._match_route(subject).normal

    def explain(
        self, subject: Subject, cost: int | None = None, costs: Mapping[str, int] = NO_COSTS
    ) -> RequestExplanation:
        """Return for each policy whether it matches, and if not, why. It is slow, and uses none of the tables."""
        return Explainer(self._bundle.document).explain(subject, self._plan_of(subject), cost, costs)

    def _charge(
        self, policy: CompiledPolicy, subject: Subject, route_class: str, plan: str | None, cost: int | None
    ) -> PolicyCharge | None:
        quota, units = policy.quota, policy.cost(route_class) if cost is None else cost
        key = policy.key(subject, route_class, plan)
        found = self._limit(quota, plan, key)
        limit = found.share
        if limit == UNLIMITED:
            return None
        state = self._keys.of(key)
        if isinstance(quota, AllowanceQuota):
            assert isinstance(limit, int)
            on_expiry, dimensions = policy.spec.on_hold_expiry.value, policy.usage_dimensions(subject, route_class)
            charge = AllowanceCharge(key, units, limit, dimensions, on_expiry)
            began_at = self._bundle.began_at.get(subject.get("tenant", ""))
            return PolicyCharge(policy, charge, state, limit, found.window, began_at)
        if isinstance(quota, ConcurrencyQuota):
            assert isinstance(limit, int)
            slots = self._slots(quota, key, units, limit, is_shadow=policy.is_shadow)
            return PolicyCharge(policy, slots, state, limit, found.window)
        assert isinstance(limit, Rate)
        rate_micro, burst, window_ms = limit
        rate = RateCharge(
            key,
            units,
            rate_micro,
            burst,
            quota.algorithm,
            window_ms,
            policy.may_slice and not limit.is_slow,
            policy.is_shadow,
            policy.is_shared and self._has_others and not limit.is_slow,
            self._calendar_window(quota, window_ms) if quota.align is Alignment.CALENDAR else None,
        )
        return PolicyCharge(policy, rate, state, found.units, found.window)

    def with_limit(self, each: PolicyCharge, limit: str) -> PolicyCharge:
        """Return the charge of a rate under another limit, of which this region has its base share; others as is.

        The demand for such a limit is not known elsewhere, so it is neither shared by demand nor taken in slices.
        """
        charge = each.charge
        if not isinstance(charge, RateCharge) or not isinstance(each.policy.quota, RateQuota):
            return each
        found = self._compiled(each.policy.quota, limit)
        assert isinstance(found.share, Rate)
        rate_micro, burst, window_ms = found.share
        charge = replace(
            charge, rate_micro=rate_micro, burst=burst, window_ms=window_ms, may_slice=False, is_shared=False
        )
        return replace(each, charge=charge, limit=found.units, window=found.window)

    def _calendar_window(self, quota: RateQuota, window_ms: int) -> CalendarWindow:
        window = self._windows.get((quota.time_zone, window_ms))
        if window is None:  # at most one for each limit of the document
            window = self._windows[quota.time_zone, window_ms] = calendar_window(window_ms, quota.time_zone, self._now)
        return window

    def _slots(self, quota: ConcurrencyQuota, key: str, units: int, limit: int, *, is_shadow: bool) -> SlotCharge:
        """Return the charge of slots. Shared ones have the limit of all and the base share of this one."""
        weight, total = self._bundle.weight, self._bundle.total_weight
        if is_shadow or not _is_shared(quota) or not self._has_others:
            return SlotCharge(key, units, share_of(limit, weight, total), slot_ttl_ms(quota), is_shadow)
        return SlotCharge(key, units, limit, slot_ttl_ms(quota), base_share=base_slots(limit, weight, total))

    def _limit(self, quota: Quota, plan: str | None, key: str) -> RegionalLimit:
        """Return the limit of the narrowest override, else the plan's."""
        if quota.name in self._overridden:
            for wider in wider_keys(key):
                if wider in self._overrides:
                    return self._overrides[wider]
        limit = self._limits.get((quota.name, plan))
        if limit is None:  # at most one for each plan and quota of the document
            limit = self._limits[quota.name, plan] = self._limit_on(quota, plan)
        return limit

    def _plan_of(self, subject: Mapping[str, str]) -> str | None:
        return self._bundle.subscriptions.get(subject.get("tenant", ""), self._bundle.document.default_plan)

    def shared(self, key: str) -> Rate | SlotCharge | None:
        """Return this region's base share of a rate or slots that regions share by demand; else None."""
        name, values = parse_quota_key(key)
        quota = next((each for each in self._bundle.document.quotas if each.name == name), None)
        if not _is_shared(quota) or not self._has_others:
            return None
        limit = self._limit(quota, values.get("plan") or self._plan_of(values), key).share
        if isinstance(quota, ConcurrencyQuota):
            return self._slots(quota, key, 0, limit, is_shadow=False) if isinstance(limit, int) else None
        return limit if isinstance(limit, Rate) and not limit.is_slow else None

    def allowance_limit(self, key: str) -> int | None:
        """Return the limit of an allowance by its quota key; None if it is no allowance of this document."""
        name, values = parse_quota_key(key)
        quota = next((each for each in self._bundle.document.quotas if each.name == name), None)
        if not isinstance(quota, AllowanceQuota):
            return None
        limit = self._limit(quota, values.get("plan") or self._plan_of(values), key).share
        return limit if isinstance(limit, int) else None

    def _in_force(self, age_ms: int) -> dict[str, RegionalLimit]:
        """Return the limits of overrides by quota key; of several for one key, the last."""
        quotas = {quota.name: quota for quota in self._bundle.document.quotas}
        terms = [term for term in self._bundle.overrides if is_in_force(term, age_ms)]
        return {term.key: self._compiled(quotas[name_of_quota(term.key)], term.limit) for term in terms}

    def _limit_on(self, quota: Quota, plan: str | None) -> RegionalLimit:
        """Return the limit of a plan. A plan without one limits the tenant to nothing."""
        return self._compiled(quota, limit_of(quota, plan))

    def _compiled(self, quota: Quota, limit: LimitValue | None) -> RegionalLimit:
        if limit == UNLIMITED:
            return RegionalLimit(MAX_UNITS, UNLIMITED, Window.of(MAX_UNITS, 0))
        if isinstance(quota, RateQuota):
            whole = Rate(0, 0) if limit is None else parse_rate(limit, quota.algorithm)
            share = base_rate(whole, self._bundle.weight, self._bundle.total_weight)
            return RegionalLimit(whole.burst, share, _window_of(whole))
        units = limit if isinstance(limit, int) else 0
        if isinstance(quota, AllowanceQuota):
            return RegionalLimit(units, units, Window.of(units, PERIOD_S[quota.period]))
        return RegionalLimit(units, units, Window.of_slots(units))


def _window_of(rate: Rate) -> Window:
    if rate.window_ms:
        return Window.of(rate.burst, rate.window_ms // 1000)
    if not rate.rate_micro:
        return Window.of(rate.burst, 0)
    return Window.of(rate.burst, max(1, int(rate.burst * 1_000_000 / rate.rate_micro)), refills=True)


def _meeting_conditions(match: RoutePolicies, subject: Subject) -> list[CompiledPolicy]:
    """Leave out policies for other addresses and labels than the request's."""
    if not match.is_conditional:
        return match.policies
    return [
        policy
        for policy in match.policies
        if (not policy.labels or has_labels(subject, policy.labels))
        and (not policy.networks or _is_within(subject, policy))
    ]


def _is_within(subject: Subject, policy: CompiledPolicy) -> bool:
    try:
        return is_within(subject, policy.networks)
    except InvalidAddress:
        if not policy.is_shadow:
            raise
        return False


def is_in_force(term: OverrideTerm, age_ms: int) -> bool:
    return term.starts_in_ms <= age_ms and (term.ends_in_ms is None or age_ms < term.ends_in_ms)


def edges_ms(bundle: PolicyBundle) -> Iterator[int]:
    """Yield the ages of a bundle at which an override begins or ends, or at which days of a time zone are looked up.

    The days of UTC need no look: all are equally long.
    """
    for term in bundle.overrides:
        yield term.starts_in_ms
        if term.ends_in_ms is not None:
            yield term.ends_in_ms
    if any(isinstance(each, RateQuota) and each.time_zone != "UTC" for each in bundle.document.quotas):
        yield from range(HOUR_MS, 366 * DAY_MS, HOUR_MS)


def _is_shared(quota: Quota | None) -> TypeGuard[SharedQuota]:
    return isinstance(quota, SharedQuota) and sharing_of(quota) is not Sharing.REGIONAL


def _compiled(bundle: PolicyBundle) -> list[CompiledPolicy]:
    document = bundle.document
    quotas = {quota.name: quota for quota in document.quotas}
    return [
        _compile(place, policy, quotas[policy.quota], costs_of(document, policy), sample_rate(bundle, policy.name))
        for place, policy in enumerate(document.policies)
    ]


def sample_rate(bundle: PolicyBundle, policy: str) -> float:
    """Return the rate at which admissions of a policy are logged."""
    return bundle.samples.get(policy, bundle.samples.get(OTHER_POLICIES, DEFAULT_RATE))


PERIOD_S = {
    PeriodKind.HOUR: 3600,
    PeriodKind.DAY: 86_400,
    PeriodKind.MONTH: 30 * 86_400,
    PeriodKind.ANNIVERSARY: 30 * 86_400,
}


def _compile(place: int, policy: PolicySpec, quota: Quota, costs: Costs, sample_rate: float) -> CompiledPolicy:
    match = policy.match
    return CompiledPolicy(
        spec=policy,
        quota=quota,
        methods=match.methods,
        route_classes=frozenset(as_list(match.route_class)),
        networks=tuple(parse_network(text) for text in as_list(match.ip)),
        labels=tuple((LABEL_PREFIX + name, frozenset(as_list(values))) for name, values in match.labels.items()),
        costs=costs,
        is_plain=all(field in PLAIN_FIELDS or is_label(field) for field in policy.by),
        wait_ms=parse_duration_ms(policy.wait),
        may_slice=isinstance(quota, RateQuota) and quota.slices and quota.algorithm in SLICED and not policy.shadow,
        is_shadow=policy.shadow,
        is_shared=_is_shared(quota) and not policy.shadow,
        is_central=mode_of(quota) is Mode.CENTRAL,
        place=place,
        name=policy.name,
        quota_name=quota.name,
        kind=quota.kind.value,
        dimensions=usage_dimensions(policy.name, (), {}, NO_CLASS),
        hazard=hazard_of(sample_rate),
    )
