"""Validate a limits document: find everything that is wrong with it, each with its field, a rule and a reason.

What the limits document could say but this version does not support is refused here: a limit that was accepted is
enforced. The types of the document (protocol/limits/document.py) have refused unknown fields and wrong types already.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from protocol.addresses import parse_network
from protocol.check import MAX_VALUE_LENGTH
from protocol.decision_log.sampling import parse_sample
from protocol.identifiers import is_name
from protocol.limits.document import (
    ALL,
    DEFAULT_HORIZON,
    DEFAULT_REPORT_WITHIN,
    ENTRY_FIELDS,
    HARD,
    LABEL_PREFIX,
    LONGEST_REPORT_WITHIN_MS,
    OTHER_CLASSES,
    OTHER_PLANS,
    SHORTEST_REPORT_WITHIN_MS,
    SOFT,
    SUBJECT_FIELDS,
    UNLIMITED,
    USAGE_FIELDS,
    Alignment,
    AllowanceQuota,
    ConcurrencyQuota,
    Costs,
    HoldExpiry,
    LabelValues,
    Limit,
    LimitsDocument,
    LimitValue,
    Match,
    Mode,
    PeriodKind,
    PolicySpec,
    Portion,
    Quota,
    RateQuota,
    RouteRules,
    StoreFailure,
    as_list,
    envoy_rules_of,
    is_label,
    logging_rules_of,
    parse_portion,
)
from protocol.limits.rates import WINDOWS, RateAlgorithm, Sharing, parse_duration_ms, parse_rate
from protocol.limits.routes import has_dot_segments, split_query
from protocol.limits.usage_labels import MAX_USAGE_LABELS
from protocol.units import MAX_UNITS
from protocol.zones import why_not_for_periods

MAX_SLOTS = 10_000
MAX_SLOT_TTL_MS = 24 * 3_600_000
MAX_CENTRAL_WAIT_MS = 10_000  # how long a request may wait for the coordinator
MAX_WILDCARDS = 4  # of a route
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")


class DocumentFault(NamedTuple):
    """One thing that is wrong with a document."""

    field: str
    rule: str
    reason: str


def faults_of(document: LimitsDocument) -> list[DocumentFault]:
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
        *_faults_of_decision_log(document),
        *_faults_of_envoy(document),
    ]


def _faults_of_envoy(document: LimitsDocument) -> Iterator[DocumentFault]:
    for domain, rules in envoy_rules_of(document).domains.items():
        where = f"envoy.domains.{domain}"
        if not 1 <= len(domain) <= MAX_VALUE_LENGTH:
            yield DocumentFault(where, "length", f"a domain has 1 to {MAX_VALUE_LENGTH} characters")
        for key, field in rules.entries.items():
            if not key:
                yield DocumentFault(f"{where}.entries", "required", "the key of an entry has at least one character")
            if field not in ENTRY_FIELDS and not is_label(field):
                known = f"{', '.join(ENTRY_FIELDS)}, nor a label such as labels.model"
                yield DocumentFault(f"{where}.entries.{key}", "known", f"{field!r} is none of {known}")


def _faults_of_decision_log(document: LimitsDocument) -> Iterator[DocumentFault]:
    rules, names = logging_rules_of(document), {policy.name for policy in document.policies}
    yield from _faults_of_sample("decisions.admissions", rules.admissions)
    for name, text in rules.by_policy.items():
        where = f"decisions.by_policy.{name}"
        if name not in names:
            yield DocumentFault(where, "known", f"there is no policy {name!r}")
        yield from _faults_of_sample(where, text)


def _faults_of_sample(where: str, text: str | float) -> Iterator[DocumentFault]:
    try:
        parse_sample(text)
    except ValueError as error:
        yield DocumentFault(where, "sample", str(error))


def _faults_of_names(document: LimitsDocument) -> Iterator[DocumentFault]:
    for plan in document.plans:
        if not is_name(plan):
            yield DocumentFault(f"plans.{plan}", "name", "a plan's name has lower case letters, digits, - and _")
    if document.default_plan is not None and document.default_plan not in document.plans:
        yield DocumentFault("default_plan", "known", f"there is no plan {document.default_plan!r}")
    yield from _repeated("quotas", [quota.name for quota in document.quotas])
    yield from _repeated("policies", [policy.name for policy in document.policies])


def _faults_of_classes(document: LimitsDocument) -> Iterator[DocumentFault]:
    for name, routes in document.route_classes.items():
        where = f"route_classes.{name}"
        if not is_name(name):
            yield DocumentFault(where, "name", "a route class's name has lower case letters, digits, - and _")
        if not routes:
            yield DocumentFault(where, "required", "a route class has at least one route")
        for index, each in enumerate(routes):
            yield from _faults_of_route(document.routes, f"{where}[{index}].route", each.route)
            yield from _faults_of_method(f"{where}[{index}].method", each.method)
    for name, table in document.cost_tables.items():
        if not is_name(name):
            yield DocumentFault(f"cost_tables.{name}", "name", "a table's name has lower case letters, digits, - and _")
        yield from _faults_of_costs(document, f"cost_tables.{name}", table)


def _faults_of_costs(document: LimitsDocument, where: str, table: Costs) -> Iterator[DocumentFault]:
    for name in table:
        if name != OTHER_CLASSES and name not in document.route_classes:
            yield DocumentFault(
                f"{where}.{name}", "known", f"there is no route class {name!r}; * stands for all others"
            )


def _repeated(where: str, names: list[str]) -> Iterator[DocumentFault]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield DocumentFault(f"{where}[{index}].name", "unique", f"{name!r} is used twice")
        seen.add(name)


def _faults_of_quota(document: LimitsDocument, index: int, quota: Quota) -> Iterator[DocumentFault]:
    where = f"quotas[{index}]"
    yield from _faults_of_limit(document, f"{where}.limit", quota)
    if isinstance(quota, AllowanceQuota):
        yield from _faults_of_mode(f"{where}.mode", quota)
        yield from _faults_of_allowance(document, where, quota)
    elif isinstance(quota, ConcurrencyQuota):
        yield from _faults_of_concurrency(where, quota)
    else:
        yield from _faults_of_windows(where, quota)


def _faults_of_windows(where: str, quota: RateQuota) -> Iterator[DocumentFault]:
    if quota.sharing in (Sharing.ADAPTIVE, Sharing.STRICT) and quota.algorithm in WINDOWS:
        reason = f"{quota.algorithm} counts windows, which cannot move between regions: write 'regional'"
        yield DocumentFault(f"{where}.sharing", "shareable", reason)
    if quota.align is Alignment.CALENDAR and quota.algorithm is not RateAlgorithm.FIXED_WINDOW:
        reason = f"{quota.algorithm} has no windows that begin at a fixed time: only fixed_window can be aligned"
        yield DocumentFault(f"{where}.align", "supported", reason)
    if wrong_zone := why_not_for_periods(quota.time_zone):
        yield DocumentFault(f"{where}.time_zone", "zone", wrong_zone)
    elif quota.time_zone != "UTC" and quota.align is not Alignment.CALENDAR:
        yield DocumentFault(f"{where}.time_zone", "align", "a zone has an effect only with 'align: calendar'")


def _faults_of_mode(where: str, quota: AllowanceQuota) -> Iterator[DocumentFault]:
    if quota.mode is Mode.REGIONAL and quota.cap != HARD:
        reason = "a soft cap extends one limit of all regions, but here each region has its own: the cap must be hard"
        yield DocumentFault(where, "cap", reason)
    elif quota.mode is Mode.REGIONAL and quota.carry_over is not None:
        reason = "units that are left of one region's limit would go to all regions: nothing can be carried over"
        yield DocumentFault(where, "carry_over", reason)
    elif quota.mode is Mode.CENTRAL and isinstance(quota.cap, dict) and "overdraft" in quota.cap:
        yield DocumentFault(
            where, "cap", "a disconnected region holds no units of a central quota, so it has no overdraft"
        )
    elif quota.mode is Mode.CENTRAL and quota.horizon != DEFAULT_HORIZON:
        yield DocumentFault(
            where, "horizon", "nothing is leased ahead of a request, so there is no horizon: leave it out"
        )


def _faults_of_allowance(document: LimitsDocument, where: str, quota: AllowanceQuota) -> Iterator[DocumentFault]:
    if reason := why_not_for_periods(quota.time_zone):
        yield DocumentFault(f"{where}.time_zone", "zone", reason)
    yield from _faults_of_cap(f"{where}.cap", quota.cap)
    if quota.horizon != DEFAULT_HORIZON:
        yield from _faults_of_duration(f"{where}.horizon", quota.horizon)
    if quota.report_within != DEFAULT_REPORT_WITHIN:
        yield from _faults_of_report_within(f"{where}.report_within", quota.report_within)
    yield from _faults_of_thresholds(f"{where}.thresholds", quota.thresholds or [])
    yield from _faults_of_carry_over(document, f"{where}.carry_over", quota.carry_over)


def _faults_of_report_within(where: str, text: str) -> Iterator[DocumentFault]:
    faults = list(_faults_of_duration(where, text))
    yield from faults
    if not faults and not SHORTEST_REPORT_WITHIN_MS <= parse_duration_ms(text) <= LONGEST_REPORT_WITHIN_MS:
        yield DocumentFault(where, "range", f"{text} is not between 100ms and 1h")


def _faults_of_carry_over(document: LimitsDocument, where: str, value: Limit | None) -> Iterator[DocumentFault]:
    for plan, each in (value if isinstance(value, dict) else {None: value}).items():
        place = where if plan is None else f"{where}.{plan}"
        if plan is not None and plan not in document.plans:
            yield DocumentFault(place, "known", f"there is no plan {plan!r}")
        if each not in (None, 0, ALL):
            try:
                parse_portion(each)
            except ValueError:
                reason = f"{each!r} is no portion; write 500 (units), 50% (of the limit), {ALL}, or 0"
                yield DocumentFault(place, "portion", reason)


def _faults_of_cap(where: str, cap: str | dict[str, int]) -> Iterator[DocumentFault]:
    if cap in (HARD, SOFT):
        return
    if isinstance(cap, dict) and cap and cap.keys() <= {"overage", "overdraft"}:
        for name, units in cap.items():
            if not 0 <= units <= MAX_UNITS:
                yield DocumentFault(f"{where}.{name}", "units", f"a whole number from 0 to {MAX_UNITS} is needed")
    else:
        reason = (
            f"write {HARD}, {SOFT}, {{overage: 500}}: so far beyond the limit; or {{overdraft: 50}}: so many units"
            " beyond their leases for regions that are cut off"
        )
        yield DocumentFault(where, "known", reason)


def _faults_of_thresholds(where: str, thresholds: list[int | str]) -> Iterator[DocumentFault]:
    """Check that thresholds ascend, and so are all of one kind: 80% and 900 units have no order."""
    before: Portion | None = None
    for place, text in enumerate(thresholds):
        try:
            portion = parse_portion(text)
        except ValueError as error:
            yield DocumentFault(f"{where}[{place}]", "portion", str(error))
            continue
        if before and (before.units is None) != (portion.units is None):
            yield DocumentFault(f"{where}[{place}]", "mixed", "thresholds are all in percent, or all in units")
        elif before and before >= portion:
            yield DocumentFault(f"{where}[{place}]", "ascending", f"{text} is not above the threshold before it")
        before = portion


def _faults_of_limit(document: LimitsDocument, where: str, quota: Quota) -> Iterator[DocumentFault]:
    by_plan = quota.limit if isinstance(quota.limit, dict) else {None: quota.limit}
    for plan, value in by_plan.items():
        place = where if plan is None else f"{where}.{plan}"
        if plan is not None and plan not in document.plans and plan != OTHER_PLANS:
            yield DocumentFault(place, "known", f"there is no plan {plan!r}")
        yield from faults_of_value(place, quota, value)
    missing = [plan for plan in document.plans if plan not in by_plan]
    if missing and isinstance(quota.limit, dict) and OTHER_PLANS not in quota.limit:
        names = ", ".join(map(repr, missing[:10]))
        reason = f"no limit for the plans {names}, so it would admit nothing of them: name every plan, or write '*'"
        yield DocumentFault(where, "plans", reason)


def faults_of_value(where: str, quota: Quota, value: LimitValue) -> Iterator[DocumentFault]:
    """Check one limit, of the document or of an override."""
    if value == UNLIMITED:
        if isinstance(quota, AllowanceQuota):
            reason = "an allowance is billed, and its limit bounds mistakes: write the most that you would bill"
            yield DocumentFault(where, "unlimited", reason)
        return
    if isinstance(quota, RateQuota):
        yield from _faults_of_rate(where, value, quota)
        return
    most = MAX_SLOTS if isinstance(quota, ConcurrencyQuota) else MAX_UNITS
    if not isinstance(value, int) or not 0 <= value <= most:
        others = "" if isinstance(quota, AllowanceQuota) else f", or {UNLIMITED!r}"
        yield DocumentFault(where, "units", f"a whole number from 0 to {most}{others} is needed, not {value!r}")


def _faults_of_rate(where: str, value: LimitValue, quota: RateQuota) -> Iterator[DocumentFault]:
    try:
        rate = parse_rate(value, quota.algorithm)
    except ValueError as error:
        yield DocumentFault(where, "rate", str(error))
        return
    if rate.is_slow and quota.sharing in (Sharing.ADAPTIVE, Sharing.STRICT):
        reason = f"{value!r} is too slow to be shared by demand: write 'regional', or use an allowance, which is leased"
        yield DocumentFault(where, "shareable", reason)


def _faults_of_concurrency(where: str, quota: ConcurrencyQuota) -> Iterator[DocumentFault]:
    if quota.slot_ttl is not None:
        yield from _faults_of_slot_ttl(f"{where}.slot_ttl", quota.slot_ttl)
    if quota.sharing is Sharing.ADAPTIVE:
        reason = "running work cannot be asked to stop: share slots by demand with 'strict', or by weight, 'regional'"
        yield DocumentFault(f"{where}.sharing", "shareable", reason)


def _faults_of_slot_ttl(where: str, text: str) -> Iterator[DocumentFault]:
    faults = list(_faults_of_duration(where, text))
    if not faults and not 1000 <= parse_duration_ms(text) <= MAX_SLOT_TTL_MS:
        faults = [DocumentFault(where, "range", f"a slot is held from 1s to 24h unless it is extended, not {text!r}")]
    yield from faults


def _faults_of_duration(where: str, text: str) -> Iterator[DocumentFault]:
    try:
        parse_duration_ms(text)
    except ValueError as error:
        yield DocumentFault(where, "duration", str(error))


def _faults_of_policy(document: LimitsDocument, index: int, policy: PolicySpec) -> Iterator[DocumentFault]:
    where = f"policies[{index}]"
    quota = next((each for each in document.quotas if each.name == policy.quota), None)
    if quota is None:
        yield DocumentFault(f"{where}.quota", "known", f"there is no quota {policy.quota!r}")
    for place, field in enumerate(policy.by):
        if field not in SUBJECT_FIELDS and not is_label(field):
            known = f"{', '.join(SUBJECT_FIELDS)}, or a label such as labels.model"
            yield DocumentFault(f"{where}.by[{place}]", "known", f"{field!r} is none of {known}")
        if field in policy.by[:place]:
            yield DocumentFault(f"{where}.by[{place}]", "unique", f"{field!r} is named twice")
    yield from _faults_of_usage(where, policy, quota)
    yield from _faults_of_duration(f"{where}.wait", policy.wait)
    yield from _faults_of_route(document.routes, f"{where}.match.route", policy.match.route)
    yield from _faults_of_method(f"{where}.match.method", policy.match.method)
    yield from _faults_of_match(document, f"{where}.match", policy.match)
    yield from _faults_of_cost(document, f"{where}.cost", policy.cost)
    if quota is not None and isinstance(quota.limit, dict) and not {"tenant", "plan"} & set(policy.by):
        # The plan is a tenant's: the coordinator, which only knows what is counted by, could not tell the limit.
        reason = f"the limit of {quota.name!r} depends on the plan: count by tenant, or by plan, too"
        yield DocumentFault(f"{where}.by", "tenant", reason)
    if isinstance(quota, AllowanceQuota) and quota.period is PeriodKind.ANNIVERSARY and "tenant" not in policy.by:
        reason = f"the periods of {quota.name!r} follow a tenant's subscription: count by tenant, too"
        yield DocumentFault(f"{where}.by", "tenant", reason)
    yield from _faults_of_failure(where, policy, quota)
    if isinstance(quota, AllowanceQuota) and quota.mode is Mode.CENTRAL:
        yield from _faults_of_central_policy(where, policy, quota)
    if policy.on_hold_expiry is HoldExpiry.CHARGE and quota is not None and not isinstance(quota, AllowanceQuota):
        yield DocumentFault(f"{where}.on_hold_expiry", "allowance", "only a hold of an allowance can be charged")


def _faults_of_usage(where: str, policy: PolicySpec, quota: Quota | None) -> Iterator[DocumentFault]:
    if policy.usage_by and quota is not None and not isinstance(quota, AllowanceQuota):
        yield DocumentFault(f"{where}.usage_by", "allowance", "usage is only booked for an allowance")
    if sum(map(is_label, policy.usage_by)) > MAX_USAGE_LABELS:
        yield DocumentFault(f"{where}.usage_by", "max_length", f"usage has at most {MAX_USAGE_LABELS} labels")
    for place, field in enumerate(policy.usage_by):
        if field not in USAGE_FIELDS and not is_label(field):
            known = f"{', '.join(USAGE_FIELDS)}, nor a label such as labels.model"
            yield DocumentFault(f"{where}.usage_by[{place}]", "known", f"{field!r} is none of {known}")
        if field in policy.usage_by[:place]:
            yield DocumentFault(f"{where}.usage_by[{place}]", "unique", f"{field!r} is named twice")


def _faults_of_shadows(document: LimitsDocument) -> Iterator[DocumentFault]:
    """Check that shadow policies change nothing for requests: they may only count."""
    allowances = {quota.name for quota in document.quotas if isinstance(quota, AllowanceQuota)}
    enforced = {policy.quota: policy.name for policy in document.policies if not policy.shadow}
    for index, policy in enumerate(document.policies):
        where = f"policies[{index}].shadow"
        if policy.shadow and policy.quota in allowances:
            reason = "usage of an allowance is billed: only a rate or a concurrency may be in shadow"
            yield DocumentFault(where, "supported", reason)
        elif policy.shadow and policy.quota in enforced:
            other = enforced[policy.quota]
            reason = f"{policy.quota!r} is enforced by policy {other!r}, whose units it would take: count another quota"
            yield DocumentFault(where, "quota", reason)


def _faults_of_match(document: LimitsDocument, where: str, match: Match) -> Iterator[DocumentFault]:
    if match.route_class == []:
        yield DocumentFault(f"{where}.route_class", "required", "name a route class, or leave it out")
    for place, name in enumerate(as_list(match.route_class)):
        if name not in document.route_classes:
            yield DocumentFault(_item(where, "route_class", match.route_class, place), "known", f"there is no {name!r}")
    for place, text in enumerate(as_list(match.ip)):
        try:
            parse_network(text)
        except ValueError as error:
            yield DocumentFault(_item(where, "ip", match.ip, place), "network", f"{error}; write it as 10.0.0.0/8")
    yield from _faults_of_labels(f"{where}.labels", match.labels)


def _faults_of_labels(where: str, labels: Mapping[str, LabelValues]) -> Iterator[DocumentFault]:
    for name, values in labels.items():
        if not is_label(LABEL_PREFIX + name):
            reason = "a label's name begins with a lower case letter and has at most 32 of a-z, 0-9 and _"
            yield DocumentFault(f"{where}.{name}", "name", reason)
        for place, value in enumerate(as_list(values)):
            if not 1 <= len(value) <= MAX_VALUE_LENGTH:
                field = f"{where}.{name}[{place}]" if isinstance(values, list) else f"{where}.{name}"
                yield DocumentFault(field, "length", f"a label's value has 1 to {MAX_VALUE_LENGTH} characters")


def _item(where: str, name: str, value: str | list[str] | None, place: int) -> str:
    return f"{where}.{name}[{place}]" if isinstance(value, list) else f"{where}.{name}"


def _faults_of_cost(document: LimitsDocument, where: str, cost: int | str | Costs) -> Iterator[DocumentFault]:
    if isinstance(cost, str) and cost not in document.cost_tables:
        yield DocumentFault(where, "known", f"there is no table {cost!r} in cost_tables")
    elif isinstance(cost, dict):
        yield from _faults_of_costs(document, where, cost)


def _faults_of_route(rules: RouteRules, where: str, route: str) -> Iterator[DocumentFault]:
    segments = route.removesuffix("*").split("/")
    if "**" in route or any("*" in segment and segment != "*" for segment in segments):
        yield DocumentFault(where, "wildcard", "a * is the last character, or a whole segment as in /v1/*/exports")
    if route.count("*") > MAX_WILDCARDS:
        yield DocumentFault(where, "wildcard", f"a route has at most {MAX_WILDCARDS} of *")
    if route != "*" and not route.startswith("/"):
        yield DocumentFault(where, "path", "a route begins with /")
    if has_dot_segments(route):
        yield DocumentFault(where, "segments", "a route has no segments . and .., which are resolved in requests")
    if rules.query == "drop" and split_query(route)[1]:
        reason = "requests are matched without their query: leave it out, or write routes: {query: keep}"
        yield DocumentFault(where, "query", reason)


def _faults_of_method(where: str, method: str | list[str]) -> Iterator[DocumentFault]:
    """Check methods, which are compared in capitals."""
    if method == []:
        yield DocumentFault(where, "required", "name a method, or * for all")
    for each in method if isinstance(method, list) else [method]:
        if not _METHOD.fullmatch(each.upper()) and method != "*":
            yield DocumentFault(where, "method", f"{each!r} is no method; write GET, or * for all")


def _faults_of_central_policy(where: str, policy: PolicySpec, quota: Quota) -> Iterator[DocumentFault]:
    """Check policies of a central quota: without the coordinator's reply nothing is admitted."""
    try:
        wait_ms = parse_duration_ms(policy.wait)
    except ValueError:
        return  # reported already
    if not 0 < wait_ms <= MAX_CENTRAL_WAIT_MS:
        longest_s = MAX_CENTRAL_WAIT_MS // 1000
        reason = (
            f"{quota.name!r} is central: each request waits for the coordinator, for at most {longest_s}s, not for 0s"
        )
        yield DocumentFault(f"{where}.wait", "range", reason)
    if policy.on_store_failure is not StoreFailure.CLOSED:
        reason = f"{quota.name!r} is central: without the coordinator nothing is admitted, so it fails 'closed'"
        yield DocumentFault(f"{where}.on_store_failure", "supported", reason)


def _faults_of_failure(where: str, policy: PolicySpec, quota: Quota | None) -> Iterator[DocumentFault]:
    if policy.on_store_failure is not StoreFailure.CLOSED and isinstance(quota, ConcurrencyQuota):
        reason = "a concurrency fails closed: without the store it is unknown which slots are in use"
        yield DocumentFault(f"{where}.on_store_failure", "supported", reason)
