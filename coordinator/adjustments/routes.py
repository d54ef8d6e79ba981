"""HTTP: adjustments, which correct the ledger by decision. One person proposes, and another one approves."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.adjustments import adjust
from coordinator.adjustments.adjust import ProposedAdjustment
from coordinator.adjustments.read_adjustments import (
    Adjustment,
    AdjustmentFilter,
    AdjustmentName,
    read_adjustment,
    read_adjustments,
)
from coordinator.adjustments.rules import AdjustmentKind, AdjustmentRefusal, AdjustmentState, AdjustmentTerms
from coordinator.exchange.rules.balances import Key
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import (
    PositiveUnits,
    Printable,
    QuotaKey,
    Reason,
    Several,
    ValidPeriod,
    path_id,
)
from coordinator.state import CoordinatorDep
from web.bodies import reply
from web.openapi import described
from web.problems import InvalidParameter, Problem, refused_all
from web.strict_routes import BodyModel

router = APIRouter(tags=["adjustments"], route_class=IdempotentRoute)
# Who proposes or approves may read what there is to be decided.
Reader = Annotated[Caller, Depends(RequireScope("usage:read", "adjust:propose", "adjust:approve"))]
Proposer = Annotated[Caller, Depends(RequireScope("adjust:propose"))]
Approver = Annotated[Caller, Depends(RequireScope("adjust:approve"))]

_MISSING = "There is no such adjustment."
AdjustmentId = Annotated[
    UUID,
    Path(description="The id of an adjustment.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]),
    path_id(_MISSING),
]


class AdjustmentBody(BodyModel):
    quota: QuotaKey
    period: ValidPeriod
    kind: Annotated[
        AdjustmentKind, Field(strict=False, description="What the units are moved for.", examples=["credit"])
    ]
    units: PositiveUnits
    reason: Reason
    document: Annotated[
        str,
        Field(
            min_length=1,
            max_length=1000,
            description="Where to find what the adjustment rests on: a ticket, a file.",
            examples=["https://tickets.example.com/FIN-1234"],
        ),
        Printable,
    ]


class AdjustmentList(Struct, frozen=True):
    """Adjustments in the order in which they were proposed."""

    data: list[Adjustment]
    page: PageLinks


class AdjustmentQuery(PageQuery):
    quota: Annotated[
        Several[QuotaKey], Field(description="Only of these quota keys.", examples=["exports:tenant=acme"])
    ] = ()
    period: Annotated[Several[ValidPeriod], Field(description="Only of these periods.", examples=["2026-11"])] = ()
    state: Annotated[Several[AdjustmentState], Field(description="Only in these states.", examples=["proposed"])] = ()


@router.get("/v1/adjustments", **described(answers={200: AdjustmentList}))
async def list_adjustments(
    coordinator: CoordinatorDep, _: Reader, query: Annotated[AdjustmentQuery, Query()]
) -> Response:
    """Return adjustments in the order in which they were proposed."""
    page, now = query.page(), coordinator.clock.now()
    only, after = AdjustmentFilter(query.quota, query.period, query.state), page.after(AdjustmentName)
    rows = await coordinator.database.read(
        lambda c: read_adjustments(c, only, now, after or AdjustmentName(), page.size + 1)
    )
    links = page.links(rows, lambda row: AdjustmentName(row.proposed_at, row.id))
    return reply(AdjustmentList(rows[: page.size], links))


@router.get("/v1/adjustments/{adjustment}", **described(answers={200: Adjustment, 404: None}))
async def get_adjustment(adjustment: AdjustmentId, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return one adjustment."""
    now = coordinator.clock.now()
    found = await coordinator.database.read(lambda c: read_adjustment(c, adjustment, now))
    return reply(_granted(found or AdjustmentRefusal.NO_SUCH_ADJUSTMENT))


@router.post("/v1/adjustments", **described(answers={201: Adjustment, 409: None}, headers={201: ["Location"]}))
async def propose_adjustment(
    request: Request, coordinator: CoordinatorDep, caller: Proposer, body: AdjustmentBody
) -> Response:
    """Propose an adjustment. Units move when another token approves it, within 30 days."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    terms = AdjustmentTerms(Key(body.quota, body.period), body.kind, body.units)
    proposed = ProposedAdjustment(id_for(request, caller), terms, body.reason, body.document)
    made = _granted(
        await coordinator.database.run(lambda c: adjust.propose_adjustment(c, coordinator.documents, proposed, by, now))
    )
    return reply(made, 201, {"Location": f"/v1/adjustments/{made.id}"})


@router.post("/v1/adjustments/{adjustment}:approve", **described(answers={200: Adjustment, 404: None, 409: None}))
async def approve_adjustment(
    request: Request, adjustment: AdjustmentId, coordinator: CoordinatorDep, caller: Approver
) -> Response:
    """Approve an adjustment, with another token than the proposer's. The units move at once."""
    by, now, documents = actor_of(request, caller), coordinator.clock.now(), coordinator.documents
    return reply(
        _granted(await coordinator.database.run(lambda c: adjust.approve_adjustment(c, documents, adjustment, by, now)))
    )


@router.post("/v1/adjustments/{adjustment}:withdraw", **described(answers={200: Adjustment, 404: None, 409: None}))
async def withdraw_adjustment(
    request: Request, adjustment: AdjustmentId, coordinator: CoordinatorDep, caller: Proposer
) -> Response:
    """Withdraw a proposed adjustment, so that it cannot be approved."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    return reply(_granted(await coordinator.database.run(lambda c: adjust.withdraw_adjustment(c, adjustment, by, now))))


_INVALID = {
    AdjustmentRefusal.UNKNOWN_QUOTA: InvalidParameter(
        "quota", "known", "Neither the ledger of that period nor the limits document has such an allowance."
    ),
    AdjustmentRefusal.NOT_BEGUN: InvalidParameter("period", "begun", "The period has not begun."),
}
_REFUSED = {
    AdjustmentRefusal.SAME_PERSON: "The proposer cannot approve. Use another token.",
    AdjustmentRefusal.APPROVED_BEFORE: "The adjustment is approved already.",
    AdjustmentRefusal.WITHDRAWN: "The adjustment was withdrawn.",
    AdjustmentRefusal.EXPIRED: "The adjustment was not approved in time. Propose it again.",
    AdjustmentRefusal.MORE_THAN_UNALLOCATED: "Fewer units of the limit and of credits are left that no region holds.",
    AdjustmentRefusal.MORE_THAN_BILLED: "Fewer units are billed and not written off.",
    AdjustmentRefusal.TOO_LARGE: "The total would exceed the largest number of units that can be counted.",
}


def _granted(answer: Adjustment | AdjustmentRefusal) -> Adjustment:
    if isinstance(answer, Adjustment):
        return answer
    if answer is AdjustmentRefusal.NO_SUCH_ADJUSTMENT:
        raise Problem("not-found", _MISSING)
    if answer in _INVALID:
        raise refused_all([_INVALID[answer]])
    raise Problem("adjustment-refused", _REFUSED[answer], extra={"refusal": answer.value})
