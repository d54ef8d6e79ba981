"""Look callers up. Every request does so, or its transaction confirms them, so a revoked token is refused at once.

A caller is known by the hash of a token, or, if it is a region, by a name in its client certificate.
"""

from collections.abc import Collection
from typing import NamedTuple, TypeAlias
from uuid import UUID, uuid5

from coordinator.access.rules.scopes import allows, region_of
from coordinator.database.connection import Connection

Credential: TypeAlias = bytes | str  # the hash of a token, or a name in a verified client certificate
NAMESPACE = UUID("0e7b1d1c-90d5-4f0f-8b53-3c1b7a6f2a44")  # of the ids of identities of regions; never changes


class Caller(NamedTuple):
    token_id: UUID
    scopes: frozenset[str]
    identity: str | None = None  # the name in the certificate, if it has shown no token

    def may(self, scope: str) -> bool:
        return allows(self.scopes, scope)

    @property
    def region(self) -> str | None:
        return region_of(self.scopes)


async def authenticate(connection: Connection, credentials: Collection[Credential]) -> dict[Credential, Caller]:
    """Return the callers with these credentials, without unknown and revoked ones."""
    tokens = [each for each in credentials if isinstance(each, bytes)]
    names = [each for each in credentials if isinstance(each, str)]
    return {
        row["hash"] or row["identity"]: Caller(
            row["id"] or uuid5(NAMESPACE, row["identity"]), frozenset(row["scopes"]), row["identity"]
        )
        for row in await connection.fetch(_CALLERS, tokens, names)
    }


_CALLERS = """
SELECT hash, NULL AS identity, id, scopes FROM token WHERE hash = ANY ($1::bytea[]) AND revoked_at IS NULL
UNION ALL
SELECT NULL, identity, NULL, ARRAY['region:' || region] FROM region_identity WHERE identity = ANY ($2::text[])
"""
