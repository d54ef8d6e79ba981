"""HTTP: who the tenants are: their names, ids in other systems, addresses and time zones."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct
from pydantic import AfterValidator, Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import Text
from coordinator.state import CoordinatorDep
from coordinator.tenants import operations
from coordinator.tenants.operations import Tenant, TenantProfile
from protocol.zones import zone_of
from web.bodies import reply
from web.openapi import described
from web.problems import Problem
from web.strict_routes import BodyModel

router = APIRouter(tags=["tenants"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("usage:read"))]
Writer = Annotated[Caller, Depends(RequireScope("tenant:write"))]
PathTenant = Annotated[Text, Path(description="A tenant.", examples=["acme"])]

MAX_EXTERNAL_IDS, MAX_ADDRESS_LINES = 16, 8
_UNKNOWN = "Nothing is registered of this tenant."


def _zone(name: str) -> str:
    zone_of(name)
    return name


SystemName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,31}$")]


class TenantBody(BodyModel):
    """The fields to register. They replace what is registered: fields that are left out become empty."""

    name: Annotated[Text, Field(description="The name on paper.", examples=["Acme GmbH"])]
    external_ids: Annotated[
        dict[SystemName, Text],
        Field(
            default_factory=dict,
            max_length=MAX_EXTERNAL_IDS,
            description="The tenant's ids in other systems, by system.",
            examples=[{"stripe": "cus_9s6XKzkNRiz8i3"}],
        ),
    ]
    address: Annotated[
        list[Text],
        Field(
            default_factory=list,
            max_length=MAX_ADDRESS_LINES,
            description="The lines of its address.",
            examples=[["Hafenstr. 1", "20457 Hamburg"]],
        ),
    ]
    time_zone: Annotated[
        str, AfterValidator(_zone), Field(description="The zone of times on paper.", examples=["Europe/Berlin"])
    ] = "UTC"


class TenantList(Struct, frozen=True):
    """Registered tenants by id, as they are now."""

    data: list[Tenant]
    page: PageLinks


@router.get("/v1/tenants", **described(answers={200: TenantList}))
async def list_tenants(coordinator: CoordinatorDep, _: Reader, query: Annotated[PageQuery, Query()]) -> Response:
    """Return the registered tenants."""
    page = query.page("tenants")
    rows = await coordinator.database.read(lambda c: operations.read_tenants(c, page.after(str) or "", page.size + 1))
    return reply(TenantList(rows[: page.size], page.links(rows, lambda row: row.tenant)))


@router.get("/v1/tenants/{tenant:path}", **described(answers={200: Tenant, 404: None}))
async def get_tenant(tenant: PathTenant, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return what is registered of a tenant."""
    found = await coordinator.database.read(lambda c: operations.read_tenant(c, tenant))
    if found is None:
        raise Problem("not-found", _UNKNOWN)
    return reply(found)


@router.put("/v1/tenants/{tenant:path}", **described(answers={200: Tenant, 201: Tenant}))
async def put_tenant(
    request: Request, tenant: PathTenant, coordinator: CoordinatorDep, caller: Writer, body: TenantBody
) -> Response:
    """Register a tenant's name, ids in other systems and address, for statements, spreadsheets and webhooks.

    It changes no limit and no unit.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    profile = TenantProfile(body.name, body.external_ids, body.address, body.time_zone)
    put, is_new = await coordinator.database.run(lambda c: operations.put_tenant(c, tenant, profile, by, now))
    return reply(put, 201 if is_new else 200)


@router.delete("/v1/tenants/{tenant:path}", **described(answers={204: None, 404: None}))
async def delete_tenant(request: Request, tenant: PathTenant, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """Delete what is registered of a tenant. Its usage and its statements stay."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    if not await coordinator.database.run(lambda c: operations.delete_tenant(c, tenant, by, now)):
        raise Problem("not-found", _UNKNOWN)
    return Response(status_code=204)
