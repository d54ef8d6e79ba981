"""Find the callers of JWTs: people and jobs that a company's issuer names.

A caller has an id that follows from issuer and subject, in place of a token's. All JWTs of one subject are one person,
so a second JWT does not approve what the first one proposed.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime
from uuid import UUID, uuid5

from coordinator.access.audit import record
from coordinator.access.authenticate import Caller
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from web.credentials.jwt_claims import JwtIdentity
from web.credentials.verify_jwt import JwtVerifier

NAMESPACE = UUID("6d0b2f0e-6a53-4b41-9a53-0f6c4e1c7b52")  # of the ids of all identities; never changes
REMEMBERED = 4_096  # identities

Note = Callable[[UUID, JwtIdentity], Awaitable[None]]


def identity_id(issuer: str, subject: str) -> UUID:
    """Return the id of a subject of an issuer. No other pair of texts gives the same input."""
    return uuid5(NAMESPACE, f"{len(issuer)}:{issuer}{subject}")


class JwtCallers:
    """Verifies JWTs, and sees to it that the database has the issuer, subject and name of each caller."""

    def __init__(self, verifier: JwtVerifier, note: Note) -> None:
        self._verifier = verifier
        self._note = note
        self._noted: dict[UUID, str] = {}  # names; the one that was noted longest ago is the first

    async def find(self, token: str) -> Caller:
        """Return the caller with a JWT. Raise a Problem if it is refused."""
        identity = await self._verifier.verify(token)
        id_ = identity_id(identity.issuer, identity.subject)
        if id_ not in self._noted or identity.name not in ("", self._noted[id_]):
            await self._note(id_, identity)
            self._remember(id_, identity.name)
        return Caller(id_, identity.scopes)

    def _remember(self, id_: UUID, name: str) -> None:
        self._noted[id_] = name
        while len(self._noted) > REMEMBERED:
            del self._noted[next(iter(self._noted))]


async def note_identity(connection: Connection, id_: UUID, identity: JwtIdentity, now: datetime) -> None:
    """Write who has an id, and record it in the audit, unless this is known."""
    issuer, subject, name = identity.issuer, identity.subject, identity.name
    if await connection.fetchval(_WRITE, id_, issuer, subject, name, now):
        details = {"issuer": issuer, "subject": subject, "name": name}
        await record(connection, Actor(str(id_)), Action.IDENTITY_SEEN, str(id_), details, now)


_WRITE = """
INSERT INTO identity (id, issuer, subject, name, first_seen_at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (id) DO UPDATE SET name = excluded.name WHERE identity.name <> excluded.name AND excluded.name <> ''
RETURNING true
"""
