"""Enqueue events in the transaction of the change that they are about. Without a webhook nothing is written."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from coordinator.database.connection import Connection
from coordinator.webhooks.rules import Event
from web.traces.context import current_context


async def enqueue(connection: Connection, events: Sequence[Event], now: datetime) -> None:
    """Enqueue events for the webhooks that are registered for them. An event whose id is known is skipped."""
    if events:
        context = current_context()
        await connection.execute(
            _ENQUEUE,
            [each.id for each in events],
            [each.kind.value for each in events],
            [msgspec.json.encode(each.data).decode() for each in events],
            now,
            None if context is None else context.traceparent,
        )


_ENQUEUE = """
WITH wanted AS (
    SELECT new.*, webhook.id AS webhook
    FROM unnest($1::uuid[], $2::text[], $3::jsonb[]) AS new (id, kind, data)
    JOIN webhook ON new.kind = ANY (webhook.events)
), written AS (
    INSERT INTO outbox (id, kind, data, occurred_at, traceparent)
    SELECT DISTINCT id, kind, data, $4::timestamptz, $5::text FROM wanted
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO delivery (event, webhook, next_attempt_at) SELECT id, wanted.webhook, $4 FROM wanted JOIN written USING (id)
"""
