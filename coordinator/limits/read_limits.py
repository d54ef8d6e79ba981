"""Read the limits document in force."""

from datetime import datetime
from typing import NamedTuple

import msgspec

from coordinator.database.connection import Connection
from protocol.limits.document import LimitsDocument


class AppliedLimits(NamedTuple):
    """A document with the catalogue version that applied it; before the first one, an empty document at version 0."""

    version: int = 0
    document: LimitsDocument = LimitsDocument()
    applied_at: datetime | None = None
    applied_by: str | None = None


async def read_limits(connection: Connection) -> AppliedLimits:
    row = await connection.fetchrow(_NEWEST)
    if row is None:
        return AppliedLimits()
    document = msgspec.json.decode(row["document"], type=LimitsDocument)
    return AppliedLimits(row["version"], document, row["applied_at"], row["applied_by"])


_NEWEST = """
SELECT version, document::text AS document, applied_at, applied_by FROM limits_version ORDER BY version DESC LIMIT 1
"""
