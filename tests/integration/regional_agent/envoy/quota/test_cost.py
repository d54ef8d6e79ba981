"""What many proxies cost an agent: few messages for each while demand is steady, and all at once."""

import asyncio
from collections.abc import Callable
from time import monotonic, process_time

import pytest
from envoy.service.rate_limit_quota.v3.rlqs_pb2 import RateLimitQuotaUsageReports

from regional_agent.envoy.quota.messages import STREAM_RATE_LIMIT_QUOTAS
from tests.budget import size
from tests.integration.regional_agent.envoy.grpc_harness import GrpcAgent, grpc_agent
from tests.integration.regional_agent.envoy.quota.test_streams import DOCUMENT
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = pytest.mark.anyio

STREAMS, BUCKETS, SECONDS = map(int, size("LEASEHOLD_QUOTA_LOAD", "5x4x4", short="5x4x2").split("x"))
DEMAND = 2  # requests a second of each bucket


class Load:
    """Proxies that report the same demand once a second, and count what they are sent."""

    def __init__(self, at: GrpcAgent) -> None:
        self._at = at
        self.messages = 0
        self.assigned: set[str] = set()
        self.client_s = 0.0

    async def run_proxy(self, number: int) -> None:
        call = self._at.channel.stream_stream(STREAM_RATE_LIMIT_QUOTAS)()
        reading = asyncio.create_task(self._read(call, str(number)))
        try:
            await asyncio.sleep(number / STREAMS)
            while True:
                await call.write(self.report)
                await asyncio.sleep(1)
        finally:
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, call: object, name: str) -> None:
        async for _ in call:  # type: ignore[attr-defined]
            self.messages += 1
            self.assigned.add(name)

    @property
    def report(self) -> bytes:
        reports = RateLimitQuotaUsageReports(domain="edge")
        for bucket in range(BUCKETS):
            usage = reports.bucket_quota_usages.add(num_requests_allowed=DEMAND)
            usage.bucket_id.bucket["tenant"] = f"tenant-{bucket}"
            usage.time_elapsed.seconds = 1
        return bytes(reports.SerializeToString())


@pytest.mark.extended
async def test_a_steady_proxy_is_sent_less_than_a_message_a_second(
    world: World, record_property: Callable[[str, object], None]
) -> None:
    async with grpc_agent(world, DOCUMENT) as at:
        load = Load(at)
        tasks = [asyncio.create_task(load.run_proxy(number)) for number in range(STREAMS)]
        try:
            await until(lambda: len(load.assigned) == STREAMS)
            await asyncio.sleep(2)
            before, from_s, from_cpu_s = load.messages, monotonic(), process_time()
            await asyncio.sleep(SECONDS)
            elapsed_s, cpu_s = monotonic() - from_s, process_time() - from_cpu_s
            sent = (load.messages - before) / STREAMS / elapsed_s
            found = f"{STREAMS} streams, {BUCKETS} buckets: {sent:.2f} sent a second, {cpu_s / elapsed_s:.0%} of a core"
            record_property("cost", found)
            assert sent < 1, found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
