"""Read overrides: other limits for some of a quota's keys, for a time."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import msgspec
from msgspec import Struct

from coordinator.access.token_names import TokenName, with_token_names
from coordinator.database.connection import Connection
from protocol.limits.document import LimitValue


class Override(Struct, frozen=True):
    id: UUID
    quota: str
    subject: dict[str, str]  # every key with these values; without any, all keys of the quota
    limit: LimitValue
    valid_from: datetime
    valid_until: datetime | None
    reason: str
    created_at: datetime
    created_by: str  # the id of the token
    created_by_name: TokenName = msgspec.UNSET


class OverrideName(NamedTuple):
    """The place of an override in a list."""

    key: str = ""
    id: UUID = UUID(int=0)


class KeyedOverride(NamedTuple):
    key: str
    override: Override


async def read_override(connection: Connection, id_: UUID) -> Override | None:
    row = await connection.fetchrow(f"{_OVERRIDES} WHERE id = $1", id_)
    return (await with_token_names(connection, [_override(row)]))[0] if row else None


async def read_overrides(
    connection: Connection, quotas: Sequence[str], since: datetime | None, after: OverrideName, count: int
) -> list[KeyedOverride]:
    """Return up to `count` overrides of these quotas, or of all. With `since`, leave out those that ended before."""
    rows = await connection.fetch(_SOME, list(quotas) or None, since, after.key, after.id, count)
    named = await with_token_names(connection, [_override(row) for row in rows])
    return [KeyedOverride(row["key"], override) for row, override in zip(rows, named, strict=True)]


def _override(row: asyncpg.Record) -> Override:
    decoded: dict[str, Any] = {name: msgspec.json.decode(row[name]) for name in ("subject", "limit")}
    plain = {name: value for name, value in row.items() if name in Override.__struct_fields__ and name not in decoded}
    return Override(**plain, **decoded)


_OVERRIDES = """
SELECT key, id, quota, subject::text, value::text AS limit, valid_from, valid_until, reason, created_at, created_by
FROM limit_override
"""
_SOME = f"""{_OVERRIDES}
WHERE ($1::text[] IS NULL OR quota = ANY ($1)) AND ($2::timestamptz IS NULL OR valid_until IS NULL OR valid_until > $2)
    AND (key, id) > ($3::text, $4::uuid)
ORDER BY key, id LIMIT $5
"""
