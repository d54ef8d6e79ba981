"""Revoke a token. Every coordinator refuses the next request that carries it: each reads the row again."""

from datetime import datetime
from uuid import UUID

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action
from coordinator.database.connection import Connection


async def revoke_token(connection: Connection, token_id: UUID, now: datetime) -> bool:
    """Revoke a token, and return whether it exists. Revoking it again changes nothing, not even the time."""
    async with connection.transaction():
        if await connection.fetchval(_REVOKE, token_id, now):
            await record(connection, None, Action.TOKEN_REVOKED, str(token_id), {}, now)
            return True
    return bool(await connection.fetchval("SELECT true FROM token WHERE id = $1", token_id))


_REVOKE = "UPDATE token SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL RETURNING true"
