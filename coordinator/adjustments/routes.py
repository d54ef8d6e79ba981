"""For those who correct the books by a decision: one proposes, another approves."""

from collections.abc import Iterator
from typing import Annotated
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.adjustments.adjust import (
    ProposedAdjustment,
    approve_adjustment,
    propose_adjustment,
    withdraw_adjustment,
)
from coordinator.adjustments.read_adjustments import (
    Adjustment,
    AdjustmentFilter,
    AdjustmentName,
    read_adjustment,
    read_adjustments,
)
from coordinator.adjustments.rules import AdjustmentKind, AdjustmentRefusal, AdjustmentState, Terms
from coordinator.exchange.parsing import refused
from coordinator.exchange.rules.balances import Key
from coordinator.http.inputs import Reason, faults_of_reason
from coordinator.http.queries import PAGE, TEXT, Query, a_text, choices, one_of, several, with_query
from coordinator.state import CoordinatorDep
from protocol.identifiers import PeriodId, QuotaKey, parse_quota_key
from protocol.messages import Message
from protocol.periods import period_of
from protocol.units import PositiveUnits
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["adjustments"], route_class=IdempotentRoute)
# Who proposes or approves sees what there is to be decided.
Reader = Annotated[Caller, Depends(require("usage:read", "adjust:propose", "adjust:approve"))]
Proposer = Annotated[Caller, Depends(require("adjust:propose"))]
Approver = Annotated[Caller, Depends(require("adjust:approve"))]

Document = Annotated[
    str, Meta(min_length=1, max_length=1000, description="where somebody finds what it rests on: a ticket, a file")
]


class AdjustmentBody(Message, frozen=True):
    quota: QuotaKey
    period: PeriodId  # that it is about
    kind: AdjustmentKind
    units: PositiveUnits
    reason: Reason
    document: Document


class AdjustmentList(Struct, frozen=True):
    """In the order in which they were proposed."""

    data: list[Adjustment]
    page: dict[str, str | None]


_LIST = {
    "quota": ("only of this quota key; repeated, of any of them", several(TEXT)),
    "period": ("only about this period; repeated, about any of them", several(TEXT)),
    "state": ("only these; repeated, any of them", several(choices(AdjustmentState))),
    **PAGE,
}


@router.get("/v1/adjustments", **with_query(described(answers={200: AdjustmentList}), _LIST))
async def list_adjustments(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    query = Query(request)
    only = AdjustmentFilter(
        query.many("quota", a_text), query.many("period", a_text), query.many("state", one_of(AdjustmentState))
    )
    page = query.page("adjustments", only)
    after = query.one("page_after", lambda _: _place(page.cursor.after), AdjustmentName())
    query.checked()
    now = coordinator.clock.now()
    rows = await coordinator.database.read(lambda c: read_adjustments(c, only, now, after, page.size + 1))
    links = page.links(rows, lambda row: msgspec.json.encode((row.proposed_at, row.id)).decode())
    return reply(AdjustmentList(rows[: page.size], links))


@router.get("/v1/adjustments/{adjustment}", **described(answers={200: Adjustment, 404: None}))
async def get_adjustment(adjustment: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    id_, now = _id(adjustment), coordinator.clock.now()
    found = await coordinator.database.read(lambda c: read_adjustment(c, id_, now))
    return reply(_granted(found or AdjustmentRefusal.NO_SUCH_ADJUSTMENT))


@router.post("/v1/adjustments", **described(body=AdjustmentBody, answers={201: Adjustment, 409: None}))
async def propose(request: Request, coordinator: CoordinatorDep, caller: Proposer) -> Response:
    """Nothing is moved yet: somebody else has to approve it, within 30 days."""
    body, by, now = await read_body(request, AdjustmentBody), actor_of(request, caller), coordinator.clock.now()
    if faults := list(_faults_of(body)):
        raise refused(faults)
    terms = Terms(Key(body.quota, body.period), body.kind, body.units)
    wanted = ProposedAdjustment(id_for(request, caller), terms, body.reason, body.document)
    made = _granted(
        await coordinator.database.run(lambda c: propose_adjustment(c, coordinator.documents, wanted, by, now))
    )
    return reply(made, 201, {"Location": f"/v1/adjustments/{made.id}"})


@router.post("/v1/adjustments/{adjustment}:approve", **described(answers={200: Adjustment, 404: None, 409: None}))
async def approve(request: Request, adjustment: str, coordinator: CoordinatorDep, caller: Approver) -> Response:
    """By another token than the proposer's. With it the units are moved."""
    id_, by, now = _id(adjustment), actor_of(request, caller), coordinator.clock.now()
    documents = coordinator.documents
    return reply(_granted(await coordinator.database.run(lambda c: approve_adjustment(c, documents, id_, by, now))))


@router.post("/v1/adjustments/{adjustment}:withdraw", **described(answers={200: Adjustment, 404: None, 409: None}))
async def withdraw(request: Request, adjustment: str, coordinator: CoordinatorDep, caller: Proposer) -> Response:
    """It can be approved no more."""
    id_, by, now = _id(adjustment), actor_of(request, caller), coordinator.clock.now()
    return reply(_granted(await coordinator.database.run(lambda c: withdraw_adjustment(c, id_, by, now))))


def _faults_of(body: AdjustmentBody) -> Iterator[InvalidParameter]:
    yield from faults_of_reason(body.reason)
    if not body.document.isprintable():
        yield InvalidParameter("document", "text", "it holds a character that cannot be printed")
    for name, parse, value in (("quota", parse_quota_key, body.quota), ("period", period_of, body.period)):
        try:
            parse(value)
        except ValueError as error:
            yield InvalidParameter(name, "format", str(error))


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise _missing() from None


def _place(text: str) -> AdjustmentName:
    """Raises ValueError for what no page has given."""
    try:
        return msgspec.json.decode(text, type=AdjustmentName) if text else AdjustmentName()
    except msgspec.MsgspecError as error:
        raise ValueError("it is not the `next` of a page") from error


def _missing() -> Problem:
    return Problem("not-found", "there is no such adjustment")


_INVALID = {
    AdjustmentRefusal.UNKNOWN_QUOTA: InvalidParameter(
        "quota", "known", "neither the books of that period nor the limits have such an allowance"
    ),
    AdjustmentRefusal.NOT_BEGUN: InvalidParameter("period", "begun", "it has not begun"),
}
_REFUSED = {
    AdjustmentRefusal.SAME_PERSON: "who proposes does not approve",
    AdjustmentRefusal.APPROVED_BEFORE: "it was approved before",
    AdjustmentRefusal.WITHDRAWN: "it was withdrawn",
    AdjustmentRefusal.EXPIRED: "nobody approved it in time: propose it again",
    AdjustmentRefusal.MORE_THAN_UNALLOCATED: "less than that is left of the limit and credits which no region holds",
    AdjustmentRefusal.MORE_THAN_BILLED: "less than that is billed, or was not written off before",
    AdjustmentRefusal.TOO_LARGE: "with it there would be more units than can be counted",
}


def _granted(answer: Adjustment | AdjustmentRefusal) -> Adjustment:
    if isinstance(answer, Adjustment):
        return answer
    if answer is AdjustmentRefusal.NO_SUCH_ADJUSTMENT:
        raise _missing()
    if answer in _INVALID:
        raise refused([_INVALID[answer]])
    raise Problem("adjustment-refused", _REFUSED[answer], extra={"refusal": answer.value})
