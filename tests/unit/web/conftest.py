"""Fixtures of a small app behind the real middleware, and a client that reaches it without a socket."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI, Query
from msgspec import Meta, Struct
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from web.bodies import read_body, reply
from web.metrics import HttpMetrics, exposition
from web.openapi import described, install_openapi
from web.problems import InvalidParameter, Problem, install_problems
from web.requests import install_requests

MAX_BODY_BYTES = 1_000_000
SECRET = "lh_" + "s" * 43


class Subject(Struct, forbid_unknown_fields=True, frozen=True):
    tenant: Annotated[str, Meta(min_length=1, max_length=64)]


class Order(Struct, forbid_unknown_fields=True, frozen=True):
    subject: Subject
    cost: Annotated[int, Meta(ge=1, le=2**53 - 1)] = 1
    note: Any = None
    items: Annotated[list[Subject], Meta(max_length=10)] = []
    labels: dict[str, Annotated[str, Meta(max_length=4)]] = {}


class Placed(Struct, frozen=True):
    tenant: str
    cost: int


def make_app(registry: CollectorRegistry | None = None) -> FastAPI:
    registry = registry or CollectorRegistry()
    app = FastAPI(title="doors", version="1", docs_url=None, redoc_url=None)

    @app.post("/orders", **described(body=Order, answers={201: Placed, 429: Placed}))
    async def place(request: Request) -> Response:
        order = await read_body(request, Order)
        return reply(Placed(order.subject.tenant, order.cost), 201)

    @app.get("/orders", **described(answers={200: list[Placed]}))
    async def listed(page_size: Annotated[int, Query(ge=1)] = 10) -> Response:
        return reply([Placed("acme", page_size)])

    @app.get("/refused/{kind}")
    async def refused(kind: str) -> Response:
        invalid = [InvalidParameter("a.b", "known", "no")]
        raise Problem(kind, "Because.", invalid_parameters=invalid, headers={"Retry-After": "3"}, extra={"status": 1})

    @app.get("/http/{status}")
    async def http(status: int) -> Response:
        raise HTTPException(status, detail=f"inside {SECRET}")

    @app.get("/breaks")
    async def breaks() -> Response:
        raise RuntimeError(f"postgresql://owner:hunter2@db/x refused {SECRET}")

    @app.get("/endless")
    async def endless() -> Response:
        async def events() -> AsyncIterator[bytes]:
            while True:
                yield b": again\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/by-fastapi")
    async def by_fastapi(body: dict[str, int]) -> int:
        return len(body)

    @app.get("/metrics")
    async def metrics() -> Response:
        return exposition(registry)

    install_problems(app)
    install_openapi(app)
    install_requests(app, max_body_bytes=MAX_BODY_BYTES, metrics=HttpMetrics(registry))
    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://doors") as client:
        yield client


def assert_problem(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """Assert that an answer has the shape of every refusal."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["type"] == f"/problems/{kind}"
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    assert document["instance"] == answer.request.url.path
    assert document["request_id"] == answer.headers["x-request-id"]
    return document
