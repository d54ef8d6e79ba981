"""The header `traceparent` is read as the W3C specifies, and a malformed one counts as missing."""

import pytest

from protocol.traces.trace_context import TraceContext, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_header_is_read_and_written(flags: str) -> None:
    text = f"00-{TRACE}-{SPAN}-{flags}"
    context = parse_traceparent(text)
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), flags == "01")
    assert context.traceparent == text


def test_a_later_version_may_have_more_fields() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-03-more") == TraceContext(int(TRACE, 16), int(SPAN, 16), True)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_a_malformed_header_counts_as_missing(text: str | None) -> None:
    assert parse_traceparent(text) is None
