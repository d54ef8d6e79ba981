"""For those who give somebody another limit for a while: now, or announced for later."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, id_for
from coordinator.exchange.parsing import refused
from coordinator.http.inputs import Moment, Reason, faults_of_end, faults_of_reason
from coordinator.http.queries import FLAG, PAGE, TEXT, Query, a_flag, a_text, several, with_query
from coordinator.overrides.add_override import MAX_OVERRIDES, add_override
from coordinator.overrides.delete_override import delete_override
from coordinator.overrides.read_overrides import Override, OverrideName, read_override, read_overrides
from coordinator.overrides.rules import spelt_subject
from coordinator.state import CoordinatorDep
from protocol.identifiers import Name
from protocol.limits.document import SUBJECT_FIELDS, LimitValue
from protocol.messages import Message
from web.bodies import described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["catalogue"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(require("quota:read"))]
Writer = Annotated[Caller, Depends(require("quota:write"))]


class OverrideBody(Message, frozen=True):
    """Without `valid_from`: from now on. Without `valid_until`: until it is deleted."""

    quota: Name
    subject: Annotated[dict[str, str], Meta(max_length=len(SUBJECT_FIELDS))]
    limit: LimitValue
    reason: Reason
    valid_from: Moment | None = None
    valid_until: Moment | None = None


class OverrideList(Struct, frozen=True):
    """By quota and subject. A list of what is, not of what was: a change between two pages shows in the second."""

    data: list[Override]
    page: dict[str, str | None]


_LIST = {
    "quota": ("only of this quota; repeated, of any of them", several(TEXT)),
    "over": ("also those that are over", FLAG),
    **PAGE,
}


@router.get("/v1/overrides", **with_query(described(answers={200: OverrideList}), _LIST))
async def list_overrides(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    query = Query(request)
    quotas, is_over = query.many("quota", a_text), query.one("over", a_flag, default=False)
    page = query.page("overrides", quotas, is_over)
    after = query.one("page_after", lambda _: _place(page.cursor.after), OverrideName())
    query.checked()
    since = None if is_over else coordinator.clock.now()
    rows = await coordinator.database.read(lambda c: read_overrides(c, quotas, since, after, page.size + 1))
    links = page.links(rows, lambda row: msgspec.json.encode((row.key, str(row.override.id))).decode())
    return reply(OverrideList([row.override for row in rows[: page.size]], links))


@router.post("/v1/overrides", **described(body=OverrideBody, answers={201: Override, 409: None}))
async def add_override_(request: Request, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """In force in every region within a second, or from `valid_from` on, by the coordinator's clock."""
    body, by, now = await read_body(request, OverrideBody), actor_of(request, caller), coordinator.clock.now()
    wanted = _override(body, id_for(request, caller), by.name, now)
    added = await coordinator.database.run(lambda c: add_override(c, wanted, by, now))
    if added.faults:
        raise refused([InvalidParameter(*fault) for fault in added.faults])
    if added.is_full:
        raise Problem("full", f"there are {MAX_OVERRIDES} overrides, and there can be no more; delete some")
    return reply(added.override, 201, {"Location": f"/v1/overrides/{added.override.id}"})


@router.get("/v1/overrides/{override}", **described(answers={200: Override, 404: None}))
async def get_override(override: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    found = await coordinator.database.read(lambda c: read_override(c, _id(override)))
    if found is None:
        raise _missing()
    return reply(found)


@router.delete("/v1/overrides/{override}", **described(answers={204: None, 404: None}))
async def delete_override_(request: Request, override: str, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """The plan's limit counts again, in every region within a second."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    if not await coordinator.database.run(lambda c: delete_override(c, _id(override), by, now)):
        raise _missing()
    return Response(status_code=204)


def _override(body: OverrideBody, id_: UUID, by: str, now: datetime) -> Override:
    starts, ends = body.valid_from or now, body.valid_until
    faults = [*faults_of_end(starts, ends, now), *faults_of_reason(body.reason)]
    try:
        subject = spelt_subject(body.subject)
    except ValueError as error:
        faults.append(InvalidParameter("subject", "format", str(error)))
    if faults:
        raise refused(faults)
    return Override(id_, body.quota, subject, body.limit, starts, ends, body.reason, now, by)


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise _missing() from None


def _missing() -> Problem:
    return Problem("not-found", "there is no such override")


def _place(text: str) -> OverrideName:
    """Raises ValueError for what no page has given."""
    try:
        place = msgspec.json.decode(text, type=OverrideName) if text else OverrideName()
        UUID(place.id)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError("it is not the `next` of a page") from error
    return place
