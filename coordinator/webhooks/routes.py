"""HTTP: webhooks, their deliveries and their secrets."""

from collections.abc import Mapping
from typing import Annotated
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Struct
from pydantic import Field

from coordinator.access.auth import RequireScope, actor_of
from coordinator.access.authenticate import Caller
from coordinator.access.idempotency import IdempotentRoute, ResponseWithSecret, id_for
from coordinator.http.pagination import PageLinks, PageQuery
from coordinator.http.parameters import Flag, path_id
from coordinator.state import CoordinatorDep
from coordinator.webhooks import deliveries, endpoints
from coordinator.webhooks.deliveries import WebhookDelivery
from coordinator.webhooks.endpoints import MAX_WEBHOOKS, Webhook, WebhookWithSecret
from coordinator.webhooks.rules import EventKind, canonical_url, fault_of_url
from web.bodies import JSON, reply
from web.openapi import described
from web.problems import Problem, refused
from web.strict_routes import BodyModel

router = APIRouter(tags=["webhooks"], route_class=IdempotentRoute)
Admin = Annotated[Caller, Depends(RequireScope("admin"))]

_MISSING = "There is no such webhook."
WebhookId = Annotated[
    UUID, Path(description="The id of a webhook.", examples=["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]), path_id(_MISSING)
]


class WebhookBody(BodyModel):
    url: Annotated[
        str,
        Field(
            min_length=1,
            max_length=2048,
            description="Where events are sent: https, or http to this machine.",
            examples=["https://finance.example.com/leasehold"],
        ),
    ]
    events: Annotated[
        list[Annotated[EventKind, Field(strict=False)]],
        Field(min_length=1, max_length=100, description="Which events are sent.", examples=[["period.closed"]]),
    ]


class ReplayBody(BodyModel):
    events: Annotated[
        list[Annotated[UUID, Field(strict=False)]],
        Field(
            default_factory=list,
            max_length=1000,
            description="Only these events. Without any, all dead letters.",
            examples=[["3f2b7c52-52f5-4f3e-8a6c-0d9f5a1f7f10"]],
        ),
    ]


class Replayed(Struct, frozen=True):
    """The number of deliveries that are due again."""

    deliveries: int


class WebhookList(Struct, frozen=True):
    """All webhooks, oldest first."""

    data: list[Webhook]
    page: PageLinks


class DeliveryList(Struct, frozen=True):
    """Deliveries by the ids of their events."""

    data: list[WebhookDelivery]
    page: PageLinks


class DeliveryQuery(PageQuery):
    dead: Annotated[Flag, Field(description="Only dead letters.", examples=[True])] = False


@router.post("/v1/webhooks", **described(answers={201: WebhookWithSecret, 409: None}, headers={201: ["Location"]}))
async def create_webhook(request: Request, coordinator: CoordinatorDep, caller: Admin, body: WebhookBody) -> Response:
    """Register a URL for events.

    Only this response shows the secret that signs the deliveries: when it is repeated for the same `Idempotency-Key`,
    the secret is null.
    """
    by, now = actor_of(request, caller), coordinator.clock.now()
    url = canonical_url(body.url)
    if fault := fault_of_url(url):
        raise refused("url", "format", fault)
    id_ = id_for(request, caller)
    made = await coordinator.database.run(lambda c: endpoints.add_webhook(c, id_, url, body.events, by, now))
    if made is None:
        raise Problem("full", f"There are {MAX_WEBHOOKS} webhooks, which is the maximum. Delete some.")
    return _with_secret(made, 201, {"Location": f"/v1/webhooks/{made.id}"})


@router.get("/v1/webhooks", **described(answers={200: WebhookList}))
async def list_webhooks(coordinator: CoordinatorDep, _: Admin) -> Response:
    """Return all webhooks in one page, oldest first."""
    return reply(WebhookList(await coordinator.database.read(endpoints.read_webhooks), PageLinks(None)))


@router.get("/v1/webhooks/{webhook}", **described(answers={200: Webhook, 404: None}))
async def get_webhook(webhook: WebhookId, coordinator: CoordinatorDep, _: Admin) -> Response:
    """Return one webhook, and how many of its deliveries are waiting or dead."""
    return reply(_found(await coordinator.database.read(lambda c: endpoints.read_webhook(c, webhook))))


@router.delete("/v1/webhooks/{webhook}", **described(answers={204: None, 404: None}))
async def delete_webhook(request: Request, webhook: WebhookId, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """Delete a webhook with its waiting deliveries."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    if not await coordinator.database.run(lambda c: endpoints.delete_webhook(c, webhook, by, now)):
        raise Problem("not-found", _MISSING)
    return Response(status_code=204)


@router.post("/v1/webhooks/{webhook}:rotate", **described(answers={200: WebhookWithSecret, 404: None}))
async def rotate_webhook_secret(
    request: Request, webhook: WebhookId, coordinator: CoordinatorDep, caller: Admin
) -> Response:
    """Make a new secret, which only this response shows. For 24 hours deliveries are signed with both secrets."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    rotated = await coordinator.database.run(lambda c: endpoints.rotate_secret(c, webhook, by, now))
    if rotated is None:
        raise Problem("not-found", _MISSING)
    return _with_secret(rotated)


@router.post("/v1/webhooks/{webhook}:pause", **described(answers={200: Webhook, 404: None}))
async def pause_webhook(request: Request, webhook: WebhookId, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """Pause the deliveries of a webhook. Events wait until it is resumed."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    return reply(_found(await coordinator.database.run(lambda c: endpoints.pause_webhook(c, webhook, True, by, now))))


@router.post("/v1/webhooks/{webhook}:resume", **described(answers={200: Webhook, 404: None}))
async def resume_webhook(request: Request, webhook: WebhookId, coordinator: CoordinatorDep, caller: Admin) -> Response:
    """Resume the deliveries of a paused webhook."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    return reply(_found(await coordinator.database.run(lambda c: endpoints.pause_webhook(c, webhook, False, by, now))))


@router.get("/v1/webhooks/{webhook}/deliveries", **described(answers={200: DeliveryList, 404: None}))
async def list_webhook_deliveries(
    webhook: WebhookId, coordinator: CoordinatorDep, _: Admin, query: Annotated[DeliveryQuery, Query()]
) -> Response:
    """Return the deliveries of the last 40 days, and those that are waiting."""
    page = query.page(webhook)
    after = page.after(UUID) or UUID(int=0)
    _found(await coordinator.database.read(lambda c: endpoints.read_webhook(c, webhook)))
    rows = await coordinator.database.read(
        lambda c: deliveries.read_deliveries(c, webhook, query.dead, after, page.size + 1)
    )
    return reply(DeliveryList(rows[: page.size], page.links(rows, lambda row: row.event)))


@router.post("/v1/webhooks/{webhook}:replay", **described(answers={200: Replayed, 404: None}))
async def replay_webhook_deliveries(
    request: Request, webhook: WebhookId, coordinator: CoordinatorDep, caller: Admin, body: ReplayBody
) -> Response:
    """Redeliver dead letters, with the ids that they had."""
    by, now = actor_of(request, caller), coordinator.clock.now()
    _found(await coordinator.database.read(lambda c: endpoints.read_webhook(c, webhook)))
    return reply(
        Replayed(await coordinator.database.run(lambda c: deliveries.replay(c, webhook, body.events, by, now)))
    )


def _with_secret(webhook: WebhookWithSecret, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with the secret, and store a response without it for a repeated Idempotency-Key."""
    response = ResponseWithSecret(msgspec.json.encode(webhook), status, headers, media_type=JSON)
    response.stored_body = msgspec.json.encode(msgspec.structs.replace(webhook, secret=None))
    return response


def _found(webhook: Webhook | None) -> Webhook:
    if webhook is None:
        raise Problem("not-found", _MISSING)
    return webhook
