"""Requests have ids, limits, a log line each, and metrics."""

from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from tests.unit.web.conftest import MAX_BODY_BYTES, SECRET, assert_problem, make_app
from web.metrics import hold_open
from web.requests import RequestContext

pytestmark = pytest.mark.anyio


async def test_a_request_id_of_the_caller_is_kept(client: httpx.AsyncClient) -> None:
    answer = await client.get("/orders", headers={"x-request-id": "trace-1.a_B"})
    assert answer.headers.get_list("x-request-id") == ["trace-1.a_B"]


@pytest.mark.parametrize("brought", [None, "", "a b", "a" * 129, "a\tb", "ü", 'a"b'])
async def test_an_invalid_request_id_is_replaced(client: httpx.AsyncClient, brought: str | None) -> None:
    headers = {} if brought is None else {"x-request-id": brought.encode()}
    first = await client.get("/nothing", headers=headers)  # type: ignore[arg-type]
    second = await client.get("/nothing", headers=headers)  # type: ignore[arg-type]
    assert_problem(first, 404, "not-found")
    assert first.headers["x-request-id"] not in (brought, second.headers["x-request-id"])


async def test_the_id_is_in_every_line_of_the_log_and_only_there() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        bound.append(structlog.contextvars.get_contextvars())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    bound: list[dict[str, object]] = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(RequestContext(app)), base_url="http://doors") as client:
        await client.get("/", headers={"x-request-id": "mine"})
    assert bound == [{"request_id": "mine"}]
    assert structlog.contextvars.get_contextvars() == {}


async def test_each_request_is_one_log_line_without_secrets(client: httpx.AsyncClient) -> None:
    with capture_logs() as logs:
        await client.get("/refused/not-found?api_key=" + SECRET, headers={"authorization": f"Bearer {SECRET}"})
        await client.get("/nothing/" + SECRET)
        await client.head("/orders")
        await client.get("/metrics")
    lines = [entry for entry in logs if entry["event"] == "request"]
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("GET", "/refused/{kind}", 404),
        ("GET", "unmatched", 404),
        ("HEAD", "/orders", 200),
    ]
    assert all(line["duration_ms"] >= 0 for line in lines)
    assert SECRET not in str(logs)


async def test_a_body_that_is_declared_too_large_is_not_read(client: httpx.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("nobody may ask for it")
        yield b""

    headers = {"content-length": str(MAX_BODY_BYTES + 1), "content-type": "application/json"}
    document = assert_problem(await client.post("/orders", content=body(), headers=headers), 413, "body-too-large")
    assert document["max_body_bytes"] == MAX_BODY_BYTES


async def _streamed(chunks: int) -> AsyncIterator[bytes]:
    yield b'{"subject":{"tenant":"a"},"note":"'
    for _ in range(chunks):
        yield b"x" * 100_000
    yield b'"}'


@pytest.mark.parametrize("path", ["/orders", "/by-fastapi"])
async def test_a_body_that_grows_too_large_is_cut(client: httpx.AsyncClient, path: str) -> None:
    headers = {"content-type": "application/json"}
    assert_problem(await client.post(path, content=_streamed(11), headers=headers), 413, "body-too-large")


async def test_a_body_up_to_the_limit_is_read(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    body = b"".join([each async for each in _streamed(9)])
    padded = body + b" " * (MAX_BODY_BYTES - len(body))
    assert (await client.post("/orders", content=padded, headers=headers)).status_code == 201
    assert (await client.post("/orders", content=padded + b" ", headers=headers)).status_code == 413


async def test_a_client_that_expects_continue_gets_connection_close(client: httpx.AsyncClient) -> None:
    headers = {"content-length": str(MAX_BODY_BYTES + 1), "expect": "100-continue"}
    assert (await client.post("/orders", content=b"", headers=headers)).headers["connection"] == "close"


async def test_head_of_an_endless_stream_ends(client: httpx.AsyncClient) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    with anyio.fail_after(10):
        await make_app()(_scope("HEAD", "/endless"), receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_a_client_that_hangs_up_is_no_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise ClientDisconnect

    with capture_logs() as logs:
        await RequestContext(app)(_scope("POST", "/"), receive, send)
    assert [(entry["event"], entry["status"]) for entry in logs] == [("request", 499)]


async def test_an_error_in_mid_answer_sends_no_second_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("too late")

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message["type"])

    sent: list[str] = []
    with pytest.raises(RuntimeError, match="too late"):
        await RequestContext(app)(_scope("GET", "/"), receive, send)
    assert sent == ["http.response.start"]


def _scope(method: str, path: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [],
        "server": ("doors", 80),
        "client": ("client", 1),
    }


async def test_requests_that_wait_for_news_are_timed_apart() -> None:
    registry = CollectorRegistry()
    app = make_app(registry)

    @app.get("/news")
    async def news(request: Request) -> Response:
        hold_open(request.scope)
        return Response()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path in ("/news", "/orders"):
            await client.get(path)
    for name, routes in (("request", {"/news": None, "/orders": 1}), ("held_request", {"/news": 1, "/orders": None})):
        for route, count in routes.items():
            found = registry.get_sample_value(f"leasehold_http_{name}_duration_seconds_count", {"route": route})
            assert found == count, (name, route)


async def test_metrics_count_by_route_and_never_by_path() -> None:
    registry = CollectorRegistry()
    transport = httpx.ASGITransport(make_app(registry))
    async with httpx.AsyncClient(transport=transport, base_url="http://doors") as client:
        for path in ("/orders", "/orders?page_size=3", "/stranger/1", "/stranger/2"):
            await client.get(path)
        await client.request("MADEUP", "/orders")
        text = (await client.get("/metrics")).text

    def count(route: str, method: str, status: str) -> float | None:
        labels = {"route": route, "method": method, "status": status}
        return registry.get_sample_value("leasehold_http_requests_total", labels)

    assert count("/orders", "GET", "200") == 2
    assert count("unmatched", "GET", "404") == 2
    assert count("/orders", "other", "405") == 1
    assert registry.get_sample_value("leasehold_http_request_duration_seconds_count", {"route": "/orders"}) == 3
    assert "stranger" not in text
    assert "MADEUP" not in text
