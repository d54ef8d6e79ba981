"""Look tokens up. Every request does so, or its transaction confirms the token, so a revoked one is refused at once."""

from collections.abc import Collection
from typing import NamedTuple
from uuid import UUID

from coordinator.access.rules.scopes import allows, region_of
from coordinator.database.connection import Connection


class Caller(NamedTuple):
    token_id: UUID
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        return allows(self.scopes, scope)

    @property
    def region(self) -> str | None:
        return region_of(self.scopes)


async def authenticate(connection: Connection, token_hashes: Collection[bytes]) -> dict[bytes, Caller]:
    """Return the callers of these token hashes, without unknown and revoked ones."""
    rows = await connection.fetch(_TOKENS, token_hashes)
    return {row["hash"]: Caller(row["id"], frozenset(row["scopes"])) for row in rows}


_TOKENS = "SELECT hash, id, scopes FROM token WHERE hash = ANY ($1::bytea[]) AND revoked_at IS NULL"
