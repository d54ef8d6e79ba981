"""Which policies a request meets, and what each of them takes.

The document is compiled once, when it arrives, so that a request costs the same under ten policies and under ten
thousand: a route finds its policies by hash and bisection (domain/routes.py), what a quota limits on a plan is worked
out once, and the routes that are asked for most are remembered with their answer. All of it hangs on one bundle and is
thrown away with it; whoever lets something else change an answer (an override that begins or ends) makes new Policies.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from protocol.identifiers import quota_key, wider_keys
from protocol.policy import (
    LimitsDocument,
    LimitValue,
    OverrideTerm,
    PolicyBundle,
    PolicySpec,
    QuotaKind,
    QuotaSpec,
    Rate,
    limit_of,
    parse_duration_ms,
    parse_rate,
    safe_share,
)
from regional_agent.domain.remembered import Remembered
from regional_agent.domain.routes import Routes
from regional_agent.store.scripts import AllowanceCharge, Charge, RateCharge

Subject = dict[str, str]

MOST_ROUTES = 10_000  # of requests, each with a method, that are remembered with the policies they meet


class UnknownSubjectField(Exception):
    """A policy counts by a field that the request's subject does not have."""

    def __init__(self, policy: str, field: str) -> None:
        super().__init__(f"policy {policy!r} counts by {field!r}, which the subject does not have")
        self.field = field


class KindNotServed(Exception):
    """A policy's quota is of a kind that this version does not serve."""

    def __init__(self, policy: str, kind: QuotaKind) -> None:
        super().__init__(f"policy {policy!r} limits {kind.value}, which this version does not serve")


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    spec: PolicySpec
    quota: QuotaSpec
    methods: frozenset[str]  # empty: every method
    wait_ms: int
    window_s: int  # how long the quota's window is, for the RateLimit-Policy header; 0: by the rate
    place: int  # in the document
    dimensions: str  # what finance groups usage by, beyond tenant, quota and region, which the lease already tells

    def key(self, subject: Subject) -> str:
        try:
            return quota_key(self.quota.name, [(field, subject[field]) for field in self.spec.by])
        except KeyError as missing:
            raise UnknownSubjectField(self.spec.name, str(missing.args[0])) from None


@dataclass(frozen=True, slots=True)
class Demanded:
    """What one policy takes of one request."""

    policy: CompiledPolicy
    charge: Charge
    wait_ms: int = 0


class Policies:
    """One bundle, at an age: overrides count that have begun by then and not ended."""

    def __init__(self, bundle: PolicyBundle, age_ms: int = 0) -> None:
        self.version = bundle.version
        self._bundle = bundle
        self._routes = Routes((policy.spec.match.route, policy) for policy in _compiled(bundle.document))
        self._met: Remembered[tuple[str, str], list[CompiledPolicy]] = Remembered(MOST_ROUTES)
        self._limits: dict[tuple[str, str | None], int | Rate] = {}
        self._overrides = self._in_force(age_ms)
        self._overridden = {quota_of(key) for key in self._overrides}

    def match(self, subject: Subject) -> list[CompiledPolicy]:
        """The policies that a request meets, in the document's order for each kind of route."""
        asked = subject.get("route", ""), subject.get("method", "")
        met = self._met.get(asked)
        if met is None:
            met = self._look_up(*asked)
            self._met.put(asked, met)
        return met

    def _look_up(self, route: str, method: str) -> list[CompiledPolicy]:
        by_prefix = sorted(self._routes.by_prefix(route), key=lambda policy: policy.place)
        found = (*self._routes.exactly(route), *by_prefix)
        return [policy for policy in found if not policy.methods or method in policy.methods]

    def demand(self, subject: Subject, cost: int | None) -> list[Demanded]:
        """What the request takes of each policy that it meets."""
        return [self._demanded(policy, subject, cost) for policy in self.match(subject)]

    def _demanded(self, policy: CompiledPolicy, subject: Subject, cost: int | None) -> Demanded:
        quota, units = policy.quota, policy.spec.cost if cost is None else cost
        key = policy.key(subject)
        limit = self._limit(quota, subject, key)
        if quota.kind is QuotaKind.ALLOWANCE:
            assert isinstance(limit, int)
            return Demanded(policy, AllowanceCharge(key, units, limit, policy.dimensions), policy.wait_ms)
        if quota.kind is QuotaKind.RATE:
            assert isinstance(limit, Rate)
            return Demanded(policy, RateCharge(key, units, limit.rate_micro, limit.burst))
        raise KindNotServed(policy.spec.name, quota.kind)

    def _limit(self, quota: QuotaSpec, subject: Subject, key: str) -> int | Rate:
        """An override's, of whichever is for the narrowest subject; else the plan's. Of a rate, this region's share."""
        if quota.name in self._overridden:
            for wider in wider_keys(key):
                if wider in self._overrides:
                    return self._overrides[wider]
        plan = self._bundle.subscriptions.get(subject.get("tenant", ""), self._bundle.document.default_plan)
        limit = self._limits.get((quota.name, plan))
        if limit is None:  # there are no more plans and quotas than the document has
            limit = self._limits[quota.name, plan] = self._limit_on(quota, plan)
        return limit

    def _in_force(self, age_ms: int) -> dict[str, int | Rate]:
        """By the keys that they are for; of several for one, the last."""
        quotas = {quota.name: quota for quota in self._bundle.document.quotas}
        terms = [term for term in self._bundle.overrides if begun(term, age_ms)]
        return {term.key: self._compiled(quotas[quota_of(term.key)], term.limit) for term in terms}

    def _limit_on(self, quota: QuotaSpec, plan: str | None) -> int | Rate:
        """A tenant whose plan gives none is limited to nothing."""
        return self._compiled(quota, limit_of(quota, plan))

    def _compiled(self, quota: QuotaSpec, limit: LimitValue | None) -> int | Rate:
        if quota.kind is QuotaKind.RATE:
            whole = Rate(0, 0) if limit is None else parse_rate(limit)
            return safe_share(whole, self._bundle.weight, self._bundle.total_weight)
        return limit if isinstance(limit, int) else 0


def begun(term: OverrideTerm, age_ms: int) -> bool:
    """And not ended."""
    return term.starts_in_ms <= age_ms and (term.ends_in_ms is None or age_ms < term.ends_in_ms)


def edges_ms(bundle: PolicyBundle) -> Iterator[int]:
    """The ages at which an override begins or ends."""
    for term in bundle.overrides:
        yield term.starts_in_ms
        if term.ends_in_ms is not None:
            yield term.ends_in_ms


def quota_of(key: str) -> str:
    return key.partition(":")[0]


def _compiled(document: LimitsDocument) -> list[CompiledPolicy]:
    quotas = {quota.name: quota for quota in document.quotas}
    return [_compile(place, policy, quotas[policy.quota]) for place, policy in enumerate(document.policies)]


def _compile(place: int, policy: PolicySpec, quota: QuotaSpec) -> CompiledPolicy:
    method = policy.match.method
    return CompiledPolicy(
        spec=policy,
        quota=quota,
        methods=frozenset() if method == "*" else frozenset([method] if isinstance(method, str) else method),
        wait_ms=parse_duration_ms(policy.wait),
        window_s={"hour": 3600, "day": 86_400, "month": 2_592_000}.get(quota.period or "", 0),
        place=place,
        dimensions=msgspec.json.encode({"policy": policy.name}).decode(),
    )


def digest(parts: Sequence[str]) -> str:
    """A name for a text of any length, such as an operation's id within its tenant."""
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()
