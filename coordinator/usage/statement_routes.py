"""For finance: what a tenant is billed for, and where each line of it comes from."""

import re
from datetime import UTC, datetime
from typing import Annotated, NamedTuple, NoReturn, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Struct

from coordinator.access.auth import require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.http.queries import DEFAULT_PAGE_SIZE, PAGE, TEXT, Page, Query, a_text, number_of, with_query
from coordinator.state import Coordinator, CoordinatorDep
from coordinator.usage.read_statement import NoStatement, Source, read_sources, read_statement
from coordinator.usage.routes import parse_as_of
from coordinator.usage.rules.statement import Statement, StatementId, StatementLine, parse_statement_id
from coordinator.usage.sheets import OTHER_MEDIA, SHAPE, Shape, shape_of, shaped, statement_sheet
from web.bodies import described, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["finance"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(require("usage:read"))]
T = TypeVar("T")


class SourceList(Struct, frozen=True):
    """Reports in the order in which they were booked, and then what was moved without one."""

    line: StatementLine
    data: list[Source]
    page: dict[str, str | None]


AS_OF = {"as_of": ("a sealed position, or a time; without it, all of a closed period, or the newest seal", TEXT)}
_STATEMENT = described(answers={200: Statement, 304: None, 404: None}, also=OTHER_MEDIA)
_TENANT = {"tenant": ("whose; it must be given", TEXT)}


@router.get("/v1/periods/{period}/statement", **with_query(_STATEMENT, _TENANT | AS_OF | SHAPE))
async def get_statement_of_period(request: Request, period: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    """What a tenant is billed for, in numbered lines. Final once the period is closed."""
    query = Query(request)
    tenant = query.one("tenant", a_text, "")
    as_of, shape = query.one("as_of", _parse_as_of, None), shape_of(query)
    if not request.query_params.get("tenant"):
        query.refuse("tenant", "required", "a statement is of one tenant")
    query.checked()
    return await _statement(request, coordinator, StatementId(period, tenant), as_of, shape)


_BY_ID = described(answers={200: Statement, 304: None, 404: None}, also=OTHER_MEDIA)


@router.get("/v1/statements/{statement}", **with_query(_BY_ID, AS_OF | SHAPE))
async def get_statement(request: Request, statement: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    """The same by its id, which never changes."""
    query = Query(request)
    as_of, shape = query.one("as_of", _parse_as_of, None), shape_of(query)
    query.checked()
    return await _statement(request, coordinator, _named(statement), as_of, shape)


async def _statement(
    request: Request, coordinator: Coordinator, of: StatementId, as_of: int | datetime | None, shape: Shape
) -> Response:
    found = await coordinator.database.run(lambda c: read_statement(c, of, as_of), snapshot=True)
    if isinstance(found, NoStatement):
        _refuse(found)
    name = re.sub(r"[^\w.-]", "_", f"statement-{of.period}-{of.tenant}", flags=re.ASCII)[:100]
    return shaped(request, shape, found, statement_sheet, name, for_good=found.is_final)


@router.get(
    "/v1/statements/{statement}/lines/{n}/reports",
    **with_query(described(answers={200: SourceList, 404: None}), AS_OF | PAGE),
)
async def list_sources(request: Request, statement: str, n: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Each report that a line is from: who sent it, where it is in its chain, and how many units of the line it has."""
    asked = asked_line(request, statement, n, DEFAULT_PAGE_SIZE)
    asked.query.checked()
    page = asked.page
    found = of_line(
        await coordinator.database.run(
            lambda c: read_sources(c, asked.of, asked.n, asked.as_of, page.cursor.after, page.size + 1), snapshot=True
        )
    )
    return reply(SourceList(found.line, found.sources[: page.size], page.links(found.numbers, str)))


class AskedLine(NamedTuple):
    """A part of what a line of a statement is from."""

    query: Query
    of: StatementId
    n: int
    as_of: int | datetime | None
    page: Page


def asked_line(request: Request, statement: str, n: str, page_size: int) -> AskedLine:
    """Whoever asks has the query checked, after reading what else it wants of it."""
    query, of, number = Query(request), _named(statement), number_of("n", n)
    as_of = query.one("as_of", _parse_as_of, None)
    page = query.page(of, number, as_of, size=page_size)
    if page.cursor.after and not re.fullmatch(r"[01]\.\d{1,18}", page.cursor.after, re.ASCII):
        query.refuse("page_after", "format", "it is not the `next` of a page")
    return AskedLine(query, of, number, as_of, page)


def of_line(found: T | NoStatement | None) -> T:
    if isinstance(found, NoStatement):
        _refuse(found)
    if found is None:
        raise Problem("not-found", "the statement has no such line")
    return found


def _parse_as_of(text: str) -> int | datetime:
    return parse_as_of(text, UTC)


def _named(statement: str) -> StatementId:
    found = parse_statement_id(statement)
    if found is None:
        raise Problem("not-found", "there is no such statement")
    return found


# What is wrong with what was asked for; of all else there is nothing.
_WRONG = {NoStatement.NOT_SEALED: ("as_of", "sealed"), NoStatement.TOO_LONG: ("tenant", "at_most")}


def _refuse(why: NoStatement) -> NoReturn:
    if why not in _WRONG:
        raise Problem("not-found", why)
    fault = InvalidParameter(*_WRONG[why], why)
    raise Problem("invalid-request", "the query is not valid", invalid_parameters=[fault])
