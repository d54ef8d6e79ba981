"""Routes of exchanges, shares, signals and policies, for agents. An agent acts for one region only."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import structs
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.access.auth import (
    PresumedRegion,
    confirm_region,
    presume_this_region,
    require_a_region,
    require_this_region,
)
from coordinator.epochs.fence import fence_lost
from coordinator.exchange.parsing import parse_exchanges, parse_shares
from coordinator.exchange.rules.submissions import ExchangeCall
from coordinator.exchange.transaction import Applied
from coordinator.http.conditions import IfNoneMatch, unless_known
from coordinator.http.polling import PollQuery, Prefer, is_up_to_date, wait_for_signal
from coordinator.limits.policy_bundle import tagged_policy_bundle
from coordinator.outages import DatabaseUnavailable
from coordinator.shared_limits.share_rates import share_rates
from coordinator.state import Coordinator, CoordinatorDep, coordinator_of
from protocol.limits.document import PolicyBundle
from protocol.messages import (
    ExchangeRequest,
    ExchangeResponse,
    SharesRequest,
    SharesResponse,
    Signal,
)
from web.bodies import read_json, reply
from web.metrics import hold_open
from web.openapi import described
from web.problems import Problem
from web.strict_routes import StrictRoute
from web.traces.context import current_context

router = APIRouter(tags=["agents"], route_class=StrictRoute)

PathRegion = Annotated[str, Depends(require_this_region)]
AuthenticatedRegion = Annotated[str, Depends(require_a_region)]

HEARTBEAT_S = 10.0
TOKEN_CHECK_S = 5.0  # how often a stream's token is checked, however much traffic there is


# --- exchanges --------------------------------------------------------------------------------------------------------


@router.post("/v1/regions/{region}/exchanges", **described(body=ExchangeRequest, answers={200: ExchangeResponse}))
async def post_exchanges(
    request: Request, region: Annotated[PresumedRegion, Depends(presume_this_region)], coordinator: CoordinatorDep
) -> Response:
    """Book what lanes report, and grant what they want. The same bytes are booked once, however often they are sent.

    A malformed exchange or want is refused by itself, in its place among the replies.
    """
    call = parse_exchanges(region.name, await read_json(request))
    call = call._replace(token_hash=region.token_hash, names=region.names, cause=current_context())
    applied = await _apply(coordinator, call)
    await confirm_region(request, region, applied.is_authentic, coordinator)
    return reply(applied.response)


class ExchangesAhead:
    """A middleware that answers exchanges without FastAPI, and hands every other request to it.

    Nearly all requests of regions are exchanges, and routing them costs more than the answer. It calls the same
    function as the route does; a test compares both ways.
    """

    def __init__(self, app: ASGIApp, unavailable: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        self._app = app
        self._unavailable = unavailable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _EXCHANGES.fullmatch(scope["path"]) if scope.get("method") == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE  # by which it is counted and logged
        request = Request(scope, receive)
        try:
            response = await _exchange(request, found[1])
        except DatabaseUnavailable as error:
            response = await self._unavailable(request, error)
        await response(scope, receive, send)


async def _exchange(request: Request, region: str) -> Response:
    coordinator = await coordinator_of(request)
    return await post_exchanges(request, await presume_this_region(request, region, coordinator), coordinator)


_EXCHANGES = re.compile("/v1/regions/([^/]+)/exchanges")
_ROUTE = next(each for each in router.routes if isinstance(each, Route) and _EXCHANGES.fullmatch(each.path))


async def _apply(coordinator: Coordinator, call: ExchangeCall) -> Applied:
    applied, now = await coordinator.batcher.apply(call), coordinator.clock.now()
    if applied.lost:
        await coordinator.database.run(lambda connection: fence_lost(connection, call.region, applied.lost, now))
    coordinator.metrics.note_exchanges(applied.response, applied.reports, applied.quarantined, applied.notices)
    coordinator.refusals.note_replies(call.region, applied.response.replies)
    return applied


@router.post("/v1/regions/{region}/shares", **described(body=SharesRequest, answers={200: SharesResponse}))
async def post_shares(request: Request, region: PathRegion, coordinator: CoordinatorDep) -> Response:
    """Report the demand for rates and slots that are shared by demand, and return what the region may use from now on.

    A malformed rate or slot is refused by itself.
    """
    parsed, now = parse_shares(await read_json(request)), coordinator.clock.now()
    out = await coordinator.database.run(lambda c: share_rates(c, coordinator.documents, region, parsed.request, now))
    coordinator.metrics.note_overshoots(out.overshoots)
    coordinator.refusals.note_items(region, "rate", parsed.refused_rates)
    coordinator.refusals.note_items(region, "slot", parsed.refused_slots)
    refused_items = [*parsed.refused_rates, *parsed.refused_slots, *out.response.refused]
    return reply(structs.replace(out.response, refused=refused_items))


# --- signals ----------------------------------------------------------------------------------------------------------


_SIGNALS = described(answers={200: None})
_SIGNALS["responses"][200] |= {"description": "Hints, as they come", "content": {"text/event-stream": {}}}


@router.get("/v1/regions/{region}/signals", **_SIGNALS)
async def stream_signals(request: Request, region: PathRegion, coordinator: CoordinatorDep) -> Response:
    """Stream signals as server-sent events. They are hints: what a region misses comes with its next exchange."""
    hold_open(request.scope)
    events = _events(request, region, coordinator)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(request: Request, region: str, coordinator: Coordinator) -> AsyncIterator[bytes]:
    with coordinator.hub.subscribe(region) as subscription:
        yield _event(Signal(kind="hello"))
        clock = asyncio.get_running_loop().time
        checked_at_s = clock()
        # All streams beat at the same moments, so that their tokens are looked up together.
        while (taken := await subscription.take(HEARTBEAT_S - clock() % HEARTBEAT_S)) is not None:
            if clock() >= checked_at_s + TOKEN_CHECK_S:
                if not await _may_stay(request, region, coordinator):
                    return
                checked_at_s = clock()
            yield b"".join(map(_event, taken)) or b": still here\n\n"


async def _may_stay(request: Request, region: str, coordinator: Coordinator) -> bool:
    """Return whether a stream may continue. A revoked token ends it; an outage of the database does not."""
    try:
        await require_this_region(request, region, coordinator)
    except Problem:
        return False
    except DatabaseUnavailable:
        return True
    return True


def _event(signal: Signal) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (signal.kind.encode(), msgspec.json.encode(signal))


# --- policies ---------------------------------------------------------------------------------------------------------


@router.get("/v1/policies", **described(answers={200: PolicyBundle, 304: None}))
async def get_policies(
    request: Request,
    region: AuthenticatedRegion,
    coordinator: CoordinatorDep,
    query: Annotated[PollQuery, Query()],
    _if_none_match: IfNoneMatch = None,
    _prefer: Prefer = None,
) -> Response:
    """Return all that an agent needs to decide. With `since`, wait until there is another version than that."""
    with coordinator.hub.subscribe(region) as subscription:
        bundle, tag = await _bundle(coordinator, region)
        is_newest = is_up_to_date(request, query.since, bundle.version, tag)
        if is_newest and await wait_for_signal(request, subscription, "policies"):
            bundle, tag = await _bundle(coordinator, region)
    if is_up_to_date(request, query.since, bundle.version, tag):
        return Response(status_code=304)
    return unless_known(request, reply(bundle), tag)


async def _bundle(coordinator: Coordinator, region: str) -> tuple[PolicyBundle, str]:
    """Return it with its ETag."""
    now = coordinator.clock.now()
    return await coordinator.database.run(lambda c: tagged_policy_bundle(c, region, now), snapshot=True)
