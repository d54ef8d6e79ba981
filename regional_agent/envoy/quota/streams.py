"""`StreamRateLimitQuotas`: a proxy reports what it admitted, and is sent what it may admit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from protocol.clock import Clock
from protocol.protobuf.reading import MalformedMessage
from regional_agent.admission.engine import NoPoliciesYet
from regional_agent.agent import RegionalAgent
from regional_agent.envoy.door.methods import GrpcError, MessageStream, Status
from regional_agent.envoy.quota.divisions import Divisions
from regional_agent.envoy.quota.messages import Reports, Usage, decode_reports
from regional_agent.envoy.quota.planning import BucketPlan, plan_bucket
from regional_agent.envoy.quota.proxies import Bucket, Proxies, Proxy
from regional_agent.envoy.quota.rules import CONFIRM_MS
from regional_agent.metrics import ProxyQuotaMetrics

PLAN_EVERY_MS = 2_000  # blocks begin and end
MOST_REQUESTS = 2**40  # in one report

log = structlog.get_logger()


class RateLimitQuotaService:
    def __init__(self, region: RegionalAgent, clock: Clock) -> None:
        self._region = region
        self._clock = clock
        self._most_buckets = region.settings.quota_max_buckets
        self.proxies = Proxies(region.settings.quota_max_proxies)
        self.divisions = Divisions(region, self.proxies, clock)
        self.reports = self.refused_buckets = 0
        self._planned_by: tuple[object, object, int] = None, None, 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        loops = [asyncio.create_task(self.divisions.run()), asyncio.create_task(self._plan_again())]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    async def stream(self, stream: MessageStream) -> None:
        """Serve one proxy until it leaves. Raises GrpcError."""
        proxy: Proxy | None = None
        sender: asyncio.Task[None] | None = None
        try:
            async for message in stream:
                reports = _decoded(message)
                if proxy is None:
                    proxy = self._connect(stream, reports)
                    sender = asyncio.create_task(_send_to(proxy, stream))
                self._apply(proxy, reports)
        finally:
            if sender is not None:
                sender.cancel()
            if proxy is not None:
                self._disconnect(proxy)

    def _connect(self, stream: MessageStream, reports: Reports) -> Proxy:
        if not reports.domain:
            raise GrpcError(Status.INVALID_ARGUMENT, "domain: the first message of a stream names it")
        proxy = self.proxies.connect(stream.peer, stream.metadata, reports.domain, self._clock.monotonic_ms())
        if proxy is None:
            raise GrpcError(Status.RESOURCE_EXHAUSTED, "the agent has as many proxies as it accepts")
        log.info("proxy connected", proxy=proxy.name, domain=proxy.domain)
        return proxy

    def _disconnect(self, proxy: Proxy) -> None:
        """Keep what the proxy may use yet."""
        proxy.is_connected = False
        now_ms = self._clock.monotonic_ms()
        for bucket in proxy.buckets.values():
            self.divisions.leave(bucket, now_ms)
        log.info("proxy disconnected", proxy=proxy.name, domain=proxy.domain)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _apply(self, proxy: Proxy, reports: Reports) -> None:
        if reports.domain not in ("", proxy.domain):
            raise GrpcError(Status.INVALID_ARGUMENT, f"domain: the stream is of {proxy.domain!r}; open another one")
        now_ms = self._clock.monotonic_ms()
        proxy.reported_ms = now_ms
        self.reports += len(reports.usages)
        for usage in reports.usages:
            bucket = proxy.buckets.get(usage.bucket) or self._subscribe(proxy, usage, now_ms)
            if bucket is not None:
                self._count(bucket, usage, now_ms)

    def _subscribe(self, proxy: Proxy, usage: Usage, now_ms: int) -> Bucket | None:
        if not usage.bucket or len(proxy.buckets) >= self._most_buckets:
            self.refused_buckets += 1
            return None
        bucket = proxy.add(usage.bucket, self._plan(proxy, usage.bucket), now_ms)
        self.divisions.hasten()
        return bucket

    def _count(self, bucket: Bucket, usage: Usage, now_ms: int) -> None:
        allowed, denied = min(usage.allowed, MOST_REQUESTS), min(usage.denied, MOST_REQUESTS)
        bucket.used += allowed
        bucket.denied += denied
        if allowed or denied:
            bucket.requested_ms = now_ms
        self.divisions.report(bucket, allowed, denied, usage.elapsed_s, now_ms)

    def measure(self, metrics: ProxyQuotaMetrics) -> None:
        """Set the gauges, which are read when metrics are scraped."""
        proxies, now_ms = list(self.proxies), self._clock.monotonic_ms()
        buckets = [bucket for proxy in proxies if proxy.is_connected for bucket in proxy.buckets.values()]
        metrics.proxies.set(sum(proxy.is_connected for proxy in proxies))
        metrics.buckets.set(len(buckets))
        metrics.refused_buckets.set(sum(bucket.plan.is_refused for bucket in buckets))
        metrics.rates.set(len(self.divisions.rates))
        metrics.reports.set(self.reports)
        metrics.ignored.set(self.refused_buckets)
        metrics.messages.set(self.proxies.sent)
        metrics.oldest.set(max((now_ms - bucket.sent_ms for bucket in buckets if bucket.sent_ms), default=0) / 1000)
        metrics.overshoot.set(self.divisions.most_overshoot())

    # --- plans --------------------------------------------------------------------------------------------------------

    def _plan(self, proxy: Proxy, bucket: tuple[tuple[str, str], ...]) -> BucketPlan:
        try:
            plan = plan_bucket(self._region.admission, proxy.domain, bucket)
        except NoPoliciesYet:
            raise GrpcError(Status.UNAVAILABLE, "the agent has not received its policies yet") from None
        if plan.is_refused:
            names = ".".join(f"{key}={value}" for key, value in bucket)
            log.warning("quota bucket refused", domain=proxy.domain, bucket=names, reason=plan.reason)
        return plan

    async def _plan_again(self) -> None:
        """Plan all buckets anew when policies or blocks have changed, and from time to time where there are blocks."""
        while True:
            await asyncio.sleep(0.1)
            admission, now_ms = self._region.admission, self._clock.monotonic_ms()
            policies, blocks, planned_ms = self._planned_by
            is_same = policies is admission.policies and blocks is admission.blocks
            if is_same and (not admission.blocks or now_ms < planned_ms + PLAN_EVERY_MS):
                continue
            self._planned_by = admission.policies, admission.blocks, now_ms
            for proxy in self.proxies:
                for bucket in proxy.buckets.values():
                    self._replan(bucket, now_ms)

    def _replan(self, bucket: Bucket, now_ms: int) -> None:
        with suppress(NoPoliciesYet):
            plan = plan_bucket(self._region.admission, bucket.proxy.domain, bucket.id)
            before = {rate.charge.quota for rate in bucket.plan.rates}
            after = {rate.charge.quota for rate in plan.rates}
            if before != after:
                self.divisions.leave(bucket, now_ms)
            bucket.plan = plan
            if before != after:
                self.divisions.report(bucket, 0, 0, 0, now_ms)
                self.divisions.hasten()
            else:
                self.divisions.follow(bucket, now_ms)


def _decoded(message: bytes) -> Reports:
    try:
        return decode_reports(message)
    except MalformedMessage as error:
        raise GrpcError(Status.INVALID_ARGUMENT, f"the message is no RateLimitQuotaUsageReports: {error}") from None


async def _send_to(proxy: Proxy, stream: MessageStream) -> None:
    """Send what is due. A proxy that does not confirm it in time loses its connection: its state would be unknown."""
    while True:
        due = await proxy.next_message()
        try:
            await stream.deliver(due.message, due.since_s + CONFIRM_MS / 1000)
        except TimeoutError:
            log.warning("proxy confirms no assignments, connection reset", proxy=proxy.name, domain=proxy.domain)
            return
