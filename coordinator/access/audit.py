"""Write the audit: each action of people, in the transaction in which it is done."""

from collections.abc import Iterable, Mapping
from datetime import datetime

import msgspec

from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection


async def record(
    connection: Connection, by: Actor | None, action: Action, object_: str, details: Mapping[str, object], now: datetime
) -> None:
    """Write an entry. Without an actor it names the user of the database session."""
    await record_all(connection, by, action, [(object_, details)], now)


async def record_all(
    connection: Connection,
    by: Actor | None,
    action: Action,
    objects: Iterable[tuple[str, Mapping[str, object]]],
    now: datetime,
) -> None:
    """Write an entry for each object, with its details."""
    name, request_id = by or (None, None)
    rows = [
        (now, name, action.value, object_, request_id, msgspec.json.encode(details).decode())
        for object_, details in objects
    ]
    await connection.executemany(_INSERT, rows)


_INSERT = """
INSERT INTO audit (recorded_at, actor, action, object, request_id, details)
VALUES ($1, coalesce($2, 'database:' || session_user), $3, $4, $5, $6::jsonb)
"""
