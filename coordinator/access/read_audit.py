"""Read the audit: who did what to what."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, UnsetType
from sqlalchemy import BigInteger, Text, any_, cast, select
from sqlalchemy.dialects.postgresql import ARRAY

from coordinator.access.token_names import TokenName, with_names_beside, with_token_names
from coordinator.database.compiled import CompiledStatement, compiled, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import Timestamp, audit


class AuditEntry(Struct, frozen=True):
    id: int
    recorded_at: datetime
    actor: str  # the id of a token or of a JWT's caller, or `database:` and the user who worked on the database itself
    action: str
    object: str
    request_id: str | None
    details: dict[str, Any]
    actor_name: TokenName = msgspec.UNSET
    actor_issuer: str | UnsetType = msgspec.UNSET  # of a JWT's caller
    actor_subject: str | UnsetType = msgspec.UNSET


class AuditFilter(NamedTuple):
    """Which entries are wanted; without a condition all of them. `end` is exclusive."""

    actors: Sequence[str]
    actions: Sequence[str]
    objects: Sequence[str]
    start: datetime | None
    end: datetime | None


async def read_audit(connection: Connection, question: AuditFilter, before: int | None, count: int) -> list[AuditEntry]:
    """Return at most `count` entries that were written before the given one, newest first."""
    conditions = question._asdict() | {"before": before}
    given = {name: value for name, value in conditions.items() if value is not None and value != ()}
    rows = await connection.fetch(*_entries(tuple(given)).with_values(count=count, **given))
    details = await with_names_beside(connection, [msgspec.json.decode(row["details"]) for row in rows])
    people = {row["id"]: dict(row) for row in await connection.fetch(_PEOPLE, [row["actor"] for row in rows])}
    entries = [
        AuditEntry(**{**row, "details": each}, **_identity_of(people.get(row["actor"])))
        for row, each in zip(rows, details, strict=True)
    ]
    return await with_token_names(connection, entries)


def _identity_of(person: Mapping[str, str] | None) -> dict[str, Any]:
    return {} if person is None else {"actor_issuer": person["issuer"], "actor_subject": person["subject"]}


_PEOPLE = "SELECT id::text AS id, issuer, subject FROM identity WHERE id::text = ANY ($1::text[])"

_CONDITIONS = {
    "actors": audit.c.actor == any_(parameter("actors", ARRAY(Text))),
    "actions": audit.c.action == any_(parameter("actions", ARRAY(Text))),
    "objects": audit.c.object == any_(parameter("objects", ARRAY(Text))),
    "start": audit.c.recorded_at >= parameter("start", Timestamp),
    "end": audit.c.recorded_at < parameter("end", Timestamp),
    "before": audit.c.id < parameter("before", BigInteger),
}


@lru_cache(maxsize=64)
def _entries(conditions: tuple[str, ...]) -> CompiledStatement:
    plain = (audit.c[name] for name in ("id", "recorded_at", "actor", "action", "object", "request_id"))
    entries = select(*plain, cast(audit.c.details, Text).label("details"))
    wanted = entries.where(*(_CONDITIONS[name] for name in conditions))
    return compiled(wanted.order_by(audit.c.id.desc()).limit(parameter("count", BigInteger)))
