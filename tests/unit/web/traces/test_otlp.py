"""The bytes that are sent to a receiver of traces are the messages of the specification, as protobuf decodes them."""

from functools import partial
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from protocol.traces.trace_context import TraceContext
from web.traces.context import Kind
from web.traces.otlp import MOST_LINKS, OtlpExporter, encode_span
from web.traces.spans import Attributes, Span, begin_span

CAUSE = TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_sampled=True)


def decoded(span: Span) -> Any:
    return trace_pb2.Span.FromString(encode_span(span))


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(each) for each in found.values] if kind == "array_value" else found


def test_a_span_has_all_that_happened() -> None:
    attributes: Attributes = {
        "text": "schön",
        "yes": True,
        "no": False,
        "number": 2**40,
        "debt": -3,
        "many": ["a", "b"],
        "0": 0,
    }
    span = begin_span("store call", Kind.CLIENT, (CAUSE,), attributes)
    span.ended_ns, span.fault = span.began_ns + 5, "NoAnswer"
    found = decoded(span)
    assert found.name == "store call"
    assert found.kind == trace_pb2.Span.SPAN_KIND_CLIENT
    assert found.trace_id == bytes.fromhex("0af7651916cd43dd8448eb211c80319c")
    assert found.parent_span_id == bytes.fromhex("b7ad6b7169203331")
    assert found.span_id == span.context.span_id.to_bytes(8, "big")
    assert found.end_time_unix_nano - found.start_time_unix_nano == 5
    assert {each.key: value_of(each.value) for each in found.attributes} == attributes
    assert (found.status.code, found.status.message) == (trace_pb2.Status.STATUS_CODE_ERROR, "NoAnswer")


def test_a_span_without_a_cause_begins_a_trace() -> None:
    found = decoded(begin_span("POST /v1/check", Kind.SERVER, ()))
    assert not found.parent_span_id
    assert len(found.trace_id) == 16
    assert any(found.trace_id)
    assert found.status.code == trace_pb2.Status.STATUS_CODE_UNSET


def test_a_span_has_links_to_its_other_causes_up_to_a_bound() -> None:
    causes = [TraceContext(number, number, is_sampled=True) for number in range(1, 200)]
    found = decoded(begin_span("exchange", Kind.CLIENT, causes))
    assert [int.from_bytes(each.trace_id, "big") for each in found.links] == list(range(2, MOST_LINKS + 2))


def test_attributes_that_are_made_later_are_made_by_the_exporter() -> None:
    span = begin_span("POST /v1/check", Kind.SERVER, ())
    span.attributes = partial(dict, reason="rate")
    assert value_of(decoded(span).attributes[0].value) == "rate"


def test_a_receiver_that_refuses_is_an_error() -> None:
    exporter = OtlpExporter("leasehold-agent", "http://127.0.0.1:9/v1/traces", {})
    with pytest.raises(httpx.HTTPError):
        exporter.export([begin_span("exchange", Kind.CLIENT, ())])
