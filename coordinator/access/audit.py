"""Write the audit: each action of people, in the transaction in which it is done."""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection


async def record(
    connection: Connection, by: Actor | None, action: Action, object_: str, details: Mapping[str, object], now: datetime
) -> None:
    """Write an entry. Without an actor it names the user of the database session."""
    name, request_id = by or (None, None)
    written = msgspec.json.encode(details).decode()
    await connection.execute(_INSERT, now, name, action.value, object_, request_id, written)


_INSERT = """
INSERT INTO audit (recorded_at, actor, action, object, request_id, details)
VALUES ($1, coalesce($2, 'database:' || session_user), $3, $4, $5, $6::jsonb)
"""
