"""Open the traces that the settings ask for, and the middleware that makes a span of each sampled request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.traces.trace_context import HEADER
from web.metrics import IS_HELD_OPEN
from web.traces.context import TraceMetrics, within
from web.traces.otlp import OtlpExporter
from web.traces.settings import TraceSettings
from web.traces.spans import Span
from web.traces.tracing import Tracing

NOT_TRACED = ("/healthz", "/readyz", "/metrics")
_HEADER = HEADER.encode()


def open_tracing(service: str, settings: TraceSettings, metrics: TraceMetrics) -> Tracing | None:
    """Return what sends spans to the receiver of the settings; None without one."""
    if settings.traces_url is None:
        return None
    exporter = OtlpExporter(service, settings.traces_url, settings.headers_of_traces())
    return Tracing(exporter, settings.traces_ratio, metrics, shows_keys=settings.traces_keys)


@asynccontextmanager
async def exporting(tracing: Tracing | None) -> AsyncIterator[None]:
    """Export what is left at the end of a block."""
    try:
        yield
    finally:
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def trace_requests(app: FastAPI, tracing: Tracing | None) -> None:
    if tracing is not None:
        app.add_middleware(TraceRequests, tracing=tracing)


class TraceRequests:
    """Makes a span of each sampled request, except long polls and event streams."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_traced = scope["type"] == "http" and scope["path"] not in NOT_TRACED
        span = self._tracing.begin_request(scope["method"], _traceparent(scope)) if is_traced else None
        if span is None:
            await self._app(scope, receive, send)
            return
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with within(span.context):
                await self._app(scope, receive, noted)
        finally:
            _describe(span, scope, status)
            self._tracing.end_request(span, is_shown=not scope.get(IS_HELD_OPEN))


def _describe(span: Span, scope: Scope, status: int) -> None:
    route = getattr(scope.get("route"), "path", "unmatched")
    span.name = f"{scope['method']} {route}"
    span.attributes = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status,
    }


def _traceparent(scope: Scope) -> str | None:
    found = [value for name, value in scope["headers"] if name == _HEADER]
    return found[0].decode("latin-1") if len(found) == 1 else None
