"""The trace that this code runs for, and what traces are asked for, without OpenTelemetry."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

from protocol.traces.trace_context import HEADER, TraceContext
from web.declared_metrics import DeclaredMetrics, counter

_current: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


class Kind(StrEnum):
    """The kind of a span, as OpenTelemetry has it."""

    SERVER = "server"  # a request that arrived
    CLIENT = "client"  # a call of another process
    INTERNAL = "internal"


class ExportResult(StrEnum):
    EXPORTED = "exported"
    LOST = "lost"


class TraceMetrics(DeclaredMetrics):
    spans = counter(
        "leasehold_trace_spans",
        "Spans of sampled requests: exported, or lost because the queue was full or the receiver did not take them.",
        "result",
    )


def current_context() -> TraceContext | None:
    """Return the context of the span around this code; None if it is not traced."""
    return _current.get()


def trace_headers() -> dict[str, str]:
    """Return the header that passes the trace on; none where there is no trace."""
    context = _current.get()
    return {} if context is None else {HEADER: context.traceparent}


@contextmanager
def within(context: TraceContext | None) -> Iterator[None]:
    """Let everything that the block causes belong to this trace, or to none."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
