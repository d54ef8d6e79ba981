"""The agent's doors. They translate, and decide nothing."""

import math
import random
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from doors.bodies import described, read_body, reply
from doors.metrics import exposition
from doors.problems import PROBLEMS, InvalidParameter, Problem, problem_document, problem_response
from doors.request_ids import request_id_of
from doors.tokens import bearer_token, same_token
from regional_agent.admission import NoPoliciesYet, Verdict
from regional_agent.answers import (
    BatchAnswer,
    BatchItem,
    Check,
    CheckAnswer,
    CheckBatch,
    headers_of,
    retry_after_header,
)
from regional_agent.domain.subjects import InvalidAddress
from regional_agent.policies import KindNotServed, UnknownSubjectField
from regional_agent.region import Region
from regional_agent.status import Status, faults_of, status_of
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.scripts import OperationConflict

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


@services.post(
    HOT_PATHS[0], **described(body=Check, answers={200: CheckAnswer, 429: CheckAnswer, 501: None, 503: CheckAnswer})
)
async def check(request: Request, region: TheRegion) -> Response:
    """May this happen now? Consumes when it may."""
    verdict = await _decide(region, await read_body(request, Check))
    headers = headers_of(verdict.answer.policies, verdict.windows_s)
    if verdict.answer.allowed:
        return reply(verdict.answer, headers=headers)
    return problem_response(_denial(verdict, headers), request)


@services.post(HOT_PATHS[1], **described(body=CheckBatch, answers={200: BatchAnswer}))
async def check_batch(request: Request, region: TheRegion) -> Response:
    """Up to 1,000 checks, decided one by one, in order."""
    batch = await read_body(request, CheckBatch)
    return reply(BatchAnswer(items=[await _item(request, region, each) for each in batch.checks]))


async def _item(request: Request, region: Region, check: Check) -> BatchItem:
    try:
        answer = (await _decide(region, check)).answer
    except Problem as problem:
        document = problem_document(problem, request.url.path, request_id_of(request.scope))
        return BatchItem(status=problem.status, problem=document)
    return BatchItem(status=200 if answer.allowed else PROBLEMS[_kind_of_denial(answer)].status, answer=answer)


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


async def _decide(region: Region, check: Check) -> Verdict:
    try:
        return await region.admission.decide(check)
    except UnknownSubjectField as error:
        fault = InvalidParameter(f"subject.{error.field}", "required", str(error))
        raise Problem("invalid-request", f"{fault.field}: {fault.reason}", invalid_parameters=[fault]) from None
    except InvalidAddress as error:
        fault = InvalidParameter("subject.ip", "address", str(error))
        raise Problem("invalid-request", f"{fault.field}: {fault.reason}", invalid_parameters=[fault]) from None
    except OperationConflict:
        fault = InvalidParameter("operation_id", "same_body", "this operation_id was used before with another body")
        raise Problem("operation-conflict", fault.reason, invalid_parameters=[fault]) from None
    except KindNotServed as error:
        raise Problem("quota-kind-unsupported", str(error)) from None
    except NoPoliciesYet:
        raise Problem("not-ready", "the agent has no policies yet", headers={"Retry-After": "1"}) from None


def _denial(verdict: Verdict, headers: dict[str, str]) -> Problem:
    answer = verdict.answer
    headers |= retry_after_header(answer.retry_after_ms, random.random())  # noqa: S311  (it spreads a herd, no more)
    extra = {field: getattr(answer, field) for field in answer.__struct_fields__}
    return Problem(_kind_of_denial(answer), _detail_of_denial(answer), headers=headers, extra=extra)


def _kind_of_denial(answer: CheckAnswer) -> str:
    if answer.blocked_by is not None:
        return "blocked"
    return "quota-exceeded" if answer.degraded is None else "store-unavailable"


def _detail_of_denial(answer: CheckAnswer) -> str:
    if answer.blocked_by is not None:
        return f"a block on its {answer.blocked_by} denies this request, whatever its quotas"
    if answer.degraded is not None:
        return f"policy {answer.denied_by!r} fails closed, and the region's store cannot be asked"
    return f"policy {answer.denied_by!r} denies this request; ask again in {math.ceil(answer.retry_after_ms / 1000)} s"
