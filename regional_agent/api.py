"""The agent's doors. They translate, and decide nothing."""

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from doors.bodies import described, read_body, reply
from doors.metrics import exposition
from doors.problems import Problem
from doors.request_ids import request_id_of
from doors.tokens import bearer_token, same_token
from regional_agent.admission import tell
from regional_agent.answers import BatchAnswer, Check, CheckAnswer, CheckBatch, answered
from regional_agent.batches import Batch, asked_of
from regional_agent.refusals import REFUSALS, problem_of
from regional_agent.region import Region
from regional_agent.status import Status, faults_of, status_of
from regional_agent.store.connection import StoreError, StoreUnavailable

HOT_PATHS = ("/v1/check", "/v1/check:batch")


def the_region(request: Request) -> Region:
    region: Region = request.app.state.region
    return region


TheRegion = Annotated[Region, Depends(the_region)]


async def ask_for_token(request: Request, region: TheRegion) -> None:
    """On loopback none is needed; anywhere else the settings insist on one."""
    expected = region.settings.service_token
    if expected is not None and not same_token(bearer_token(request), expected.get_secret_value()):
        headers = {"WWW-Authenticate": "Bearer"}
        raise Problem("unauthenticated", "this agent asks for a token: Authorization: Bearer <token>", headers=headers)


services = APIRouter(tags=["services"], dependencies=[Depends(ask_for_token)])
health = APIRouter(tags=["health"])


@services.post(HOT_PATHS[0], **described(body=Check, answers={200: CheckAnswer, 429: CheckAnswer, 503: CheckAnswer}))
async def check(request: Request, region: TheRegion) -> Response:
    """May this happen now? Consumes when it may."""
    try:
        verdict = await region.admission.decide(await read_body(request, Check))
    except REFUSALS as refusal:
        raise problem_of(refusal) from None
    told = answered(verdict, request.url.path, request_id_of(request.scope))
    return Response(told.body, told.status, told.headers, told.media_type)


@services.post(HOT_PATHS[1], **described(body=CheckBatch, answers={200: BatchAnswer}))
async def check_batch(request: Request, region: TheRegion) -> Response:
    """Up to 1,000 checks, decided in order, each as if it were alone."""
    checks = (await read_body(request, CheckBatch)).checks
    answer: asyncio.Future[BatchAnswer] = asyncio.get_running_loop().create_future()
    batch = Batch(request.url.path, request_id_of(request.scope), partial(tell, answer))
    batch.submit(region.admission, [asked_of(region.admission, check) for check in checks])
    return reply(await answer)


@services.get("/v1/status", **described(answers={200: Status, 503: None}))
async def status(region: TheRegion) -> Response:
    """This region: its epoch, its leases with their totals, the age of what is not reported yet."""
    try:
        return reply(await status_of(region))
    except (StoreUnavailable, StoreError) as error:
        raise Problem("store-unavailable", str(error), headers={"Retry-After": "1"}) from error


@health.get("/healthz")
async def healthz() -> Response:
    return reply({"status": "ok"})


@health.get("/readyz")
async def readyz(region: TheRegion) -> Response:
    """Not ready while it cannot enforce."""
    faults = faults_of(region)
    if faults:
        raise Problem("not-ready", "; ".join(faults), headers={"Retry-After": "1"})
    return reply({"status": "ready"})


@health.get("/metrics")
async def metrics(region: TheRegion) -> Response:
    region.measure()
    return exposition(region.metrics.registry)
