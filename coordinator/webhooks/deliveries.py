"""Deliveries of events: take those that are due, record the results, and redeliver dead letters.

A coordinator takes deliveries by moving their next attempt into the future, further than an attempt lasts, and commits
before it sends anything. If it dies before it has recorded a result, the delivery is due again: an event may be
delivered twice, and is never lost.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.tenants.operations import Tenant, read_tenants_by_id
from coordinator.webhooks.rules import EventKind, is_dead, retry_delay, tenant_of
from protocol.traces.trace_context import TraceContext, parse_traceparent

TAKEN_FOR = timedelta(seconds=60)
KEPT_FOR = timedelta(days=40)  # longer than any period, in which a threshold has one event
DELETED_AT_ONCE = 1000


class DueDelivery(NamedTuple):
    event: UUID
    webhook: UUID
    url: str
    secrets: Sequence[str]
    body: bytes
    attempts: int  # this one included
    kind: str
    cause: TraceContext | None  # of the request that the event is about, if it was traced


class DeliveryResult(NamedTuple):
    """The status of a receiver's response, or why there was none."""

    status: int | None
    error: str | None = None

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class AttemptResult(StrEnum):
    DELIVERED = "delivered"
    FAILED = "failed"  # it is tried again
    DEAD = "dead"


class WebhookDelivery(msgspec.Struct, frozen=True):
    event: UUID
    kind: EventKind
    occurred_at: datetime
    attempts: int
    next_attempt_at: datetime
    delivered_at: datetime | None
    dead_at: datetime | None
    status: int | None
    error: str | None


async def take_due_deliveries(connection: Connection, now: datetime, at_most: int) -> list[DueDelivery]:
    """Take up to `at_most` due deliveries of webhooks that are not paused, each for TAKEN_FOR."""
    rows = await connection.fetch(_TAKE, now, now + TAKEN_FOR, at_most)
    data = [msgspec.json.decode(row["data"], type=dict[str, Any]) for row in rows]
    tenants = list(map(tenant_of, data))
    registered = await read_tenants_by_id(connection, {each for each in tenants if each is not None})
    return [
        _due(row, now, each, EventTenant.of(tenant, registered))
        for row, each, tenant in zip(rows, data, tenants, strict=True)
    ]


class EventTenant(msgspec.Struct, frozen=True):
    """The tenant that an event is about, with what is registered of it now."""

    id: str
    name: str | None
    external_ids: dict[str, str]

    @classmethod
    def of(cls, tenant: str | None, registered: Mapping[str, Tenant]) -> "EventTenant | None":
        if tenant is None:
            return None
        found = registered.get(tenant)
        return cls(tenant, found.name if found else None, found.external_ids if found else {})


def _due(row: asyncpg.Record, now: datetime, data: dict[str, Any], tenant: EventTenant | None) -> DueDelivery:
    previous = row["previous_secret"] if row["previous_until"] and now < row["previous_until"] else None
    body = {
        "id": row["event"],
        "kind": row["kind"],
        "installation": row["installation"],
        "occurred_at": row["occurred_at"],
        "tenant": tenant,
        "data": data,
    }
    secrets = [row["secret"], *([previous] if previous else [])]
    return DueDelivery(
        row["event"],
        row["webhook"],
        row["url"],
        secrets,
        msgspec.json.encode(body),
        row["attempts"],
        row["kind"],
        parse_traceparent(row["traceparent"]),
    )


async def record_result(
    connection: Connection, due: DueDelivery, result: DeliveryResult, jitter: float, now: datetime
) -> AttemptResult:
    """Record the result of an attempt, unless another coordinator has taken the delivery since."""
    dead = not result.is_success and is_dead(due.attempts, result.status)
    next_attempt_at = now + retry_delay(due.attempts, jitter)
    ended = now if result.is_success else None, now if dead else None
    await connection.execute(_RECORD, due.event, due.webhook, due.attempts, next_attempt_at, *ended, *result)
    if result.is_success:
        return AttemptResult.DELIVERED
    return AttemptResult.DEAD if dead else AttemptResult.FAILED


async def read_deliveries(
    connection: Connection, webhook: UUID, dead: bool, after: UUID, count: int
) -> list[WebhookDelivery]:
    """Return up to `count` deliveries of a webhook by the ids of their events, from the one after `after`."""
    rows = await connection.fetch(_LIST, webhook, dead, after, count)
    return [msgspec.convert(dict(row), WebhookDelivery) for row in rows]


async def replay(connection: Connection, webhook: UUID, events: Sequence[UUID], by: Actor, now: datetime) -> int:
    """Make dead letters due again, those of the given events or all, and return how many there were."""
    rows = await connection.fetch(_REPLAY, webhook, list(events), now)
    if rows:
        await record(connection, by, Action.WEBHOOK_REPLAYED, str(webhook), {"deliveries": len(rows)}, now)
    return len(rows)


async def delete_old_events(connection: Connection, now: datetime) -> None:
    """Delete a batch of old events, with their deliveries."""
    await connection.execute(_DELETE_OLD, now - KEPT_FOR, DELETED_AT_ONCE)


# The condition under which the delivery job has work.
DELIVERIES_DUE = (
    "EXISTS (SELECT FROM delivery WHERE next_attempt_at <= $2 AND delivered_at IS NULL AND dead_at IS NULL)"
)
_TAKE = """
WITH due AS (
    SELECT event, webhook FROM delivery JOIN webhook ON webhook.id = delivery.webhook
    WHERE next_attempt_at <= $1 AND delivered_at IS NULL AND dead_at IS NULL AND NOT paused
    ORDER BY next_attempt_at LIMIT $3 FOR UPDATE OF delivery SKIP LOCKED
), taken AS (
    UPDATE delivery SET next_attempt_at = $2, attempts = attempts + 1 FROM due
    WHERE (delivery.event, delivery.webhook) = (due.event, due.webhook) RETURNING delivery.*
)
SELECT taken.event, taken.webhook, taken.attempts, url, secret, previous_secret, previous_until, kind,
    data::text AS data, occurred_at, traceparent, (SELECT id FROM installation) AS installation
FROM taken JOIN webhook ON webhook.id = taken.webhook JOIN outbox ON outbox.id = taken.event
"""
_RECORD = """
UPDATE delivery SET next_attempt_at = $4, delivered_at = $5, dead_at = $6, status = $7, error = $8
WHERE (event, webhook, attempts) = ($1, $2, $3) AND delivered_at IS NULL AND dead_at IS NULL
"""
_LIST = """
SELECT event, kind, occurred_at, attempts, next_attempt_at, delivered_at, dead_at, status, error
FROM delivery JOIN outbox ON outbox.id = delivery.event
WHERE webhook = $1 AND (dead_at IS NOT NULL OR NOT $2) AND event > $3 ORDER BY event LIMIT $4
"""
_REPLAY = """
UPDATE delivery SET attempts = 0, next_attempt_at = $3, dead_at = NULL
WHERE webhook = $1 AND dead_at IS NOT NULL AND ($2::uuid[] = '{}' OR event = ANY ($2)) RETURNING event
"""
_DELETE_OLD = """
DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE occurred_at < $1 ORDER BY occurred_at LIMIT $2)
"""
