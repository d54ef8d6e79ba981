"""HTTP: regions, and the audit."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.access.read_audit import AuditEntry, AuditFilter, read_audit
from coordinator.access.rules.audit import Action
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import Instant, RegionName, Several, Text
from coordinator.regions import put_region as operations
from coordinator.regions.put_identities import IdentityTaken
from coordinator.regions.put_identities import put_identities as replace_identities
from coordinator.regions.read_regions import RegionView, read_region, read_regions
from coordinator.state import CoordinatorDep
from web.bodies import reply
from web.openapi import described
from web.problems import Problem
from web.strict_routes import BodyModel
from web.tls.peers import IDENTITY_PATTERN

router = APIRouter(tags=["operations"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("quota:read"))]
Writer = Annotated[Caller, Depends(RequireScope("alloc:write"))]
Auditor = Annotated[Caller, Depends(RequireScope("audit:read"))]
Admin = Annotated[Caller, Depends(RequireScope("admin"))]

PathRegion = Annotated[RegionName, Path()]
RegionStatus = Literal["active", "draining", "down"]
MAX_IDENTITIES = 16
Identity = Annotated[str, Field(pattern=IDENTITY_PATTERN, max_length=1000)]


class RegionBody(BodyModel):
    """A change of a region: fields that are left out keep their values. A new region is active and has the weight 1."""

    weight: Annotated[
        int | None,
        Field(ge=0, le=1_000_000, description="Its base share of every rate, relative to other regions.", examples=[1]),
    ] = None
    status: Annotated[
        RegionStatus | None, Field(description="A draining region is granted nothing.", examples=["active"])
    ] = None


class NewRegionBody(RegionBody):
    name: RegionName


class IdentitiesBody(BodyModel):
    """All identities of the region. What is left out may not authenticate itself any more."""

    identities: Annotated[
        list[Identity],
        Field(
            max_length=MAX_IDENTITIES,
            description="Names in client certificates: a URI such as a SPIFFE ID, or a host name.",
            examples=[["spiffe://example.org/leasehold/us-east"]],
        ),
    ]


class RegionList(Struct, frozen=True):
    """Regions by name, as they are now: a change between two pages shows in the second."""

    data: list[RegionView]
    page: PageLinks


@router.get("/v1/regions", **described(answers={200: RegionList}))
async def list_regions(coordinator: CoordinatorDep, _: Reader, query: Annotated[PageQuery, Query()]) -> Response:
    """Return regions by name, with their weight, status, epoch and agents."""
    page, now = query.page("regions"), coordinator.clock.now()
    rows = await coordinator.database.read(lambda c: read_regions(c, page.after(str) or "", page.size + 1, now))
    return reply(RegionList(rows[: page.size], page.links(rows, lambda row: row.name)))


@router.post("/v1/regions", **described(answers={201: RegionView, 200: RegionView}, headers={201: ["Location"]}))
async def create_region(request: Request, coordinator: CoordinatorDep, caller: Writer, body: NewRegionBody) -> Response:
    """Add a region. If there is one of this name already it is changed, and the answer is 200."""
    return await _put(request, coordinator, caller, body.name, body)


@router.get("/v1/regions/{region}", **described(answers={200: RegionView, 404: None}))
async def get_region(region: PathRegion, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return one region."""
    now = coordinator.clock.now()
    found = await coordinator.database.read(lambda c: read_region(c, region, now))
    if found is None:
        raise Problem("not-found", "There is no such region.")
    return reply(found)


@router.put(
    "/v1/regions/{region}", **described(answers={200: RegionView, 201: RegionView}, headers={201: ["Location"]})
)
async def put_region(
    request: Request, region: PathRegion, coordinator: CoordinatorDep, caller: Writer, body: RegionBody
) -> Response:
    """Change the weight or status of a region, or add it."""
    return await _put(request, coordinator, caller, region, body)


async def _put(request: Request, coordinator: CoordinatorDep, caller: Caller, name: str, body: RegionBody) -> Response:
    by, now = actor_of(request, caller), coordinator.clock.now()
    put = await coordinator.database.run(lambda c: operations.put_region(c, name, body.weight, body.status, by, now))
    headers = {"Location": f"/v1/regions/{name}"} if put.is_new else {}
    return reply(put.region, 201 if put.is_new else 200, headers)


@router.put("/v1/regions/{region}/identities", **described(answers={200: RegionView, 404: None, 409: None}))
async def put_identities(
    request: Request, region: PathRegion, coordinator: CoordinatorDep, caller: Admin, body: IdentitiesBody
) -> Response:
    """Say which client certificates the agents of a region may show instead of a token, by names in them.

    They get exactly the scope `region:NAME`. Name two identities while agents change from one to the other.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    try:
        put = await coordinator.database.run(
            lambda c: replace_identities(c, region, dict.fromkeys(body.identities), by, now)
        )
    except IdentityTaken as taken:
        raise Problem("identity-taken", str(taken)) from None
    if put is None:
        raise Problem("not-found", "There is no such region.")
    return reply(put)


# --- the audit -------------------------------------------------------------------------------------------------------


class AuditList(Struct, frozen=True):
    """Entries of the audit, newest first. Pages go back in time: what happens meanwhile is in none of them."""

    data: list[AuditEntry]
    page: PageLinks


class AuditQuery(PageQuery):
    actor: Annotated[
        Several[Text],
        Field(description="Only what these tokens did, by id.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]),
    ] = ()
    action: Annotated[Several[Action], Field(description="Only these actions.", examples=["limits.applied"])] = ()
    object: Annotated[
        Several[Text],
        Field(description="Only what was done to these: the id of a token, a tenant, a region.", examples=["acme"]),
    ] = ()
    start: Annotated[
        Instant, Field(alias="from", description="An RFC 3339 time, or a date in UTC.", examples=["2026-11-01"])
    ] = None
    end: Annotated[Instant, Field(alias="to", description="The first moment after.", examples=["2026-12-01"])] = None


@router.get("/v1/audit", **described(answers={200: AuditList}))
async def list_audit_entries(
    coordinator: CoordinatorDep, _: Auditor, query: Annotated[AuditQuery, Query()]
) -> Response:
    """Return who did what, and by which request, newest first."""
    page = query.page()
    only = AuditFilter(query.actor, query.action, query.object, query.start, query.end)
    rows = await coordinator.database.read(lambda c: read_audit(c, only, page.after(int), page.size + 1))
    return reply(AuditList(rows[: page.size], page.links(rows, lambda row: row.id)))
