"""For those who run the system: its regions, and who did what."""

import re
from datetime import UTC
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.access.read_audit import AuditEntry, AuditQuestion, read_audit
from coordinator.access.rules.audit import Action
from coordinator.http.queries import PAGE, TEXT, Query, a_text, choices, one_of, several, with_query
from coordinator.regions.put_region import put_region
from coordinator.regions.read_regions import Region, read_region, read_regions
from coordinator.state import CoordinatorDep
from coordinator.usage.rules.usage import parse_instant
from protocol.identifiers import RegionName, is_region
from protocol.messages import Message
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["operations"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(require("quota:read"))]
Writer = Annotated[Caller, Depends(require("alloc:write"))]
Auditor = Annotated[Caller, Depends(require("audit:read"))]

Weight = Annotated[int, Meta(ge=0, le=1_000_000, description="its part of every rate, beside the other regions'")]
Status = Literal["active", "draining", "down"]


class RegionBody(Message, frozen=True):
    """What is left out stays as it is; a new region is active and weighs 1."""

    weight: Weight | None = None
    status: Status | None = None


class NewRegion(RegionBody, frozen=True, kw_only=True):
    name: RegionName


class RegionList(Struct, frozen=True):
    """By name. A list of what is, not of what was: a change between two pages shows in the second."""

    data: list[Region]
    page: dict[str, str | None]


@router.get("/v1/regions", **with_query(described(answers={200: RegionList}), PAGE))
async def list_regions(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    query = Query(request)
    page = query.page("regions")
    query.checked()
    now = coordinator.clock.now()
    rows = await coordinator.database.read(lambda c: read_regions(c, page.cursor.after, page.size + 1, now))
    return reply(RegionList(rows[: page.size], page.links(rows, lambda row: row.name)))


@router.post("/v1/regions", **described(body=NewRegion, answers={201: Region, 200: Region}))
async def add_region(request: Request, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """Adding a region again is the same as changing it: 200."""
    body = await read_body(request, NewRegion)
    return await _put(request, coordinator, caller, body.name, body)


@router.get("/v1/regions/{region}", **described(answers={200: Region, 404: None}))
async def get_region(region: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    now = coordinator.clock.now()
    found = await coordinator.database.read(lambda c: read_region(c, _checked(region), now))
    if found is None:
        raise Problem("not-found", "there is no such region")
    return reply(found)


@router.put("/v1/regions/{region}", **described(body=RegionBody, answers={200: Region, 201: Region}))
async def put_region_(request: Request, region: str, coordinator: CoordinatorDep, caller: Writer) -> Response:
    return await _put(request, coordinator, caller, region, await read_body(request, RegionBody))


async def _put(request: Request, coordinator: CoordinatorDep, caller: Caller, name: str, body: RegionBody) -> Response:
    _checked(name)
    by, now = actor_of(request, caller), coordinator.clock.now()
    put = await coordinator.database.run(lambda c: put_region(c, name, body.weight, body.status, by, now))
    headers = {"Location": f"/v1/regions/{name}"} if put.is_new else {}
    return reply(put.region, 201 if put.is_new else 200, headers)


def _checked(name: str) -> str:
    if not is_region(name):
        fault = InvalidParameter("region", "name", "a region's name has lower case letters, digits and -")
        raise Problem("invalid-request", "the region's name is not valid", invalid_parameters=[fault])
    return name


# --- the audit -------------------------------------------------------------------------------------------------------


class AuditList(Struct, frozen=True):
    """The newest first. Pages go back in time, so what is done meanwhile is in none of them."""

    data: list[AuditEntry]
    page: dict[str, str | None]


_ID = re.compile(r"[0-9]{1,18}")
_AUDIT = {
    "actor": ("only what was done with this token, by its id; repeated, any of them", several(TEXT)),
    "action": ("only this; repeated, any of them", several(choices(Action))),
    "object": ("only what was done to this: a token's id, a tenant, a region; repeated, any of them", several(TEXT)),
    "from": ("an RFC 3339 time or a date, in UTC; all there is", TEXT),
    "to": ("the first moment after; all there is", TEXT),
    **PAGE,
}


@router.get("/v1/audit", **with_query(described(answers={200: AuditList}), _AUDIT))
async def get_audit(request: Request, coordinator: CoordinatorDep, _: Auditor) -> Response:
    query = Query(request)
    question = AuditQuestion(
        query.many("actor", a_text),
        query.many("action", one_of(Action)),
        query.many("object", a_text),
        query.one("from", lambda text: parse_instant(text, UTC), None),
        query.one("to", lambda text: parse_instant(text, UTC), None),
    )
    page = query.page("audit", *question)
    after = page.cursor.after
    if after and not _ID.fullmatch(after):
        query.refuse("page_after", "format", "it is not the `next` of a page")
    query.checked()
    before = int(after) if after else None
    rows = await coordinator.database.read(lambda c: read_audit(c, question, before, page.size + 1))
    return reply(AuditList(rows[: page.size], page.links(rows, lambda row: str(row.id))))
