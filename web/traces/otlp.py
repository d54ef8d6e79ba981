"""Export spans by OTLP over HTTP, in its binary form, which all collectors accept.

The messages are opentelemetry/proto/trace/v1/trace.proto of the specification; of its fields those are written that our
spans have. OpenTelemetry's own exporter is not used, because its package of messages and that of Envoy's install the
same files.
"""

from collections.abc import Iterable, Mapping, Sequence

import httpx

from protocol.compatibility.releases import RELEASE
from protocol.traces.trace_context import TraceContext
from web.traces.context import Kind
from web.traces.spans import Span

MOST_LINKS = 64
TIMEOUT_S = 5.0
CONTENT_TYPE = {"Content-Type": "application/x-protobuf"}
_KINDS = {Kind.INTERNAL: 1, Kind.SERVER: 2, Kind.CLIENT: 3}
_ERROR = 2
_VARINT, _FIXED_64, _BYTES = 0, 1, 2  # wire types of protobuf

Value = str | int | bool | Sequence[str]


class OtlpExporter:
    """Sends the spans of one service to a receiver."""

    def __init__(self, service: str, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._http = httpx.Client(timeout=TIMEOUT_S, headers={**headers, **CONTENT_TYPE})
        self._resource = _message(1, _attributes(1, {"service.name": service, "service.version": RELEASE}))
        self._scope = _message(1, _text(1, "leasehold") + _text(2, RELEASE))

    def export(self, spans: Sequence[Span]) -> None:
        """Raises httpx.HTTPError."""
        scope_spans = self._scope + b"".join(_message(2, encode_span(each)) for each in spans)
        body = _message(1, self._resource + _message(2, scope_spans))
        self._http.post(self._url, content=body).raise_for_status()


def encode_span(span: Span) -> bytes:
    """Return the message of a span, whose parent is its first cause, and which has links to the others."""
    attributes = span.attributes() if callable(span.attributes) else span.attributes
    parent = span.causes[0].span_id.to_bytes(8, "big") if span.causes else b""
    return b"".join(
        (
            _ids(span.context),
            _message(4, parent) if parent else b"",
            _text(5, span.name),
            _number(6, _KINDS[span.kind]),
            _time(7, span.began_ns),
            _time(8, span.ended_ns),
            _attributes(9, attributes),
            *(_message(13, _ids(each)) for each in span.causes[1 : 1 + MOST_LINKS]),
            _message(15, _text(2, span.fault) + _number(3, _ERROR)) if span.fault else b"",
        )
    )


def _ids(context: TraceContext) -> bytes:
    return _message(1, context.trace_id.to_bytes(16, "big")) + _message(2, context.span_id.to_bytes(8, "big"))


def _attributes(field: int, attributes: Mapping[str, Value]) -> bytes:
    pairs = (_text(1, name) + _message(2, _value(value)) for name, value in attributes.items())
    return b"".join(_message(field, pair) for pair in pairs)


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(1, value)
    if isinstance(value, bool):
        return _number(2, value)
    if isinstance(value, int):
        return _number(3, value)
    return _message(5, _messages(1, map(_value, value)))


def _messages(field: int, bodies: Iterable[bytes]) -> bytes:
    return b"".join(_message(field, body) for body in bodies)


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode(errors="replace"))


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(body)) + body


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(number)


def _time(field: int, nanoseconds: int) -> bytes:
    return _varint(field << 3 | _FIXED_64) + nanoseconds.to_bytes(8, "little")


def _varint(value: int) -> bytes:
    """Return an integer, of which each byte has seven bits. Negative ones count as 64 bits."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
