"""Our reader and writer of Envoy's messages agree with the generated classes."""

from contextlib import suppress

import pytest
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from protocol.protobuf.reading import MalformedMessage
from protocol.protobuf.writing import bytes_field
from regional_agent.envoy.rls import messages

texts = st.text(max_size=20)
uint64 = st.integers(0, 2**64 - 1)


@st.composite
def requests(draw: st.DrawFn) -> RateLimitRequest:
    descriptors = []
    for _ in range(draw(st.integers(0, 3))):
        entries = [{"key": draw(texts), "value": draw(texts)} for _ in range(draw(st.integers(0, 3)))]
        each = RateLimitDescriptor(entries=entries)
        if draw(st.booleans()):
            each.hits_addend.value = draw(uint64)
        if draw(st.booleans()):
            each.limit.requests_per_unit, each.limit.unit = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 7))
        descriptors.append(each)
    return RateLimitRequest(domain=draw(texts), descriptors=descriptors, hits_addend=draw(st.integers(0, 2**32 - 1)))


@given(requests())
def test_a_request_is_read_as_the_generated_class_wrote_it(request: RateLimitRequest) -> None:
    read = messages.decode_request(request.SerializeToString())
    assert read.domain == request.domain
    assert len(read.descriptors) == len(request.descriptors)
    for ours, theirs in zip(read.descriptors, request.descriptors, strict=True):
        assert ours.entries == tuple((each.key, each.value) for each in theirs.entries)
        limit = (theirs.limit.requests_per_unit, theirs.limit.unit) if theirs.HasField("limit") else None
        assert ours.override == limit
        whole = theirs.hits_addend.value if theirs.HasField("hits_addend") else request.hits_addend or None
        assert ours.hits == whole


def test_negative_hits_are_read() -> None:
    refund = bytes_field(2, RateLimitDescriptor(entries=[{"key": "a"}]).SerializeToString() + b"\x20\x01")
    assert [each.is_refund for each in messages.decode_request(refund).descriptors] == [True]


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_raise_no_other_error(raw: bytes) -> None:
    """An error of another kind would end the connection, or be answered as a fault of the agent."""
    with suppress(MalformedMessage):
        messages.decode_request(raw)


@pytest.mark.parametrize("raw", ["12ff", "0a", "08ff", "1affffffffffffffffffff01", "0b", "1801ff", "1a0161", "0800"])
def test_malformed_messages_are_refused(raw: str) -> None:
    with pytest.raises(MalformedMessage):
        messages.decode_request(bytes.fromhex(raw))


def test_texts_that_are_no_utf8_stay_different() -> None:
    entries = [bytes_field(1, bytes_field(1, b"k") + bytes_field(2, value)) for value in (b"\xff", b"\xfe")]
    read = messages.decode_request(b"".join(bytes_field(2, each) for each in entries))
    assert [each.entries[0][1] for each in read.descriptors] == ["\\xff", "\\xfe"]


@given(
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.sampled_from([0, 1, 60, 3600, 86_400, 604_800, 7]),
    st.integers(0, 10**9),
)
def test_a_response_is_read_by_the_generated_class(limit: int, remaining: int, window_s: int, reset_ms: int) -> None:
    metadata: dict[str, str | int | bool] = {"policy": "export", "allowed": False, "retry_after_ms": 3}
    response = RateLimitResponse.FromString(
        messages.encode_code(messages.OVER_LIMIT)
        + messages.encode_status(messages.OK, messages.encode_limit("export", limit, window_s), remaining, reset_ms)
        + messages.encode_status(messages.OVER_LIMIT)
        + messages.encode_headers({"Retry-After": "7"})
        + messages.encode_body(b"{}")
        + messages.encode_metadata(metadata)
    )
    first, second = response.statuses
    assert (response.overall_code, first.code, second.code) == (2, 1, 2)
    assert first.current_limit.name == "export"
    assert first.current_limit.requests_per_unit == min(limit, 2**32 - 1)
    assert RateLimitResponse.RateLimit.Unit.Name(first.current_limit.unit) == {
        1: "SECOND", 60: "MINUTE", 3600: "HOUR", 86_400: "DAY", 604_800: "WEEK"
    }.get(window_s, "UNKNOWN")  # fmt: skip
    assert first.limit_remaining == min(remaining, 2**32 - 1)
    assert first.duration_until_reset.ToMilliseconds() == reset_ms
    assert [(each.key, each.value) for each in response.response_headers_to_add] == [("Retry-After", "7")]
    assert response.raw_body == b"{}"
    assert MessageToDict(response.dynamic_metadata) == metadata
