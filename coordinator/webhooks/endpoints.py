"""Register webhooks, and rotate, pause and delete them."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.access.token_names import TokenName, with_token_names
from coordinator.database.connection import Connection
from coordinator.webhooks.rules import ROTATES_FOR, EventKind, new_secret

MAX_WEBHOOKS = 100


class Webhook(msgspec.Struct, frozen=True):
    id: UUID
    url: str
    events: list[EventKind]
    paused: bool
    created_at: datetime
    created_by: str
    waiting: int = 0  # deliveries that are due, or will be tried again
    dead: int = 0  # deliveries that are tried again only if they are replayed
    created_by_name: TokenName = msgspec.UNSET


class WebhookWithSecret(Webhook, frozen=True, kw_only=True):
    secret: str | None  # null in a repeated response: it is shown once


async def add_webhook(
    connection: Connection, id_: UUID, url: str, events: Sequence[EventKind], by: Actor, now: datetime
) -> WebhookWithSecret | None:
    """Register a webhook, or return the one of this id. Return None if the maximum number is reached."""
    if await connection.fetchval("SELECT count(*) FROM webhook WHERE id <> $1", id_) >= MAX_WEBHOOKS:
        return None
    kinds = [each.value for each in dict.fromkeys(events)]
    row = await connection.fetchrow(_ADD, id_, url, kinds, new_secret(), now, by.name)
    if row is not None:
        await record(connection, by, Action.WEBHOOK_ADDED, str(id_), {"url": url, "events": kinds}, now)
    return await _with_secret(connection, row or await connection.fetchrow("SELECT * FROM webhook WHERE id = $1", id_))


async def read_webhooks(connection: Connection) -> list[Webhook]:
    rows = await connection.fetch(f"{_READ} ORDER BY created_at, id")
    return await with_token_names(connection, [msgspec.convert(dict(row), Webhook) for row in rows])


async def read_webhook(connection: Connection, id_: UUID) -> Webhook | None:
    row = await connection.fetchrow(f"{_READ} WHERE id = $1", id_)
    return (await with_token_names(connection, [msgspec.convert(dict(row), Webhook)]))[0] if row else None


async def rotate_secret(connection: Connection, id_: UUID, by: Actor, now: datetime) -> WebhookWithSecret | None:
    """Make a new secret. For ROTATES_FOR both secrets sign."""
    row = await connection.fetchrow(_ROTATE, id_, new_secret(), now + ROTATES_FOR)
    if row is None:
        return None
    await record(connection, by, Action.WEBHOOK_ROTATED, str(id_), {}, now)
    return await _with_secret(connection, row)


async def pause_webhook(connection: Connection, id_: UUID, paused: bool, by: Actor, now: datetime) -> Webhook | None:
    """Pause or resume deliveries. Events of the time between wait."""
    if await connection.fetchval(_PAUSE, id_, paused):
        await record(connection, by, Action.WEBHOOK_PAUSED, str(id_), {"paused": paused}, now)
    return await read_webhook(connection, id_)


async def delete_webhook(connection: Connection, id_: UUID, by: Actor, now: datetime) -> bool:
    """Delete a webhook with its deliveries, and return whether there was one."""
    url = await connection.fetchval("DELETE FROM webhook WHERE id = $1 RETURNING url", id_)
    if url is not None:
        await record(connection, by, Action.WEBHOOK_DELETED, str(id_), {"url": url}, now)
    return url is not None


async def _with_secret(connection: Connection, row: asyncpg.Record | None) -> WebhookWithSecret:
    assert row is not None
    return (await with_token_names(connection, [msgspec.convert(dict(row), WebhookWithSecret)]))[0]


_ADD = """
INSERT INTO webhook (id, url, events, secret, created_at, created_by) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT DO NOTHING RETURNING *
"""
_READ = """
SELECT id, url, events, paused, created_at, created_by,
    (SELECT count(*) FROM delivery WHERE delivery.webhook = webhook.id
        AND delivered_at IS NULL AND dead_at IS NULL) AS waiting,
    (SELECT count(*) FROM delivery WHERE delivery.webhook = webhook.id AND dead_at IS NOT NULL) AS dead
FROM webhook
"""
_ROTATE = """
UPDATE webhook SET previous_secret = secret, previous_until = $3, secret = $2 WHERE id = $1 RETURNING *
"""
_PAUSE = "UPDATE webhook SET paused = $2 WHERE id = $1 AND paused <> $2 RETURNING true"
