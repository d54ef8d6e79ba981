"""Which policies a request meets, and what each of them takes.

The document is compiled once, when it arrives: exact routes into a table, wildcards into a list ordered by length.
Matching a request then looks at nothing but its own route.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from protocol.identifiers import quota_key
from protocol.policy import (
    LimitsDocument,
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
from regional_agent.store.scripts import AllowanceCharge, Charge, RateCharge

Subject = dict[str, str]


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
    def __init__(self, bundle: PolicyBundle) -> None:
        self.version = bundle.version
        self._bundle = bundle
        self._exact: dict[str, list[CompiledPolicy]] = {}
        self._wildcards: list[tuple[str, CompiledPolicy]] = []
        for policy in _compiled(bundle.document):
            self._place(policy)

    def _place(self, policy: CompiledPolicy) -> None:
        route = policy.spec.match.route
        if route.endswith("*"):
            self._wildcards.append((route[:-1], policy))
        else:
            self._exact.setdefault(route, []).append(policy)

    def match(self, subject: Subject) -> list[CompiledPolicy]:
        """The policies that a request meets, in the document's order for each kind of route."""
        route, method = subject.get("route", ""), subject.get("method", "")
        found = [*self._exact.get(route, ())]
        found += [policy for prefix, policy in self._wildcards if route.startswith(prefix)]
        return [policy for policy in found if not policy.methods or method in policy.methods]

    def demand(self, subject: Subject, cost: int | None) -> list[Demanded]:
        """What the request takes of each policy that it meets."""
        return [self._demanded(policy, subject, cost) for policy in self.match(subject)]

    def _demanded(self, policy: CompiledPolicy, subject: Subject, cost: int | None) -> Demanded:
        quota, units = policy.quota, policy.spec.cost if cost is None else cost
        key, limit = policy.key(subject), self._limit(quota, subject)
        if quota.kind is QuotaKind.ALLOWANCE:
            assert isinstance(limit, int)
            return Demanded(policy, AllowanceCharge(key, units, limit, _dimensions(policy)), policy.wait_ms)
        if quota.kind is QuotaKind.RATE:
            assert isinstance(limit, Rate)
            share = safe_share(limit, self._bundle.weight, self._bundle.total_weight)
            return Demanded(policy, RateCharge(key, units, share.rate_micro, share.burst))
        raise KindNotServed(policy.spec.name, quota.kind)

    def _limit(self, quota: QuotaSpec, subject: Subject) -> int | Rate:
        """The limit on the tenant's plan. A tenant whose plan gives none is limited to nothing."""
        plan = self._bundle.subscriptions.get(subject.get("tenant", ""), self._bundle.document.default_plan)
        limit = limit_of(quota, plan)
        if quota.kind is QuotaKind.RATE:
            return Rate(0, 0) if limit is None else parse_rate(limit)
        return limit if isinstance(limit, int) else 0


def _compiled(document: LimitsDocument) -> list[CompiledPolicy]:
    quotas = {quota.name: quota for quota in document.quotas}
    return [_compile(policy, quotas[policy.quota]) for policy in document.policies]


def _compile(policy: PolicySpec, quota: QuotaSpec) -> CompiledPolicy:
    method = policy.match.method
    methods = frozenset() if method == "*" else frozenset([method] if isinstance(method, str) else method)
    window_s = {"hour": 3600, "day": 86_400, "month": 2_592_000}.get(quota.period or "", 0)
    return CompiledPolicy(policy, quota, methods, parse_duration_ms(policy.wait), window_s)


def _dimensions(policy: CompiledPolicy) -> str:
    """What finance groups usage by, beyond tenant, quota and region, which the lease already tells."""
    return msgspec.json.encode({"policy": policy.spec.name}).decode()


def digest(parts: Sequence[str]) -> str:
    """A name for a text of any length, such as an operation's id within its tenant."""
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()
