"""HTTP: resets, by which every region forgets what a rate has counted of some keys. Agents wait for the next one."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.blocks.routes import Reader
from coordinator.http.conditions import IfNoneMatch, unless_known
from coordinator.http.parameters import QuotaName, Reason
from coordinator.http.polling import PollQuery, Prefer, is_up_to_date, wait_for_signal
from coordinator.overrides.rules import spelt_subject
from coordinator.resets import operations
from coordinator.resets.read_resets import Reset, ResetList, read_resets
from coordinator.state import Coordinator, CoordinatorDep
from protocol.limits.document import SUBJECT_FIELDS
from web.bodies import reply
from web.openapi import described
from web.problems import InvalidParameter, Problem, refused, refused_all
from web.strict_routes import BodyModel

router = APIRouter(tags=["catalogue"], route_class=IdempotentRoute)
Writer = Annotated[Caller, Depends(RequireScope("quota:write"))]


class ResetBody(BodyModel):
    """A reset of the key, or keys, that have these values."""

    quota: QuotaName
    subject: Annotated[
        dict[str, str],
        Field(
            max_length=len(SUBJECT_FIELDS),
            description="A value for each field that the quota is counted by.",
            examples=[{"user": "jane"}],
        ),
    ]
    reason: Reason


@router.get("/v1/resets", **described(answers={200: ResetList, 304: None}))
async def list_resets(
    request: Request,
    coordinator: CoordinatorDep,
    caller: Reader,
    query: Annotated[PollQuery, Query()],
    _if_none_match: IfNoneMatch = None,
    _prefer: Prefer = None,
) -> Response:
    """Return the resets of the last seven days, up to 1,000 after `since`.

    Requires the scope `quota:read`, or a region's token.
    """
    with coordinator.hub.subscribe(caller.region or "") as subscription:
        found, tag = await _resets(coordinator, query.since)
        is_newest = is_up_to_date(request, query.since, found.version, tag)
        if is_newest and await wait_for_signal(request, subscription, "resets"):
            found, tag = await _resets(coordinator, query.since)
    if is_up_to_date(request, query.since, found.version, tag):
        return Response(status_code=304, headers={"ETag": tag})
    return unless_known(request, reply(found), tag)


async def _resets(coordinator: Coordinator, since: int | None) -> tuple[ResetList, str]:
    """Return them with their ETag."""
    found = await coordinator.database.run(lambda c: read_resets(c, since or 0), snapshot=True)
    return found, f'"resets-{since or 0}-{found.version}"'


@router.post("/v1/resets", **described(answers={201: Reset, 409: None}))
async def create_reset(request: Request, coordinator: CoordinatorDep, caller: Writer, body: ResetBody) -> Response:
    """Let every region forget, within a second, what a rate has counted of a subject: unlock a user's log-in.

    A region that is away does it when it is back. An allowance cannot be reset; it has adjustments.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    try:
        subject = spelt_subject(body.subject)
    except ValueError as error:
        raise refused("subject", "format", str(error)) from error
    wanted = operations.ResetRequest(body.quota, subject, body.reason)
    added = await coordinator.database.run(lambda c: operations.add_reset(c, wanted, by, now))
    if added.faults:
        raise refused_all([InvalidParameter(*fault) for fault in added.faults])
    if added.reset is None:
        raise Problem("full", f"There are {operations.MOST_KEPT} resets of the last seven days, which is the maximum.")
    return reply(added.reset, 201)
