"""Read the limits document in force."""

from datetime import datetime
from typing import NamedTuple

import msgspec

from coordinator.database.connection import Connection
from coordinator.outages import LimitsNotReadable
from protocol.compatibility.releases import GUIDE, RELEASE
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
    document = stored_document(row["document"], row["version"])
    return AppliedLimits(row["version"], document, row["applied_at"], row["applied_by"])


async def read_version(connection: Connection, version: int) -> LimitsDocument | None:
    text = await connection.fetchval("SELECT document::text FROM limits_version WHERE version = $1", version)
    return None if text is None else stored_document(text, version)


def stored_document(text: str | bytes, version: int) -> LimitsDocument:
    """Decode a stored document. A release that cannot read it must not decide anything: raises LimitsNotReadable."""
    try:
        return msgspec.json.decode(text, type=LimitsDocument)
    except msgspec.ValidationError as error:
        raise LimitsNotReadable(
            f"version {version} of the limits document was applied by a newer release than this coordinator's "
            f"({RELEASE}): {error}. Before going back, apply a document that both releases know ({GUIDE})"
        ) from None


_NEWEST = """
SELECT version, document::text AS document, applied_at, applied_by FROM limits_version ORDER BY version DESC LIMIT 1
"""
