"""List tokens. Their texts are known only to their holders."""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from coordinator.database.connection import Connection


class KnownToken(NamedTuple):
    id: UUID
    scopes: list[str]
    note: str
    created_at: datetime
    revoked_at: datetime | None


async def list_tokens(connection: Connection) -> list[KnownToken]:
    """Return every token that was ever issued, oldest first."""
    return [KnownToken(*row.values()) for row in await connection.fetch(_ALL)]


_ALL = "SELECT id, scopes, note, created_at, revoked_at FROM token ORDER BY created_at, id"
