"""Who carries this token? Asked for every request, so that a revoked token is refused at once."""

from typing import NamedTuple
from uuid import UUID

from coordinator.database.connection import Connection
from coordinator.domain.scopes import allows, region_of


class Caller(NamedTuple):
    token_id: UUID
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        return allows(self.scopes, scope)

    @property
    def region(self) -> str | None:
        return region_of(self.scopes)


async def authenticate(connection: Connection, token_hash: bytes) -> Caller | None:
    """None for a token that was never issued, and for one that was revoked."""
    row = await connection.fetchrow(_TOKEN, token_hash)
    return Caller(row["id"], frozenset(row["scopes"])) if row else None


_TOKEN = "SELECT id, scopes FROM token WHERE hash = $1 AND revoked_at IS NULL"  # noqa: S105 - a statement, no secret
