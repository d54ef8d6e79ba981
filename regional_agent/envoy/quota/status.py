"""Which proxies are connected by the quota protocol, and what each may admit."""

from msgspec import Struct

from protocol.units import Units
from regional_agent.envoy.quota.divisions import DividedRate
from regional_agent.envoy.quota.messages import Blanket
from regional_agent.envoy.quota.proxies import Bucket, Proxy
from regional_agent.envoy.quota.rules import NANO_UNITS, NOTHING, Assignment
from regional_agent.envoy.quota.streams import RateLimitQuotaService

MOST_SHOWN = 1000


class ProxyStatus(Struct, frozen=True, kw_only=True):
    """A proxy that reports by Envoy's quota protocol (RLQS)."""

    proxy: str
    agent: str  # that it is connected to; with several workers, one of them
    domain: str
    connected: bool  # if not, what it was assigned may be in force yet
    age_ms: Units  # since it connected
    reported_ms_ago: Units
    buckets: Units
    messages: Units  # that were sent to it


class AssignmentStatus(Struct, frozen=True, kw_only=True):
    """The part of one bucket that one proxy may admit."""

    proxy: str
    bucket: dict[str, str]
    quotas: list[str]  # the keys of the rates that limit it
    rule: str | None  # `allow` or `deny` where one rule is for all requests
    reason: str  # of that rule
    rate_milli: Units  # thousandths of a request per second, otherwise
    tokens: Units  # requests at once
    age_ms: Units  # since it was sent
    allowed: Units  # requests, since the proxy connected
    denied: Units


class DividedRateStatus(Struct, frozen=True, kw_only=True):
    """A rate that proxies of an agent have parts of."""

    quota: str
    agent: str  # that divides it; with several workers, one of them
    share_micro: Units  # of the region
    agent_micro: Units  # of it, what this agent divides
    proxies: Units
    demand_micro: Units  # of the proxies
    overshoot_milli: Units  # thousandths of a unit that were admitted beyond share and burst: at most, so far
    bound_milli: Units  # and in the worst case


class QuotaStatus(Struct, frozen=True, kw_only=True):
    """The state of the quota protocol at an agent, of all its workers."""

    proxies: list[ProxyStatus]
    assignments: list[AssignmentStatus]
    more_assignments: Units
    rates: list[DividedRateStatus]


def quota_status(service: RateLimitQuotaService, agent: str, now_ms: int) -> QuotaStatus:
    proxies = list(service.proxies)
    buckets = [bucket for proxy in proxies for bucket in proxy.buckets.values()]
    return QuotaStatus(
        proxies=[_proxy(each, agent, now_ms) for each in proxies[:MOST_SHOWN]],
        assignments=[_assignment(each, now_ms) for each in buckets[:MOST_SHOWN]],
        more_assignments=max(0, len(buckets) - MOST_SHOWN),
        rates=[_rate(each, agent, now_ms) for each in list(service.divisions.rates.values())[:MOST_SHOWN]],
    )


def _proxy(proxy: Proxy, agent: str, now_ms: int) -> ProxyStatus:
    return ProxyStatus(
        proxy=proxy.name,
        agent=agent,
        domain=proxy.domain,
        connected=proxy.is_connected,
        age_ms=now_ms - proxy.connected_ms,
        reported_ms_ago=now_ms - proxy.reported_ms,
        buckets=len(proxy.buckets),
        messages=proxy.sent,
    )


def _assignment(bucket: Bucket, now_ms: int) -> AssignmentStatus:
    sent, plan = bucket.sent, bucket.plan
    rule = None
    if isinstance(sent, Blanket):
        rule = "deny" if sent is Blanket.DENY_ALL else "allow"
    limit = sent if isinstance(sent, Assignment) else NOTHING
    return AssignmentStatus(
        proxy=bucket.proxy.name,
        bucket=dict(bucket.id),
        quotas=[rate.charge.quota for rate in plan.rates],
        rule=rule,
        reason=plan.reason,
        rate_milli=limit.rate_micro // 1000,
        tokens=limit.tokens,
        age_ms=now_ms - bucket.sent_ms if sent is not None else 0,
        allowed=bucket.used,
        denied=bucket.denied,
    )


def _rate(divided: DividedRate, agent: str, now_ms: int) -> DividedRateStatus:
    division = divided.division
    return DividedRateStatus(
        quota=divided.charge.quota,
        agent=agent,
        share_micro=int(division.share.rate_micro),
        agent_micro=int(division.agent_micro),
        proxies=len({bucket.proxy.name for bucket in division.parts}),
        demand_micro=division.demand_micro(now_ms),
        overshoot_milli=-(-division.most_debt_nano * 1000 // NANO_UNITS),
        bound_milli=divided.bound_nano * 1000 // NANO_UNITS,
    )
