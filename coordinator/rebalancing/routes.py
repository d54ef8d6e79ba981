"""HTTP: how allowances, rates and slots are divided over regions, and rebalances."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct, structs, to_builtins
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.exchange.rules.balances import Key
from coordinator.http.conditions import IfMatch, IfNoneMatch, expectation, strong_tag, unless_known
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import QuotaNameOrKey, Several, Text, ValidPeriod, path_id
from coordinator.limits.known_names import faults_of_names
from coordinator.rebalancing import follow
from coordinator.rebalancing.read_allocations import Allocation, AllocationFilter, read_allocations
from coordinator.rebalancing.read_rebalances import read_rebalance, read_rebalances
from coordinator.rebalancing.rebalance import RebalanceRequest, begin_rebalance, plan_rebalance
from coordinator.rebalancing.refusals import (
    InvalidRebalance,
    NewerRebalances,
    NothingToMove,
    RebalanceRunning,
    Refusal,
)
from coordinator.rebalancing.schemas import Rebalance, RebalanceBody
from coordinator.shared_limits.read_shares import SharedRate, SharedSlots, ShareQuestion, read_rates, read_slots
from coordinator.state import Coordinator, CoordinatorDep
from web.bodies import reply
from web.openapi import described
from web.problems import InvalidParameter, Problem, refused_all

T = TypeVar("T")

router = APIRouter(tags=["allocations"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("quota:read"))]
Writer = Annotated[Caller, Depends(RequireScope("alloc:write"))]
Follower = Annotated[Caller, Depends(RequireScope("quota:read", "alloc:write"))]  # who begins one may follow it

_MISSING = "There is no such rebalance."
RebalanceId = Annotated[
    UUID,
    Path(description="The id of a rebalance.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]),
    path_id(_MISSING),
]


# --- allocations and shares -------------------------------------------------------------------------------------------


class AllocationList(Struct, frozen=True):
    """Allocations by quota and period, as they are now: a change between two pages shows in the second."""

    data: list[Allocation]
    page: PageLinks


class RateList(Struct, frozen=True):
    """Shared rates by key: those that regions have reported. Of any other each region has its base share."""

    data: list[SharedRate]
    page: PageLinks


class SlotList(Struct, frozen=True):
    """Shared slots by key: those that regions have reported. Of any other each region has its base share."""

    data: list[SharedSlots]
    page: PageLinks


class RebalanceList(Struct, frozen=True):
    """Rebalances, newest first."""

    data: list[Rebalance]
    page: PageLinks


class ShareQuery(PageQuery):
    quota: Annotated[
        Several[QuotaNameOrKey],
        Field(description="Only these quotas, by name or by key.", examples=["exports", "exports:tenant=acme"]),
    ] = ()
    tenant: Annotated[
        Several[Text], Field(description="Only what is counted by these tenants.", examples=["acme"])
    ] = ()
    region: Annotated[Several[Text], Field(description="Only what these regions have.", examples=["eu-west"])] = ()


class AllocationQuery(ShareQuery):
    period: Annotated[
        Several[ValidPeriod],
        Field(
            description="Only of these periods. Without any, those that run or are not accounted for.",
            examples=["2026-11"],
        ),
    ] = ()


@router.get("/v1/allocations", **described(answers={200: AllocationList, 304: None}))
async def list_allocations(
    request: Request,
    coordinator: CoordinatorDep,
    _: Reader,
    query: Annotated[AllocationQuery, Query()],
    _if_none_match: IfNoneMatch = None,
) -> Response:
    """Return what each region holds, as it last reported: idle and wanted units, and when it will run dry."""
    only = AllocationFilter(query.quota, query.tenant, query.region, query.period)
    await _refuse_unknown_names(query, coordinator)
    page, now = query.page(), coordinator.clock.now()
    after = page.after(Key) or Key("", "")
    rows = await coordinator.database.run(
        lambda c: read_allocations(c, coordinator.documents, only, after, page.size + 1, now), snapshot=True
    )
    links = page.links(rows, lambda row: Key(row.quota, row.period))
    answer = reply(AllocationList(rows[: page.size], links))
    return unless_known(request, answer, strong_tag(bytes(answer.body)))


@router.get("/v1/rates", **described(answers={200: RateList}))
async def list_rates(coordinator: CoordinatorDep, _: Reader, query: Annotated[ShareQuery, Query()]) -> Response:
    """Return rates that are shared by demand: each region's share, and the published and the measured worst case."""
    return reply(RateList(*await _shared("rates", read_rates, query, coordinator)))


@router.get("/v1/slots", **described(answers={200: SlotList}))
async def list_slots(coordinator: CoordinatorDep, _: Reader, query: Annotated[ShareQuery, Query()]) -> Response:
    """Return slots that are shared by demand: how many each region may use. Together they never exceed the limit."""
    return reply(SlotList(*await _shared("slots", read_slots, query, coordinator)))


async def _shared(
    name: str, read: Callable[..., Awaitable[dict[str, T | None]]], query: ShareQuery, coordinator: Coordinator
) -> tuple[list[T], PageLinks]:
    only, page = ShareQuestion(query.quota, query.tenant, query.region), query.page(name)
    await _refuse_unknown_names(query, coordinator)
    documents, now = coordinator.documents, coordinator.clock.now()
    rows = await coordinator.database.run(
        lambda c: read(c, documents, only, page.after(str) or "", page.size + 1, now), snapshot=True
    )
    shared = [each for each in list(rows.values())[: page.size] if each is not None]
    return shared, page.links(list(rows), str)


async def _refuse_unknown_names(query: ShareQuery, coordinator: Coordinator) -> None:
    names = {"quota": query.quota, "region": query.region}
    if faults := await coordinator.database.read(lambda c: faults_of_names(c, names)):
        raise refused_all(faults)


# --- rebalances -------------------------------------------------------------------------------------------------------


@router.post(
    "/v1/rebalances",
    **described(
        answers={200: Rebalance, 201: Rebalance, 404: None, 409: None, 412: None},
        headers={200: ["ETag"], 201: ["ETag", "Location"]},
    ),
)
async def create_rebalance(
    request: Request, coordinator: CoordinatorDep, caller: Writer, body: RebalanceBody, if_match: IfMatch = None
) -> Response:
    """Begin a rebalance, or plan one.

    With `dry_run` the answer is 200 with the plan: what would be moved, what cannot be, and why. Otherwise it is 201,
    and the rebalance has begun. Send the plan's ETag as `If-Match` to begin it only if no other
    rebalance has begun since: if one has, the answer is 412 and lists those.
    """
    by, now, documents = actor_of(request, caller), coordinator.clock.now(), coordinator.documents
    is_expected = expectation(if_match, lambda version: [_tag(version)])
    wanted = RebalanceRequest(id_for(request, caller), body, by, is_expected)
    if body.dry_run:
        planned = await coordinator.database.run(lambda c: plan_rebalance(c, documents, wanted, now), snapshot=True)
        return _response(planned, 200)
    return _response(await coordinator.database.run(lambda c: begin_rebalance(c, documents, wanted, now)), 201)


def _response(answer: Rebalance | Refusal, status: int) -> Response:
    if not isinstance(answer, Rebalance):
        raise _problem_of(answer)
    location = {"Location": f"/v1/rebalances/{answer.id}"} if answer.id else {}
    return reply(answer, status, {"ETag": _tag(answer.version), **location})


def _problem_of(refusal: Refusal) -> Problem:
    if isinstance(refusal, InvalidRebalance):
        return refused_all([InvalidParameter(*fault) for fault in refusal.faults])
    if isinstance(refusal, NewerRebalances):
        since = [to_builtins(structs.replace(each, moves=[])) for each in refusal.since]
        detail = f"Other rebalances have begun since: {'; '.join(map(_sentence, refusal.since))}."
        return Problem("precondition-failed", detail, extra={"changed": since})
    if isinstance(refusal, RebalanceRunning):
        detail = "Another rebalance moves units of the same allowance. Wait for its end, or cancel it."
        return Problem("rebalance-running", detail, extra={"rebalance": str(refusal.other)})
    if isinstance(refusal, NothingToMove):
        cannot = refusal.plan.cannot
        detail = "; ".join(f"{each.units} of {each.quota}: {each.region}: {each.reason}" for each in cannot)
        return Problem("rebalance-impossible", detail, extra={"cannot": to_builtins(cannot)})
    return Problem("not-found", f"The ledger of the current period has no {refusal.quota}.")


def _sentence(each: Rebalance) -> str:
    about, by = each.request.get("quota") or each.request.get("region"), each.created_by_name or each.created_by
    return f"{each.mode} of {about} ({each.state}) by {by} at {each.created_at.isoformat()}"


def _tag(version: int) -> str:
    return f'"rebalance-{version}"'


@router.get("/v1/rebalances", **described(answers={200: RebalanceList}))
async def list_rebalances(coordinator: CoordinatorDep, _: Follower, query: Annotated[PageQuery, Query()]) -> Response:
    """Return rebalances, newest first."""
    page = query.page("rebalances")
    rows = await coordinator.database.run(lambda c: read_rebalances(c, page.after(int), page.size + 1), snapshot=True)
    return reply(RebalanceList(rows[: page.size], page.links(rows, lambda row: row.version)))


@router.get("/v1/rebalances/{rebalance}", **described(answers={200: Rebalance, 404: None}, headers={200: ["ETag"]}))
async def get_rebalance(rebalance: RebalanceId, coordinator: CoordinatorDep, _: Follower) -> Response:
    """Return the progress of a rebalance: units recalled, returned and regranted, and the regions it waits for."""
    return _found(await coordinator.database.run(lambda c: read_rebalance(c, rebalance), snapshot=True))


@router.post(
    "/v1/rebalances/{rebalance}:cancel", **described(answers={200: Rebalance, 404: None}, headers={200: ["ETag"]})
)
async def cancel_rebalance(
    request: Request, rebalance: RebalanceId, coordinator: CoordinatorDep, caller: Writer
) -> Response:
    """Cancel a rebalance. Units that were moved stay where they are, and a region that was drained is restored.

    Cancelling it again changes nothing.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    return _found(await coordinator.database.run(lambda c: follow.cancel_rebalance(c, rebalance, by, now)))


def _found(found: Rebalance | None) -> Response:
    if found is None:
        raise Problem("not-found", _MISSING)
    return reply(found, headers={"ETag": _tag(found.version)})
