"""What is limited, by what, and for whom: the limits document and what agents get of it.

The document is written by people, so every mistake is answered with the field, the rule and the reason. What the
design names but this version does not serve yet is refused here, at the door: a limit that was accepted is enforced.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from protocol.addresses import parse_network
from protocol.identifiers import Name, is_name
from protocol.units import MAX_UNITS, Milliseconds, PositiveUnits, Units
from protocol.zones import why_not_for_periods

MAX_QUOTAS = 1000
MAX_POLICIES = 10_000
MAX_PLANS = 100
# Buckets count thousand-millionths of a unit, so that no refill is ever rounded; that many fit Lua's numbers.
MAX_BURST = 9_000_000
MAX_RATE_MICRO = MAX_BURST * 1_000_000
MAX_LOG = 10_000  # what remembers every request is bounded
MAX_SLOTS = 10_000  # and what remembers every holder
DEFAULT_SLOT_TTL_MS = 600_000
MAX_SLOT_TTL_MS = 24 * 3_600_000
MAX_CENTRAL_WAIT_MS = 10_000  # a request that asks the coordinator hangs for no longer
MAX_ROUTE_CLASSES = 100
MAX_ROUTES = 1000  # of a class
MAX_NETWORKS = 1000  # of a policy
MAX_WILDCARDS = 4  # in a route
MAX_THRESHOLDS = 20  # of a quota
MAX_PERCENT = 1000
# What policies count by; `ip_prefix`, `route_class` and `plan` are worked out from address, route and tenant.
SUBJECT_FIELDS = ("tenant", "user", "api_key", "ip", "ip_prefix", "route", "method", "route_class", "plan")
USAGE_FIELDS = ("api_key", "route_class")  # what usage can be told apart by beyond its quota, region and policy
OTHER_CLASSES = "*"  # in a table of costs: whatever it does not name
OTHER_PLANS = "*"  # in a limit by plan: of all plans that it does not name, and of tenants on none


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A misspelt key in a document is an error, not a default."""


class QuotaKind(StrEnum):
    ALLOWANCE = "allowance"
    RATE = "rate"
    CONCURRENCY = "concurrency"


class PeriodKind(StrEnum):
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    ANNIVERSARY = "anniversary"  # of its tenant's subscription


class StoreFailure(StrEnum):
    """What a policy answers while its region's store cannot be asked."""

    OPEN = "open"
    CLOSED = "closed"
    LOCAL = "local"


class Mode(StrEnum):
    """Who says how much of an allowance a region may spend."""

    LEASED = "leased"  # it has some ahead, by its demand: units follow whoever needs them
    REGIONAL = "regional"  # it has the whole limit for itself, and no other region's
    CENTRAL = "central"  # it has none ahead: each request asks the coordinator


class HoldExpiry(StrEnum):
    """What becomes of units that were set aside when nobody has said what became of the work."""

    RELEASE = "release"
    CHARGE = "charge"


class RateAlgorithm(StrEnum):
    """How a rate is counted: one file each in lua/algorithms."""

    TOKEN_BUCKET = "token_bucket"  # noqa: S105  (no password)
    GCRA = "gcra"
    LEAKY_BUCKET = "leaky_bucket"
    FIXED_WINDOW = "fixed_window"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_LOG = "sliding_log"


# Those whose units may be given out later than they were taken: the others count by the moment.
SLICED = {RateAlgorithm.TOKEN_BUCKET, RateAlgorithm.GCRA}
WINDOWS = {RateAlgorithm.FIXED_WINDOW, RateAlgorithm.SLIDING_WINDOW, RateAlgorithm.SLIDING_LOG}


class Sharing(StrEnum):
    """How a rate is divided over regions."""

    ADAPTIVE = "adaptive"  # by demand, at once: what that may admit beyond the limit is bounded, and published
    STRICT = "strict"  # by demand, but nothing is given before somebody else has confirmed giving it up
    REGIONAL = "regional"  # each region has its part by weight, whoever asks


class Rate(NamedTuple):
    """`rate_micro` millionths of a unit a second, and as many units at once as `burst`.

    Where a whole window is counted, `burst` is what may pass in one: so a share of the burst is a share of the window.
    """

    rate_micro: int
    burst: int
    window_ms: int = 0


HARD, SOFT = "hard", "soft"  # caps of an allowance
DEFAULT_HORIZON = "auto"  # by the period: see `horizon_ms_of`
SHORTEST_DEFAULT_HORIZON_MS, LONGEST_DEFAULT_HORIZON_MS = 10_000, 120_000
ALL = "all"  # of what is left, goes over
LimitValue = int | str
Thresholds = Annotated[list[int | str], Meta(max_length=MAX_THRESHOLDS)]
Limit = LimitValue | dict[str, LimitValue]


class QuotaSpec(Part, frozen=True):
    name: Name
    kind: QuotaKind
    limit: Limit
    period: str | None = None
    time_zone: str = "UTC"
    cap: str | dict[str, int] = HARD
    mode: str = Mode.LEASED
    horizon: str = DEFAULT_HORIZON
    durability: str = "exact"
    algorithm: str = "token_bucket"
    sharing: str | None = None  # see `sharing_of`
    slices: bool = True  # of a hot rate an agent may take units ahead
    slot_ttl: str | None = None  # of a concurrency; DEFAULT_SLOT_TTL_MS unless it says otherwise
    thresholds: Thresholds | None = None  # of an allowance; DEFAULT_THRESHOLDS unless it says otherwise
    carry_over: Limit | None = None  # of an allowance, of what is left at its period's close


class Portion(NamedTuple):
    """Of a limit: so many units, or so many percent of it."""

    units: int | None = None
    percent: int | None = None


DEFAULT_THRESHOLDS = (Portion(percent=50), Portion(percent=80), Portion(percent=100))


class RouteMatch(Part, frozen=True):
    """Some requests, by route and method. A `*` at the end of a route is whatever follows, within it a segment."""

    route: str = "*"
    method: str | list[str] = "*"

    @property
    def methods(self) -> frozenset[str]:
        """Empty: every method."""
        if self.method == "*":
            return frozenset()
        return frozenset([self.method] if isinstance(self.method, str) else self.method)


RouteClass = Annotated[list[RouteMatch], Meta(max_length=MAX_ROUTES)]


class Match(RouteMatch, frozen=True):
    """All of it must be so; of what is a list, any."""

    route_class: str | list[str] | None = None
    ip: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_NETWORKS)] | None = None


class IpPrefix(Part, frozen=True):
    """How much of an address counts: who has a whole /64 would otherwise have as many quotas as it has addresses."""

    ipv4: Annotated[int, Meta(ge=0, le=32)] = 32
    ipv6: Annotated[int, Meta(ge=0, le=128)] = 64


Costs = dict[str, PositiveUnits]  # by route class


class PolicySpec(Part, frozen=True):
    name: Name
    quota: Name
    by: Annotated[list[str], Meta(max_length=len(SUBJECT_FIELDS))]  # nothing: one quota for all
    match: Match = Match()
    usage_by: Annotated[list[str], Meta(max_length=len(USAGE_FIELDS))] = []  # each makes as many lines as it has values
    cost: PositiveUnits | str | Costs = 1  # units, or a table, or the name of one in `cost_tables`
    ip_prefix: IpPrefix = IpPrefix()
    on_store_failure: StoreFailure = StoreFailure.CLOSED
    local_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.2  # of its region's share: what an agent gives by itself
    on_hold_expiry: HoldExpiry = HoldExpiry.RELEASE
    wait: str = "400ms"  # at the very end of an allowance, how long a request may wait for a last unit
    shadow: bool = False  # decided and counted, and never enforced


class LimitsDocument(Part, frozen=True):
    quotas: Annotated[list[QuotaSpec], Meta(max_length=MAX_QUOTAS)] = []
    policies: Annotated[list[PolicySpec], Meta(max_length=MAX_POLICIES)] = []
    plans: Annotated[dict[str, Part], Meta(max_length=MAX_PLANS)] = {}
    default_plan: str | None = None
    route_classes: Annotated[dict[str, RouteClass], Meta(max_length=MAX_ROUTE_CLASSES)] = {}
    cost_tables: Annotated[dict[str, Costs], Meta(max_length=MAX_ROUTE_CLASSES)] = {}


class OverrideTerm(Struct, frozen=True, kw_only=True):
    """Another limit for every key that `key` reaches. It begins and ends so long after the bundle was made."""

    key: str  # see `wider_keys`
    limit: LimitValue
    starts_in_ms: Milliseconds = 0
    ends_in_ms: Milliseconds | None = None  # none: until a bundle comes without it


class PolicyBundle(Struct, frozen=True, kw_only=True):
    """What an agent needs to decide: the document, who is on which plan, and its region's part of every rate."""

    version: Units
    document: LimitsDocument
    subscriptions: dict[str, str]
    began_at: dict[str, datetime] = {}  # of the subscriptions, where a period is their anniversary
    weight: Units
    total_weight: PositiveUnits
    overrides: list[OverrideTerm] = []  # of those that reach a key alike, the last in force counts
    hold_key: bytes = b""  # of the region: its agents seal the ids of holds with it


class Fault(NamedTuple):
    """One thing that is wrong with a document."""

    field: str
    rule: str
    reason: str


_RATE = re.compile(r"^(\d+)\s*/\s*(second|minute|hour)(?:\s*,\s*burst\s+(\d+))?$")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}
_DURATION = re.compile(r"^(\d+)(ms|s|m|h|d)$")
_PERCENT = re.compile(r"^(\d{1,4})%$", re.ASCII)
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_duration_ms(text: str) -> int:
    """`10s` as milliseconds. Raises ValueError for anything else than a number and a unit."""
    found = _DURATION.match(text)
    if not found:
        raise ValueError(f"{text!r} is not a duration; write it as 500ms, 10s, 5m, 1h or 1d")
    return int(found[1]) * _MILLISECONDS[found[2]]


def horizon_ms_of(quota: QuotaSpec) -> int:
    """Return for how long a region's lease is to last at its demand: what the quota says, else a 1,440th of its period.

    So regions survive a short outage of the coordinator where units are bought for long, and an hour's units are not
    stranded in regions that hardly need them. A lease of a month is refilled while a minute's demand is left.
    """
    if quota.horizon != DEFAULT_HORIZON:
        return parse_duration_ms(quota.horizon)
    period_ms = _USUAL_PERIOD_MS[PeriodKind(str(quota.period))]
    return min(max(period_ms // 1_440, SHORTEST_DEFAULT_HORIZON_MS), LONGEST_DEFAULT_HORIZON_MS)


_DAY_MS = 86_400_000
_USUAL_PERIOD_MS = {
    PeriodKind.HOUR: _DAY_MS // 24,
    PeriodKind.DAY: _DAY_MS,
    PeriodKind.MONTH: 30 * _DAY_MS,
    PeriodKind.ANNIVERSARY: 30 * _DAY_MS,
}


def parse_rate(text: LimitValue, algorithm: str = RateAlgorithm.TOKEN_BUCKET) -> Rate:
    """`100/second, burst 200` as integers. Without a burst, one second's worth (at least one unit).

    An algorithm that counts in windows knows no burst: `100/minute` is its window and what may pass in it.
    """
    found = _RATE.match(text) if isinstance(text, str) else None
    if not found:
        raise ValueError(f"{text!r} is not a rate; write it as '100/second' or '1000/minute, burst 200'")
    if algorithm in WINDOWS:
        return _windowed(text, found, algorithm)
    rate_micro = int(found[1]) * 1_000_000 // _SECONDS[found[2]]
    burst = int(found[3]) if found[3] else max(1, rate_micro // 1_000_000)
    if not 0 < rate_micro <= MAX_RATE_MICRO or not 0 < burst <= MAX_BURST:
        raise ValueError(f"{text!r}: rate and burst must be above zero and at most {MAX_BURST}")
    return Rate(rate_micro, burst)


def _windowed(text: LimitValue, found: re.Match[str], algorithm: str) -> Rate:
    units, window_s = int(found[1]), _SECONDS[found[2]]
    if found[3]:
        raise ValueError(f"{text!r}: a rate that is counted by {algorithm} has no burst; write '100/minute' alone")
    most = MAX_LOG if algorithm == RateAlgorithm.SLIDING_LOG else MAX_BURST
    if not 0 < units <= most:
        raise ValueError(f"{text!r}: a rate that is counted by {algorithm} is above zero and at most {most} a window")
    return Rate(units * 1_000_000 // window_s, units, window_s * 1000)


@functools.lru_cache(maxsize=1000)
def parse_portion(text: int | str) -> Portion:
    """`80%`, or a number of units. Raises ValueError for anything else, and for nothing at all."""
    if isinstance(text, int) and 0 < text <= MAX_UNITS:
        return Portion(units=text)
    found = _PERCENT.match(text) if isinstance(text, str) else None
    if not found or not 0 < int(found[1]) <= MAX_PERCENT:
        raise ValueError(f"{text!r} is no portion; write 80% (at most {MAX_PERCENT}%), or a number of units above zero")
    return Portion(percent=int(found[1]))


def carried_over(quota: QuotaSpec, plan: str | None, limit: int) -> int:
    """So many unused units of a period with that limit go over into the next at most. All of them may be more than the
    limit: what was credited is among them.
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


def overdraft_of(quota: QuotaSpec) -> int:
    """How many units regions that are cut off may admit beyond their leases, all together in a period."""
    return quota.cap.get("overdraft", 0) if isinstance(quota.cap, dict) else 0


def extension_of(quota: QuotaSpec) -> int:
    """How many units may be admitted beyond the limit."""
    if isinstance(quota.cap, dict):
        return quota.cap.get("overage", 0)
    return MAX_UNITS if quota.cap == SOFT else 0


def thresholds_of(quota: QuotaSpec) -> Sequence[Portion]:
    return DEFAULT_THRESHOLDS if quota.thresholds is None else [parse_portion(each) for each in quota.thresholds]


def safe_share(limit: Rate, weight: int, total_weight: int) -> Rate:
    """A region's part of a rate by its weight: what it may always use, and all it may use while it is cut off.

    All parts together never exceed the rate, nor the burst, but where the burst is so small that a region would be
    left with less than one unit, and so admit nothing, ever: it has one.
    """
    if weight <= 0 or limit.burst == 0:
        return Rate(0, 0)
    burst = share_of(limit.burst, weight, total_weight)
    return Rate(limit.rate_micro * weight // total_weight, burst, limit.window_ms)


def share_of(units: int, weight: int, total_weight: int) -> int:
    """A region's part of what may be taken at once: one unit at least, where there is any."""
    return max(1, units * weight // total_weight) if units and weight > 0 else 0


def safe_slots(units: int, weight: int, total_weight: int) -> int:
    """A region's part of slots that are shared by demand: all parts together are never above the limit."""
    return units * weight // total_weight


def sharing_of(quota: QuotaSpec) -> Sharing:
    """A rate is adaptive unless it says otherwise; what passed in a window cannot move to another region. Slots are
    divided by weight, or strictly: who works cannot be asked to stop.
    """
    if quota.kind is QuotaKind.CONCURRENCY:
        return Sharing(quota.sharing or Sharing.REGIONAL)
    if quota.algorithm in WINDOWS:
        return Sharing.REGIONAL
    return Sharing(quota.sharing or Sharing.ADAPTIVE)


def slot_ttl_ms(quota: QuotaSpec) -> int:
    return parse_duration_ms(quota.slot_ttl) if quota.slot_ttl else DEFAULT_SLOT_TTL_MS


def limit_of(quota: QuotaSpec, plan: str | None) -> LimitValue | None:
    """Return the quota's limit on a plan, or on none; None where there is none, and so nothing is admitted."""
    if not isinstance(quota.limit, dict):
        return quota.limit
    others = quota.limit.get(OTHER_PLANS)
    return others if plan is None else quota.limit.get(plan, others)


def costs_of(document: LimitsDocument, policy: PolicySpec) -> Costs:
    """What a request costs by its route class; without a class, or where the table is silent, what `*` says or 1."""
    cost = policy.cost
    if isinstance(cost, int):
        return {OTHER_CLASSES: cost}
    table = document.cost_tables[cost] if isinstance(cost, str) else cost
    return {OTHER_CLASSES: 1} | table


def as_list(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else value


def faults_of(document: LimitsDocument) -> list[Fault]:
    """Everything that is wrong with a document, in the order in which it is read."""
    return [
        *_faults_of_names(document),
        *_faults_of_classes(document),
        *(fault for index, quota in enumerate(document.quotas) for fault in _faults_of_quota(document, index, quota)),
        *(
            fault
            for index, policy in enumerate(document.policies)
            for fault in _faults_of_policy(document, index, policy)
        ),
        *_faults_of_shadows(document),
    ]


def _faults_of_names(document: LimitsDocument) -> Iterator[Fault]:
    for plan in document.plans:
        if not is_name(plan):
            yield Fault(f"plans.{plan}", "name", "a plan's name has lower case letters, digits, - and _")
    if document.default_plan is not None and document.default_plan not in document.plans:
        yield Fault("default_plan", "known", f"there is no plan {document.default_plan!r}")
    yield from _repeated("quotas", [quota.name for quota in document.quotas])
    yield from _repeated("policies", [policy.name for policy in document.policies])


def _faults_of_classes(document: LimitsDocument) -> Iterator[Fault]:
    for name, routes in document.route_classes.items():
        where = f"route_classes.{name}"
        if not is_name(name):
            yield Fault(where, "name", "a route class's name has lower case letters, digits, - and _")
        if not routes:
            yield Fault(where, "required", "a route class has at least one route")
        for index, each in enumerate(routes):
            yield from _faults_of_route(f"{where}[{index}].route", each.route)
            yield from _faults_of_method(f"{where}[{index}].method", each.method)
    for name, table in document.cost_tables.items():
        if not is_name(name):
            yield Fault(f"cost_tables.{name}", "name", "a table's name has lower case letters, digits, - and _")
        yield from _faults_of_costs(document, f"cost_tables.{name}", table)


def _faults_of_costs(document: LimitsDocument, where: str, table: Costs) -> Iterator[Fault]:
    for name in table:
        if name != OTHER_CLASSES and name not in document.route_classes:
            yield Fault(f"{where}.{name}", "known", f"there is no route class {name!r}; * stands for all others")


def _repeated(where: str, names: list[str]) -> Iterator[Fault]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield Fault(f"{where}[{index}].name", "unique", f"{name!r} is used twice")
        seen.add(name)


def _faults_of_quota(document: LimitsDocument, index: int, quota: QuotaSpec) -> Iterator[Fault]:
    where = f"quotas[{index}]"
    yield from _faults_of_limit(document, f"{where}.limit", quota)
    yield from _faults_of_mode(f"{where}.mode", quota)
    if quota.kind is QuotaKind.ALLOWANCE:
        yield from _faults_of_allowance(document, where, quota)
    elif quota.kind is QuotaKind.CONCURRENCY:
        yield from _faults_of_slots(where, quota)
    elif quota.kind is QuotaKind.RATE:
        yield from _unknown(f"{where}.algorithm", quota.algorithm, RateAlgorithm)
        yield from _faults_of_sharing(f"{where}.sharing", quota)
    if quota.kind is not QuotaKind.ALLOWANCE and quota.thresholds is not None:
        yield Fault(f"{where}.thresholds", "allowance", "only of an allowance it is counted how much of it was used")
    if quota.kind is not QuotaKind.ALLOWANCE and quota.carry_over is not None:
        yield Fault(f"{where}.carry_over", "allowance", "only of an allowance something is left when its period ends")
    if quota.kind is not QuotaKind.ALLOWANCE and quota.cap != HARD:
        yield Fault(f"{where}.cap", "allowance", "only of an allowance more than its limit can be had, and billed")


def _faults_of_mode(where: str, quota: QuotaSpec) -> Iterator[Fault]:
    yield from _unknown(where, quota.mode, Mode)
    if quota.mode != Mode.LEASED and quota.kind is not QuotaKind.ALLOWANCE:
        reason = "only an allowance is leased; how a rate or a concurrency is divided over regions is its 'sharing'"
        yield Fault(where, "allowance", reason)
    elif quota.mode == Mode.REGIONAL and quota.cap != HARD:
        reason = "a soft cap goes beyond one limit of all regions together, and here each has its own: the cap is hard"
        yield Fault(where, "cap", reason)
    elif quota.mode == Mode.REGIONAL and quota.carry_over is not None:
        reason = "what a region left of its own limit would be for all regions in the next period: nothing goes over"
        yield Fault(where, "carry_over", reason)
    elif quota.mode == Mode.CENTRAL and isinstance(quota.cap, dict) and "overdraft" in quota.cap:
        yield Fault(where, "cap", "a region that is cut off has nothing of it, and goes on for nothing: no overdraft")
    elif quota.mode == Mode.CENTRAL and quota.horizon != DEFAULT_HORIZON:
        yield Fault(where, "horizon", "nothing is leased ahead of a request, so there is no horizon: leave it out")


def _faults_of_sharing(where: str, quota: QuotaSpec) -> Iterator[Fault]:
    if quota.sharing is not None:
        yield from _unknown(where, quota.sharing, Sharing)
    if quota.sharing in (Sharing.ADAPTIVE, Sharing.STRICT) and quota.algorithm in WINDOWS:
        reason = (
            f"{quota.algorithm} counts windows, which cannot move with demand: each region has its part, 'regional'"
        )
        yield Fault(where, "shareable", reason)


def _faults_of_allowance(document: LimitsDocument, where: str, quota: QuotaSpec) -> Iterator[Fault]:
    if quota.period is None:
        yield Fault(f"{where}.period", "required", "an allowance needs a period: hour, day, month or anniversary")
    else:
        yield from _unknown(f"{where}.period", quota.period, PeriodKind)
    if reason := why_not_for_periods(quota.time_zone):
        yield Fault(f"{where}.time_zone", "zone", reason)
    yield from _faults_of_cap(f"{where}.cap", quota.cap)
    yield from _unknown(f"{where}.durability", quota.durability, ("exact",))
    if quota.horizon != DEFAULT_HORIZON:
        yield from _faults_of_duration(f"{where}.horizon", quota.horizon)
    yield from _faults_of_thresholds(f"{where}.thresholds", quota.thresholds or [])
    yield from _faults_of_carry_over(document, f"{where}.carry_over", quota.carry_over)


def _faults_of_carry_over(document: LimitsDocument, where: str, value: Limit | None) -> Iterator[Fault]:
    for plan, each in (value if isinstance(value, dict) else {None: value}).items():
        place = where if plan is None else f"{where}.{plan}"
        if plan is not None and plan not in document.plans:
            yield Fault(place, "known", f"there is no plan {plan!r}")
        if each not in (None, 0, ALL):
            try:
                parse_portion(each)
            except ValueError:
                reason = f"{each!r} is no portion; write 500 (units), 50% (of the limit), {ALL}, or 0"
                yield Fault(place, "portion", reason)


def _faults_of_cap(where: str, cap: str | dict[str, int]) -> Iterator[Fault]:
    if cap in (HARD, SOFT):
        return
    if isinstance(cap, dict) and cap and cap.keys() <= {"overage", "overdraft"}:
        for name, units in cap.items():
            if not 0 <= units <= MAX_UNITS:
                yield Fault(f"{where}.{name}", "units", f"a whole number from 0 to {MAX_UNITS} is needed")
    else:
        reason = (
            f"write {HARD}, {SOFT}, {{overage: 500}}: so far beyond the limit; or {{overdraft: 50}}: so many units"
            " beyond their leases for regions that are cut off"
        )
        yield Fault(where, "known", reason)


def _faults_of_thresholds(where: str, thresholds: list[int | str]) -> Iterator[Fault]:
    """Each above the one before, and so all of one kind: 80% and 900 units have no order."""
    before: Portion | None = None
    for place, text in enumerate(thresholds):
        try:
            portion = parse_portion(text)
        except ValueError as error:
            yield Fault(f"{where}[{place}]", "portion", str(error))
            continue
        if before and (before.units is None) != (portion.units is None):
            yield Fault(f"{where}[{place}]", "mixed", "thresholds are all in percent, or all in units")
        elif before and before >= portion:
            yield Fault(f"{where}[{place}]", "ascending", f"{text} is not above the threshold before it")
        before = portion


def _faults_of_limit(document: LimitsDocument, where: str, quota: QuotaSpec) -> Iterator[Fault]:
    by_plan = quota.limit if isinstance(quota.limit, dict) else {None: quota.limit}
    for plan, value in by_plan.items():
        place = where if plan is None else f"{where}.{plan}"
        if plan is not None and plan not in document.plans and plan != OTHER_PLANS:
            yield Fault(place, "known", f"there is no plan {plan!r}")
        yield from faults_of_value(place, quota, value)
    missing = [plan for plan in document.plans if plan not in by_plan]
    if missing and isinstance(quota.limit, dict) and OTHER_PLANS not in quota.limit:
        names = ", ".join(map(repr, missing[:10]))
        reason = f"no limit for the plans {names}, so it would admit nothing of them: name every plan, or write '*'"
        yield Fault(where, "plans", reason)


def faults_of_value(where: str, quota: QuotaSpec, value: LimitValue) -> Iterator[Fault]:
    """One limit, in the document or in an override."""
    if quota.kind is QuotaKind.RATE:
        yield from _faults_of_rate(where, value, quota.algorithm)
        return
    most = MAX_SLOTS if quota.kind is QuotaKind.CONCURRENCY else MAX_UNITS
    if not isinstance(value, int) or not 0 <= value <= most:
        yield Fault(where, "units", f"a whole number from 0 to {most} is needed, not {value!r}")


def _faults_of_rate(where: str, value: LimitValue, algorithm: str) -> Iterator[Fault]:
    try:
        parse_rate(value, algorithm)
    except ValueError as error:
        yield Fault(where, "rate", str(error))


def _faults_of_slots(where: str, quota: QuotaSpec) -> Iterator[Fault]:
    if quota.slot_ttl is not None:
        yield from _faults_of_slot_ttl(f"{where}.slot_ttl", quota.slot_ttl)
    if quota.sharing == Sharing.ADAPTIVE:
        reason = "who works cannot be asked to stop: slots are shared strictly, 'strict', or by weight, 'regional'"
        yield Fault(f"{where}.sharing", "shareable", reason)
    elif quota.sharing is not None:
        yield from _unknown(f"{where}.sharing", quota.sharing, Sharing)


def _faults_of_slot_ttl(where: str, text: str) -> Iterator[Fault]:
    faults = list(_faults_of_duration(where, text))
    if not faults and not 1000 <= parse_duration_ms(text) <= MAX_SLOT_TTL_MS:
        faults = [Fault(where, "range", f"a slot is held from 1s to 24h unless it is extended, not {text!r}")]
    yield from faults


def _faults_of_duration(where: str, text: str) -> Iterator[Fault]:
    try:
        parse_duration_ms(text)
    except ValueError as error:
        yield Fault(where, "duration", str(error))


def _unknown(where: str, value: str, known: Iterable[str]) -> Iterator[Fault]:
    words = tuple(known)
    if value not in words:
        yield Fault(where, "known", f"{value!r} is none of {', '.join(words)}")


def _faults_of_policy(document: LimitsDocument, index: int, policy: PolicySpec) -> Iterator[Fault]:
    where = f"policies[{index}]"
    quota = next((each for each in document.quotas if each.name == policy.quota), None)
    if quota is None:
        yield Fault(f"{where}.quota", "known", f"there is no quota {policy.quota!r}")
    for place, field in enumerate(policy.by):
        if field not in SUBJECT_FIELDS:
            yield Fault(f"{where}.by[{place}]", "known", f"{field!r} is none of {', '.join(SUBJECT_FIELDS)}")
        if field in policy.by[:place]:
            yield Fault(f"{where}.by[{place}]", "unique", f"{field!r} is named twice")
    yield from _faults_of_usage(where, policy, quota)
    yield from _faults_of_duration(f"{where}.wait", policy.wait)
    yield from _faults_of_route(f"{where}.match.route", policy.match.route)
    yield from _faults_of_method(f"{where}.match.method", policy.match.method)
    yield from _faults_of_match(document, f"{where}.match", policy.match)
    yield from _faults_of_cost(document, f"{where}.cost", policy.cost)
    if quota is not None and isinstance(quota.limit, dict) and not {"tenant", "plan"} & set(policy.by):
        # The plan is a tenant's: the coordinator, which only knows what is counted by, could not tell the limit.
        reason = f"the limit of {quota.name!r} depends on the plan: count by tenant, or by plan, too"
        yield Fault(f"{where}.by", "tenant", reason)
    if quota is not None and quota.period == PeriodKind.ANNIVERSARY and "tenant" not in policy.by:
        reason = f"the periods of {quota.name!r} follow a tenant's subscription: count by tenant, too"
        yield Fault(f"{where}.by", "tenant", reason)
    yield from _faults_of_failure(where, policy, quota)
    if quota is not None and quota.mode == Mode.CENTRAL:
        yield from _faults_of_asking(where, policy, quota)
    if policy.on_hold_expiry is HoldExpiry.CHARGE and quota is not None and quota.kind is not QuotaKind.ALLOWANCE:
        yield Fault(f"{where}.on_hold_expiry", "allowance", "only what is held of an allowance can be charged")


def _faults_of_usage(where: str, policy: PolicySpec, quota: QuotaSpec | None) -> Iterator[Fault]:
    if policy.usage_by and quota is not None and quota.kind is not QuotaKind.ALLOWANCE:
        yield Fault(f"{where}.usage_by", "allowance", "only of an allowance usage is booked")
    for place, field in enumerate(policy.usage_by):
        if field not in USAGE_FIELDS:
            yield Fault(f"{where}.usage_by[{place}]", "known", f"{field!r} is none of {', '.join(USAGE_FIELDS)}")
        if field in policy.usage_by[:place]:
            yield Fault(f"{where}.usage_by[{place}]", "unique", f"{field!r} is named twice")


def _faults_of_shadows(document: LimitsDocument) -> Iterator[Fault]:
    """What is in shadow may count, and change nothing for anybody."""
    kinds = {quota.name: quota.kind for quota in document.quotas}
    enforced = {policy.quota: policy.name for policy in document.policies if not policy.shadow}
    for index, policy in enumerate(document.policies):
        where = f"policies[{index}].shadow"
        if policy.shadow and kinds.get(policy.quota) is QuotaKind.ALLOWANCE:
            reason = "what is counted of an allowance is billed: only a rate or a concurrency may be in shadow"
            yield Fault(where, "supported", reason)
        elif policy.shadow and policy.quota in enforced:
            other = enforced[policy.quota]
            reason = f"{policy.quota!r} is enforced by policy {other!r}, whose units it would take: count another quota"
            yield Fault(where, "quota", reason)


def _faults_of_match(document: LimitsDocument, where: str, match: Match) -> Iterator[Fault]:
    if match.route_class == []:
        yield Fault(f"{where}.route_class", "required", "name a route class, or leave it out")
    for place, name in enumerate(as_list(match.route_class)):
        if name not in document.route_classes:
            yield Fault(_item(where, "route_class", match.route_class, place), "known", f"there is no {name!r}")
    for place, text in enumerate(as_list(match.ip)):
        try:
            parse_network(text)
        except ValueError as error:
            yield Fault(_item(where, "ip", match.ip, place), "network", f"{error}; write it as 10.0.0.0/8")


def _item(where: str, name: str, value: str | list[str] | None, place: int) -> str:
    return f"{where}.{name}[{place}]" if isinstance(value, list) else f"{where}.{name}"


def _faults_of_cost(document: LimitsDocument, where: str, cost: int | str | Costs) -> Iterator[Fault]:
    if isinstance(cost, str) and cost not in document.cost_tables:
        yield Fault(where, "known", f"there is no table {cost!r} in cost_tables")
    elif isinstance(cost, dict):
        yield from _faults_of_costs(document, where, cost)


def _faults_of_route(where: str, route: str) -> Iterator[Fault]:
    segments = route.removesuffix("*").split("/")
    if "**" in route or any("*" in segment and segment != "*" for segment in segments):
        yield Fault(where, "wildcard", "a * is the last character, or a whole segment as in /v1/*/exports")
    if route.count("*") > MAX_WILDCARDS:
        yield Fault(where, "wildcard", f"a route has at most {MAX_WILDCARDS} of *")
    if route != "*" and not route.startswith("/"):
        yield Fault(where, "path", "a route begins with /")


def _faults_of_method(where: str, method: str | list[str]) -> Iterator[Fault]:
    """Requests name their method in capitals: another spelling would match none, and so limit nothing."""
    if method == []:
        yield Fault(where, "required", "name a method, or * for all")
    for each in method if isinstance(method, list) else [method]:
        if not _METHOD.fullmatch(each) and method != "*":
            yield Fault(where, "method", f"{each!r} is no method; write GET, or * for all")


def _faults_of_asking(where: str, policy: PolicySpec, quota: QuotaSpec) -> Iterator[Fault]:
    """Of what is central nothing is admitted that the coordinator was not asked for."""
    try:
        wait_ms = parse_duration_ms(policy.wait)
    except ValueError:
        return  # said already
    if not 0 < wait_ms <= MAX_CENTRAL_WAIT_MS:
        longest_s = MAX_CENTRAL_WAIT_MS // 1000
        reason = (
            f"{quota.name!r} is central: each request waits for the coordinator, for at most {longest_s}s, not for 0s"
        )
        yield Fault(f"{where}.wait", "range", reason)
    if policy.on_store_failure is not StoreFailure.CLOSED:
        reason = f"{quota.name!r} is central: what the coordinator was not asked for is denied, so it fails 'closed'"
        yield Fault(f"{where}.on_store_failure", "supported", reason)


def _faults_of_failure(where: str, policy: PolicySpec, quota: QuotaSpec | None) -> Iterator[Fault]:
    is_served = quota is None or quota.kind in (QuotaKind.RATE, QuotaKind.ALLOWANCE)
    if policy.on_store_failure is not StoreFailure.CLOSED and not is_served:
        reason = "a concurrency fails closed: who holds its slots cannot be known without the store"
        yield Fault(f"{where}.on_store_failure", "supported", reason)
