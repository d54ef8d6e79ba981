"""The limits document: which quotas there are, and which policies apply them to which requests.

People write the document; the coordinator validates it (coordinator/limits/rules/validation.py) and sends it to agents
in a policy bundle. The kinds of quota are a tagged union: the field `kind` decides which other fields a quota may have.
"""

import functools
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from protocol.check import LABEL_PATTERN, MAX_LABELS, Subject, Unmatched
from protocol.decision_log.sampling import OTHER_POLICIES, SampleRate, parse_sample
from protocol.identifiers import Name
from protocol.limits.rates import WINDOWS, RateAlgorithm, Sharing, parse_duration_ms
from protocol.limits.usage_labels import MAX_USAGE_LABELS
from protocol.units import MAX_UNITS, Milliseconds, PositiveUnits, Units

MAX_QUOTAS = 1000
MAX_POLICIES = 10_000
MAX_PLANS = 100
DEFAULT_SLOT_TTL_MS = 600_000
MAX_ROUTE_CLASSES = 100
MAX_ROUTES = 1000  # of a route class
MAX_NETWORKS = 1000  # of a policy
MAX_EXAMPLES = 100
MAX_THRESHOLDS = 20  # of a quota
MAX_PERCENT = 1000
# The fields that policies count by. `ip_prefix`, `route_class` and `plan` are derived from address, route and tenant.
# Labels are named `labels.model`, and there may be any.
SUBJECT_FIELDS = ("tenant", "user", "api_key", "ip", "ip_prefix", "route", "method", "route_class", "plan")
LABEL_PREFIX = "labels."
MAX_LABEL_VALUES = 100  # of a label that a policy matches
# The fields that an entry of an Envoy descriptor may become; also labels.
ENTRY_FIELDS = ("tenant", "user", "api_key", "ip", "route", "method")
MAX_DOMAINS = 100
MAX_ENTRY_KEYS = 100  # of a domain
# The dimensions that usage may have besides quota, region and policy; also labels.
USAGE_FIELDS = ("api_key", "route_class")
OTHER_CLASSES = "*"  # in a cost table: all route classes that it does not name
OTHER_PLANS = "*"  # in a limit by plan: all plans that it does not name, and tenants without a plan

HARD, SOFT = "hard", "soft"  # caps of an allowance
DEFAULT_HORIZON = "auto"  # depends on the period: see `horizon_of`
SHORTEST_DEFAULT_HORIZON_MS, LONGEST_DEFAULT_HORIZON_MS = 10_000, 120_000
DEFAULT_REPORT_WITHIN = "auto"  # depends on how long the rest of the limit lasts: see coordinator/exchange/rules/pacing
SHORTEST_REPORT_WITHIN_MS, LONGEST_REPORT_WITHIN_MS = 100, 3_600_000  # that a document may set
ALL = "all"  # carry over all that is left
UNLIMITED = "unlimited"  # the limit of a rate or a concurrency that admits everything
LimitValue = int | str  # units of an allowance or a concurrency, a rate such as `100/second`, or UNLIMITED
Limit = LimitValue | dict[str, LimitValue]


class DocumentPart(Struct, frozen=True, kw_only=True):
    """A part of the document.

    Unknown fields are ignored, so that agents and coordinators read what a newer release has stored. What people apply
    is read as `strict` (protocol/compatibility/strict.py).
    """


class QuotaKind(StrEnum):
    ALLOWANCE = "allowance"
    RATE = "rate"
    CONCURRENCY = "concurrency"


class PeriodKind(StrEnum):
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    ANNIVERSARY = "anniversary"  # a month that begins on the day of the tenant's subscription


class StoreFailure(StrEnum):
    """The answer of a policy while the region's store is unavailable."""

    OPEN = "open"
    CLOSED = "closed"
    LOCAL = "local"


class Mode(StrEnum):
    """The ways to divide an allowance over regions."""

    LEASED = "leased"  # regions hold leases, by demand: units follow the demand
    REGIONAL = "regional"  # each region has the whole limit for itself
    CENTRAL = "central"  # nothing is leased ahead: each request asks the coordinator


class Alignment(StrEnum):
    """When a fixed window begins."""

    FIRST_REQUEST = "first_request"
    CALENDAR = "calendar"  # with the full minute, hour, day or week: see protocol/limits/windows.py


class HoldExpiry(StrEnum):
    """The fate of the units of a hold that is neither committed nor released in time."""

    RELEASE = "release"
    CHARGE = "charge"


class Portion(NamedTuple):
    """A portion of a limit: a number of units, or a percentage."""

    units: int | None = None
    percent: int | None = None


DEFAULT_THRESHOLDS = (Portion(percent=50), Portion(percent=80), Portion(percent=100))
Thresholds = Annotated[list[int | str], Meta(max_length=MAX_THRESHOLDS)]


class QuotaFields(DocumentPart, frozen=True, tag_field="kind"):
    """The fields that every kind of quota has."""

    name: Name
    limit: Limit


class AllowanceQuota(QuotaFields, frozen=True, tag=QuotaKind.ALLOWANCE.value):
    """A number of units a period, booked exactly."""

    kind: ClassVar[QuotaKind] = QuotaKind.ALLOWANCE

    period: PeriodKind
    time_zone: str = "UTC"
    cap: str | dict[str, int] = HARD
    mode: Mode = Mode.LEASED
    horizon: str = DEFAULT_HORIZON
    durability: Literal["exact"] = "exact"
    report_within: str = DEFAULT_REPORT_WITHIN
    thresholds: Thresholds | None = None  # DEFAULT_THRESHOLDS if it is left out
    carry_over: Limit | None = None  # how much of what is left when the period closes goes into the next one


class RateQuota(QuotaFields, frozen=True, tag=QuotaKind.RATE.value):
    """A number of units per time, approximate within a published bound."""

    kind: ClassVar[QuotaKind] = QuotaKind.RATE

    algorithm: RateAlgorithm = RateAlgorithm.TOKEN_BUCKET
    align: Alignment = Alignment.FIRST_REQUEST
    time_zone: str = "UTC"  # in which aligned windows of days and weeks begin
    sharing: Sharing | None = None  # see `sharing_of`
    slices: bool = True  # agents may take units of a hot key ahead of requests


class ConcurrencyQuota(QuotaFields, frozen=True, tag=QuotaKind.CONCURRENCY.value):
    """A number of holds at a time."""

    kind: ClassVar[QuotaKind] = QuotaKind.CONCURRENCY

    sharing: Sharing | None = None  # see `sharing_of`
    slot_ttl: str | None = None  # DEFAULT_SLOT_TTL_MS if it is left out


Quota = AllowanceQuota | RateQuota | ConcurrencyQuota
SharedQuota = RateQuota | ConcurrencyQuota


class RouteRules(DocumentPart, frozen=True):
    """The rules by which agents normalise the routes of policies and requests, before they compare or count by them."""

    trailing_slash: Literal["ignore", "keep"] = "ignore"  # ignore: `/x/` is `/x`
    case: Literal["keep", "ignore"] = "keep"  # ignore: `/X` is `/x`
    query: Literal["drop", "keep"] = "drop"  # drop: what follows a `?` or `#` does not count
    merge_slashes: bool = True  # `//x` is `/x`
    percent: Literal["decode_unreserved", "keep"] = "decode_unreserved"  # `%65` is `e`, and `%2f` is `%2F`


class RouteMatch(DocumentPart, frozen=True):
    """Matches requests by route and method. A `*` at the end of a route matches any rest; within it, one segment."""

    route: str = "*"
    method: str | list[str] = "*"

    @property
    def methods(self) -> frozenset[str]:
        """The methods that match, in capitals; empty if every method does."""
        return frozenset() if self.method == "*" else frozenset(map(str.upper, as_list(self.method)))


RouteClass = Annotated[list[RouteMatch], Meta(max_length=MAX_ROUTES)]


LabelValues = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_LABEL_VALUES)]


class Match(RouteMatch, frozen=True):
    """Matches requests that meet all of its conditions; of a list, any entry has to match."""

    route_class: str | list[str] | None = None
    ip: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_NETWORKS)] | None = None
    labels: Annotated[dict[str, LabelValues], Meta(max_length=MAX_LABELS)] = {}


class IpPrefix(DocumentPart, frozen=True):
    """The number of bits of an address that count. A client with a /64 would otherwise have 2^64 quotas."""

    ipv4: Annotated[int, Meta(ge=0, le=32)] = 32
    ipv6: Annotated[int, Meta(ge=0, le=128)] = 64


Costs = dict[str, PositiveUnits]  # by route class


class PolicySpec(DocumentPart, frozen=True):
    name: Name
    quota: Name
    by: Annotated[list[str], Meta(max_length=len(SUBJECT_FIELDS))]  # empty: all requests count against one quota
    match: Match = Match()
    usage_by: Annotated[list[str], Meta(max_length=len(USAGE_FIELDS) + MAX_USAGE_LABELS)] = []  # a line for each value
    cost: PositiveUnits | str | Costs = 1  # units, a table, or the name of a table in `cost_tables`
    ip_prefix: IpPrefix = IpPrefix()
    on_store_failure: StoreFailure = StoreFailure.CLOSED
    local_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.2  # of the region's share, which one agent may admit alone
    on_hold_expiry: HoldExpiry = HoldExpiry.RELEASE
    wait: str = "400ms"  # how long a request may wait for the last units of an allowance
    shadow: bool = False  # decided and counted, but never enforced


class ExampleRequest(DocumentPart, frozen=True):
    """A request that a dry run explains. It changes nothing of what is enforced."""

    subject: Subject


class LoggedKeys(StrEnum):
    """The form in which the decision log keeps users, API keys, addresses and labels."""

    HASHED = "hashed"
    PLAIN = "plain"


class DecisionLogRules(DocumentPart, frozen=True):
    """The sample of admissions that the decision log keeps. It keeps every denial."""

    admissions: str | float = "0.1%"  # the sample of admissions
    by_policy: Annotated[dict[Name, str | float], Meta(max_length=MAX_POLICIES)] = {}  # another one for these
    keys: LoggedKeys = LoggedKeys.HASHED


class LimitOverrides(StrEnum):
    """An agent's treatment of a limit that Envoy sends in a descriptor (`limit_override`)."""

    REFUSE = "refuse"  # the request, by name
    HONOUR = "honour"  # it takes the place of the limit of each rate that the descriptor meets


class EnvoyDomain(DocumentPart, frozen=True):
    """The rules by which agents read the descriptors of one domain, see protocol/limits/descriptors.py."""

    entries: Annotated[dict[str, str], Meta(max_length=MAX_ENTRY_KEYS)] = {}  # a subject's field by the key of an entry
    response_headers: bool = True  # RateLimit, X-RateLimit and Retry-After, which Envoy adds to its response
    response_body: bool = False  # of a denied request: the problem document that the agent's HTTP API answers
    limit_overrides: LimitOverrides = LimitOverrides.REFUSE


class EnvoyRules(DocumentPart, frozen=True):
    """The rules by which agents read Envoy's descriptors. A domain that is not named here has the defaults."""

    domains: Annotated[dict[str, EnvoyDomain], Meta(max_length=MAX_DOMAINS)] = {}


class LimitsDocument(DocumentPart, frozen=True):
    quotas: Annotated[list[Quota], Meta(max_length=MAX_QUOTAS)] = []
    policies: Annotated[list[PolicySpec], Meta(max_length=MAX_POLICIES)] = []
    plans: Annotated[dict[str, DocumentPart], Meta(max_length=MAX_PLANS)] = {}
    default_plan: str | None = None
    route_classes: Annotated[dict[str, RouteClass], Meta(max_length=MAX_ROUTE_CLASSES)] = {}
    cost_tables: Annotated[dict[str, Costs], Meta(max_length=MAX_ROUTE_CLASSES)] = {}
    routes: RouteRules = RouteRules()
    unmatched: Unmatched = Unmatched.ALLOW
    examples: Annotated[list[ExampleRequest], Meta(max_length=MAX_EXAMPLES)] = []
    # Left out where it is not set: agents and coordinators of the release before do not know it.
    decisions: DecisionLogRules | UnsetType = UNSET
    envoy: EnvoyRules | UnsetType = UNSET


class OverrideTerm(Struct, frozen=True, kw_only=True):
    """Another limit for each quota key that `key` covers. Start and end are counted from when the bundle was made."""

    key: str  # see `wider_keys`
    limit: LimitValue
    starts_in_ms: Milliseconds = 0
    ends_in_ms: Milliseconds | None = None  # None: until a bundle arrives without it


class PolicyBundle(Struct, frozen=True, kw_only=True):
    """All that an agent needs to decide: the document, the subscriptions, and its region's weight."""

    version: Units
    document: LimitsDocument
    subscriptions: dict[str, str]
    began_at: dict[str, datetime] = {}  # starts of the subscriptions, for periods that are anniversaries
    weight: Units
    total_weight: PositiveUnits
    overrides: list[OverrideTerm] = []  # of two with the same key, the last one in force applies
    samples: dict[str, SampleRate] = {}  # the part of admissions that is logged, by policy; `*`: of all others
    hold_key: bytes = b""  # the key of the region that its agents seal hold ids with
    requires: dict[str, list[str]] = {}  # capabilities that a reader needs, by item: `quotas.api`, `policies.search`


class Horizon(NamedTuple):
    """The time that a region's lease should last at its demand: the longest while much of the limit is left."""

    shortest_ms: int
    longest_ms: int


def horizon_of(quota: AllowanceQuota) -> Horizon:
    """Return the horizon: as the quota says, else at least a 1,440th of its period.

    So regions survive a short outage of the coordinator for allowances with long periods, and the units of an hour are
    not stranded in regions that hardly need them. A lease of a month is refilled while a minute's demand is left.
    """
    if quota.horizon != DEFAULT_HORIZON:
        set_ms = parse_duration_ms(quota.horizon)
        return Horizon(set_ms, set_ms)
    by_period_ms = max(_USUAL_PERIOD_MS[quota.period] // 1_440, SHORTEST_DEFAULT_HORIZON_MS)
    return Horizon(min(by_period_ms, LONGEST_DEFAULT_HORIZON_MS), LONGEST_DEFAULT_HORIZON_MS)


def report_within_ms_of(quota: AllowanceQuota) -> int | None:
    """Return how long usage may wait for its report, if the quota says so."""
    return None if quota.report_within == DEFAULT_REPORT_WITHIN else parse_duration_ms(quota.report_within)


_DAY_MS = 86_400_000
_USUAL_PERIOD_MS = {
    PeriodKind.HOUR: _DAY_MS // 24,
    PeriodKind.DAY: _DAY_MS,
    PeriodKind.MONTH: 30 * _DAY_MS,
    PeriodKind.ANNIVERSARY: 30 * _DAY_MS,
}
_PERCENT = re.compile(r"^(\d{1,4})%$", re.ASCII)


@functools.lru_cache(maxsize=1000)
def parse_portion(text: int | str) -> Portion:
    """Parse `80%` or a number of units. Raises ValueError for anything else, and for zero."""
    if isinstance(text, int) and 0 < text <= MAX_UNITS:
        return Portion(units=text)
    found = _PERCENT.match(text) if isinstance(text, str) else None
    if not found or not 0 < int(found[1]) <= MAX_PERCENT:
        raise ValueError(f"{text!r} is no portion; write 80% (at most {MAX_PERCENT}%), or a number of units above zero")
    return Portion(percent=int(found[1]))


def carried_over(quota: AllowanceQuota, plan: str | None, limit: int) -> int:
    """Return how many unused units of a period with this limit go into the next period at most.

    With `all` that may be more than the limit, for credited units count as well.
    """
    value = quota.carry_over
    if isinstance(value, dict):
        value = value.get(plan) if plan is not None else None
    if value is None or value == 0:
        return 0
    if value == ALL:
        return MAX_UNITS
    portion = parse_portion(value)
    return limit * (portion.percent or 0) // 100 if portion.units is None else portion.units


def overdraft_of(quota: Quota) -> int:
    """Return how many units all disconnected regions together may admit beyond their leases in a period."""
    return quota.cap.get("overdraft", 0) if isinstance(quota, AllowanceQuota) and isinstance(quota.cap, dict) else 0


def extension_of(quota: AllowanceQuota) -> int:
    """Return how many units may be admitted beyond the limit."""
    if isinstance(quota.cap, dict):
        return quota.cap.get("overage", 0)
    return MAX_UNITS if quota.cap == SOFT else 0


def thresholds_of(quota: AllowanceQuota) -> Sequence[Portion]:
    return DEFAULT_THRESHOLDS if quota.thresholds is None else [parse_portion(each) for each in quota.thresholds]


def mode_of(quota: Quota | None) -> Mode:
    """Return the mode of an allowance. Other quotas, and unknown ones, count as leased."""
    return quota.mode if isinstance(quota, AllowanceQuota) else Mode.LEASED


def logging_rules_of(document: LimitsDocument) -> DecisionLogRules:
    return document.decisions or DecisionLogRules()


def envoy_rules_of(document: LimitsDocument) -> EnvoyRules:
    return document.envoy or EnvoyRules()


def samples_of(document: LimitsDocument) -> dict[str, float]:
    """Return the part of admissions that is logged, by policy."""
    rules = logging_rules_of(document)
    by_policy = {policy: parse_sample(text) for policy, text in rules.by_policy.items()}
    return {OTHER_POLICIES: parse_sample(rules.admissions)} | by_policy


def sharing_of(quota: SharedQuota) -> Sharing:
    """Return how a quota is divided over regions, where the document leaves it out as well.

    A rate is adaptive by default, but windows cannot move between regions. Slots are divided by weight by default, and
    never adaptive, for running work cannot be asked to stop.
    """
    if isinstance(quota, ConcurrencyQuota):
        return quota.sharing or Sharing.REGIONAL
    if quota.algorithm in WINDOWS:
        return Sharing.REGIONAL
    return quota.sharing or Sharing.ADAPTIVE


def slot_ttl_ms(quota: ConcurrencyQuota) -> int:
    return parse_duration_ms(quota.slot_ttl) if quota.slot_ttl else DEFAULT_SLOT_TTL_MS


def limit_of(quota: Quota, plan: str | None) -> LimitValue | None:
    """Return the quota's limit on a plan, or without a plan. None if there is none: then nothing is admitted."""
    if not isinstance(quota.limit, dict):
        return quota.limit
    others = quota.limit.get(OTHER_PLANS)
    return others if plan is None else quota.limit.get(plan, others)


def limits_of(quota: Quota) -> Collection[LimitValue]:
    """Return the quota's limits on all plans."""
    return quota.limit.values() if isinstance(quota.limit, dict) else [quota.limit]


def costs_of(document: LimitsDocument, policy: PolicySpec) -> Costs:
    """Return the cost of a request by its route class; `*` is the cost of all other classes, and 1 by default."""
    cost = policy.cost
    if isinstance(cost, int):
        return {OTHER_CLASSES: cost}
    table = document.cost_tables[cost] if isinstance(cost, str) else cost
    return {OTHER_CLASSES: 1} | table


def is_label(field: str) -> bool:
    """Return whether a field that policies count by is a label, such as `labels.model`."""
    return field.startswith(LABEL_PREFIX) and _LABEL_NAME.fullmatch(field.removeprefix(LABEL_PREFIX)) is not None


_LABEL_NAME = re.compile(LABEL_PATTERN)


def as_list(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else value
