"""HTTP: usage, and periods with their reconciliation, trial balance and close."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct, to_builtins
from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.archives.refusal import Archived, archived_problem
from coordinator.http.conditions import IfNoneMatch, strong_tag, unless_known
from coordinator.http.pagination import Page, PageLinks, PageQuery
from coordinator.http.parameters import MAX_VALUES, Flag, Instant, QuotaKey, Several, Text, ValidPeriod, WholeNumber
from coordinator.limits.known_names import faults_of_names
from coordinator.periods import close as periods
from coordinator.periods.close import CloseRefused, CloseRequest, PeriodClose
from coordinator.periods.read_periods import BookedPeriod, read_period, read_periods
from coordinator.periods.rules.closing import Obstacle
from coordinator.proof.seal import ShownSeal, read_seals
from coordinator.state import CoordinatorDep
from coordinator.usage.read_changes import UsageChange, read_usage_changes
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
from coordinator.usage.sheets import (
    OTHER_MEDIA,
    Shape,
    ShapeParameter,
    reconciliation_sheet,
    shaped,
    trial_balance_sheet,
)
from protocol.check import LABEL_PATTERN
from protocol.limits.document import LABEL_PREFIX, is_label
from protocol.periods import period_of
from protocol.units import MAX_UNITS
from protocol.zones import zone_of
from web.bodies import reply
from web.openapi import described
from web.problems import Problem, refused, refused_all
from web.strict_routes import BodyModel, QueryModel

router = APIRouter(tags=["finance"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("usage:read"))]
Closer = Annotated[Caller, Depends(RequireScope("period:close"))]
T = TypeVar("T")


# --- usage ------------------------------------------------------------------------------------------------------------


class UsageAnswer(Struct, frozen=True):
    """Sums over the ledger up to the position `as_of`, which all pages of one list share."""

    data: list[UsageRow]
    as_of: int
    coverage: Coverage | None  # on the first page
    page: PageLinks


def parse_as_of(text: str, zone: tzinfo) -> int | datetime:
    """Return a position of the ledger, or a time. Raise ValueError for anything else."""
    if text.isascii() and text.isdecimal() and len(text) <= 18:
        return int(text)
    return parse_instant(text, zone)


def _as_of(text: str, info: ValidationInfo) -> int | datetime:
    return parse_as_of(text, info.data.get("time_zone") or UTC)


AsOf = Annotated[
    int | datetime | None,
    PlainValidator(_as_of, json_schema_input_type=str),
    Field(
        description="A sealed position of the ledger, or a time: the newest seal up to then.",
        examples=["2026-12-01T00:00:00Z"],
    ),
]


def _split(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(part for value in values for part in value.split(",")))


def _group(text: str) -> str:
    if text not in list(Dimension) and not is_label(text):
        known = ", ".join(Dimension)
        raise PydanticCustomError("enum", f"It is none of {known}, nor a label such as labels.model.")
    return text


def _label_filters(given: object) -> Mapping[str, tuple[str, ...]]:
    """Return the values of each label, from one value or several."""
    if not isinstance(given, Mapping):
        raise PydanticCustomError("name", "Name the label: labels.model=large.")
    values = {name: [value] if isinstance(value, str) else value for name, value in given.items()}
    filters = {name: tuple(dict.fromkeys(each)) for name, each in values.items()}
    if len(filters) > MAX_GROUPS or not all(map(is_label, filters)):
        raise PydanticCustomError("name", "A label's name has at most 32 of a-z, 0-9 and _, as in labels.model.")
    if any(len(values) > MAX_VALUES or not all(values) for values in filters.values()):
        raise PydanticCustomError("length", f"A label has 1 to {MAX_VALUES} values, none of them empty.")
    return filters


MAX_GROUPS = 16
_LABEL_FIELD = rf"^{re.escape(LABEL_PREFIX)}{LABEL_PATTERN.removeprefix('^')}"
LabelField = Annotated[str, Field(pattern=_LABEL_FIELD)]
_LABELS_SCHEMA = {
    "type": "object",
    "patternProperties": {_LABEL_FIELD: {"type": "array", "items": {"type": "string"}, "maxItems": MAX_VALUES}},
    "additionalProperties": False,
    "examples": [{"labels.model": ["large"]}],
}


class UsageQuery(PageQuery):
    time_zone: Annotated[
        tzinfo | None,
        PlainValidator(zone_of, json_schema_input_type=str),
        Field(
            description="The calendar of pieces and dates: an IANA time zone. Without it, UTC.",
            examples=["Europe/Berlin"],
        ),
    ] = None
    start: Annotated[
        Instant,
        Field(
            alias="from",
            description="An RFC 3339 time or a date. Without it, the beginning of this month.",
            examples=["2026-11-01"],
        ),
    ] = None
    end: Annotated[
        Instant,
        Field(
            alias="to",
            description="The first moment after. Without it, the end of this month.",
            examples=["2026-12-01"],
        ),
    ] = None
    granularity: Annotated[
        Granularity | None, Field(description="The length of a piece. Without it there is one.", examples=["P1D"])
    ] = None
    as_of: AsOf = None
    zeros: Annotated[Flag, Field(description="Include pieces in which nothing was used.", examples=[True])] = False
    group_by: Annotated[
        tuple[Annotated[str, PlainValidator(_group, json_schema_input_type=Dimension | LabelField)], ...],
        Field(
            max_length=MAX_GROUPS,
            description="What to tell apart, labels as `labels.model`: repeated, or with commas.",
            examples=["tenant", "labels.model"],
        ),
        BeforeValidator(_split),
    ] = ()
    tenant: Annotated[Several[Text], Field(description="Only these tenants.", examples=["acme"])] = ()
    quota: Annotated[Several[Text], Field(description="Only these quotas.", examples=["exports"])] = ()
    quota_key: Annotated[
        Several[QuotaKey], Field(description="Only these quota keys.", examples=["exports:tenant=acme"])
    ] = ()
    region: Annotated[Several[Text], Field(description="Only these regions.", examples=["eu-west"])] = ()
    policy: Annotated[Several[Text], Field(description="Only these policies.", examples=["exports-per-tenant"])] = ()
    route_class: Annotated[Several[Text], Field(description="Only these route classes.", examples=["heavy"])] = ()
    api_key: Annotated[
        Several[Annotated[str, Field(pattern="^k_[0-9a-f]{16}$")]],
        Field(description="Only these API keys, by their hash.", examples=["k_9f86d081884c7d65"]),
    ] = ()
    period: Annotated[
        Several[ValidPeriod], Field(description="Only what is billed in these.", examples=["2026-11"])
    ] = ()
    degraded: Annotated[
        Several[Literal["open", "local"]],
        Field(description="Only what these failure modes admitted.", examples=["local"]),
    ] = ()
    counted_as: Annotated[
        Several[Literal["included", "overage"]],
        Field(description="`included` in the limit, or `overage`.", examples=["overage"]),
    ] = ()
    charge_period: Annotated[
        Several[ValidPeriod], Field(description="Only what was used in these.", examples=["2026-10"])
    ] = ()
    labels: Annotated[
        Mapping[str, tuple[str, ...]],
        PlainValidator(_label_filters),
        WithJsonSchema(_LABELS_SCHEMA),
        Field(description="Only these values of a label: `labels.model=large`."),
    ] = {}

    @model_validator(mode="before")
    @classmethod
    def _gather_labels(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        """Gather the parameters that are labels, whose names no model can list, into one field."""
        labels = {name: value for name, value in parameters.items() if name.startswith(LABEL_PREFIX)}
        others = {name: value for name, value in parameters.items() if name not in labels}
        return others | {"labels": labels} if labels and "labels" not in others else parameters


@router.get("/v1/usage", **described(answers={200: UsageAnswer, 304: None}))
async def get_usage(
    request: Request,
    coordinator: CoordinatorDep,
    _: Reader,
    query: Annotated[UsageQuery, Query()],
    _if_none_match: IfNoneMatch = None,
) -> Response:
    """Return usage from `from` up to, not including, `to`, in pieces by the calendar of `time_zone`."""
    question, page = _question_of(query, coordinator.clock.now())
    cursor = page.cursor
    names = {"region": query.region, "policy": query.policy, "route_class": query.route_class}
    if faults := await coordinator.database.read(lambda c: faults_of_names(c, names)):
        raise refused_all(faults)
    found = await coordinator.database.run(
        lambda c: read_usage_as_of(c, question, query.as_of, cursor.as_of, cursor.skip, page.size + 1), snapshot=True
    )
    if isinstance(found, Archived):
        raise archived_problem(found)
    if found is None:
        raise refused("as_of", "sealed", "No seal covers it yet. GET /v1/seals/latest has the newest position.")
    more = len(found.rows) > page.size
    following = page.next(skip=cursor.skip + page.size, as_of=found.as_of) if more else None
    answer = reply(UsageAnswer(found.rows[: page.size], found.as_of, found.coverage, PageLinks(following)))
    return unless_known(request, answer, strong_tag(bytes(answer.body)))


def _question_of(query: UsageQuery, now: datetime) -> tuple[UsageQuestion, Page]:
    zone = query.time_zone or UTC
    first, last = month_around(now, zone)
    start, end = query.start or first, query.end or last
    if start >= end:
        raise refused("to", "after", "`to` must be after `from`.")
    filters = {dimension.value: list(values) for dimension in Dimension if (values := getattr(query, dimension))}
    filters |= {name: list(values) for name, values in query.labels.items()}
    # The question has the month that is meant: a cursor does not lead from one month into the next.
    only = sorted(filters.items())
    groups = list(query.group_by)
    page = query.page_of(start, end, query.granularity, str(zone), groups, only, query.as_of, query.zeros)
    try:
        cuts = boundaries(start, end, query.granularity, zone)
    except ValueError as error:
        raise refused("granularity", "bound", str(error)) from None
    return UsageQuestion(cuts, groups, filters, query.zeros), page


class ChangesQuery(PageQuery):
    since: Annotated[
        WholeNumber,
        Field(
            ge=0,
            le=MAX_UNITS,
            description="A sealed position: `next_since` of the step before, `as_of` of a statement, or 0.",
            examples=[4572],
        ),
    ]


class UsageChanges(Struct, frozen=True):
    """The changes of one step of the ledger. After its last page, continue with `next_since`."""

    data: list[UsageChange]
    since: int
    next_since: int  # the same as `since` if nothing newer is sealed
    sealed_at: datetime | None
    page: PageLinks


@router.get("/v1/usage/changes", **described(answers={200: UsageChanges}))
async def list_usage_changes(
    coordinator: CoordinatorDep, _: Reader, query: Annotated[ChangesQuery, Query()]
) -> Response:
    """Return what was added to what tenants are billed, from a sealed position up to the next one.

    The same `since` has the same rows with the same ids for ever, unless nothing newer is sealed yet.
    """
    page = query.page_of(query.since)
    skip = page.cursor.skip
    found = await coordinator.database.run(
        lambda c: read_usage_changes(c, query.since, skip, page.size + 1), snapshot=True
    )
    if found is None:
        raise refused("since", "sealed", "No seal covers it yet. GET /v1/seals/latest has the newest position.")
    following = page.next(skip=skip + page.size) if len(found.changes) > page.size else None
    rows = found.changes[: page.size]
    return reply(UsageChanges(rows, query.since, found.next_since, found.sealed_at, PageLinks(following)))


@router.get("/v1/seals/latest", **described(answers={200: ShownSeal, 404: None}))
async def get_latest_seal(coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return the newest seal. Its `position` is the newest `as_of` that can be asked for."""
    rows = await coordinator.database.read(lambda c: read_seals(c, None, 1))
    if not rows:
        raise Problem("not-found", "Nothing is sealed yet. The first seal takes a minute at most.")
    return reply(rows[0])


# --- periods ----------------------------------------------------------------------------------------------------------


def _period(text: str) -> str:
    try:
        return period_of(text).id
    except ValueError:
        raise Problem("not-found", UNKNOWN_PERIOD) from None


UNKNOWN_PERIOD = "Unknown period."
PathPeriod = Annotated[str, Path(description="A period.", examples=["2026-11"]), BeforeValidator(_period)]


class PeriodList(Struct, frozen=True):
    """Periods that anything is booked in."""

    data: list[BookedPeriod]
    page: PageLinks


class ShapeQuery(QueryModel):
    shape: ShapeParameter = Shape.JSON


@router.get("/v1/periods", **described(answers={200: PeriodList}))
async def list_periods(coordinator: CoordinatorDep, _: Reader, query: Annotated[PageQuery, Query()]) -> Response:
    """Return the periods that anything is booked in."""
    page = query.page("periods")
    rows = await coordinator.database.read(lambda c: read_periods(c, page.after(str) or "", page.size + 1))
    return reply(PeriodList(rows[: page.size], page.links(rows, lambda row: row.id)))


@router.get("/v1/periods/{period}", **described(answers={200: BookedPeriod, 404: None}))
async def get_period(period: PathPeriod, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return one period: its bounds, its state and, once it is closed, its root."""
    return reply(_found(await coordinator.database.read(lambda c: read_period(c, period))))


_RECONCILIATION = described(answers={200: Reconciliation, 304: None, 404: None}, also=OTHER_MEDIA)


@router.get("/v1/periods/{period}/reconciliation", **_RECONCILIATION)
async def get_reconciliation(
    request: Request,
    period: PathPeriod,
    coordinator: CoordinatorDep,
    _: Reader,
    query: Annotated[ShapeQuery, Query()],
    _if_none_match: IfNoneMatch = None,
) -> Response:
    """Compare the ledger with what the regions report, and return every difference."""
    now = coordinator.clock.now()
    found = _found(await coordinator.database.run(lambda c: reconcile_period(c, period, now), snapshot=True))
    return await shaped(request, query.shape, found, reconciliation_sheet, f"reconciliation-{period}")


_TRIAL_BALANCE = described(answers={200: TrialBalance, 304: None, 404: None}, also=OTHER_MEDIA)


@router.get("/v1/periods/{period}/trial-balance", **_TRIAL_BALANCE)
async def get_trial_balance(
    request: Request,
    period: PathPeriod,
    coordinator: CoordinatorDep,
    _: Reader,
    query: Annotated[ShapeQuery, Query()],
    _if_none_match: IfNoneMatch = None,
) -> Response:
    """Return the balance of each account by transfers, by pools and leases, and by the regions' reports."""
    now = coordinator.clock.now()
    found = _found(await coordinator.database.run(lambda c: balance_period(c, period, now), snapshot=True))
    return await shaped(request, query.shape, found, trial_balance_sheet, f"trial-balance-{period}")


class CloseBody(BodyModel):
    dry_run: Annotated[bool, Field(description="Return what would happen, and change nothing.", examples=[True])] = (
        False
    )
    carry_suspense: Annotated[
        bool, Field(description="Move suspense into the open period, where it waits for reports.", examples=[False])
    ] = False
    holds: Annotated[
        Literal["wait", "leave"],
        Field(
            description="`wait` for the end of open holds, or `leave` their units out: they become late usage.",
            examples=["wait"],
        ),
    ] = "wait"


@router.post(
    "/v1/periods/{period}:close", **described(answers={200: PeriodClose, 202: PeriodClose, 404: None, 409: None})
)
async def close_period(
    request: Request, period: PathPeriod, coordinator: CoordinatorDep, caller: Closer, body: CloseBody
) -> Response:
    """Close a period.

    The answer is 200 if the period is closed, and for a dry run. It is 202 while the close waits for something that
    ends by itself; nothing is granted in the period any more, and the close goes on without further requests. It is 409
    if people have to decide something first.
    """
    now, settings = coordinator.clock.now(), coordinator.settings
    close_request = CloseRequest(actor_of(request, caller), body.carry_suspense, body.dry_run, body.holds == "leave")
    grace = timedelta(milliseconds=settings.close_grace_ms)
    hold_wait = timedelta(milliseconds=settings.close_hold_wait_ms)
    answer = await periods.close(coordinator.database, period, close_request, grace, now, hold_wait)
    if isinstance(answer, CloseRefused):
        missing = [to_builtins(each) for each in answer.missing]
        detail = "The period cannot be closed until people have decided what `missing` lists."
        if all(each.what is Obstacle.NOT_OVER for each in answer.missing):
            detail = "The period has not ended."
        raise Problem("period-not-closable", detail, extra={"missing": missing})
    found = _found(answer)
    return reply(found, 202 if found.missing and not body.dry_run else 200)


def _found(found: T | None) -> T:
    if found is None:
        raise Problem("not-found", UNKNOWN_PERIOD)
    return found
