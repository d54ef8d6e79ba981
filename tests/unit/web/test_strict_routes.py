"""Strict routes: what FastAPI would let through is refused, and every fault of a request is reported at once."""

from typing import Annotated, Any, Literal
from uuid import UUID

import httpx
import pytest
from fastapi import APIRouter, Body, FastAPI, Query
from pydantic import Field

from web.bodies import reply
from web.problems import install_problems
from web.strict_routes import BodyModel, QueryModel, StrictRoute

pytestmark = pytest.mark.anyio


class Part(BodyModel):
    count: Annotated[int, Field(ge=0, le=9)] = 0


class Order(BodyModel):
    id: Annotated[UUID | None, Field(strict=False)] = None
    name: Annotated[str, Field(min_length=1, max_length=4)]
    urgent: bool = False
    parts: list[Part] = []  # noqa: RUF012 - pydantic copies it


class Ship(BodyModel):
    mode: Literal["ship"]
    weight: int


class Fetch(BodyModel):
    mode: Literal["fetch"]


class OrderQuery(QueryModel):
    dry_run: bool = False


def make_app() -> FastAPI:
    app, router = FastAPI(), APIRouter(route_class=StrictRoute)

    @router.post("/orders")
    async def create_order(query: Annotated[OrderQuery, Query()], body: Order) -> object:
        return reply(body.model_dump(mode="json"))

    @router.post("/deliveries")
    async def create_delivery(body: Annotated[Ship | Fetch, Body(discriminator="mode")]) -> object:
        return reply(body.model_dump())

    app.include_router(router)
    install_problems(app)
    return app


async def post(path: str, content: bytes | str, media_type: str = "application/json") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://test") as client:
        return await client.post(path, content=content, headers={"Content-Type": media_type})


def faults(answer: httpx.Response) -> list[tuple[str, str]]:
    document: dict[str, Any] = answer.json()
    assert (answer.status_code, document["type"]) == (422, "/problems/invalid-request")
    return [(each["field"], each["rule"]) for each in document["invalid_parameters"]]


async def test_a_good_body_is_read() -> None:
    answer = await post(
        "/orders", '{"name": "nut", "parts": [{"count": 3}], "id": "00000000-0000-0000-0000-000000000007"}'
    )
    assert answer.json() == {
        "id": "00000000-0000-0000-0000-000000000007",
        "name": "nut",
        "urgent": False,
        "parts": [{"count": 3}],
    }


async def test_every_fault_is_reported_at_once() -> None:
    answer = await post(
        "/orders?when=now&dry_run=true&dry_run=true", '{"parts": [{"count": 1}, {"count": 10}], "x": 1, "id": "7"}'
    )
    assert faults(answer) == [
        ("dry_run", "once"),
        ("id", "format"),
        ("name", "required"),
        ("parts[1].count", "maximum"),
        ("when", "unknown"),
        ("x", "unknown"),
    ]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ('"name": 7', "name"),
        ('"name": "n", "urgent": "true"', "urgent"),
        ('"name": "n", "urgent": 1', "urgent"),
        ('"name": "n", "parts": {}', "parts"),
        ('"name": "n", "parts": [{"count": "1"}]', "parts[0].count"),
        ('"name": "n", "parts": [{"count": 1.0}]', "parts[0].count"),
        ('"name": "n", "parts": [{"count": true}]', "parts[0].count"),
    ],
)
async def test_no_value_is_converted_from_another_type(part: str, field: str) -> None:
    assert faults(await post("/orders", f"{{{part}}}")) == [(field, "type")]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"name": "a", "name": "b"}', ("name", "duplicate")),
        ('{"name": "a", "parts": [{"count": 1, "count": 2}]}', ("count", "duplicate")),
        ('{"name": "a\\u0000"}', ("body", "characters")),
        ("", ("body", "required")),
        ("[]", ("body", "type")),
    ],
)
async def test_ambiguous_json_is_refused(content: str, fault: tuple[str, str]) -> None:
    assert faults(await post("/orders", content)) == [fault]


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"name": NaN}', b"[" * 100_000])
async def test_what_is_no_json_is_refused(content: bytes) -> None:
    answer = await post("/orders", content)
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-json")


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/merge-patch+json", "application/json; charset=latin-1"]
)
async def test_other_media_types_are_refused(media_type: str) -> None:
    answer = await post("/orders", '{"name": "n"}', media_type)
    assert (answer.status_code, answer.json()["type"]) == (415, "/problems/unsupported-media-type")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"mode": "ship", "weight": "1"}', ("weight", "type")),
        ('{"mode": "ship"}', ("weight", "required")),
        ('{"mode": "sail"}', ("mode", "enum")),
        ("{}", ("mode", "required")),
    ],
)
async def test_faults_of_a_union_name_the_field_alone(content: str, fault: tuple[str, str]) -> None:
    assert faults(await post("/deliveries", content)) == [fault]
