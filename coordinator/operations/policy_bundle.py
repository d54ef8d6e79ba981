"""What one region's agents need to decide, read at one version.

Four questions are asked, so the caller hands a connection whose transaction is REPEATABLE READ, or takes what
READ COMMITTED gives: a bundle whose version is older than its contents, never newer. For `version` is read first,
an agent that polls with it hears of whatever it already got once more, and misses nothing.
"""

import msgspec

from coordinator.database.connection import Connection
from protocol.policy import LimitsDocument, PolicyBundle


async def policy_bundle(connection: Connection, region: str) -> PolicyBundle:
    """A region that is not active has no part in any rate: its weight is 0."""
    version: int = await connection.fetchval("SELECT version FROM policy_version")
    weight, total = await connection.fetchrow(_WEIGHTS, region) or (0, 0)
    return PolicyBundle(
        version=version,
        document=await current_document(connection),
        subscriptions={row["tenant"]: row["plan"] for row in await connection.fetch(_SUBSCRIPTIONS)},
        weight=weight,
        total_weight=max(total, 1),
    )


async def current_document(connection: Connection) -> LimitsDocument:
    """The document in force; an empty one, which limits nothing, before the first was applied."""
    text = await connection.fetchval(_DOCUMENT)
    return LimitsDocument() if text is None else msgspec.json.decode(text, type=LimitsDocument)


_WEIGHTS = """
SELECT coalesce(sum(weight) FILTER (WHERE name = $1), 0)::bigint, coalesce(sum(weight), 0)::bigint
FROM region WHERE status = 'active'
"""
_SUBSCRIPTIONS = "SELECT tenant, plan FROM subscription ORDER BY tenant"
_DOCUMENT = "SELECT document::text FROM limits_version ORDER BY version DESC LIMIT 1"
