"""Proxies that report to a real agent by the quota protocol: what they are assigned, and what they are refused."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from envoy.service.rate_limit_quota.v3.rlqs_pb2 import RateLimitQuotaResponse, RateLimitQuotaUsageReports
from envoy.type.v3.ratelimit_strategy_pb2 import RateLimitStrategy

from regional_agent.envoy.quota.messages import STREAM_RATE_LIMIT_QUOTAS
from tests.integration.regional_agent.envoy.grpc_harness import GrpcAgent, grpc_agent
from tests.integration.regional_agent.world import World
from tests.waiting import until

DOCUMENT: dict[str, Any] = {
    "plans": {},
    "quotas": [
        {"name": "edge", "kind": "rate", "limit": "900/second, burst 900", "sharing": "regional"},
        {"name": "pages", "kind": "rate", "limit": "90/second, burst 900", "sharing": "regional"},
        {"name": "windows", "kind": "rate", "limit": "9/hour", "algorithm": "fixed_window"},
        {"name": "units", "kind": "allowance", "limit": 100, "period": "month"},
        {"name": "slots", "kind": "concurrency", "limit": 6},
    ],
    "policies": [
        {"name": "edge", "quota": "edge", "by": ["tenant"], "match": {"labels": {"domain": "edge"}}},
        {"name": "page", "quota": "pages", "by": [], "match": {"labels": {"page": "slow"}}},
        {"name": "window", "quota": "windows", "by": [], "match": {"labels": {"kind": "window"}}},
        {"name": "unit", "quota": "units", "by": [], "match": {"labels": {"kind": "unit"}}},
        {"name": "slot", "quota": "slots", "by": [], "match": {"labels": {"kind": "slot"}}},
    ],
}  # a region has a third of each rate: 300 and 30 a second
SHARE, SLOW_SHARE = 300, 30
ALLOW, DENY = RateLimitStrategy.ALLOW_ALL, RateLimitStrategy.DENY_ALL

Bucket = Mapping[str, str]

pytestmark = pytest.mark.anyio


class Proxy:
    """A client of the quota protocol, which reports so much traffic of each bucket until it is told otherwise."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.strategies: dict[tuple[tuple[str, str], ...], RateLimitStrategy | None] = {}
        self.messages = 0

    async def report(self, bucket: Bucket, allowed: int = 0, denied: int = 0, domain: str = "edge") -> None:
        reports = RateLimitQuotaUsageReports(domain=domain)
        usage = reports.bucket_quota_usages.add(num_requests_allowed=allowed, num_requests_denied=denied)
        usage.bucket_id.bucket.update(bucket)
        await self._call.write(reports.SerializeToString())

    async def read(self) -> None:
        async for message in self._call:
            self.messages += 1
            for action in RateLimitQuotaResponse.FromString(message).bucket_action:
                key = tuple(sorted(action.bucket_id.bucket.items()))
                assigned = action.quota_assignment_action
                assert action.HasField("abandon_action") or assigned.assignment_time_to_live.seconds == 3
                strategy = assigned.rate_limit_strategy
                self.strategies[key] = None if action.HasField("abandon_action") else strategy

    def strategy(self, bucket: Bucket) -> RateLimitStrategy | None:
        return self.strategies.get(tuple(sorted(bucket.items())))

    def rate(self, bucket: Bucket) -> float:
        """Return the requests a second that the proxy may admit; -1 without a token bucket."""
        strategy = self.strategy(bucket)
        if strategy is None or not strategy.HasField("token_bucket"):
            return -1
        assigned = strategy.token_bucket
        return float(assigned.tokens_per_fill.value / assigned.fill_interval.seconds)

    async def keep_reporting(self, demand: dict[str, int], bucket: Bucket) -> None:
        """Report five times a second, admitting as much as is assigned."""
        while True:
            admitted = min(demand["units"], max(0, int(self.rate(bucket)))) // 5
            await self.report(bucket, admitted, demand["units"] // 5 - admitted)
            await asyncio.sleep(0.2)


@asynccontextmanager
async def proxy(at: GrpcAgent, name: str = "") -> AsyncIterator[Proxy]:
    call = at.channel.stream_stream(STREAM_RATE_LIMIT_QUOTAS)(metadata=[("x-leasehold-proxy", name)] if name else [])
    connected = Proxy(call)
    reading = asyncio.create_task(connected.read())
    try:
        yield connected
    finally:
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def reporting(at: Proxy, bucket: Bucket, units: int) -> AsyncIterator[dict[str, int]]:
    demand = {"units": units}
    task = asyncio.create_task(at.keep_reporting(demand, bucket))
    try:
        yield demand
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_share_is_divided_by_demand_and_follows_it(world: World) -> None:
    acme = {"tenant": "acme"}
    async with (
        grpc_agent(world, DOCUMENT) as at,
        proxy(at) as one,
        proxy(at) as other,
        reporting(one, acme, 20),
        reporting(other, acme, 2_000) as much,
    ):
        await until(lambda: other.rate(acme) > 0.75 * SHARE and one.rate(acme) >= 15)
        assert one.rate(acme) + other.rate(acme) <= 1.4 * SHARE  # with what is in the bucket
        much["units"] = 10
        await until(lambda: one.rate(acme) > SHARE / 4)


async def test_what_proxies_have_is_taken_from_the_store(world: World) -> None:
    """Checks admit the burst once, whatever proxies have of it; so what proxies have is missing there."""
    acme, subject = {"tenant": "acme"}, {"tenant": "acme", "labels": {"domain": "edge"}}
    async with grpc_agent(world, DOCUMENT) as at, proxy(at) as one, reporting(one, acme, 3_000):
        await until(lambda: one.rate(acme) > 0)
        rate = at.agent.region.admission
        assert rate.policies is not None

        async def remaining() -> int:
            answer = (await at.agent.http.post("/v1/check", json={"subject": subject, "mode": "peek"})).json()
            return int(answer["policies"][0]["remaining"])

        assert await remaining() <= 900 // 3 - 20


async def test_a_bucket_of_two_rates_has_the_smaller_part(world: World) -> None:
    both = {"tenant": "acme", "page": "slow"}
    async with grpc_agent(world, DOCUMENT) as at, proxy(at) as one, reporting(one, both, 500):
        await until(lambda: one.rate(both) > 0)
        assert one.rate(both) < 5 * SLOW_SHARE
        metrics = (await at.agent.http.get("/metrics")).text
        assert "leasehold_quota_divided_rates 2.0" in metrics
        assert "leasehold_quota_proxies 1.0" in metrics


@pytest.mark.parametrize(
    ("bucket", "rule", "reason"),
    [
        ({"kind": "unit"}, DENY, "an allowance is counted exactly"),
        ({"kind": "slot"}, DENY, "slots are given back"),
        ({"kind": "window"}, DENY, "fixed_window has no parts"),
        ({"kind": "other"}, ALLOW, "no policy matches it"),
    ],
)
async def test_what_has_no_parts_is_one_rule_with_a_reason(
    bucket: Bucket, rule: int, reason: str, world: World
) -> None:
    async with grpc_agent(world, DOCUMENT) as at, proxy(at) as one:
        await one.report(bucket, 1, domain="other")
        await until(lambda: one.strategy(bucket) is not None)
        found = one.strategy(bucket)
        assert found is not None
        assert found.HasField("blanket_rule")
        assert found.blanket_rule == rule
        status = (await at.agent.http.get("/v1/status")).json()["proxy_quotas"]
        [shown] = status["assignments"]
        assert reason in shown["reason"]
        assert shown["rule"] == ("deny" if rule == DENY else "allow")
        assert [each["domain"] for each in status["proxies"]] == ["other"]


async def refused(at: GrpcAgent, send: Callable[[Any], Any]) -> grpc.aio.AioRpcError:
    call = at.channel.stream_stream(STREAM_RATE_LIMIT_QUOTAS)()
    await send(call)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_malformed_messages_end_the_stream_by_name(world: World) -> None:
    async with grpc_agent(world, DOCUMENT) as at:
        error = await refused(at, lambda call: call.write(b"\x0a\xff"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "RateLimitQuotaUsageReports" in str(error.details())
        error = await refused(at, lambda call: call.write(RateLimitQuotaUsageReports().SerializeToString()))
        assert "domain" in str(error.details())


async def test_proxies_and_buckets_are_bounded(world: World) -> None:
    async with grpc_agent(world, DOCUMENT, quota_max_proxies=1, quota_max_buckets=2) as at, proxy(at) as one:
        for tenant in "abc":
            await one.report({"tenant": tenant}, 1)
        await until(lambda: one.rate({"tenant": "b"}) > 0)
        assert one.strategy({"tenant": "c"}) is None
        report = RateLimitQuotaUsageReports(domain="edge").SerializeToString()
        assert (await refused(at, lambda call: call.write(report))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
