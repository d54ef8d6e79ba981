"""A trace leads from a service's request over the check, the store and the exchange to the webhook that it causes."""

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanContext

from leasehold import AsyncClient
from protocol.traces.trace_context import TraceContext, parse_traceparent
from regional_agent.main import create_app
from regional_agent.traces.checks import traced_protocol
from tests.integration.coordinator.webhooks.test_webhooks import Receiver, receiver, registered
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Template, World, another_coordinator, world_on
from tests.integration.web.conftest import serving
from tests.waiting import until

__all__ = ["receiver"]  # a fixture
pytestmark = pytest.mark.anyio


class Span(NamedTuple):
    service: str
    name: str
    span_id: int
    parent: int
    trace: int
    attributes: dict[str, Any]
    links: list[int]


class Collector:
    """A receiver of OTLP over HTTP, as any collector of traces is."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_packed = self.headers.get("Content-Encoding") == "gzip"
                collector.bodies.append(gzip.decompress(body) if is_packed else body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def spans(self) -> list[Span]:
        return [span for body in self.bodies for span in _spans(ExportTraceServiceRequest.FromString(body))]


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        # The messages are those of one of two packages, which install the same files; the older has another name.
        scopes = resource.scope_spans if hasattr(resource, "scope_spans") else resource.instrumentation_library_spans
        for span in (span for scope in scopes for span in scope.spans):
            own, parent, trace = map(int.from_bytes, (span.span_id, span.parent_span_id, span.trace_id))
            links = [int.from_bytes(link.span_id) for link in span.links]
            yield Span(service, span.name, own, parent, trace, _values(span.attributes), links)


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@asynccontextmanager
async def traced_agent(world: World, coordinator: str, collector: Collector, **more: Any) -> AsyncIterator[str]:
    """Serve an agent as its process does, with the fast path, and yield its address."""
    told = {"coordinator_url": coordinator, "traces_url": collector.url, "traces_ratio": 0.0} | more
    app = create_app(world.settings("us-east", **told))
    region = app.state.region
    async with serving(app, protocol=traced_protocol(app.state.fast_path, region.traces)) as address:
        await until(lambda: region.has_epochs and region.admission.policies is not None)
        yield address


@pytest.fixture
async def idle_world(world_database: str, world_template: Template, store: str) -> AsyncIterator[World]:
    """Yield a world whose own coordinator runs no jobs, so that the traced one delivers all webhooks."""
    async with world_on(world_database, world_template.tokens, store) as world:
        for scheduler in [task for task in asyncio.all_tasks() if task.get_name() == "scheduler"]:
            scheduler.cancel()
        yield world


async def spend(address: str, units: int, tracer: Any) -> SpanContext:
    """Check as a service does whose own request is traced, and return the context of that request."""
    async with AsyncClient(address, timeout_ms=30_000) as client:
        with tracer.start_as_current_span("a request of the service") as span:
            assert (await client.check(EXPORT, cost=units)).allowed
            context: SpanContext = span.get_span_context()
            return context


async def test_a_trace_leads_from_the_service_to_the_webhook(
    idle_world: World, collector: Collector, receiver: Receiver
) -> None:
    quotas = [each | ({"thresholds": [40]} if each["name"] == "exports" else {}) for each in DOCUMENT["quotas"]]
    assert (await idle_world.admin.put("/v1/limits", json=DOCUMENT | {"quotas": quotas})).is_success
    await registered(idle_world.admin, receiver.url, "threshold.reached")
    tracing = {"traces_url": collector.url, "traces_ratio": 0.0}
    service = TracerProvider(shutdown_on_exit=False).get_tracer("service")
    async with another_coordinator(idle_world.database, **tracing) as coordinator:
        async with traced_agent(idle_world, coordinator, collector) as address:
            async with httpx.AsyncClient(base_url=address) as untraced:
                assert (await untraced.post("/v1/check", json={"subject": EXPORT})).status_code == 200
            request = await spend(address, 60, service)
            await until(lambda: receiver.heard)
        await until(lambda: any(span.name == "webhook delivery" for span in collector.spans()))
    check_tree(collector, receiver, request)


def check_tree(collector: Collector, receiver: Receiver, request: SpanContext) -> None:
    spans = {span.span_id: span for span in collector.spans()}
    assert {span.trace for span in spans.values()} == {request.trace_id}, "only the sampled request is traced"
    delivery = next(span for span in spans.values() if span.name == "webhook delivery")
    path, span = [], delivery
    while True:
        path.append((span.service, span.name))
        if span.parent == request.span_id:
            break
        span = spans[span.parent]
    assert path == [
        ("leasehold-coordinator", "webhook delivery"),
        ("leasehold-coordinator", "transaction"),
        ("leasehold-coordinator", "POST /v1/regions/{region}/exchanges"),
        ("leasehold-agent", "exchange"),
        ("leasehold-agent", "POST /v1/check"),
    ]
    assert span.attributes["leasehold.region"] == "us-east"
    assert span.attributes["leasehold.quotas"] == ["exports"]
    assert span.attributes["leasehold.policies"] == ["export"]
    assert span.attributes["http.response.status_code"] == 200
    assert any(each.name == "store call" and each.parent == span.span_id for each in spans.values())
    passed_on = parse_traceparent(receiver.heard[0][0]["traceparent"])
    assert passed_on == TraceContext(request.trace_id, delivery.span_id, is_sampled=True)
    for secret in (b"acme", b"lh_"):
        assert not any(secret in body for body in collector.bodies), "spans have neither keys nor tokens"


async def test_one_call_of_the_store_has_links_to_all_that_it_decides(idle_world: World, collector: Collector) -> None:
    """Requests that are sampled by chance have traces of their own; denials say why."""
    told = {"traces_ratio": 1.0, "traces_keys": True}
    async with (
        traced_agent(idle_world, idle_world.url, collector, **told) as address,
        httpx.AsyncClient(base_url=address, timeout=30) as client,
    ):
        subjects = [{"tenant": f"t{number}", "route": "/v1/search", "method": "GET"} for number in range(20)]
        answers = await asyncio.gather(*(client.post("/v1/check", json={"subject": each}) for each in subjects))
        assert {answer.status_code for answer in answers} == {200}
        denied = await client.post("/v1/check", json={"subject": subjects[0], "cost": 1_000})
        assert denied.status_code == 429
    spans = collector.spans()
    checks = {span.span_id: span for span in spans if span.name == "POST /v1/check"}
    calls = [span for span in spans if span.name == "store call"]
    decided = [cause for call in calls for cause in (call.parent, *call.links)]
    assert set(decided) == set(checks)
    assert len(decided) == len(checks) == 21
    refused = next(span for span in checks.values() if span.attributes["http.response.status_code"] == 429)
    assert refused.attributes["leasehold.denied_by"] == "search"
    assert refused.attributes["leasehold.reason"] == "never"
    assert refused.attributes["leasehold.quota_keys"] == ["api:tenant=t0"]


async def test_an_agent_without_a_receiver_loses_its_spans_and_counts_them(idle_world: World) -> None:
    nowhere = Collector()
    nowhere.server.server_close()
    told = {"traces_url": nowhere.url, "traces_ratio": 1.0}
    app = create_app(idle_world.settings("us-east", **told))
    region = app.state.region
    async with serving(app, protocol=traced_protocol(app.state.fast_path, region.traces)) as address:
        await until(lambda: region.has_epochs and region.admission.policies is not None)
        async with httpx.AsyncClient(base_url=address, timeout=30) as client:
            assert (await client.post("/v1/check", json={"subject": EXPORT})).status_code == 200
    lost = region.metrics.registry.get_sample_value("leasehold_trace_spans_total", {"result": "lost"})
    assert lost is not None
    assert lost >= 1
