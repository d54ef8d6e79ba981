"""Who did what, the newest first."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from coordinator.database.connection import Connection


class AuditEntry(Struct, frozen=True):
    id: int
    recorded_at: datetime
    actor: str  # the id of a token, or `database:` and the user who worked on the database itself
    action: str
    object: str
    request_id: str | None
    details: dict[str, Any]


class AuditQuestion(NamedTuple):
    """Where nothing is asked for, everything is meant. Half-open in time."""

    actors: Sequence[str]
    actions: Sequence[str]
    objects: Sequence[str]
    start: datetime | None
    end: datetime | None


async def read_audit(
    connection: Connection, question: AuditQuestion, before: int | None, count: int
) -> list[AuditEntry]:
    """At most so many, that were written before the given one."""
    asked = (values or None for values in question[:3])
    rows = await connection.fetch(_DEEDS, *asked, question.start, question.end, before, count)
    return [AuditEntry(**{**row, "details": msgspec.json.decode(row["details"])}) for row in rows]


_DEEDS = """
SELECT id, recorded_at, actor, action, object, request_id, details::text AS details FROM audit
WHERE ($1::text[] IS NULL OR actor = ANY ($1)) AND ($2::text[] IS NULL OR action = ANY ($2))
    AND ($3::text[] IS NULL OR object = ANY ($3))
    AND ($4::timestamptz IS NULL OR recorded_at >= $4) AND ($5::timestamptz IS NULL OR recorded_at < $5)
    AND ($6::bigint IS NULL OR id < $6)
ORDER BY id DESC LIMIT $7
"""
