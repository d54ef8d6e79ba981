"""Read the resets that regions may still have to catch up with."""

from datetime import datetime

import msgspec
from msgspec import Struct

from coordinator.access.token_names import TokenName, with_token_names
from coordinator.database.connection import Connection
from protocol.messages import MAX_RESETS, ResetKeys, ResetNumber


class Reset(ResetKeys, frozen=True, kw_only=True):
    quota: str
    subject: dict[str, str]
    reason: str
    created_at: datetime
    created_by: str  # the id of the token
    created_by_name: TokenName = msgspec.UNSET


class ResetList(Struct, frozen=True, kw_only=True):
    """Resets of the last seven days, the oldest first; `version` is the number to ask from next."""

    version: ResetNumber
    data: list[Reset]


async def read_resets(connection: Connection, since: int) -> ResetList:
    """Return the first resets after a number. The version of the last page is the highest number that there is."""
    rows = await connection.fetch(_AFTER, since, MAX_RESETS)
    found = [Reset(**{**row, "subject": msgspec.json.decode(row["subject"])}) for row in rows]
    if len(found) == MAX_RESETS:
        version = found[-1].number
    else:
        version = await connection.fetchval("SELECT coalesce(max(number), 0) FROM reset")
    return ResetList(version=version, data=await with_token_names(connection, found))


_AFTER = """
SELECT number, keys, quota, subject::text AS subject, reason, created_at, created_by FROM reset
WHERE number > $1 ORDER BY number LIMIT $2
"""
