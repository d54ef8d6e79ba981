"""HTTP routes of the limits document and of subscriptions."""

import asyncio
from datetime import datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import UNSET, Struct, structs
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute
from coordinator.access.token_names import TokenName, with_token_names
from coordinator.http.conditions import IfMatch, IfNoneMatch, expectation, unless_known
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import Flag, Moment, Text
from coordinator.limits import subscriptions
from coordinator.limits.document import YAML, read_document, refuse_document, write_yaml
from coordinator.limits.explain_examples import ExplainedExample, explain_examples, plans_of_examples
from coordinator.limits.put_limits import LimitsOutcome, PutLimits, put_limits
from coordinator.limits.read_limits import AppliedLimits, read_limits
from coordinator.limits.rules.difference import Change
from coordinator.limits.rules.plan_change import LimitEffect
from coordinator.limits.subscriptions import Subscription
from coordinator.state import CoordinatorDep
from protocol.limits.document import LimitsDocument
from web.bodies import JSON, reply
from web.openapi import described
from web.problems import InvalidParameter, Problem, refused, refused_all
from web.strict_routes import BodyModel, QueryModel

router = APIRouter(tags=["catalogue"], route_class=IdempotentRoute)
Reader = Annotated[Caller, Depends(RequireScope("quota:read"))]
Writer = Annotated[Caller, Depends(RequireScope("quota:write"))]


# --- limits ----------------------------------------------------------------------------------------------------------


class LimitsInForce(Struct, frozen=True):
    """The document with every default written out. Before the first one was applied it is empty, at version 0."""

    version: int
    applied_at: datetime | None
    applied_by: str | None  # the id of the token
    document: LimitsDocument
    applied_by_name: TokenName = UNSET


class LimitsPut(Struct, frozen=True):
    """The document in force, and what was changed. For a dry run: the document that was sent, and what would change."""

    version: int
    dry_run: bool
    changes: list[Change]
    document: LimitsDocument
    examples: list[ExplainedExample]  # of a dry run: which policies match the examples of the document


class PutLimitsQuery(QueryModel):
    dry_run: Annotated[Flag, Field(description="Return what would change, and change nothing.", examples=[True])] = (
        False
    )


@router.get("/v1/limits", **described(answers={200: LimitsInForce, 304: None}))
async def get_limits(
    request: Request, coordinator: CoordinatorDep, _: Reader, _if_none_match: IfNoneMatch = None
) -> Response:
    """Return the limits document in force, as JSON.

    With `Accept: application/yaml` it is returned as YAML, which can be put back as it is.
    """
    limits = await coordinator.database.read(read_limits)
    json_tag, yaml_tag = _tags(limits.version)
    if YAML in request.headers.get("Accept", ""):
        text = await asyncio.to_thread(_as_yaml, limits)
        return unless_known(request, Response(text, media_type=YAML), yaml_tag)
    answer = LimitsInForce(limits.version, limits.applied_at, limits.applied_by, limits.document)
    (named,) = await coordinator.database.read(lambda c: with_token_names(c, [answer]))
    return unless_known(request, reply(named), json_tag)


def also_yaml(route: dict[str, Any]) -> dict[str, Any]:
    content = route["openapi_extra"]["requestBody"]["content"]
    content[YAML] = content[JSON]
    return route


# The document is a type of the protocol, which agents read as well, and may come as YAML: msgspec reads it.
_PUT_LIMITS = described(body=LimitsDocument, answers={200: LimitsPut, 412: None}, headers={200: ["ETag"]})


@router.put("/v1/limits", **also_yaml(_PUT_LIMITS))
async def replace_limits(
    request: Request,
    coordinator: CoordinatorDep,
    caller: Writer,
    query: Annotated[PutLimitsQuery, Query()],
    if_match: IfMatch = None,
) -> Response:
    """Replace the limits document, with JSON or YAML. It is in force in every region within a second."""
    body = await request.body()
    document = await asyncio.to_thread(read_document, body, media_type_of(request))
    is_expected, by, now = expectation(if_match, _tags), actor_of(request, caller), coordinator.clock.now()
    put = await coordinator.database.run(
        lambda c: put_limits(c, document, is_expected, by, now, dry_run=query.dry_run),
    )
    await asyncio.to_thread(_raise_refusal, put, body)
    in_force = document if query.dry_run else put.limits.document
    examples = await _examples(coordinator, document) if query.dry_run else []
    answer = LimitsPut(put.limits.version, query.dry_run, list(put.changes), in_force, examples)
    return reply(answer, headers={"ETag": _tags(put.limits.version)[0]})


async def _examples(coordinator: CoordinatorDep, document: LimitsDocument) -> list[ExplainedExample]:
    if not document.examples:
        return []
    plans = await coordinator.database.read(lambda c: plans_of_examples(c, document))
    return await asyncio.to_thread(explain_examples, document, plans)


def _raise_refusal(put: PutLimits, body: bytes) -> None:
    if put.outcome is LimitsOutcome.VERSION_DIFFERS:
        detail = f"Version {put.limits.version} is in force. Read it before you replace it."
        raise Problem("precondition-failed", detail)
    if put.outcome is LimitsOutcome.IN_USE:
        refuse_document(body, put.faults)


def _tags(version: int) -> list[str]:
    """Return an ETag for each of the two ways to write a version."""
    return [f'"{version}"', f'"{version}.yaml"']


def _as_yaml(limits: AppliedLimits) -> bytes:
    return f"# version {limits.version}\n".encode() + write_yaml(msgspec.to_builtins(limits.document))


def media_type_of(request: Request) -> str:
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type not in (JSON, YAML):
        raise Problem("unsupported-media-type", f"Send the document as {JSON} or {YAML}.")
    return media_type


# --- subscriptions ---------------------------------------------------------------------------------------------------

Tenant = Annotated[Text, Path(description="A tenant.", examples=["acme"])]


class SubscriptionBody(BodyModel):
    """`began_at` is for a subscription that is new here and began in the past, such as one that is imported."""

    plan: Annotated[str, Field(description="A plan of the limits document.", examples=["pro"])]
    began_at: Moment | None = None


class SubscriptionPut(Struct, frozen=True):
    """The subscription, and what the change did to the tenant's allowances in the current periods."""

    tenant: str
    plan: str
    changed_at: datetime
    began_at: datetime
    effects: list[LimitEffect]


class SubscriptionList(Struct, frozen=True):
    """Subscriptions by tenant, as they are now: a change between two pages shows in the second."""

    data: list[Subscription]
    page: PageLinks


@router.get("/v1/subscriptions", **described(answers={200: SubscriptionList}))
async def list_subscriptions(coordinator: CoordinatorDep, _: Reader, query: Annotated[PageQuery, Query()]) -> Response:
    """Return subscriptions by tenant."""
    page = query.page("subscriptions")
    rows = await coordinator.database.read(
        lambda c: subscriptions.read_subscriptions(c, page.after(str) or "", page.size + 1)
    )
    return reply(SubscriptionList(rows[: page.size], page.links(rows, lambda row: row.tenant)))


@router.get("/v1/subscriptions/{tenant:path}", **described(answers={200: Subscription, 404: None}))
async def get_subscription(tenant: Tenant, coordinator: CoordinatorDep, _: Reader) -> Response:
    """Return a tenant's subscription."""
    found = await coordinator.database.read(lambda c: subscriptions.read_subscription(c, tenant))
    if found is None:
        raise _no_subscription()
    return reply(found)


@router.put("/v1/subscriptions/{tenant:path}", **described(answers={200: SubscriptionPut, 201: SubscriptionPut}))
async def put_subscription(
    request: Request, tenant: Tenant, coordinator: CoordinatorDep, caller: Writer, body: SubscriptionBody
) -> Response:
    """Put a tenant on a plan. Its allowances of the current periods get the new limits at once."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    if body.began_at is not None and body.began_at > now:
        raise refused("began_at", "past", "A subscription begins before it is put. Give a time in the past, or none.")
    put = await coordinator.database.run(
        lambda c: subscriptions.put_subscription(c, coordinator.documents, tenant, body.plan, by, now, body.began_at)
    )
    if put.subscription is None:
        assert put.fault is not None
        raise refused_all([InvalidParameter(*put.fault)])
    answer = SubscriptionPut(**structs.asdict(put.subscription), effects=list(put.effects))
    return reply(answer, 201 if put.is_new else 200)


@router.delete("/v1/subscriptions/{tenant:path}", **described(answers={204: None, 404: None}))
async def delete_subscription(
    request: Request, tenant: Tenant, coordinator: CoordinatorDep, caller: Writer
) -> Response:
    """Delete a subscription: the tenant is on the document's default plan from then on."""
    by, now, documents = actor_of(request, caller), coordinator.clock.now(), coordinator.documents
    if not await coordinator.database.run(lambda c: subscriptions.delete_subscription(c, documents, tenant, by, now)):
        raise _no_subscription()
    return Response(status_code=204)


def _no_subscription() -> Problem:
    return Problem("not-found", "This tenant has no subscription.")
