"""Events, written in the transaction of what they tell. Where nobody listens nothing is written."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from coordinator.database.connection import Connection
from coordinator.webhooks.rules import Event


async def tell(connection: Connection, events: Sequence[Event], now: datetime) -> None:
    """What was told before, by its id, is not told again."""
    if events:
        await connection.execute(
            _TELL,
            [each.id for each in events],
            [each.kind.value for each in events],
            [msgspec.json.encode(each.data).decode() for each in events],
            now,
        )


_TELL = """
WITH heard AS (
    SELECT told.*, webhook.id AS webhook
    FROM unnest($1::uuid[], $2::text[], $3::jsonb[]) AS told (id, kind, data)
    JOIN webhook ON told.kind = ANY (webhook.events)
), written AS (
    INSERT INTO outbox (id, kind, data, occurred_at) SELECT DISTINCT id, kind, data, $4::timestamptz FROM heard
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO delivery (event, webhook, next_attempt_at) SELECT id, heard.webhook, $4 FROM heard JOIN written USING (id)
"""
