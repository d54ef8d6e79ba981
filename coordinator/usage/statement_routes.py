"""HTTP: statements of what a tenant is billed for, and the reports that each line was booked from."""

import re
from collections.abc import Awaitable
from datetime import datetime
from typing import Annotated, NoReturn, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct
from pydantic import Field, PlainValidator

from coordinator.access.auth import RequireScope
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.archives.refusal import Archived, archived_problem
from coordinator.database.connection import Connection
from coordinator.http.conditions import IfNoneMatch
from coordinator.http.pagination import NOT_A_CURSOR, Page, PageLinks, PageQuery
from coordinator.http.parameters import Flag, Text, WholeNumber
from coordinator.state import Coordinator, CoordinatorDep
from coordinator.tenants.operations import Tenant, read_tenant
from coordinator.usage.list_statements import ListedStatement, list_statements
from coordinator.usage.read_month import parse_month, read_month_statement
from coordinator.usage.read_statement import LineSource, NoStatement, read_sources, read_statement
from coordinator.usage.routes import AsOf, PathPeriod
from coordinator.usage.rules.paper import page_of, paper_of_month, paper_of_statement
from coordinator.usage.rules.sheet import Sheet
from coordinator.usage.rules.statement import MonthStatement, Statement, StatementId, StatementLine, parse_statement_id
from coordinator.usage.sheets import (
    OTHER_MEDIA,
    Shape,
    ShapeParameter,
    customer_of,
    month_sheet,
    seller_of,
    shaped,
    statement_sheet,
)
from protocol.periods import period_of
from protocol.zones import zone_of
from web.bodies import reply
from web.openapi import described
from web.problems import Problem, refused
from web.strict_routes import QueryModel

router = APIRouter(tags=["finance"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("usage:read"))]
T = TypeVar("T")


async def _statement_of(
    statement: Annotated[str, Path(description="The id of a statement.", examples=["2026-11.YWNtZQ"])],
) -> StatementId:
    found = parse_statement_id(statement)
    if found is None:
        raise Problem("not-found", "There is no such statement.")
    return found


PathStatement = Annotated[StatementId, Depends(_statement_of)]
LineNumber = Annotated[WholeNumber, Path(description="The number of a line.", examples=[1])]


class StatementQuery(QueryModel):
    as_of: AsOf = None
    shape: ShapeParameter = Shape.JSON


class StatementListQuery(PageQuery):
    as_of: AsOf = None
    page_size: Annotated[
        WholeNumber, Field(ge=1, le=1_000, description="How many tenants a page covers at most.", examples=[100])
    ] = 1_000
    lines: Annotated[Flag, Field(description="Include the lines of each statement.", examples=[True])] = False


class TenantStatementQuery(StatementQuery):
    tenant: Annotated[Text, Field(description="Whose statement.", examples=["acme"])]


class LineQuery(PageQuery):
    as_of: AsOf = None

    def line_page(self, statement: StatementId, n: int) -> tuple[Page, str]:
        """Return the page of a line's reports that is asked for, and the name of the last report before it."""
        page = self.page_of(statement, n, self.as_of)
        after = page.after(str) or ""
        if after and not re.fullmatch(r"[01]\.\d{1,18}", after, re.ASCII):
            raise refused("page_after", "format", NOT_A_CURSOR)
        return page, after


class SourceList(Struct, frozen=True):
    """Reports in the order in which they were booked, followed by movements that have none."""

    line: StatementLine
    data: list[LineSource]
    page: PageLinks


class StatementList(Struct, frozen=True):
    """Statements by tenant, all as of the position of the first page."""

    data: list[ListedStatement]
    is_final: bool
    as_of: int
    page: PageLinks


@router.get("/v1/periods/{period}/statements", **described(answers={200: StatementList, 404: None, 410: None}))
async def list_statements_of_period(
    period: PathPeriod, coordinator: CoordinatorDep, _: Reader, query: Annotated[StatementListQuery, Query()]
) -> Response:
    """Return who is billed in a period, how much, and whether it is final.

    A tenant is listed if its statement has lines. A page may have fewer tenants than were asked for.
    """
    page = query.page_of(period, query.as_of, query.lines)
    as_of = page.cursor.as_of if page.cursor.after is not None else query.as_of
    as_of = None if page.cursor.skip else as_of  # the first page was final
    found = await coordinator.database.run(
        lambda c: list_statements(c, period, as_of, page.after(str) or "", page.size, with_lines=query.lines),
        snapshot=True,
    )
    if isinstance(found, Archived):
        raise archived_problem(found)
    if isinstance(found, NoStatement):
        _refuse(found, of_many=True)
    following = None
    if found.last is not None:
        following = page.next(after=found.last, as_of=found.as_of, skip=int(found.is_final))
    return reply(StatementList(found.statements, found.is_final, found.as_of, PageLinks(following)))


_STATEMENT = described(answers={200: Statement, 304: None, 404: None, 410: None}, also=OTHER_MEDIA)


@router.get("/v1/periods/{period}/statement", **_STATEMENT)
async def get_statement_of_period(
    request: Request,
    period: Annotated[str, Path(description="A period.", examples=["2026-11"])],
    coordinator: CoordinatorDep,
    _: Reader,
    query: Annotated[TenantStatementQuery, Query()],
    _if_none_match: IfNoneMatch = None,
) -> Response:
    """Return what a tenant is billed for in a period, in numbered lines.

    The statement of a closed period is final. Without `as_of`, that of an open one reaches to the newest seal.
    """
    return await _statement(request, coordinator, StatementId(period, query.tenant), query.as_of, query.shape)


_BY_ID = described(answers={200: Statement, 304: None, 404: None, 410: None}, also=OTHER_MEDIA)


@router.get("/v1/statements/{statement}", **_BY_ID)
async def get_statement(
    request: Request,
    coordinator: CoordinatorDep,
    _: Reader,
    statement: PathStatement,
    query: Annotated[StatementQuery, Query()],
    _if_none_match: IfNoneMatch = None,
) -> Response:
    """Return a statement by its id, which never changes."""
    return await _statement(request, coordinator, statement, query.as_of, query.shape)


async def _statement(
    request: Request, coordinator: Coordinator, of: StatementId, as_of: int | datetime | None, shape: Shape
) -> Response:
    read, registered = await coordinator.database.run(
        lambda c: _with_tenant(read_statement(c, of, as_of), c, of.tenant), snapshot=True
    )
    found = found_line(read)
    name = _file_name(of.period, of.tenant)
    is_immutable = found.is_final and shape is Shape.JSON  # all others name the tenant, and names change
    statement, zone = found, zone_of(period_of(found.period).calendar.zone)

    def page() -> str:
        parties = customer_of(statement.tenant, registered), seller_of(coordinator.settings.seller)
        return page_of(paper_of_statement(statement, *parties, zone))

    def sheet(_: Statement) -> Sheet:
        return statement_sheet(statement, registered)

    return await shaped(request, shape, found, sheet, name, page=page, is_immutable=is_immutable)


def _month(text: str) -> datetime:
    try:
        return parse_month(text)
    except ValueError:
        raise Problem("not-found", "This is no month. Write it as 2026-11.") from None


@router.get(
    "/v1/tenants/{tenant:path}/statements/{month}",
    **described(answers={200: MonthStatement, 304: None, 404: None, 410: None}, also=OTHER_MEDIA),
)
async def get_statement_of_month(
    request: Request,
    tenant: Annotated[Text, Path(description="A tenant.", examples=["acme"])],
    month: Annotated[
        datetime, Path(description="A month.", examples=["2026-11"]), PlainValidator(_month, json_schema_input_type=str)
    ],
    coordinator: CoordinatorDep,
    _: Reader,
    query: Annotated[StatementQuery, Query()],
    _if_none_match: IfNoneMatch = None,
) -> Response:
    """Return what a tenant is billed for in all periods that end in a month, each by its own time zone.

    It is final when the month is over and each of its periods is closed. Times on paper are in the tenant's time zone.
    """
    now = coordinator.clock.now()
    read, registered = await coordinator.database.run(
        lambda c: _with_tenant(read_month_statement(c, tenant, month, query.as_of, now), c, tenant), snapshot=True
    )
    found = found_line(read)
    statement, zone = found, zone_of(registered.time_zone if registered else "UTC")

    def page() -> str:
        parties = customer_of(tenant, registered), seller_of(coordinator.settings.seller)
        return page_of(paper_of_month(statement, *parties, zone))

    def sheet(_: MonthStatement) -> Sheet:
        return month_sheet(statement, registered)

    return await shaped(request, query.shape, found, sheet, _file_name(statement.month, tenant), page=page)


def _file_name(of: str, tenant: str) -> str:
    return re.sub(r"[^\w.-]", "_", f"statement-{of}-{tenant}", flags=re.ASCII)[:100]


async def _with_tenant(reading: Awaitable[T], connection: Connection, tenant: str) -> tuple[T, Tenant | None]:
    return await reading, await read_tenant(connection, tenant)


@router.get(
    "/v1/statements/{statement}/lines/{n}/reports", **described(answers={200: SourceList, 404: None, 410: None})
)
async def list_line_reports(
    coordinator: CoordinatorDep,
    _: Reader,
    statement: PathStatement,
    n: LineNumber,
    query: Annotated[LineQuery, Query()],
) -> Response:
    """Return the reports that a line was booked from: who sent each, its place in its chain, and its units."""
    page, after = query.line_page(statement, n)
    found = found_line(
        await coordinator.database.run(
            lambda c: read_sources(c, coordinator.archives, statement, n, query.as_of, after, page.size + 1),
            snapshot=True,
        )
    )
    return reply(SourceList(found.line, found.sources[: page.size], page.links(found.numbers, str)))


def found_line(found: T | NoStatement | Archived | None) -> T:
    """Return what was found of a statement or its line, or raise the Problem that nothing was."""
    if isinstance(found, Archived):
        raise archived_problem(found)
    if isinstance(found, NoStatement):
        _refuse(found)
    if found is None:
        raise Problem("not-found", "The statement has no such line.")
    return found


# Parameters that are at fault. For every other reason there is no statement.
_WRONG = {NoStatement.NOT_SEALED: ("as_of", "sealed"), NoStatement.TOO_LONG: ("tenant", "at_most")}


def _refuse(why: NoStatement, *, of_many: bool = False) -> NoReturn:
    if why not in _WRONG:
        raise Problem("not-found", why)
    if of_many and why is NoStatement.TOO_LONG:
        raise refused("page_size", "at_most", "These statements have too many lines for a page. Ask for fewer.")
    raise refused(*_WRONG[why], why)
