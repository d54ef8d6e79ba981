"""For admins: who is told of what happens to the books, and what they have not taken."""

from collections.abc import Mapping
from typing import Annotated
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta, Struct, field

from coordinator.access.auth import actor_of, require
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, ResponseWithSecret, id_for
from coordinator.exchange.parsing import refused
from coordinator.http.queries import FLAG, PAGE, Query, a_flag, with_query
from coordinator.state import CoordinatorDep
from coordinator.webhooks.deliveries import Delivery, read_deliveries, replay
from coordinator.webhooks.endpoints import (
    MAX_WEBHOOKS,
    Webhook,
    WebhookWithSecret,
    add_webhook,
    delete_webhook,
    pause_webhook,
    read_webhook,
    read_webhooks,
    rotate_secret,
)
from coordinator.webhooks.rules import EventKind, canonical_url, fault_of_url
from protocol.messages import Message
from web.bodies import JSON, described, read_body, reply
from web.problems import InvalidParameter, Problem

router = APIRouter(tags=["webhooks"], route_class=IdempotentRoute)
Admin = Annotated[Caller, Depends(require("admin"))]


class WebhookBody(Message, frozen=True):
    url: Annotated[str, Meta(min_length=1, max_length=2048, description="https://; http:// on this machine alone")]
    events: Annotated[list[EventKind], Meta(min_length=1, max_length=100)]


class ReplayBody(Message, frozen=True):
    events: Annotated[list[UUID], Meta(max_length=1000, description="only these; without any, all that are dead")] = (
        field(default_factory=list)
    )


class Replayed(Struct, frozen=True):
    deliveries: int


class WebhookList(Struct, frozen=True):
    data: list[Webhook]
    page: dict[str, str | None]


class DeliveryList(Struct, frozen=True):
    """By the events' ids."""

    data: list[Delivery]
    page: dict[str, str | None]


@router.post("/v1/webhooks", **described(body=WebhookBody, answers={201: WebhookWithSecret, 409: None}))
async def add(request: Request, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """Register a URL. The secret that signs its deliveries is shown in this answer only: a repetition by
    Idempotency-Key has `null` there.
    """
    body, by, now = await read_body(request, WebhookBody), actor_of(request, caller), coordinator.clock.now()
    url = canonical_url(body.url)
    if fault := fault_of_url(url):
        raise refused([InvalidParameter("url", "format", fault)])
    id_ = id_for(request, caller)
    made = await coordinator.database.run(lambda c: add_webhook(c, id_, url, body.events, by, now))
    if made is None:
        raise Problem("full", f"there are {MAX_WEBHOOKS} webhooks, and there can be no more; delete some")
    return _shown_once(made, 201, {"Location": f"/v1/webhooks/{made.id}"})


@router.get("/v1/webhooks", **described(answers={200: WebhookList}))
async def list_(coordinator: CoordinatorDep, _: Admin) -> Response:
    """All in one page, the oldest first."""
    return reply(WebhookList(await coordinator.database.read(read_webhooks), {"next": None}))


@router.get("/v1/webhooks/{webhook}", **described(answers={200: Webhook, 404: None}))
async def get(webhook: str, coordinator: CoordinatorDep, _: Admin) -> Response:
    id_ = _id(webhook)
    return reply(_found(await coordinator.database.read(lambda c: read_webhook(c, id_))))


@router.delete("/v1/webhooks/{webhook}", **described(answers={204: None, 404: None}))
async def delete(request: Request, webhook: str, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """With all that waits for it."""
    id_, by, now = _id(webhook), actor_of(request, caller), coordinator.clock.now()
    if not await coordinator.database.run(lambda c: delete_webhook(c, id_, by, now)):
        raise _missing()
    return Response(status_code=204)


@router.post("/v1/webhooks/{webhook}:rotate", **described(answers={200: WebhookWithSecret, 404: None}))
async def rotate(request: Request, webhook: str, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """Make a new secret, shown in this answer only. For a day deliveries are signed with both."""
    id_, by, now = _id(webhook), actor_of(request, caller), coordinator.clock.now()
    rotated = await coordinator.database.run(lambda c: rotate_secret(c, id_, by, now))
    if rotated is None:
        raise _missing()
    return _shown_once(rotated)


@router.post("/v1/webhooks/{webhook}:pause", **described(answers={200: Webhook, 404: None}))
async def pause(request: Request, webhook: str, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """What happens meanwhile waits for it."""
    id_, by, now = _id(webhook), actor_of(request, caller), coordinator.clock.now()
    return reply(_found(await coordinator.database.run(lambda c: pause_webhook(c, id_, True, by, now))))


@router.post("/v1/webhooks/{webhook}:resume", **described(answers={200: Webhook, 404: None}))
async def resume(request: Request, webhook: str, coordinator: CoordinatorDep, caller: Admin) -> Response:
    id_, by, now = _id(webhook), actor_of(request, caller), coordinator.clock.now()
    return reply(_found(await coordinator.database.run(lambda c: pause_webhook(c, id_, False, by, now))))


_DELIVERIES = {"dead": ("true: only those that are not tried again; false", FLAG), **PAGE}


@router.get(
    "/v1/webhooks/{webhook}/deliveries", **with_query(described(answers={200: DeliveryList, 404: None}), _DELIVERIES)
)
async def deliveries(request: Request, webhook: str, coordinator: CoordinatorDep, _: Admin) -> Response:
    """What it was told in the last 40 days, or is to be told yet."""
    id_, query = _id(webhook), Query(request)
    dead = query.one("dead", a_flag, default=False)
    page = query.page("deliveries", id_, dead)
    after = query.one("page_after", lambda _: UUID(page.cursor.after or str(UUID(int=0))), UUID(int=0))
    query.checked()
    _found(await coordinator.database.read(lambda c: read_webhook(c, id_)))
    rows = await coordinator.database.read(lambda c: read_deliveries(c, id_, dead, after, page.size + 1))
    return reply(DeliveryList(rows[: page.size], page.links(rows, lambda row: str(row.event))))


@router.post("/v1/webhooks/{webhook}:replay", **described(body=ReplayBody, answers={200: Replayed, 404: None}))
async def replay_(request: Request, webhook: str, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """Dead letters are told once more, under the ids that they had."""
    id_, by, now = _id(webhook), actor_of(request, caller), coordinator.clock.now()
    body = await read_body(request, ReplayBody)
    _found(await coordinator.database.read(lambda c: read_webhook(c, id_)))
    return reply(Replayed(await coordinator.database.run(lambda c: replay(c, id_, body.events, by, now))))


def _shown_once(webhook: WebhookWithSecret, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with the secret, and keep one without it for a repeated Idempotency-Key."""
    response = ResponseWithSecret(msgspec.json.encode(webhook), status, headers, media_type=JSON)
    response.stored_body = msgspec.json.encode(msgspec.structs.replace(webhook, secret=None))
    return response


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise _missing() from None


def _missing() -> Problem:
    return Problem("not-found", "there is no such webhook")


def _found(webhook: Webhook | None) -> Webhook:
    if webhook is None:
        raise _missing()
    return webhook
