"""Explain which policies match a request, and why the others do not.

This reads the document line by line, with the parts that an agent's tables are made of. A test compares both.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from protocol.addresses import Network, parse_network
from protocol.check import NO_COSTS, PolicyExplanation, RequestExplanation, UnmetCondition
from protocol.identifiers import quota_key
from protocol.limits.document import (
    LABEL_PREFIX,
    OTHER_CLASSES,
    Costs,
    LimitsDocument,
    PolicySpec,
    as_list,
    costs_of,
)
from protocol.limits.route_table import Routes
from protocol.limits.routes import RouteNormalizer
from protocol.limits.subjects import (
    NO_PLAN,
    InvalidAddress,
    InvalidSubjectValue,
    RouteClasses,
    check_values,
    has_labels,
    is_within,
    value_of,
)


class _Request(NamedTuple):
    subject: Mapping[str, str]
    match_form: str
    route_class: str
    plan: str | None
    cost: int | None
    costs: Mapping[str, int]  # by quota


class _Policy(NamedTuple):
    spec: PolicySpec
    routes: Routes[None]  # its only route
    networks: Sequence[Network]
    costs: Costs  # by route class


class Explainer:
    """Explains requests under one document."""

    def __init__(self, document: LimitsDocument) -> None:
        self._unmatched = document.unmatched
        self._normalizer = RouteNormalizer(document.routes)
        self._classes = RouteClasses(document.route_classes, self._normalizer)
        self._policies = [
            _Policy(
                policy,
                Routes([(self._normalizer.pattern(policy.match.route), None)]),
                [parse_network(text) for text in as_list(policy.match.ip)],
                costs_of(document, policy),
            )
            for policy in document.policies
        ]

    def explain(
        self, subject: Mapping[str, str], plan: str | None, cost: int | None = None, costs: Mapping[str, int] = NO_COSTS
    ) -> RequestExplanation:
        """Explain a request of a tenant on this plan. `cost` and `costs` are those of a check."""
        normal = dict(subject)
        if "route" in normal:
            normal["route"] = self._normalizer.normalize(normal["route"])
        if "method" in normal:
            normal["method"] = normal["method"].upper()
        match_form = self._normalizer.match_form(normal.get("route", ""))
        route_class = self._classes.of(match_form, normal.get("method", ""))
        request = _Request(normal, match_form, route_class, plan, cost, costs)
        policies = [_explain_policy(policy, request) for policy in self._policies]
        has_enforced = any(each.matches and not each.shadow for each in policies)
        return RequestExplanation(
            subject=normal,
            route_class=route_class,
            plan=plan,
            unmatched=None if has_enforced else self._unmatched,
            policies=policies,
        )


def _explain_policy(policy: _Policy, request: _Request) -> PolicyExplanation:
    unmet, (key, invalid) = list(_unmet(policy, request)), _key_of(policy.spec, request)
    return PolicyExplanation(
        policy=policy.spec.name,
        quota=policy.spec.quota,
        matches=not unmet,
        shadow=policy.spec.shadow,
        cost=_cost_of(policy, request),
        unmet=unmet,
        key=key,
        invalid=invalid,
    )


def _cost_of(policy: _Policy, request: _Request) -> int:
    of_policy = policy.costs.get(request.route_class) or policy.costs[OTHER_CLASSES]
    given = request.costs.get(policy.spec.quota, request.cost)
    return of_policy if given is None else given


def _unmet(policy: _Policy, request: _Request) -> Iterator[UnmetCondition]:
    match, subject, form = policy.spec.match, request.subject, request.match_form
    if not (policy.routes.exactly(form) or policy.routes.by_wildcard(form)):
        yield UnmetCondition("match.route", match.route, subject.get("route"))
    if match.methods and subject.get("method", "") not in match.methods:
        yield UnmetCondition("match.method", match.method, subject.get("method"))
    if match.route_class is not None and request.route_class not in as_list(match.route_class):
        yield UnmetCondition("match.route_class", match.route_class, request.route_class)
    if policy.networks and not _is_within(policy.networks, subject):
        yield UnmetCondition("match.ip", match.ip, subject.get("ip"))
    for name, values in match.labels.items():
        field = LABEL_PREFIX + name
        if not has_labels(subject, [(field, as_list(values))]):
            yield UnmetCondition(f"match.{field}", values, subject.get(field))


def _is_within(networks: Sequence[Network], subject: Mapping[str, str]) -> bool:
    try:
        return is_within(subject, networks)
    except InvalidAddress:
        return False


def _key_of(policy: PolicySpec, request: _Request) -> tuple[str | None, str | None]:
    """Return the quota key, or why there is none."""
    subject, plan = request.subject, request.plan or NO_PLAN
    try:
        if policy.match.ip is not None:
            is_within(subject, [])  # refuses a text that is no address, as a check does
        values = [(field, value_of(field, subject, request.route_class, plan, policy.ip_prefix)) for field in policy.by]
        check_values(policy.quota, values)
    except KeyError as missing:
        return None, f"subject.{missing.args[0]}: it is missing, and the policy counts by it"
    except InvalidAddress as error:
        return None, f"subject.ip: {error}"
    except InvalidSubjectValue as error:
        return None, f"subject.{error.field}: {error}"
    return quota_key(policy.quota, values), None
