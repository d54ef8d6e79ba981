"""HTTP: what no report has accounted for. Suspense, quarantine, how people resolve them, and retired epochs."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.epochs import retire
from coordinator.epochs.retire import RetiredEpoch
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.settlement import QuarantineReason
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import (
    MAX_VALUES,
    EpochNumber,
    Flag,
    QuotaKey,
    QuotaNameOrKey,
    Several,
    Text,
    Units,
    ValidPeriod,
    WholeNumber,
    path_id,
)
from coordinator.limits.known_names import faults_of_names
from coordinator.state import Coordinator, CoordinatorDep
from coordinator.suspense import resolve
from coordinator.suspense.bulk import (
    MOST_LEASES,
    BulkProposal,
    BulkResolution,
    TooManyLeases,
    approve_bulk,
    propose_bulk,
    read_bulk,
)
from coordinator.suspense.read_lanes import LaneName, LaneView, read_lanes
from coordinator.suspense.read_suspense import (
    EvidenceName,
    KeptEvidence,
    LeaseName,
    QuarantineFilter,
    SuspendedLease,
    SuspenseFilter,
    read_quarantine,
    read_quarantine_with_evidence,
    read_suspense,
)
from coordinator.suspense.resolve import Proposal, Resolution
from coordinator.suspense.rules import ResolutionKind, ResolutionRefusal
from protocol.lease import LeaseState
from protocol.messages import MAX_LANES
from protocol.units import MAX_UNITS
from web.bodies import reply
from web.openapi import described
from web.problems import InvalidParameter, Problem, refused, refused_all
from web.strict_routes import BodyModel

router = APIRouter(tags=["suspense"], route_class=IdempotentRoute)
Allocator = Annotated[Caller, Depends(RequireScope("alloc:write"))]
# Who proposes or approves may read what there is to be decided.
Reader = Annotated[Caller, Depends(RequireScope("usage:read", "adjust:propose", "adjust:approve"))]
Proposer = Annotated[Caller, Depends(RequireScope("adjust:propose"))]
Approver = Annotated[Caller, Depends(RequireScope("adjust:approve"))]

Reason = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1000,
        pattern=r"\S",
        description="Why. It is kept in the audit.",
        examples=["The store's disk was lost."],
    ),
]


class RetireBody(BodyModel):
    reason: Reason


@router.post("/v1/epochs/{epoch}:retire", **described(answers={200: RetiredEpoch, 404: None}))
async def retire_epoch(
    request: Request, epoch: EpochNumber, coordinator: CoordinatorDep, caller: Allocator, body: RetireBody
) -> Response:
    """Retire an epoch: its later reports are acknowledged and quarantined, and are not booked.

    Retiring it again changes nothing.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    retired = await coordinator.database.run(lambda c: retire.retire_epoch(c, epoch, body.reason, by, now))
    if retired is None:
        raise Problem("not-found", "There is no such epoch.")
    return reply(retired)


# --- what people have to decide ---------------------------------------------------------------------------------------


class SuspenseList(Struct, frozen=True):
    """Leases by period, quota and epoch."""

    data: list[SuspendedLease]
    page: PageLinks


class QuarantineList(Struct, frozen=True):
    """Reports by epoch, lane and sequence number."""

    data: list[KeptEvidence]
    page: PageLinks


_Quotas = Annotated[
    Several[QuotaNameOrKey], Field(description="Only these quotas, by name or by key.", examples=["exports"])
]
_Regions = Annotated[Several[Text], Field(description="Only these regions.", examples=["eu-west"])]
_Epochs = Annotated[Several[WholeNumber], Field(description="Only these epochs.", examples=[7])]
_Tenants = Annotated[Several[Text], Field(description="Only quotas of these tenants.", examples=["acme"])]
_Periods = Annotated[Several[ValidPeriod], Field(description="Only leases of these periods.", examples=["2026-11"])]
_Reasons = Annotated[
    Several[LeaseState], Field(description="Only for these reasons: the `state` of the lease.", examples=["lost"])
]


class SuspenseQuery(PageQuery):
    tenant: _Tenants = ()
    quota: _Quotas = ()
    region: _Regions = ()
    epoch: _Epochs = ()
    period: _Periods = ()
    reason: _Reasons = ()
    bulk: Annotated[
        UUID | None,
        Field(
            description="Only leases whose open proposal is one of this bulk.",
            examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"],
        ),
    ] = None


class QuarantineQuery(PageQuery):
    quota: _Quotas = ()
    region: _Regions = ()
    epoch: _Epochs = ()
    reason: Annotated[
        Several[QuarantineReason], Field(description="Only for these reasons.", examples=["lines_disagree"])
    ] = ()
    evidence: Annotated[
        Flag,
        Field(description="Include the reports themselves. A page then ends after 4 MiB of them.", examples=[True]),
    ] = False


@router.get("/v1/suspense", **described(answers={200: SuspenseList}))
async def list_suspense(coordinator: CoordinatorDep, _: Reader, query: Annotated[SuspenseQuery, Query()]) -> Response:
    """Return leases with units in suspense or in quarantine, each with its open proposal."""
    page, only = query.page(), _filter_of(query)
    after = page.after(LeaseName) or LeaseName()
    await _refuse_unknown_names(query.quota, query.region, coordinator)
    rows = await coordinator.database.read(lambda c: read_suspense(c, only, query.bulk, after, page.size + 1))
    links = page.links(rows, lambda row: LeaseName(row.period, row.quota, row.epoch))
    return reply(SuspenseList(rows[: page.size], links))


@router.get("/v1/quarantine", **described(answers={200: QuarantineList}))
async def list_quarantine(
    coordinator: CoordinatorDep, _: Reader, query: Annotated[QuarantineQuery, Query()]
) -> Response:
    """Return reports that were not booked, and are waiting for a decision or were decided on."""
    page = query.page()
    after = page.after(EvidenceName) or EvidenceName()
    await _refuse_unknown_names(query.quota, query.region, coordinator)
    only = QuarantineFilter(query.quota, query.region, query.epoch, query.reason)
    read = read_quarantine_with_evidence if query.evidence else read_quarantine
    rows, has_more = await coordinator.database.run(lambda c: read(c, only, after, page.size), snapshot=True)
    last = rows[-1] if has_more else None
    name = EvidenceName(last.epoch, last.lane, last.seq, last.quota, last.period) if last else None
    return reply(QuarantineList(list(rows), PageLinks(page.next(after=name) if name else None)))


class LaneList(Struct, frozen=True):
    """Lanes by epoch and number, as they are now."""

    data: list[LaneView]
    page: PageLinks


class LaneQuery(PageQuery):
    region: _Regions = ()
    waiting: Annotated[Flag, Field(description="Only lanes that wait for people.", examples=[True])] = False


@router.get("/v1/lanes", **described(answers={200: LaneList}))
async def list_lanes(coordinator: CoordinatorDep, _: Reader, query: Annotated[LaneQuery, Query()]) -> Response:
    """Return lanes, and which of them wait to be rebased because the ledger has lost data."""
    page = query.page()
    after = page.after(LaneName) or LaneName()
    await _refuse_unknown_names((), query.region, coordinator)
    rows = await coordinator.database.read(lambda c: read_lanes(c, query.region, query.waiting, after, page.size + 1))
    links = page.links(rows, lambda row: LaneName(row.epoch, row.lane))
    return reply(LaneList(rows[: page.size], links))


def _filter_of(asked: "SuspenseQuery | SuspenseFilterBody") -> SuspenseFilter:
    return SuspenseFilter(asked.tenant, asked.quota, asked.region, asked.epoch, asked.period, asked.reason)


async def _refuse_unknown_names(quotas: Sequence[str], regions: Sequence[str], coordinator: Coordinator) -> None:
    names = {"quota": quotas, "region": regions}
    if faults := await coordinator.database.read(lambda c: faults_of_names(c, names)):
        raise refused_all(faults)


# --- decisions --------------------------------------------------------------------------------------------------------


class ProposalBody(BodyModel):
    """A `rebase` is about a lane, and every other kind about a lease, which `quota` and `period` name."""

    epoch: Annotated[int, Field(ge=1, le=MAX_UNITS, description="The number of an epoch.", examples=[7])]
    kind: Annotated[
        ResolutionKind, Field(strict=False, description="What becomes of the units.", examples=["write_off"])
    ]
    reason: Reason
    quota: QuotaKey | None = None
    period: ValidPeriod | None = None
    lane: Annotated[int | None, Field(ge=0, lt=MAX_LANES, description="The number of a lane.", examples=[0])] = None
    units: Annotated[
        Units | None, Field(description="How many units an `estimate` bills. No other kind has units.")
    ] = None


@router.post("/v1/suspense:propose", **described(answers={201: Resolution, 404: None, 409: None}))
async def propose_resolution(
    request: Request, coordinator: CoordinatorDep, caller: Proposer, body: ProposalBody
) -> Response:
    """Propose a resolution, in place of the open proposal. Another token has to approve it."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    if faults := list(_faults_of(body)):
        raise refused_all(faults)
    proposal = Proposal(body.epoch, _about(body), body.kind, body.units or 0, body.reason)
    return reply(
        _granted(await coordinator.database.run(lambda c: resolve.propose_resolution(c, proposal, by, now))), 201
    )


def _faults_of(body: ProposalBody) -> Iterator[InvalidParameter]:
    if (body.units is not None) != (body.kind is ResolutionKind.ESTIMATE):
        yield InvalidParameter("units", "estimate", "An `estimate` has units, and no other kind has.")
    is_of_a_lane = body.kind is ResolutionKind.REBASE
    if (body.lane is not None) != is_of_a_lane:
        yield InvalidParameter("lane", "rebase", "A `rebase` names its lane, and no other kind does.")
    for name, value in (("quota", body.quota), ("period", body.period)):
        if (value is None) != is_of_a_lane:
            reason = "Every kind but `rebase` names its lease by `quota` and `period`."
            yield InvalidParameter(name, "lease", reason)


def _about(body: ProposalBody) -> Key | int:
    if body.lane is not None:
        return body.lane
    assert body.quota is not None
    assert body.period is not None
    return Key(body.quota, body.period)


_MISSING = {
    ResolutionRefusal.NO_SUCH_LEASE: "There is no such lease, or no such lane.",
    ResolutionRefusal.NO_SUCH_PROPOSAL: "There is no such proposal, or a newer one has replaced it.",
}
_REFUSED = {
    ResolutionRefusal.NOTHING_IN_SUSPENSE: "The lease has no units in suspense.",
    ResolutionRefusal.MORE_THAN_IN_SUSPENSE: "The lease has fewer units in suspense.",
    ResolutionRefusal.QUARANTINED: "The lease is in quarantine. Propose `unattributed` first.",
    ResolutionRefusal.NOT_QUARANTINED: "The lease is not in quarantine.",
    ResolutionRefusal.NOT_REGRESSED: "No evidence is kept that the ledger is behind in this lane.",
    ResolutionRefusal.TOO_FAR_BEHIND: "The ledger lacks too many sequence numbers of this lane. Retire its epoch.",
    ResolutionRefusal.SAME_PERSON: "The proposer cannot approve. Use another token.",
}


def _granted(answer: Resolution | ResolutionRefusal) -> Resolution:
    if isinstance(answer, Resolution):
        return answer
    if answer in _MISSING:
        raise Problem("not-found", _MISSING[answer])
    raise Problem("resolution-refused", _REFUSED[answer], extra={"refusal": answer.value})


ResolutionId = Annotated[
    UUID,
    Path(description="The id of a proposal.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]),
    path_id(_MISSING[ResolutionRefusal.NO_SUCH_PROPOSAL]),
]


@router.post("/v1/suspense/{resolution}:approve", **described(answers={200: Resolution, 404: None, 409: None}))
async def approve_resolution(
    request: Request, resolution: ResolutionId, coordinator: CoordinatorDep, caller: Approver
) -> Response:
    """Approve a proposal, with another token than the proposer's.

    Units that reports have accounted for since the proposal are not billed again.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    return reply(_granted(await coordinator.database.run(lambda c: resolve.approve_resolution(c, resolution, by, now))))


# --- many decisions at once -------------------------------------------------------------------------------------------


class SuspenseFilterBody(BodyModel):
    """Which leases: all conditions apply. Without any, all leases that wait."""

    tenant: Annotated[
        list[Text], Field(default_factory=list, max_length=MAX_VALUES, description="Quotas of these tenants.")
    ]
    quota: Annotated[
        list[QuotaNameOrKey],
        Field(default_factory=list, max_length=MAX_VALUES, description="Quotas, by name or by key."),
    ]
    region: Annotated[
        list[Text], Field(default_factory=list, max_length=MAX_VALUES, description="Regions.", examples=[["eu-west"]])
    ]
    epoch: Annotated[
        list[Units], Field(default_factory=list, max_length=MAX_VALUES, description="Epochs.", examples=[[7]])
    ]
    period: Annotated[
        list[ValidPeriod], Field(default_factory=list, max_length=MAX_VALUES, description="Periods of the leases.")
    ]
    reason: Annotated[
        list[Annotated[LeaseState, Field(strict=False)]],
        Field(default_factory=list, max_length=MAX_VALUES, description="States of the leases.", examples=[["lost"]]),
    ]


class BulkBody(BodyModel):
    filter: SuspenseFilterBody
    kind: Annotated[
        Literal["write_off", "charge", "unattributed"],
        Field(description="What becomes of the units of each lease.", examples=["write_off"]),
    ]
    reason: Reason


class BulkApprovalBody(BodyModel):
    after: Annotated[
        UUID,
        Field(
            strict=False,
            description="`next` of the call before, which has carried out a part.",
            examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"],
        ),
    ] = UUID(int=0)


_NO_BULK = "There is no such proposal, or newer ones have replaced all of it."
BulkId = Annotated[
    UUID,
    Path(description="The id of a bulk proposal.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]),
    path_id(_NO_BULK),
]


@router.post("/v1/suspense/bulk", **described(answers={201: BulkResolution, 404: None}, headers={201: ["Location"]}))
async def propose_bulk_resolution(
    request: Request, coordinator: CoordinatorDep, caller: Proposer, body: BulkBody
) -> Response:
    """Propose the same resolution for every lease that a filter finds now, each in place of its open proposal.

    `unattributed` finds leases in quarantine; the other kinds find leases with units in suspense.
    """
    await _refuse_unknown_names(body.filter.quota, body.filter.region, coordinator)
    by, now, kind = actor_of(request, caller), coordinator.clock.now(), ResolutionKind(body.kind)
    proposal = BulkProposal(id_for(request, caller), _filter_of(body.filter), kind, body.reason)
    made = await coordinator.database.run(lambda c: propose_bulk(c, proposal, by, now))
    if isinstance(made, TooManyLeases):
        reason = f"It finds {made.leases} leases, and a proposal has {MOST_LEASES} at most. Add a condition."
        raise refused("filter", "at_most", reason)
    if isinstance(made, ResolutionRefusal):
        raise Problem("not-found", "No lease that this kind of resolution is for fits the filter.")
    return reply(made, 201, {"Location": f"/v1/suspense/bulk/{made.id}"})


@router.get("/v1/suspense/bulk/{bulk}", **described(answers={200: BulkResolution, 404: None}))
async def get_bulk_resolution(bulk: BulkId, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return a bulk proposal, and how many of its resolutions are approved. `/v1/suspense?bulk=` lists the others."""
    found = await coordinator.database.read(lambda c: read_bulk(c, bulk))
    if found is None:
        raise Problem("not-found", _NO_BULK)
    return reply(found)


@router.post("/v1/suspense/bulk/{bulk}:approve", **described(answers={200: BulkResolution, 404: None, 409: None}))
async def approve_bulk_resolution(
    request: Request, bulk: BulkId, coordinator: CoordinatorDep, caller: Approver, body: BulkApprovalBody
) -> Response:
    """Approve a bulk proposal, with another token than the proposer's, and carry a part of it out.

    While `next` is not null, repeat the request with it as `after`. `refused` has the resolutions that do not fit their
    leases any more. Repeating an approval changes nothing.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    done = await approve_bulk(coordinator.database, bulk, body.after, by, now)
    if isinstance(done, BulkResolution):
        return reply(done)
    if done is ResolutionRefusal.NO_SUCH_PROPOSAL:
        raise Problem("not-found", _NO_BULK)
    raise Problem("resolution-refused", _REFUSED[done], extra={"refusal": done.value})
