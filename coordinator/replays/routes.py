"""HTTP: replay a limits document, or a version of it, against recent traffic."""

import asyncio
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import Field

from coordinator.access.auth import RequireScope
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.http.parameters import Instant, Text, WholeNumber
from coordinator.limits.document import read_document
from coordinator.limits.read_limits import read_version
from coordinator.limits.routes import also_yaml, media_type_of
from coordinator.replays.read_traffic import Traffic
from coordinator.replays.replay_traffic import TrafficReplay, replay_traffic
from coordinator.state import Coordinator, CoordinatorDep
from protocol.limits.document import LimitsDocument
from web.bodies import reply
from web.openapi import described
from web.problems import Problem, refused
from web.strict_routes import QueryModel

router = APIRouter(tags=["catalogue"], route_class=IdempotentRoute)
Writer = Annotated[Caller, Depends(RequireScope("quota:write"))]

A_DAY = timedelta(days=1)


class ReplayQuery(QueryModel):
    start: Annotated[
        Instant,
        Field(
            alias="from",
            description="An RFC 3339 time, or a date in UTC. Without it, a day before `to`.",
            examples=["2026-11-19"],
        ),
    ] = None
    end: Annotated[
        Instant, Field(alias="to", description="The first moment after. Without it, now.", examples=["2026-11-20"])
    ] = None
    tenant: Annotated[
        Text | None, Field(description="Only this tenant's checks: more of them can be read.", examples=["acme"])
    ] = None


@router.post("/v1/limits:replay", **also_yaml(described(body=LimitsDocument, answers={200: TrafficReplay})))
async def replay_document(
    request: Request, coordinator: CoordinatorDep, _: Writer, query: Annotated[ReplayQuery, Query()]
) -> Response:
    """Return what a limits document would deny of recent traffic, from the decision log. It changes nothing.

    `would_deny` is a lower bound, estimated from the logged sample, with its interval; `unknown` counts checks about
    which the log says too little.
    """
    body = await request.body()
    document = await asyncio.to_thread(read_document, body, media_type_of(request))
    return await _answer(coordinator, document, query)


@router.post("/v1/limits/{version}:replay", **described(answers={200: TrafficReplay, 404: None}))
async def replay_version(
    version: Annotated[WholeNumber, Path(description="A version of the limits document.", examples=[12])],
    coordinator: CoordinatorDep,
    _: Writer,
    query: Annotated[ReplayQuery, Query()],
) -> Response:
    """Return what a version of the limits document would deny of recent traffic. It changes nothing."""
    document = await coordinator.database.read(lambda c: read_version(c, version))
    if document is None:
        raise Problem("not-found", "There is no such version of the limits document.")
    return await _answer(coordinator, document, query)


async def _answer(coordinator: Coordinator, document: LimitsDocument, query: ReplayQuery) -> Response:
    now = coordinator.clock.now()
    traffic = _traffic(query, now)
    async with coordinator.replaying:
        found = await replay_traffic(coordinator.database, document, traffic, now)
    if found is None:
        raise refused("tenant", "rows", "The newest minutes have more rows than one replay reads. Name a tenant.")
    return reply(found)


def _traffic(query: ReplayQuery, now: datetime) -> Traffic:
    end = min(query.end or now, now)
    start = query.start or end - A_DAY
    if start >= end:
        raise refused("to", "order", "`to` must be after `from`, and `from` in the past.")
    return Traffic(start, end, query.tenant)
