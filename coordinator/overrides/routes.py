"""HTTP: overrides, which give a subject another limit for a time, from now on or from later on."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import Flag, Limit, Moment, QuotaName, Reason, Several, Text, faults_of_end, path_id
from coordinator.limits.known_names import faults_of_names
from coordinator.overrides import operations
from coordinator.overrides.read_overrides import Override, OverrideName, read_override, read_overrides
from coordinator.overrides.rules import spelt_subject
from coordinator.state import CoordinatorDep
from protocol.limits.document import SUBJECT_FIELDS
from web.bodies import reply
from web.openapi import described
from web.problems import InvalidParameter, Problem, refused_all
from web.strict_routes import BodyModel

router = APIRouter(tags=["catalogue"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("quota:read"))]
Writer = Annotated[Caller, Depends(RequireScope("quota:write"))]

_MISSING = "There is no such override."
OverrideId = Annotated[
    UUID,
    Path(description="The id of an override.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]),
    path_id(_MISSING),
]


class OverrideBody(BodyModel):
    """Without `valid_from` the override begins now. Without `valid_until` it is in force until it is deleted."""

    quota: QuotaName
    subject: Annotated[
        dict[str, str],
        Field(
            max_length=len(SUBJECT_FIELDS),
            description="Whom it is for: every key of the quota with these values. Without any it is for all keys.",
            examples=[{"tenant": "acme"}],
        ),
    ]
    limit: Limit
    reason: Reason
    valid_from: Moment | None = None
    valid_until: Moment | None = None


class OverrideList(Struct, frozen=True):
    """Overrides by quota and subject, as they are now: a change between two pages shows in the second."""

    data: list[Override]
    page: PageLinks


class OverrideQuery(PageQuery):
    quota: Annotated[Several[Text], Field(description="Only overrides of these quotas.", examples=["exports"])] = ()
    over: Annotated[Flag, Field(description="Include overrides that have ended.", examples=[True])] = False


@router.get("/v1/overrides", **described(answers={200: OverrideList}))
async def list_overrides(coordinator: CoordinatorDep, _: Reader, query: Annotated[OverrideQuery, Query()]) -> Response:
    """Return overrides that are or will be in force, by quota and subject."""
    page, since = query.page(), None if query.over else coordinator.clock.now()
    after = page.after(OverrideName) or OverrideName()
    names = {"quota": query.quota}
    if faults := await coordinator.database.read(lambda c: faults_of_names(c, names)):
        raise refused_all(faults)
    rows = await coordinator.database.read(lambda c: read_overrides(c, query.quota, since, after, page.size + 1))
    links = page.links(rows, lambda row: OverrideName(row.key, row.override.id))
    return reply(OverrideList([row.override for row in rows[: page.size]], links))


@router.post("/v1/overrides", **described(answers={201: Override, 409: None}, headers={201: ["Location"]}))
async def create_override(
    request: Request, coordinator: CoordinatorDep, caller: Writer, body: OverrideBody
) -> Response:
    """Give a subject another limit, in every region within a second, or from `valid_from` on.

    The coordinator's clock decides when an override begins and ends.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    wanted = _override(body, id_for(request, caller), by.name, now)
    added = await coordinator.database.run(lambda c: operations.add_override(c, wanted, by, now))
    if added.faults:
        raise refused_all([InvalidParameter(*fault) for fault in added.faults])
    if added.is_full:
        raise Problem("full", f"There are {operations.MAX_OVERRIDES} overrides, which is the maximum. Delete some.")
    return reply(added.override, 201, {"Location": f"/v1/overrides/{added.override.id}"})


@router.get("/v1/overrides/{override}", **described(answers={200: Override, 404: None}))
async def get_override(override: OverrideId, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return one override."""
    found = await coordinator.database.read(lambda c: read_override(c, override))
    if found is None:
        raise Problem("not-found", _MISSING)
    return reply(found)


@router.delete("/v1/overrides/{override}", **described(answers={204: None, 404: None}))
async def delete_override(
    request: Request, override: OverrideId, coordinator: CoordinatorDep, caller: Writer
) -> Response:
    """End an override: the plan's limit is in force again in every region within a second."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    if not await coordinator.database.run(lambda c: operations.delete_override(c, override, by, now)):
        raise Problem("not-found", _MISSING)
    return Response(status_code=204)


def _override(body: OverrideBody, id_: UUID, by: str, now: datetime) -> Override:
    starts, ends = body.valid_from or now, body.valid_until
    faults = faults_of_end(starts, ends, now)
    subject = body.subject
    try:
        subject = spelt_subject(subject)
    except ValueError as error:
        faults.append(InvalidParameter("subject", "format", str(error)))
    if faults:
        raise refused_all(faults)
    return Override(id_, body.quota, subject, body.limit, starts, ends, body.reason, now, by)
