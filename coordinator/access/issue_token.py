"""Issue a token. It is shown once: the database keeps only its hash."""

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple
from uuid import UUID, uuid4

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action
from coordinator.access.rules.scopes import is_scope
from coordinator.database.connection import Connection
from web.tokens import new_token, token_hash


class IssuedToken(NamedTuple):
    id: UUID
    token: str


async def issue_token(
    connection: Connection, scopes: Collection[str], note: str, now: datetime, token: str | None = None
) -> IssuedToken:
    """Issue a new token, or the given one. Issuing a token again with the same scopes returns the same id.

    Raises ValueError, whose sentence says what is wrong, for unknown scopes and for a token that was revoked.
    """
    wanted = _checked(scopes)
    shown = token or new_token()
    async with connection.transaction():
        issued = await connection.fetchrow(_INSERT, uuid4(), token_hash(shown), wanted, note, now)
        if issued is None:
            raise ValueError("this token was issued before with other scopes, or was revoked; issue a new one")
        if issued["is_new"] or issued["is_renamed"]:
            details = {"scopes": wanted, "note": note}
            await record(connection, None, Action.TOKEN_ISSUED, str(issued["id"]), details, now)
    return IssuedToken(issued["id"], shown)


def _checked(scopes: Collection[str]) -> list[str]:
    if not scopes:
        raise ValueError("a token needs at least one scope")
    for scope in scopes:
        if not is_scope(scope):
            raise ValueError(f"{scope!r} is not a scope")
    return sorted(set(scopes))


# A revoked token stays revoked, and no token gains scopes by being issued again.
_INSERT = """
WITH known AS (SELECT note FROM token WHERE hash = $2)
INSERT INTO token (id, hash, scopes, note, created_at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (hash) DO UPDATE SET note = excluded.note
    WHERE token.revoked_at IS NULL AND token.scopes = excluded.scopes
RETURNING id, xmax = 0 AS is_new, (SELECT note FROM known) IS DISTINCT FROM $4 AS is_renamed
"""
