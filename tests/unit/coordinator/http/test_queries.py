"""Query strings and cursors are parsed strictly, and every fault is named at once."""

from typing import Annotated

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Query
from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.pagination import Cursor, PageQuery, read_cursor, write_cursor
from coordinator.http.parameters import Flag, Several, Text
from web.bodies import reply
from web.problems import Problem, install_problems
from web.strict_routes import StrictRoute


class ThingQuery(PageQuery):
    dry_run: Flag = False
    tenant: Several[Text] = ()


def make_app() -> FastAPI:
    app, router = FastAPI(), APIRouter(route_class=StrictRoute)

    @router.get("/things")
    async def list_things(query: Annotated[ThingQuery, Query()]) -> object:
        return reply({"dry_run": query.dry_run, "size": query.page_size, "tenant": query.tenant})

    @router.get("/nothing")
    async def get_nothing() -> object:
        return reply({})

    app.include_router(router)
    install_problems(app)
    return app


def following(cursor: str) -> PageQuery:
    return PageQuery.model_validate({"page_after": cursor})


async def get(path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://test") as client:
        return await client.get(path)


async def faults(path: str) -> list[tuple[str, str]]:
    answer = await get(path)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-request")
    return [(fault["field"], fault["rule"]) for fault in answer.json()["invalid_parameters"]]


@pytest.mark.anyio
async def test_given_parameters_are_parsed_and_others_have_their_default() -> None:
    answer = await get("/things?dry_run=true&tenant=b&tenant=a&tenant=b")
    assert answer.json() == {"dry_run": True, "size": 1000, "tenant": ["b", "a"]}


@pytest.mark.anyio
async def test_every_fault_is_named_at_once() -> None:
    assert await faults("/things?dry_run=yes&page_size=1&page_size=2&limit=5&tenant=%00&Tenant=x") == [
        ("Tenant", "unknown"),
        ("dry_run", "format"),
        ("limit", "unknown"),
        ("page_size", "once"),
        ("tenant", "text"),
    ]


@pytest.mark.anyio
async def test_an_operation_without_parameters_refuses_any() -> None:
    assert await faults("/nothing?b=1&a=1") == [("a", "unknown"), ("b", "unknown")]
    assert (await get("/nothing")).status_code == 200


@pytest.mark.anyio
async def test_too_many_values_are_refused() -> None:
    assert await faults("/things?" + "&".join(f"tenant=t{number}" for number in range(101))) == [
        ("tenant", "max_length")
    ]


@pytest.mark.parametrize("text", ["", "-1", "1.0", "1e3", " 1", "1_0", "٣", "9" * 5000])
@pytest.mark.anyio
async def test_page_sizes_that_are_not_numbers_are_refused(text: str) -> None:
    assert await faults(f"/things?page_size={text}") == [("page_size", "format")]


@pytest.mark.parametrize(("text", "rule"), [("0", "minimum"), ("10001", "maximum")])
@pytest.mark.anyio
async def test_page_sizes_out_of_bounds_are_refused(text: str, rule: str) -> None:
    assert await faults(f"/things?page_size={text}") == [("page_size", rule)]


@given(st.builds(Cursor, question=st.text("abc"), after=st.text("abc/é \u4e2d"), skip=st.integers(0, 2**53 - 1)))
def test_a_cursor_survives_a_round_trip(cursor: Cursor) -> None:
    assert read_cursor(write_cursor(cursor)) == cursor


@given(st.text() | st.text("abcdef0123456789-_=", max_size=60))
def test_an_invalid_cursor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="next"):
        read_cursor(text)


@pytest.mark.parametrize(
    "cursor", [Cursor("q", "a\0b"), Cursor("q", skip=-1), Cursor("q", skip=2**53), Cursor("q", as_of=-1)]
)
def test_a_forged_cursor_reaches_no_database(cursor: Cursor) -> None:
    with pytest.raises(ValueError, match="next"):
        read_cursor(write_cursor(cursor))


@pytest.mark.parametrize("forged", ["x", 2**63, -1, None])
def test_a_cursor_of_another_type_is_refused(forged: object) -> None:
    page = following(PageQuery().page("seals").next(after=[forged])).page("seals")
    with pytest.raises(Problem, match="page_after"):
        page.after(int)


def test_a_cursor_is_valid_for_its_own_list_only() -> None:
    cursor = PageQuery().page("regions").next(after="eu-west")
    assert following(cursor).page("regions").after(str) == "eu-west"
    for elsewhere in (following(cursor), ThingQuery.model_validate({"page_after": cursor})):
        with pytest.raises(Problem) as caught:
            elsewhere.page("subscriptions")
        assert [(each.field, each.rule) for each in caught.value.invalid_parameters] == [("page_after", "question")]
