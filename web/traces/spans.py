"""Spans as they are kept until they are exported. Nothing of OpenTelemetry is needed to make one."""

from collections.abc import Callable, Mapping, Sequence
from random import getrandbits
from time import time_ns

from msgspec import Struct

from protocol.traces.trace_context import TraceContext
from web.traces.context import Kind

Attributes = Mapping[str, str | int | bool | Sequence[str]]


class Span(Struct, eq=False):
    """Something that took a time, as a part of a trace. `attributes` may be a function, which the exporter calls."""

    name: str
    kind: Kind
    context: TraceContext
    began_ns: int
    causes: Sequence[TraceContext] = ()  # the parent, and what else it serves
    attributes: Attributes | Callable[[], Attributes] = {}
    ended_ns: int = 0
    fault: str = ""


def begin_span(name: str, kind: Kind, causes: Sequence[TraceContext], attributes: Attributes | None = None) -> Span:
    """Begin a span that continues the trace of its first cause, or a trace of its own."""
    trace_id = causes[0].trace_id if causes else getrandbits(128) or 1
    context = TraceContext(trace_id, getrandbits(64) or 1, is_sampled=True)
    return Span(name, kind, context, time_ns(), causes, attributes or {})
