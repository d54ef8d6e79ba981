"""Of a head only a whole line of a trace context is left out, so nothing else of it can go unread."""

import pytest

from regional_agent.http.fast_path import TRACEPARENT_LINE

CONTEXT = b"00-%s-%s-01" % (b"a" * 32, b"b" * 16)
BEGIN, END = b"POST /v1/check HTTP/1.1\r\nHost: localhost", b"\r\nContent-Length: 5\r\n\r\n"


@pytest.mark.parametrize("name", [b"traceparent", b"Traceparent"])
@pytest.mark.parametrize("end", [END, b"\r\n\r\n"])
def test_the_line_of_a_trace_is_left_out(name: bytes, end: bytes) -> None:
    head = BEGIN + b"\r\n" + name + b": " + CONTEXT + end
    found = TRACEPARENT_LINE.search(head)
    assert found is not None
    assert found[1] == CONTEXT
    assert head[: found.start()] + head[found.end() :] == BEGIN + end


@pytest.mark.parametrize(
    "line",
    [
        b"\r\ntraceparent: %s\nTransfer-Encoding: chunked",
        b"\r\ntraceparent: %s\r\n folded",
        b"\r\ntraceparent: %s\r\n\tfolded",
        b"\r\ntraceparent: %s-more",
        b"\r\nx-traceparent: %s",
        b"\ntraceparent: %s",
        b"; traceparent: %s",
        b"\r\ntraceparent:  %s",
    ],
)
def test_any_other_line_stays(line: bytes) -> None:
    assert TRACEPARENT_LINE.search(BEGIN + line % CONTEXT + END) is None
