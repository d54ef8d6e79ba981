"""Which policies of a document a logged check meets, by which quota key, and at what cost.

This is exact for each logged check, also where the log has hashes: equal values have equal hashes, so the values of the
document are hashed before they are compared, and keys that are made of hashes still tell customers apart. Only a
policy that reads a network out of a hashed address cannot be replayed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from coordinator.decision_log.rules.hashing import is_hash
from protocol.addresses import Network, parse_network
from protocol.check import Unmatched
from protocol.identifiers import quota_key
from protocol.limits.document import (
    LABEL_PREFIX,
    OTHER_CLASSES,
    ConcurrencyQuota,
    Costs,
    LimitsDocument,
    PolicySpec,
    Quota,
    as_list,
    costs_of,
)
from protocol.limits.route_table import Routes
from protocol.limits.routes import RouteNormalizer
from protocol.limits.subjects import NO_PLAN, InvalidAddress, RouteClasses, has_labels, is_within, value_of

Subject = Mapping[str, str]
Hash = Callable[[str, str], str]  # field and value → the value as the log has it


class UnknownReason(StrEnum):
    """The reasons why nothing is said about some checks of a policy."""

    CONCURRENCY = "concurrency"
    HASHED_ADDRESSES = "hashed_addresses"
    MISSING_FIELD = "missing_field"
    PARTIAL_PERIOD = "partial_period"
    TOO_FEW_SAMPLES = "too_few_samples"
    INACTIVE_REGION = "inactive_region"


class ReplayedPolicy(NamedTuple):
    """A policy of the document that is replayed."""

    place: int
    spec: PolicySpec
    quota: Quota
    methods: frozenset[str]
    route_classes: frozenset[str]
    networks: Sequence[Network]
    labels: Sequence[tuple[str, frozenset[str]]]
    costs: Costs

    @property
    def reads_network(self) -> bool:
        return bool(self.networks) or "ip_prefix" in self.spec.by

    def own_cost(self, route_class: str) -> int:
        return self.costs.get(route_class) or self.costs[OTHER_CLASSES]


class Met(NamedTuple):
    """A policy that a check meets: the quota key that it counts, or why that is not known."""

    policy: ReplayedPolicy
    key: str
    own_cost: int  # of a check that states none
    unknown: UnknownReason | None = None


class Matcher:
    """Finds the policies of one document."""

    def __init__(self, document: LimitsDocument, hashed: Hash, plans: Mapping[str, str]) -> None:
        """`plans`: of the tenants that have a subscription."""
        self.denies_unmatched = document.unmatched is Unmatched.DENY
        self._default_plan = document.default_plan
        self._plans = plans
        self._normalizer = RouteNormalizer(document.routes)
        self._classes = RouteClasses(document.route_classes, self._normalizer)
        quotas = {quota.name: quota for quota in document.quotas}
        self.policies = [
            _replayed(place, policy, quotas[policy.quota], costs_of(document, policy), hashed)
            for place, policy in enumerate(document.policies)
        ]
        pattern = self._normalizer.pattern
        self._routes = Routes((pattern(each.spec.match.route), each) for each in self.policies)
        self._by_route: dict[tuple[str, str], tuple[str, str, list[ReplayedPolicy]]] = {}

    def meet(self, tenant: str, subject: Subject) -> list[Met]:
        """Return what a logged check meets, in the order of the document."""
        route, route_class, policies = self._find(subject.get("route", ""), subject.get("method", "").upper())
        whole = {**subject, "route": route} if route else dict(subject)
        if tenant:
            whole["tenant"] = tenant
        plan = self._plans.get(tenant, self._default_plan)
        found = (self._met(policy, whole, route_class, plan) for policy in policies)
        return [each for each in found if each is not None]

    def own_costs(self, subject: Subject) -> dict[str, int]:
        """Return by policy what a check costs that states no cost, whatever else decides whether they meet."""
        _, route_class, policies = self._find(subject.get("route", ""), subject.get("method", "").upper())
        return {policy.spec.name: policy.own_cost(route_class) for policy in policies}

    def _find(self, written: str, method: str) -> tuple[str, str, list[ReplayedPolicy]]:
        """Return the normal route, its class, and the policies that route and method alone do not rule out."""
        known = self._by_route.get((written, method))
        if known is None:
            route = self._normalizer.normalize(written)
            form = self._normalizer.match_form(route)
            route_class = self._classes.of(form, method)
            met = [*self._routes.exactly(form), *self._routes.by_wildcard(form)]
            fitting = [
                each
                for each in sorted(met, key=lambda each: each.place)
                if (not each.methods or method in each.methods)
                and (not each.route_classes or route_class in each.route_classes)
            ]
            known = self._by_route[written, method] = route, route_class, fitting
        return known

    def _met(self, policy: ReplayedPolicy, subject: Subject, route_class: str, plan: str | None) -> Met | None:
        if not has_labels(subject, policy.labels):
            return None
        cost, key = policy.own_cost(route_class), ""
        if policy.reads_network and is_hash(subject.get("ip", "")):
            return Met(policy, key, cost, UnknownReason.HASHED_ADDRESSES)
        try:
            if policy.networks and not is_within(subject, policy.networks):
                return None
            key = quota_key(policy.quota.name, list(_values(policy.spec, subject, route_class, plan)))
        except (KeyError, InvalidAddress):
            return Met(policy, key, cost, UnknownReason.MISSING_FIELD)
        unknown = UnknownReason.CONCURRENCY if isinstance(policy.quota, ConcurrencyQuota) else None
        return Met(policy, key, cost, unknown)


def _values(policy: PolicySpec, subject: Subject, route_class: str, plan: str | None) -> Iterable[tuple[str, str]]:
    """Yield what a policy counts by. A hashed address is counted by its hash, which stands for the whole address."""
    for field in policy.by:
        if field == "ip" and is_hash(subject.get("ip", "")):
            yield field, subject["ip"]
        else:
            yield field, value_of(field, subject, route_class, plan or NO_PLAN, policy.ip_prefix)


def _replayed(place: int, policy: PolicySpec, quota: Quota, costs: Costs, hashed: Hash) -> ReplayedPolicy:
    match = policy.match
    labels = [(LABEL_PREFIX + name, as_list(values)) for name, values in match.labels.items()]
    return ReplayedPolicy(
        place,
        policy,
        quota,
        match.methods,
        frozenset(as_list(match.route_class)),
        [parse_network(text) for text in as_list(match.ip)],
        [(field, frozenset([*values, *(hashed(field, each) for each in values)])) for field, values in labels],
        costs,
    )


class StatedCost(NamedTuple):
    """The costs that a check stated: of the quotas that it named, and of all others."""

    by_quota: Mapping[str, int]
    of_others: int | None = None

    def units(self, met: Met) -> int:
        """Return what a policy charges for the check."""
        units = self.by_quota.get(met.policy.quota.name, self.of_others)
        return met.own_cost if units is None else units


def stated_cost(charged: Mapping[str, tuple[str, int]], own: Mapping[str, int]) -> StatedCost:
    """Tell a stated cost from a policy's own. `charged`: quota and cost by policy; `own`: those of the document then.

    A check that states just what the document says is taken for one that states nothing.
    """
    stated = {quota: cost for policy, (quota, cost) in charged.items() if cost != own.get(policy)}
    of_all = set(stated.values())
    is_of_all = len(of_all) == 1 and len(stated) == len({quota for quota, _ in charged.values()})
    return StatedCost(stated, of_all.pop() if is_of_all else None)
