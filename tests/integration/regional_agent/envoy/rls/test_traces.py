"""A trace leads from Envoy's request over its call of the agent to the store, and denials reach the decision log."""

from typing import Any

import pytest
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest

from protocol.traces.trace_context import TraceContext
from regional_agent.envoy.rls.responses import SHOULD_RATE_LIMIT
from tests.integration.regional_agent.decision_log.test_decisions import logged
from tests.integration.regional_agent.envoy.grpc_harness import (
    ENVOY_DOCUMENT,
    OK,
    OVER_LIMIT,
    descriptor,
    grpc_agent,
)
from tests.integration.regional_agent.traces.test_traces import Collector, collector
from tests.integration.regional_agent.world import World

__all__ = ["collector"]  # a fixture
pytestmark = pytest.mark.anyio

ACME = {"tenant": "acme"}
CALL = TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_sampled=True)


def request(*descriptors: Any) -> bytes:
    return bytes(RateLimitRequest(domain="edge", descriptors=descriptors).SerializeToString())


async def test_a_call_of_envoy_is_a_part_of_its_trace(world: World, collector: Collector) -> None:
    tracing = {"traces_url": collector.url, "traces_ratio": 0.0}
    async with grpc_agent(world, ENVOY_DOCUMENT, **tracing) as at:
        assert (await at.ask(ACME)).overall_code == OK, "and it is not sampled"
        traced: dict[str, Any] = {"metadata": [("traceparent", CALL.traceparent)]}
        staged = request(descriptor(ACME), descriptor({"x-model": "m"}, hits=0))
        assert (await at.send(staged, **traced)).overall_code == OK
        assert (await at.send(request(descriptor(ACME, hits=1_000)), **traced)).overall_code == OVER_LIMIT
    calls = [span for span in collector.spans() if span.name == SHOULD_RATE_LIMIT]
    assert {(span.trace, span.parent) for span in calls} == {(CALL.trace_id, CALL.span_id)}
    assert [span.attributes["leasehold.allowed"] for span in calls] == [True, False]
    assert calls[1].attributes["leasehold.denied_by"] == "edge"
    asked = [span.parent for span in collector.spans() if span.name == "store call"]
    assert asked.count(calls[0].span_id) == 2, "once for each of its stages"


async def test_denials_of_envoy_are_in_the_decision_log(world: World) -> None:
    async with grpc_agent(world) as at:
        assert (await at.ask(ACME, hits=1_000)).overall_code == OVER_LIMIT
        assert (await at.ask({"path": "/v1/a"}, ACME, hits=1_000)).overall_code == OVER_LIMIT
        rows = (await logged(world, lambda rows: len(rows) >= 2, outcome="denied"))["data"]
    found = {(row["policy"], row["key"], row["reason"], row["cost"]) for row in rows}
    assert found == {("edge", "edge:tenant=acme", "never", 1_000), ("path", "paths:route=%2Fv1%2Fa", "never", 1_000)}
    assert {row["subject"].get("tenant", "acme") for row in rows} == {"acme"}
