"""For those who judge what no report has accounted for: epochs that are over, suspense, and what is kept for them."""

from collections.abc import Iterator
from typing import Annotated, TypeVar
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.epochs.retire import RetiredEpoch, retire_epoch
from coordinator.exchange.rules.balances import Key
from coordinator.http.queries import FLAG, PAGE, Query, a_flag, number_of, with_query
from coordinator.state import CoordinatorDep
from coordinator.suspense.read_suspense import (
    EvidenceName,
    KeptEvidence,
    LeaseName,
    SuspendedLease,
    read_quarantine,
    read_quarantine_with_evidence,
    read_suspense,
)
from coordinator.suspense.resolve import Proposal, Resolution, approve_resolution, propose_resolution
from coordinator.suspense.rules import ResolutionKind, ResolutionRefusal
from protocol.identifiers import PeriodId, QuotaKey
from protocol.messages import Epoch, Lane, Message
from protocol.units import Units
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["suspense"], route_class=IdempotentRoute)
Allocator = Annotated[Caller, Depends(require("alloc:write"))]
# Who proposes or approves sees what there is to be decided.
Reader = Annotated[Caller, Depends(require("usage:read", "adjust:propose", "adjust:approve"))]
Proposer = Annotated[Caller, Depends(require("adjust:propose"))]
Approver = Annotated[Caller, Depends(require("adjust:approve"))]
N = TypeVar("N")

Reason = Annotated[
    str, Meta(min_length=1, max_length=1000, pattern=r"\S", description="why, for whoever reads it later")
]


class RetireBody(Message, frozen=True):
    reason: Reason


@router.post("/v1/epochs/{epoch}:retire", **described(body=RetireBody, answers={200: RetiredEpoch, 404: None}))
async def retire_epoch_(request: Request, epoch: str, coordinator: CoordinatorDep, caller: Allocator) -> Response:
    """No more evidence of it counts: what still comes is acknowledged and kept. Again: nothing changes."""
    body, by, now = await read_body(request, RetireBody), actor_of(request, caller), coordinator.clock.now()
    number = number_of("epoch", epoch)
    retired = await coordinator.database.run(lambda c: retire_epoch(c, number, body.reason, by, now))
    if retired is None:
        raise Problem("not-found", "there is no such epoch")
    return reply(retired)


# --- what waits for people --------------------------------------------------------------------------------------------


class SuspenseList(Struct, frozen=True):
    """By period, quota and epoch."""

    data: list[SuspendedLease]
    page: dict[str, str | None]


class QuarantineList(Struct, frozen=True):
    """By epoch, lane and number."""

    data: list[KeptEvidence]
    page: dict[str, str | None]


@router.get("/v1/suspense", **with_query(described(answers={200: SuspenseList}), PAGE))
async def get_suspense(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Leases with units that nobody has accounted for, and those in quarantine; with the proposal, if there is one."""
    query = Query(request)
    page = query.page("suspense")
    after = query.one("page_after", lambda _: _name(page.cursor.after, LeaseName), LeaseName())
    query.checked()
    rows = await coordinator.database.read(lambda c: read_suspense(c, after, page.size + 1))
    return reply(SuspenseList(rows[: page.size], page.links(rows, lambda row: _text(row.period, row.quota, row.epoch))))


_EVIDENCE = {"evidence": ("true: also what was reported, whole; a page then ends after 4 MiB of it", FLAG)}


@router.get("/v1/quarantine", **with_query(described(answers={200: QuarantineList}), _EVIDENCE | PAGE))
async def get_quarantine(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    """List reports that were not booked, and wait for people or have ended."""
    query = Query(request)
    with_evidence = query.one("evidence", a_flag, default=False)
    page = query.page("quarantine", with_evidence)
    after = query.one("page_after", lambda _: _name(page.cursor.after, EvidenceName), EvidenceName())
    query.checked()
    read = read_quarantine_with_evidence if with_evidence else read_quarantine
    rows, has_more = await coordinator.database.run(lambda c: read(c, after, page.size), snapshot=True)
    last = rows[-1] if has_more else None
    next_ = page.next(after=_text(last.epoch, last.lane, last.seq, last.quota, last.period)) if last else None
    return reply(QuarantineList(list(rows), {"next": next_}))


def _text(*name: object) -> str:
    return msgspec.json.encode(name).decode()


def _name(text: str, type_: type[N]) -> N:
    """Raises ValueError for what no page has given."""
    try:
        return msgspec.json.decode(text, type=type_) if text else type_()
    except msgspec.MsgspecError as error:
        raise ValueError("it is not the `next` of a page") from error


# --- how it ends ------------------------------------------------------------------------------------------------------


class ProposalBody(Message, frozen=True):
    """About a lease; a `rebase` is about a lane."""

    epoch: Epoch
    kind: ResolutionKind
    reason: Reason
    quota: QuotaKey | None = None
    period: PeriodId | None = None
    lane: Lane | None = None
    units: Units | None = None  # of an estimate, and only of one: how many are billed


@router.post("/v1/suspense:propose", **described(body=ProposalBody, answers={201: Resolution, 404: None, 409: None}))
async def propose(request: Request, coordinator: CoordinatorDep, caller: Proposer) -> Response:
    """In place of the proposal that is open, if there is one. Somebody else has to approve it."""
    body, by, now = await read_body(request, ProposalBody), actor_of(request, caller), coordinator.clock.now()
    if faults := list(_faults_of(body)):
        raise Problem("invalid-request", "the proposal is not valid", invalid_parameters=faults)
    proposal = Proposal(body.epoch, _about(body), body.kind, body.units or 0, body.reason)
    return reply(_granted(await coordinator.database.run(lambda c: propose_resolution(c, proposal, by, now))), 201)


def _faults_of(body: ProposalBody) -> Iterator[InvalidParameter]:
    if (body.units is not None) != (body.kind is ResolutionKind.ESTIMATE):
        reason = "an estimate says how many units are billed, and only an estimate"
        yield InvalidParameter("units", "estimate", reason)
    is_of_a_lane = body.kind is ResolutionKind.REBASE
    if (body.lane is not None) != is_of_a_lane:
        yield InvalidParameter("lane", "rebase", "a rebase names its lane, and only a rebase")
    for name, value in (("quota", body.quota), ("period", body.period)):
        if (value is None) != is_of_a_lane:
            yield InvalidParameter(name, "lease", f"whatever is no rebase names its lease by quota and period: {name}")


def _about(body: ProposalBody) -> Key | int:
    if body.lane is not None:
        return body.lane
    assert body.quota is not None
    assert body.period is not None
    return Key(body.quota, body.period)


@router.post("/v1/suspense/{resolution}:approve", **described(answers={200: Resolution, 404: None, 409: None}))
async def approve(request: Request, resolution: str, coordinator: CoordinatorDep, caller: Approver) -> Response:
    """By another token than the proposer's. What evidence has drained meanwhile is taken off what is billed."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    id_ = _id(resolution)
    return reply(_granted(await coordinator.database.run(lambda c: approve_resolution(c, id_, by, now))))


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise Problem("not-found", _MISSING[ResolutionRefusal.NO_SUCH_PROPOSAL]) from None


_MISSING = {
    ResolutionRefusal.NO_SUCH_LEASE: "there is no such lease, or no such lane",
    ResolutionRefusal.NO_SUCH_PROPOSAL: "there is no such proposal, or another one has taken its place",
}
_REFUSED = {
    ResolutionRefusal.NOTHING_IN_SUSPENSE: "the lease has nothing in suspense",
    ResolutionRefusal.MORE_THAN_IN_SUSPENSE: "the lease has less than that in suspense",
    ResolutionRefusal.QUARANTINED: "the lease is in quarantine: propose `unattributed` first",
    ResolutionRefusal.NOT_QUARANTINED: "the lease is not in quarantine",
    ResolutionRefusal.NOT_REGRESSED: "nothing is kept that shows the ledger to be behind in this lane",
    ResolutionRefusal.TOO_FAR_BEHIND: "the ledger lacks too many numbers of this lane: retire its epoch",
    ResolutionRefusal.SAME_PERSON: "who proposes does not approve",
}


def _granted(answer: Resolution | ResolutionRefusal) -> Resolution:
    if isinstance(answer, Resolution):
        return answer
    if answer in _MISSING:
        raise Problem("not-found", _MISSING[answer])
    raise Problem("resolution-refused", _REFUSED[answer], extra={"refusal": answer.value})
