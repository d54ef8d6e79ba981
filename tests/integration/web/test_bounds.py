"""Heads and bodies are bounded, byte by byte on a real connection."""

import httpx
import pytest

from tests.integration.web.conftest import MAX_BODY_BYTES, MAX_HEADER_BYTES, Gate, Raw

pytestmark = pytest.mark.anyio

QUICK = b"GET /quick HTTP/1.1\r\nHost: doors\r\n"
GATED = b"GET /gated HTTP/1.1\r\nHost: doors\r\n\r\n"
LENGTH = b"POST /length HTTP/1.1\r\nHost: doors\r\nContent-Type: application/json\r\n"

TOO_LARGE_HEADS = {
    "a long header": QUICK + b"X: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
    "a very long header": QUICK + b"X: " + b"a" * 5_000_000 + b"\r\n\r\n",
    "a long name": QUICK + b"a" * MAX_HEADER_BYTES + b": 1\r\n\r\n",
    "a long path": b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: doors\r\n\r\n",
    "a long query": b"GET /quick?" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: doors\r\n\r\n",
    "many headers": QUICK + b"".join(b"X-%d: 1\r\n" % number for number in range(1000)) + b"\r\n",
    "a header that never ends": QUICK + b"X: " + b"a" * MAX_HEADER_BYTES,
    "a name that never ends": QUICK + b"a" * MAX_HEADER_BYTES,
    "a path that never ends": b"GET /" + b"a" * MAX_HEADER_BYTES,
    "a trailer": LENGTH
    + b'Transfer-Encoding: chunked\r\n\r\n1\r\n"\r\n0\r\nX: '
    + b"a" * MAX_HEADER_BYTES
    + b"\r\n\r\n",
}


@pytest.mark.parametrize("head", TOO_LARGE_HEADS.values(), ids=TOO_LARGE_HEADS.keys())
async def test_a_head_above_the_bound_is_refused(raw: Raw, head: bytes) -> None:
    await raw.send(head)
    answer = await raw.answer()
    problem = answer.problem()
    assert (answer.status, problem["type"]) == (431, "/problems/headers-too-large")
    assert problem["max_header_bytes"] == MAX_HEADER_BYTES
    assert answer.headers["connection"] == "close"
    assert await raw.rest() == b""


async def test_a_head_is_refused_while_it_streams_in(raw: Raw) -> None:
    await raw.send(QUICK + b"X: ")
    for _ in range(MAX_HEADER_BYTES):  # byte by byte; the network may join them, and the sum counts
        await raw.send(b"a")
    assert (await raw.answer()).status == 431


async def test_a_head_below_the_bound_is_accepted(raw: Raw) -> None:
    for _ in range(2):
        await raw.send(QUICK + b"X: " + b"a" * (MAX_HEADER_BYTES - 200) + b"\r\n\r\n")
        assert (await raw.answer()).status == 200


async def test_bytes_after_a_refusal_are_discarded(raw: Raw) -> None:
    await raw.send(QUICK + b"X: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n" + QUICK + b"\r\n")
    assert (await raw.answer()).status == 431
    assert await raw.rest() == b""


async def test_many_small_heads_in_one_packet_are_not_a_large_one(raw: Raw) -> None:
    count = 3 * MAX_HEADER_BYTES // len(QUICK)
    await raw.send((QUICK + b"\r\n") * count + QUICK)
    await raw.send(b"\r\n")
    for _ in range(count + 1):
        assert (await raw.answer()).status == 200


async def test_earlier_requests_are_answered_first(raw: Raw, gate: Gate) -> None:
    await raw.send(GATED + QUICK + b"\r\n" + QUICK + b"X: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n")
    await gate.entered.wait()
    gate.open.set()
    assert [(await raw.answer()).body for _ in range(2)] == [b'{"answer":"gated"}', b'{"answer":"quick"}']
    assert await raw.rest() == b""


NOT_HTTP = {
    "noise": b"\x16\x03\x01\x02\x00\r\n\r\n",
    "two lengths": LENGTH + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n",
    "length and chunks": LENGTH + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bad length": LENGTH + b"Content-Length: -1\r\n\r\n",
    "a bad chunk": LENGTH + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "a blank in a name": QUICK + b"a b: 1\r\n\r\n",
    "CONNECT": b"CONNECT doors:80 HTTP/1.1\r\nHost: doors\r\n\r\n",
}


@pytest.mark.parametrize("data", NOT_HTTP.values(), ids=NOT_HTTP.keys())
async def test_bytes_that_are_not_http_are_refused(raw: Raw, data: bytes) -> None:
    await raw.send(data)
    answer = await raw.answer()
    assert (answer.status, answer.problem()["type"]) == (400, "/problems/bad-request")
    assert await raw.rest() == b""


async def test_a_large_body_is_answered_even_if_the_client_sends_all_of_it_first(raw: Raw) -> None:
    body = b'"' + b"a" * (10 * MAX_BODY_BYTES) + b'"'
    await raw.send(LENGTH + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = await raw.answer()
    assert (answer.status, answer.problem()["type"]) == (413, "/problems/body-too-large")
    await raw.send(QUICK + b"\r\n")
    assert (await raw.answer()).status == 200


async def test_a_large_body_in_chunks_is_refused(raw: Raw) -> None:
    await raw.send(LENGTH + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        await raw.send(b"186a0\r\n" + b"a" * 100_000 + b"\r\n")
    await raw.send(b"0\r\n\r\n")
    answer = await raw.answer()
    assert (answer.status, answer.problem()["type"]) == (413, "/problems/body-too-large")
    await raw.send(QUICK + b"\r\n")
    assert (await raw.answer()).status == 200


async def test_a_large_body_is_refused_before_it_comes(raw: Raw) -> None:
    await raw.send(LENGTH + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (10 * MAX_BODY_BYTES))
    answer = await raw.answer()
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert await raw.rest() == b""


async def test_the_end_of_a_refused_body_is_not_awaited(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.http_protocol.LINGER_S", 0.05)
    await raw.send(LENGTH + b"Content-Length: %d\r\n\r\n" % (10 * MAX_BODY_BYTES))
    assert (await raw.answer()).status == 413
    assert await raw.rest() == b""


async def test_a_body_that_was_not_read_does_not_become_a_request(raw: Raw) -> None:
    smuggled = QUICK + b"\r\n"
    head = b"POST /unread HTTP/1.1\r\nHost: doors\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
    await raw.send(head)
    assert (await raw.answer()).body == b'{"answer":"unread"}'
    await raw.send(smuggled + QUICK + b"\r\n")
    assert (await raw.answer()).body == b'{"answer":"quick"}'
    await raw.send(b"GET /nothing HTTP/1.1\r\nHost: doors\r\n\r\n")
    assert (await raw.answer()).status == 404


async def test_a_client_library_sees_the_refusal(address: str) -> None:
    async with httpx.AsyncClient(base_url=address) as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("/length", content=b"a" * 10 * MAX_BODY_BYTES, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (413, "/problems/body-too-large")
        answer = await client.get("/quick", headers={"x": "a" * MAX_HEADER_BYTES})
        assert (answer.status_code, answer.json()["type"]) == (431, "/problems/headers-too-large")
        assert (await client.get("/quick")).status_code == 200


async def test_a_bug_costs_an_answer_and_not_the_connection(raw: Raw) -> None:
    await raw.send(b"GET /breaks HTTP/1.1\r\nHost: doors\r\n\r\n")
    answer = await raw.answer()
    assert (answer.status, answer.problem()["type"]) == (500, "/problems/internal-error")
    assert b"inside" not in answer.body
    await raw.send(QUICK + b"\r\n")
    assert (await raw.answer()).status == 200


async def test_head_of_a_stream_ends(raw: Raw) -> None:
    await raw.send(b"HEAD /events HTTP/1.1\r\nHost: doors\r\n\r\n")
    answer = await raw.answer()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    await raw.send(QUICK + b"\r\n")
    assert (await raw.answer()).body == b'{"answer":"quick"}'


async def test_an_upgrade_that_is_not_served_is_a_request(raw: Raw) -> None:
    await raw.send(QUICK + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert (await raw.answer()).status == 200
