"""For finance: what was used, and whether the books agree."""

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct, to_builtins

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.http.conditions import strong_tag, unless_known
from coordinator.http.queries import (
    FLAG,
    PAGE,
    TEXT,
    Page,
    Query,
    a_flag,
    a_text,
    choices,
    one_of,
    several,
    with_query,
)
from coordinator.periods.close import CloseRefused, CloseRequest, PeriodClose
from coordinator.periods.close import close as close_period
from coordinator.periods.read_periods import BookedPeriod, read_period, read_periods
from coordinator.state import Coordinator, CoordinatorDep
from coordinator.usage.read_usage import Coverage, UsageRow, read_usage_as_of
from coordinator.usage.reconcile import balance_period, reconcile_period
from coordinator.usage.rules.reconciliation import Reconciliation
from coordinator.usage.rules.trial_balance import TrialBalance
from coordinator.usage.rules.usage import (
    Dimension,
    Granularity,
    UsageQuestion,
    boundaries,
    month_around,
    parse_instant,
)
from coordinator.usage.sheets import OTHER_MEDIA, SHAPE, reconciliation_sheet, shape_of, shaped, trial_balance_sheet
from protocol.messages import Message
from protocol.periods import period_of
from protocol.zones import zone_of
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["finance"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(require("usage:read"))]
Closer = Annotated[Caller, Depends(require("period:close"))]
T = TypeVar("T")


class UsageAnswer(Struct, frozen=True):
    """Sums over the ledger up to the position `as_of`, which all pages of one answer share."""

    data: list[UsageRow]
    as_of: int
    coverage: Coverage | None  # with the first page
    page: dict[str, str | None]


class PeriodList(Struct, frozen=True):
    data: list[BookedPeriod]
    page: dict[str, str | None]


_USAGE = {
    "from": ("an RFC 3339 time or a date; the beginning of the month", TEXT),
    "to": ("the first moment after; the end of the month", TEXT),
    "granularity": ("how it is cut into pieces; without it there is one", choices(Granularity)),
    "time_zone": ("whose calendar cuts, and whose midnight a date is; UTC", TEXT),
    "as_of": ("a sealed position, or a time, which means the newest seal up to it; now", TEXT),
    "zeros": ("true: also the pieces in which nothing was used, with 0 units; false", FLAG),
    "group_by": ("what is told apart; repeated, or with commas", several(choices(Dimension))),
    **{dimension.value: ("only this one; repeated, any of them", several(TEXT)) for dimension in Dimension},
    **PAGE,
}


@router.get("/v1/usage", **with_query(described(answers={200: UsageAnswer, 304: None}), _USAGE))
async def get_usage(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Half-open from `from` to `to`, in pieces of `granularity` by the calendar of `time_zone`."""
    question, page, as_of = _usage_question(request, coordinator)
    cursor = page.cursor
    found = await coordinator.database.run(
        lambda c: read_usage_as_of(c, question, as_of, cursor.as_of, cursor.skip, page.size + 1), snapshot=True
    )
    if found is None:
        fault = InvalidParameter("as_of", "sealed", "no seal covers it (yet); GET /v1/seals lists what is sealed")
        raise Problem("invalid-request", "the query is not valid", invalid_parameters=[fault])
    more = len(found.rows) > page.size
    following = page.next(skip=cursor.skip + page.size, as_of=found.as_of) if more else None
    answer = reply(UsageAnswer(found.rows[: page.size], found.as_of, found.coverage, {"next": following}))
    return unless_known(request, answer, strong_tag(bytes(answer.body)))


def _usage_question(request: Request, coordinator: Coordinator) -> tuple[UsageQuestion, Page, int | datetime | None]:
    query = Query(request)
    zone = query.one("time_zone", zone_of, UTC)
    first, last = month_around(coordinator.clock.now(), zone)
    start = query.one("from", lambda text: parse_instant(text, zone), first)
    end = query.one("to", lambda text: parse_instant(text, zone), last)
    granularity = query.one("granularity", one_of(Granularity), None)
    groups = [each for part in query.many("group_by", _dimensions) for each in part]
    filters = {dimension: values for dimension in Dimension if (values := query.many(dimension, a_text))}
    as_of = query.one("as_of", lambda text: parse_as_of(text, zone), None)
    zeros = query.one("zeros", a_flag, False)
    if start >= end:
        query.refuse("to", "after", "it must be after `from`")
    page = query.page(start, end, granularity, str(zone), groups, sorted(filters.items()), as_of, zeros)
    query.checked()
    try:
        cuts = boundaries(start, end, granularity, zone)
    except ValueError as error:
        query.refuse("granularity", "bound", str(error))
        query.checked()
    return UsageQuestion(cuts, list(dict.fromkeys(groups)), filters, zeros), page, as_of


def _dimensions(text: str) -> list[Dimension]:
    return [one_of(Dimension)(part) for part in text.split(",")]


def parse_as_of(text: str, zone: tzinfo) -> int | datetime:
    if text.isascii() and text.isdecimal() and len(text) <= 18:
        return int(text)
    return parse_instant(text, zone)


@router.get("/v1/periods", **with_query(described(answers={200: PeriodList}), PAGE))
async def list_periods(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    query = Query(request)
    page = query.page("periods")
    query.checked()
    rows = await coordinator.database.read(lambda c: read_periods(c, page.cursor.after, page.size + 1))
    return reply(PeriodList(rows[: page.size], page.links(rows, lambda row: row.id)))


@router.get("/v1/periods/{period}", **described(answers={200: BookedPeriod, 404: None}))
async def get_period(period: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    return reply(_found(await coordinator.database.read(lambda c: read_period(c, _named(period)))))


_RECONCILIATION = described(answers={200: Reconciliation, 304: None, 404: None}, also=OTHER_MEDIA)


@router.get("/v1/periods/{period}/reconciliation", **with_query(_RECONCILIATION, SHAPE))
async def get_reconciliation(request: Request, period: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    """`balanced`, or the word for what is not, with all that was found."""
    query, now = Query(request), coordinator.clock.now()
    shape, name = shape_of(query), _named(period)
    query.checked()
    found = _found(await coordinator.database.run(lambda c: reconcile_period(c, name, now), snapshot=True))
    return shaped(request, shape, found, reconciliation_sheet, f"reconciliation-{name}")


_TRIAL_BALANCE = described(answers={200: TrialBalance, 304: None, 404: None}, also=OTHER_MEDIA)


@router.get("/v1/periods/{period}/trial-balance", **with_query(_TRIAL_BALANCE, SHAPE))
async def get_trial_balance(request: Request, period: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Each account three ways: by the transfers, by pools and leases, by the regions; and one word for all."""
    query, now = Query(request), coordinator.clock.now()
    shape, name = shape_of(query), _named(period)
    query.checked()
    found = _found(await coordinator.database.run(lambda c: balance_period(c, name, now), snapshot=True))
    return shaped(request, shape, found, trial_balance_sheet, f"trial-balance-{name}")


class CloseBody(Message, frozen=True):
    dry_run: Annotated[bool, Meta(description="tell what would be, and change nothing")] = False
    carry_suspense: Annotated[
        bool, Meta(description="what is in suspense leaves for the open period, and waits there for evidence")
    ] = False
    holds: Annotated[
        Literal["wait", "leave"],
        Meta(description="leave: close without the units that services hold; committed later, they are late usage"),
    ] = "wait"


@router.post(
    "/v1/periods/{period}:close",
    **described(body=CloseBody, answers={200: PeriodClose, 202: PeriodClose, 404: None, 409: None}),
)
async def close(request: Request, period: str, coordinator: CoordinatorDep, caller: Closer) -> Response:
    """202 while it waits for what ends by itself: nothing is granted in it any more, and it goes on by itself.

    200 if it is closed, now or since before, and for a dry run. 409 if people have to do something first.
    """
    body, now = await read_body(request, CloseBody), coordinator.clock.now()
    asked = CloseRequest(actor_of(request, caller), body.carry_suspense, body.dry_run, body.holds == "leave")
    grace = timedelta(milliseconds=coordinator.settings.close_grace_ms)
    hold_wait = timedelta(milliseconds=coordinator.settings.close_hold_wait_ms)
    answer = await close_period(coordinator.database, _named(period), asked, grace, now, hold_wait)
    if isinstance(answer, CloseRefused):
        missing = [to_builtins(each) for each in answer.missing]
        raise Problem("period-not-closable", "something has to be ended by people first", extra={"missing": missing})
    found = _found(answer)
    return reply(found, 202 if found.missing and not body.dry_run else 200)


def _named(period: str) -> str:
    """What names no period of any calendar is not looked for."""
    try:
        return period_of(period).id
    except ValueError:
        return _found(None)


def _found(found: T | None) -> T:
    if found is None:
        raise Problem("not-found", "the books have no such period")
    return found
