"""For those who look after regions: who holds what of allowances and rates, and rebalances from plan to end."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Struct, structs, to_builtins

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.exchange.parsing import refused
from coordinator.exchange.rules.balances import Key
from coordinator.http.conditions import expectation, strong_tag, unless_known
from coordinator.http.queries import PAGE, TEXT, Query, a_text, several, with_query
from coordinator.rebalancing.follow import cancel_rebalance
from coordinator.rebalancing.read_allocations import Allocation, AllocationQuestion, read_allocations
from coordinator.rebalancing.read_rebalances import Rebalance, read_rebalance, read_rebalances
from coordinator.rebalancing.rebalance import (
    Busy,
    Changed,
    Faulty,
    Impossible,
    RebalanceRequest,
    Refusal,
    begin_rebalance,
    plan_rebalance,
)
from coordinator.rebalancing.rules.requests import RebalanceBody
from coordinator.shared_limits.read_shares import SharedRate, SharedSlots, ShareQuestion, read_rates, read_slots
from coordinator.state import Coordinator, CoordinatorDep
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

T = TypeVar("T")

router = APIRouter(tags=["allocations"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(require("quota:read"))]
Writer = Annotated[Caller, Depends(require("alloc:write"))]
Follower = Annotated[Caller, Depends(require("quota:read", "alloc:write"))]  # who begins one sees how far it is


class AllocationList(Struct, frozen=True):
    """By quota and period. A list of what is, not of what was: a change between two pages shows in the second."""

    data: list[Allocation]
    page: dict[str, str | None]


class RateList(Struct, frozen=True):
    """By key: those that regions speak of. Of every other each region has its part by weight, and nobody more."""

    data: list[SharedRate]
    page: dict[str, str | None]


class SlotList(Struct, frozen=True):
    """By key: those that regions speak of. Of every other each region has its part by weight, and nobody more."""

    data: list[SharedSlots]
    page: dict[str, str | None]


class RebalanceList(Struct, frozen=True):
    """The newest first."""

    data: list[Rebalance]
    page: dict[str, str | None]


_ALLOCATIONS = {
    "quota": ("only of this quota, by its name or its key (exports:tenant=acme); repeated, any of them", several(TEXT)),
    "tenant": ("only of this tenant; repeated, any of them", several(TEXT)),
    "region": ("only what this region holds; repeated, any of them", several(TEXT)),
    "period": ("of this one; without it, of all that are not over, or not all accounted for", several(TEXT)),
    **PAGE,
}


@router.get("/v1/allocations", **with_query(described(answers={200: AllocationList, 304: None}), _ALLOCATIONS))
async def list_allocations(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Who holds what, as each region last told: idle, wanted, and when it runs dry."""
    query = Query(request)
    question = AllocationQuestion(*(query.many(name, a_text) for name in ("quota", "tenant", "region", "period")))
    page = query.page("allocations", *question)
    after = query.one("page_after", lambda _: _place(page.cursor.after), Key("", ""))
    query.checked()
    now = coordinator.clock.now()
    rows = await coordinator.database.run(
        lambda c: read_allocations(c, coordinator.documents, question, after, page.size + 1, now), snapshot=True
    )
    links = page.links(rows, lambda row: f"{row.quota} {row.period}")
    answer = reply(AllocationList(rows[: page.size], links))
    return unless_known(request, answer, strong_tag(bytes(answer.body)))


def _place(text: str) -> Key:
    """Neither a quota key nor a period's id holds a space."""
    quota, space, period = text.partition(" ")
    if text and not space:
        raise ValueError("it is not the `next` of a page")
    return Key(quota, period)


_SHARES = {
    "quota": ("only of this quota, by its name or its key; repeated, any of them", several(TEXT)),
    "tenant": ("only what is counted by this tenant; repeated, any of them", several(TEXT)),
    "region": ("of each key only this region; repeated, any of them", several(TEXT)),
    **PAGE,
}


@router.get("/v1/rates", **with_query(described(answers={200: RateList}), _SHARES))
async def list_rates(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Of rates shared by demand: what each region may be using, and the worst case: as published, and as it was."""
    return reply(RateList(*await _shared("rates", read_rates, request, coordinator)))


@router.get("/v1/slots", **with_query(described(answers={200: SlotList}), _SHARES))
async def list_slots(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Of slots shared by demand: how many may be in use in each region. Together they are never more than the limit."""
    return reply(SlotList(*await _shared("slots", read_slots, request, coordinator)))


async def _shared(
    name: str, read: Callable[..., Awaitable[dict[str, T | None]]], request: Request, coordinator: Coordinator
) -> tuple[list[T], dict[str, str | None]]:
    query = Query(request)
    question = ShareQuestion(*(query.many(each, a_text) for each in ("quota", "tenant", "region")))
    page = query.page(name, *question)
    query.checked()
    documents, now = coordinator.documents, coordinator.clock.now()
    rows = await coordinator.database.run(
        lambda c: read(c, documents, question, page.cursor.after, page.size + 1, now), snapshot=True
    )
    shared = [each for each in list(rows.values())[: page.size] if each is not None]
    return shared, page.links(list(rows), str)


# --- rebalances -------------------------------------------------------------------------------------------------------


@router.post(
    "/v1/rebalances",
    **described(body=RebalanceBody, answers={200: Rebalance, 201: Rebalance, 404: None, 409: None, 412: None}),
)
async def rebalance(request: Request, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """With `dry_run` 200: what would be done, what cannot be, and why; nothing is changed. Else 201: it has begun.

    `If-Match` with the plan's ETag guards against what others began since: 412 tells what that was.
    """
    asked: RebalanceBody = await read_body(request, RebalanceBody)  # type: ignore[arg-type]  # a union is decoded like a type
    by, now = actor_of(request, caller), coordinator.clock.now()
    is_expected = expectation(request.headers.get("If-Match"), lambda version: [_tag(version)])
    wish, documents = RebalanceRequest(id_for(request, caller), asked, by, is_expected), coordinator.documents
    if asked.dry_run:
        planned = await coordinator.database.run(lambda c: plan_rebalance(c, documents, wish, now), snapshot=True)
        return _told(planned, 200)
    return _told(await coordinator.database.run(lambda c: begin_rebalance(c, documents, wish, now)), 201)


def _told(answer: Rebalance | Refusal, status: int) -> Response:
    if not isinstance(answer, Rebalance):
        raise _problem_of(answer)
    location = {"Location": f"/v1/rebalances/{answer.id}"} if answer.id else {}
    return reply(answer, status, {"ETag": _tag(answer.version), **location})


def _problem_of(refusal: Refusal) -> Problem:
    if isinstance(refusal, Faulty):
        return refused([InvalidParameter(*fault) for fault in refusal.faults])
    if isinstance(refusal, Changed):
        since = [to_builtins(structs.replace(each, moves=[])) for each in refusal.since]
        detail = f"others have begun since: {'; '.join(map(_sentence, refusal.since))}"
        return Problem("precondition-failed", detail, extra={"changed": since})
    if isinstance(refusal, Busy):
        detail = "another rebalance moves units of the same allowance; wait for its end, or cancel it"
        return Problem("rebalance-running", detail, extra={"rebalance": str(refusal.other)})
    if isinstance(refusal, Impossible):
        cannot = refusal.plan.cannot
        detail = "; ".join(f"{each.units} of {each.quota}: {each.region}: {each.reason}" for each in cannot)
        return Problem("rebalance-impossible", detail, extra={"cannot": to_builtins(cannot)})
    return Problem("not-found", f"the books of the period that runs have no {refusal.quota}")


def _sentence(each: Rebalance) -> str:
    about = each.request.get("quota") or each.request.get("region")
    return f"{each.mode} of {about} ({each.state}) by {each.created_by} at {each.created_at.isoformat()}"


def _tag(version: int) -> str:
    return f'"rebalance-{version}"'


@router.get("/v1/rebalances", **with_query(described(answers={200: RebalanceList}), PAGE))
async def list_rebalances(request: Request, coordinator: CoordinatorDep, _: Follower) -> Response:
    query = Query(request)
    page = query.page("rebalances")
    before = query.one("page_after", lambda _: _version(page.cursor.after), None)
    query.checked()
    rows = await coordinator.database.run(lambda c: read_rebalances(c, before, page.size + 1), snapshot=True)
    return reply(RebalanceList(rows[: page.size], page.links(rows, lambda row: str(row.version))))


def _version(text: str) -> int | None:
    if text and not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError("it is not the `next` of a page")
    return int(text) if text else None


@router.get("/v1/rebalances/{rebalance}", **described(answers={200: Rebalance, 404: None}))
async def get_rebalance(rebalance: str, coordinator: CoordinatorDep, _: Follower) -> Response:
    """How far it has come: recalled, returned, regranted; and whose answer it waits for."""
    id_ = _id(rebalance)
    return _found(await coordinator.database.run(lambda c: read_rebalance(c, id_), snapshot=True))


@router.post("/v1/rebalances/{rebalance}:cancel", **described(answers={200: Rebalance, 404: None}))
async def cancel(request: Request, rebalance: str, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """What is done stays done. A region that is being drained is granted to again. Again: nothing changes."""
    by, now, id_ = actor_of(request, caller), coordinator.clock.now(), _id(rebalance)
    return _found(await coordinator.database.run(lambda c: cancel_rebalance(c, id_, by, now)))


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise _missing() from None


def _found(found: Rebalance | None) -> Response:
    if found is None:
        raise _missing()
    return reply(found, headers={"ETag": _tag(found.version)})


def _missing() -> Problem:
    return Problem("not-found", "there is no such rebalance")
