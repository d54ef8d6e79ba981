"""For those who decide what is limited: the limits document, and who is on which plan."""

import asyncio
from datetime import datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Struct, structs

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.exchange.parsing import refused
from coordinator.http.conditions import expectation, unless_known
from coordinator.http.inputs import Moment
from coordinator.http.queries import FLAG, PAGE, Query, a_flag, a_text, with_query
from coordinator.limits.delete_subscription import delete_subscription
from coordinator.limits.document import YAML, read_document, refuse_document, write_yaml
from coordinator.limits.put_limits import LimitsOutcome, PutLimits, put_limits
from coordinator.limits.put_subscription import put_subscription
from coordinator.limits.read_limits import AppliedLimits, read_limits
from coordinator.limits.read_subscriptions import Subscription, read_subscription, read_subscriptions
from coordinator.limits.rules.difference import Change
from coordinator.limits.rules.plan_change import LimitEffect
from coordinator.state import CoordinatorDep
from protocol.limits.document import LimitsDocument
from protocol.messages import Message
from web.bodies import JSON, described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["catalogue"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(require("quota:read"))]
Writer = Annotated[Caller, Depends(require("quota:write"))]


# --- limits ----------------------------------------------------------------------------------------------------------


class LimitsInForce(Struct, frozen=True):
    """The document with every default spelled out. Before the first was applied there is an empty one, at version 0."""

    version: int
    applied_at: datetime | None
    applied_by: str | None  # the id of the token
    document: LimitsDocument


class LimitsPut(Struct, frozen=True):
    """What is in force now, and what was changed, or would be."""

    version: int
    dry_run: bool
    changes: list[Change]
    document: LimitsDocument


@router.get("/v1/limits", **described(answers={200: LimitsInForce, 304: None}))
async def get_limits(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    """As JSON, or as YAML for those who accept `application/yaml`, which can be put back as it is."""
    Query(request).checked()
    limits = await coordinator.database.read(read_limits)
    json_tag, yaml_tag = _tags(limits.version)
    if YAML in request.headers.get("Accept", ""):
        text = await asyncio.to_thread(_as_yaml, limits)
        return unless_known(request, Response(text, media_type=YAML), yaml_tag)
    answer = LimitsInForce(limits.version, limits.applied_at, limits.applied_by, limits.document)
    return unless_known(request, reply(answer), json_tag)


def _also_yaml(route: dict[str, Any]) -> dict[str, Any]:
    content = route["openapi_extra"]["requestBody"]["content"]
    content[YAML] = content[JSON]
    return route


_PUT_LIMITS = _also_yaml(described(body=LimitsDocument, answers={200: LimitsPut, 412: None}))
_DRY_RUN = {"dry_run": ("say what would change, and change nothing", FLAG)}


@router.put("/v1/limits", **with_query(_PUT_LIMITS, _DRY_RUN))
async def put_limits_(request: Request, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """As JSON or YAML. In force in every region within a second; `dry_run=true` only says what would change."""
    query = Query(request)
    dry_run = query.one("dry_run", a_flag, default=False)
    query.checked()
    body = await request.body()
    document = await asyncio.to_thread(read_document, body, _media_type(request))
    is_expected = expectation(request.headers.get("If-Match"), _tags)
    by, now = actor_of(request, caller), coordinator.clock.now()
    put = await coordinator.database.run(
        lambda c: put_limits(c, document, is_expected, by, now, dry_run=dry_run),
    )
    await asyncio.to_thread(_raise_refusal, put, body)
    answer = LimitsPut(put.limits.version, dry_run, list(put.changes), document if dry_run else put.limits.document)
    return reply(answer, headers={"ETag": _tags(put.limits.version)[0]})


def _raise_refusal(put: PutLimits, body: bytes) -> None:
    if put.outcome is LimitsOutcome.VERSION_DIFFERS:
        detail = f"version {put.limits.version} is in force; read it again before you replace it"
        raise Problem("precondition-failed", detail)
    if put.outcome is LimitsOutcome.IN_USE:
        refuse_document(body, put.faults)


def _tags(version: int) -> list[str]:
    """One for each of the two ways to write the same version."""
    return [f'"{version}"', f'"{version}.yaml"']


def _as_yaml(limits: AppliedLimits) -> bytes:
    return f"# version {limits.version}\n".encode() + write_yaml(msgspec.to_builtins(limits.document))


def _media_type(request: Request) -> str:
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type not in (JSON, YAML):
        raise Problem("unsupported-media-type", f"send the document as {JSON} or {YAML}")
    return media_type


# --- subscriptions ---------------------------------------------------------------------------------------------------


class SubscriptionBody(Message, frozen=True):
    """`began_at`: of one that is new here and began before, such as one that is imported; now unless it says so."""

    plan: str
    began_at: Moment | None = None


class SubscriptionPut(Struct, frozen=True):
    """What is now, and what that did to the tenant's allowances in the periods that run."""

    tenant: str
    plan: str
    changed_at: datetime
    began_at: datetime
    effects: list[LimitEffect]


class SubscriptionList(Struct, frozen=True):
    """By tenant. A list of what is, not of what was: a change between two pages shows in the second."""

    data: list[Subscription]
    page: dict[str, str | None]


@router.get("/v1/subscriptions", **with_query(described(answers={200: SubscriptionList}), PAGE))
async def list_subscriptions(request: Request, coordinator: CoordinatorDep, _: Reader) -> Response:
    query = Query(request)
    page = query.page("subscriptions")
    query.checked()
    rows = await coordinator.database.read(lambda c: read_subscriptions(c, page.cursor.after, page.size + 1))
    return reply(SubscriptionList(rows[: page.size], page.links(rows, lambda row: row.tenant)))


@router.get("/v1/subscriptions/{tenant:path}", **described(answers={200: Subscription, 404: None}))
async def get_subscription(tenant: str, coordinator: CoordinatorDep, _: Reader) -> Response:
    found = await coordinator.database.read(lambda c: read_subscription(c, _checked(tenant)))
    return _or_not_found(found)


@router.put(
    "/v1/subscriptions/{tenant:path}",
    **described(body=SubscriptionBody, answers={200: SubscriptionPut, 201: SubscriptionPut}),
)
async def put_subscription_(request: Request, tenant: str, coordinator: CoordinatorDep, caller: Writer) -> Response:
    body = await read_body(request, SubscriptionBody)
    by, now = actor_of(request, caller), coordinator.clock.now()
    if body.began_at is not None and body.began_at > now:
        raise refused([InvalidParameter("began_at", "past", "a subscription has begun before it is put")])
    put = await coordinator.database.run(
        lambda c: put_subscription(c, coordinator.documents, _checked(tenant), body.plan, by, now, body.began_at)
    )
    if put.subscription is None:
        assert put.fault is not None
        raise refused([InvalidParameter(*put.fault)])
    answer = SubscriptionPut(**structs.asdict(put.subscription), effects=list(put.effects))
    return reply(answer, 201 if put.is_new else 200)


@router.delete("/v1/subscriptions/{tenant:path}", **described(answers={204: None, 404: None}))
async def delete_subscription_(request: Request, tenant: str, coordinator: CoordinatorDep, caller: Writer) -> Response:
    """The tenant is on the document's default plan from then on."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    documents = coordinator.documents
    if not await coordinator.database.run(lambda c: delete_subscription(c, documents, _checked(tenant), by, now)):
        return _or_not_found(None)
    return Response(status_code=204)


def _or_not_found(found: Subscription | None) -> Response:
    if found is None:
        raise Problem("not-found", "this tenant has no subscription")
    return reply(found)


def _checked(tenant: str) -> str:
    try:
        return a_text(tenant)
    except ValueError as error:
        fault = InvalidParameter("tenant", "format", str(error))
        raise Problem("invalid-request", "the tenant is not valid", invalid_parameters=[fault]) from error
