"""For those who run the system: its regions."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct

from coordinator.api.auth import require
from coordinator.api.queries import PAGE, Query, with_query
from coordinator.operations.authenticate import Caller
from coordinator.operations.put_region import put_region
from coordinator.operations.read_regions import Region, read_region, read_regions
from coordinator.state import TheCoordinator
from doors.bodies import described, read_body, reply
from doors.problems import InvalidParameter, Problem
from protocol.identifiers import RegionName, is_region
from protocol.messages import Message

router = APIRouter(tags=["operations"])
Reader = Annotated[Caller, Depends(require("quota:read"))]
Writer = Annotated[Caller, Depends(require("alloc:write"))]

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
async def list_regions(request: Request, coordinator: TheCoordinator, _: Reader) -> Response:
    query = Query(request)
    page = query.page("regions")
    query.checked()
    rows = await coordinator.database.read(lambda c: read_regions(c, page.cursor.after, page.size + 1))
    return reply(RegionList(rows[: page.size], page.links(rows, lambda row: row.name)))


@router.post("/v1/regions", **described(body=NewRegion, answers={201: Region, 200: Region}))
async def add_region(request: Request, coordinator: TheCoordinator, _: Writer) -> Response:
    """Adding a region again is the same as changing it: 200."""
    body = await read_body(request, NewRegion)
    return await _put(coordinator, body.name, body)


@router.get("/v1/regions/{region}", **described(answers={200: Region, 404: None}))
async def get_region(region: str, coordinator: TheCoordinator, _: Reader) -> Response:
    found = await coordinator.database.read(lambda c: read_region(c, _checked(region)))
    if found is None:
        raise Problem("not-found", "there is no such region")
    return reply(found)


@router.put("/v1/regions/{region}", **described(body=RegionBody, answers={200: Region, 201: Region}))
async def put_region_(request: Request, region: str, coordinator: TheCoordinator, _: Writer) -> Response:
    return await _put(coordinator, region, await read_body(request, RegionBody))


async def _put(coordinator: TheCoordinator, name: str, body: RegionBody) -> Response:
    _checked(name)
    now = coordinator.clock.now()
    put = await coordinator.database.run(lambda c: put_region(c, name, body.weight, body.status, now))
    headers = {"Location": f"/v1/regions/{name}"} if put.is_new else {}
    return reply(put.region, 201 if put.is_new else 200, headers)


def _checked(name: str) -> str:
    if not is_region(name):
        fault = InvalidParameter("region", "name", "a region's name has lower case letters, digits and -")
        raise Problem("invalid-request", "the region's name is not valid", invalid_parameters=[fault])
    return name
