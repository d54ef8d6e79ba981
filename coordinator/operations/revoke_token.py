"""Revoke a token. The next request that carries it is refused: nothing caches tokens."""

from datetime import datetime
from uuid import UUID

from coordinator.database.connection import Connection


async def revoke_token(connection: Connection, token_id: UUID, now: datetime) -> bool:
    """True if there is such a token; revoking it again changes nothing, not even the time."""
    return bool(await connection.fetchval(_REVOKE, token_id, now))


_REVOKE = "UPDATE token SET revoked_at = coalesce(revoked_at, $2) WHERE id = $1 RETURNING true"
