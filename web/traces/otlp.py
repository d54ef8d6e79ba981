"""Export spans by OTLP over HTTP, in its binary form, which all collectors accept.

The messages are opentelemetry/proto/trace/v1/trace.proto of the specification; of its fields those are written that our
spans have. OpenTelemetry's own exporter is not used, because its package of messages and that of Envoy's install the
same files.
"""

from collections.abc import Mapping, Sequence

import httpx

from protocol.compatibility.releases import RELEASE
from protocol.protobuf.writing import bytes_field, choice_field, fixed64_field
from protocol.traces.trace_context import TraceContext
from web.traces.context import Kind
from web.traces.spans import Span

MOST_LINKS = 64
TIMEOUT_S = 5.0
CONTENT_TYPE = {"Content-Type": "application/x-protobuf"}
_KINDS = {Kind.INTERNAL: 1, Kind.SERVER: 2, Kind.CLIENT: 3}
_ERROR = 2

Value = str | int | bool | Sequence[str]


class OtlpExporter:
    """Sends the spans of one service to a receiver."""

    def __init__(self, service: str, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._http = httpx.Client(timeout=TIMEOUT_S, headers={**headers, **CONTENT_TYPE})
        self._resource = bytes_field(1, _attributes(1, {"service.name": service, "service.version": RELEASE}))
        self._scope = bytes_field(1, _text(1, "leasehold") + _text(2, RELEASE))

    def export(self, spans: Sequence[Span]) -> None:
        """Raises httpx.HTTPError."""
        scope_spans = self._scope + b"".join(bytes_field(2, encode_span(each)) for each in spans)
        body = bytes_field(1, self._resource + bytes_field(2, scope_spans))
        self._http.post(self._url, content=body).raise_for_status()


def encode_span(span: Span) -> bytes:
    """Return the message of a span, whose parent is its first cause, and which has links to the others."""
    attributes = span.attributes() if callable(span.attributes) else span.attributes
    parent = span.causes[0].span_id.to_bytes(8, "big") if span.causes else b""
    return b"".join(
        (
            _ids(span.context),
            bytes_field(4, parent) if parent else b"",
            _text(5, span.name),
            choice_field(6, _KINDS[span.kind]),
            fixed64_field(7, span.began_ns.to_bytes(8, "little")),
            fixed64_field(8, span.ended_ns.to_bytes(8, "little")),
            _attributes(9, attributes),
            *(bytes_field(13, _ids(each)) for each in span.causes[1 : 1 + MOST_LINKS]),
            bytes_field(15, _text(2, span.fault) + choice_field(3, _ERROR)) if span.fault else b"",
        )
    )


def _ids(context: TraceContext) -> bytes:
    return bytes_field(1, context.trace_id.to_bytes(16, "big")) + bytes_field(2, context.span_id.to_bytes(8, "big"))


def _attributes(field: int, attributes: Mapping[str, Value]) -> bytes:
    pairs = (_text(1, name) + bytes_field(2, _value(value)) for name, value in attributes.items())
    return b"".join(bytes_field(field, pair) for pair in pairs)


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(1, value)
    if isinstance(value, bool):
        return choice_field(2, value)
    if isinstance(value, int):
        return choice_field(3, value)
    return bytes_field(5, b"".join(bytes_field(1, _value(each)) for each in value))


def _text(field: int, text: str) -> bytes:
    return bytes_field(field, text.encode(errors="replace"))
