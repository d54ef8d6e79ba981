"""The agent's HTTP routes. They translate requests and answers, and decide nothing."""

import asyncio
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Request, Response

from protocol.check import (
    BatchAnswer,
    Check,
    CheckAnswer,
    CheckBatch,
    ExplainAnswer,
    Hold,
    HoldAnswer,
    HoldCommit,
    HoldExtension,
    HoldRelease,
    HoldStatus,
    Subject,
)
from regional_agent.admission.engine import NoPoliciesYet, resolve
from regional_agent.admission.plan import CheckPlan, InvalidField
from regional_agent.agent import RegionalAgent
from regional_agent.http.batch import PendingBatch, authorize, decode_check
from regional_agent.http.callers import CallerRules, adjust_forbidden
from regional_agent.http.refusals import REFUSALS, problem_of
from regional_agent.http.schemas import BatchItems, check_response, hold_response
from regional_agent.http.workers import Workers
from regional_agent.status import Status, status_of
from web.bodies import read_body, read_parts, reply
from web.health import Health, HealthStatus, Liveness
from web.metrics import shown
from web.openapi import RATE_LIMIT_HEADERS, described
from web.request_ids import request_id_of

HOT_PATHS = ("/v1/check", "/v1/check:batch")


async def the_region(request: Request) -> RegionalAgent:
    """Return the region. It is a coroutine because FastAPI runs plain functions in a thread, for every request."""
    region: RegionalAgent = request.app.state.region
    return region


async def the_workers(request: Request) -> Workers:
    workers: Workers = request.app.state.workers
    return workers


TheRegion = Annotated[RegionalAgent, Depends(the_region)]
TheWorkers = Annotated[Workers, Depends(the_workers)]
HoldId = Annotated[
    str, Path(description="The id of a hold, from the response that made it.", examples=["hold_Q0ZzTk9x"])
]


async def require_caller(request: Request) -> None:
    """Refuse callers that may not use this agent."""
    await rules_of(request).admit(request)


def rules_of(request: Request) -> CallerRules:
    rules: CallerRules = request.app.state.caller_rules
    return rules


services = APIRouter(tags=["services"], dependencies=[Depends(require_caller)])
health = APIRouter(tags=["health"])


EXPORT = Subject(tenant="acme", route="/v1/exports", method="POST")
CHECK = Check(subject=EXPORT, cost=1, operation_id="order-17")
HOLD = Hold(subject=EXPORT, units=40, ttl_ms=60_000, operation_id="render-17")
UNMATCHED = (*RATE_LIMIT_HEADERS, "Leasehold-Unmatched")
RATE_LIMITS = {200: UNMATCHED, 429: UNMATCHED, 503: RATE_LIMIT_HEADERS}


@services.post(
    HOT_PATHS[0],
    **described(
        body=Check,
        example=CHECK,
        answers={200: CheckAnswer, 429: CheckAnswer, 503: CheckAnswer},
        headers=RATE_LIMITS,
    ),
)
async def check(request: Request, region: TheRegion) -> Response:
    """Decide whether a request may happen now, and consume its cost if it may."""
    body = await read_body(request, Check)
    if body.mode == "adjust" and not rules_of(request).request_may_adjust(request):
        raise adjust_forbidden()
    try:
        verdict = await region.admission.decide(body)
    except REFUSALS as refusal:
        raise problem_of(refusal) from None
    answer = check_response(verdict, request.url.path, request_id_of(request.scope))
    return Response(answer.body, answer.status, answer.headers, answer.media_type)


@services.post(
    HOT_PATHS[1], **described(body=CheckBatch, example=CheckBatch(checks=[CHECK]), answers={200: BatchAnswer})
)
async def check_batch(request: Request, region: TheRegion) -> Response:
    """Decide up to 1,000 checks in order, each as if it were sent alone.

    A malformed check is refused in its own item, with the status and the problem that it would have had alone.
    """
    items = (await read_parts(request, BatchItems)).checks
    answer: asyncio.Future[BatchAnswer] = asyncio.get_running_loop().create_future()
    may_adjust = rules_of(request).request_may_adjust(request)

    def plan(item: msgspec.Raw) -> CheckPlan | Exception:
        return authorize(region.admission.plan_check(decode_check(bytes(item))), may_adjust=may_adjust)

    path, request_id = request.url.path, request_id_of(request.scope)
    PendingBatch(region.admission, plan, partial(resolve, answer), path=path, request_id=request_id).submit(items)
    return reply(await answer)


@services.post("/v1/explain", **described(body=Check, example=CHECK, answers={200: ExplainAnswer, 503: None}))
async def explain(request: Request, region: TheRegion) -> Response:
    """Return for every policy whether it matches a check and, if not, why. Nothing is consumed."""
    body = await read_body(request, Check)
    try:
        return reply(await region.explain(body))
    except (NoPoliciesYet, InvalidField) as refusal:
        raise problem_of(refusal) from None


@services.post(
    "/v1/holds",
    **described(
        body=Hold,
        example=HOLD,
        answers={201: HoldAnswer, 429: CheckAnswer, 503: CheckAnswer},
        headers={201 if status == 200 else status: names for status, names in RATE_LIMITS.items()},
    ),
)
async def create_hold(request: Request, region: TheRegion) -> Response:
    """Reserve units for work whose cost is not known yet."""
    body = await read_body(request, Hold)
    region.holds.require_key()
    try:
        verdict = await region.admission.hold(body)
    except REFUSALS as refusal:
        raise problem_of(refusal) from None
    answer = hold_response(verdict, body, request.url.path, request_id_of(request.scope), region.holds.seal)
    return Response(answer.body, answer.status, answer.headers, answer.media_type)


@services.get("/v1/holds/{hold_id}", **described(answers={200: HoldStatus, 503: None}))
async def get_hold(hold_id: HoldId, region: TheRegion) -> Response:
    """Return a hold as it is now."""
    return reply(await region.holds.update(hold_id, "look"))


@services.post(
    "/v1/holds/{hold_id}:commit",
    **described(body=HoldCommit, example=HoldCommit(units=25), answers={200: HoldStatus, 409: None, 503: None}),
)
async def commit_hold(hold_id: HoldId, request: Request, region: TheRegion) -> Response:
    """Consume the units that were used, also beyond the hold, and release the rest. Another number later is refused."""
    body = await read_body(request, HoldCommit)
    may_exceed = rules_of(request).request_may_adjust(request)
    return reply(await region.holds.commit(hold_id, body, may_exceed=may_exceed))


@services.post(
    "/v1/holds/{hold_id}:extend",
    **described(
        body=HoldExtension, example=HoldExtension(ttl_ms=60_000), answers={200: HoldStatus, 409: None, 503: None}
    ),
)
async def extend_hold(hold_id: HoldId, request: Request, region: TheRegion) -> Response:
    """Extend a hold: it lasts at least so long from now on."""
    return reply(await region.holds.update(hold_id, "extend", (await read_body(request, HoldExtension)).ttl_ms))


@services.post(
    "/v1/holds/{hold_id}:release", **described(body=HoldRelease, answers={200: HoldStatus, 409: None, 503: None})
)
async def release_hold(hold_id: HoldId, request: Request, region: TheRegion) -> Response:
    """Release a hold: no units were used."""
    if await request.body():
        await read_body(request, HoldRelease)
    return reply(await region.holds.update(hold_id, "release"))


@services.get("/v1/status", **described(answers={200: Status}))
async def get_status(region: TheRegion, workers: TheWorkers) -> Response:
    """Return the state of this region: its epoch, its leases with their totals, the age of unreported usage."""
    return reply(await status_of(region, *await asyncio.gather(workers.health(), workers.door())))


@health.get("/healthz", **described(answers={200: Liveness}))
async def get_liveness() -> Response:
    """Report that the process is alive."""
    return reply(Liveness())


@health.get("/readyz", **described(answers={200: Health, 503: Health}, plain=(503,)))
async def get_readiness(workers: TheWorkers) -> Response:
    """Report whether to send requests here, and why it is degraded or not ready. 503 while it is not ready."""
    found = await workers.health()
    is_ready = found.status is not HealthStatus.NOT_READY
    return reply(found) if is_ready else reply(found, 503, headers={"Retry-After": "1"})


@health.get("/metrics", dependencies=[Depends(require_caller)], **described(answers={200: None}, also=["text/plain"]))
async def get_metrics(workers: TheWorkers) -> Response:
    """Return metrics in the format of Prometheus."""
    return shown(await workers.metrics())


@health.get("/openapi.json", dependencies=[Depends(require_caller)], include_in_schema=False)
async def openapi_document(request: Request) -> Response:
    return reply(request.app.openapi())
