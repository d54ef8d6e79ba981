"""What one region's agents need to decide, read at one version.

Several questions are asked, the version first. So even where each sees a later moment (READ COMMITTED), a bundle's
contents are never older than its version: an agent that goes on from that version may hear a change twice, and misses
none.
"""

from coordinator.database.connection import Connection
from coordinator.operations.read_limits import read_limits
from protocol.policy import PolicyBundle


async def policy_bundle(connection: Connection, region: str) -> PolicyBundle:
    """A region that is not active has no part in any rate: its weight is 0."""
    version: int = await connection.fetchval("SELECT version FROM policy_version")
    weight, total = await connection.fetchrow(_WEIGHTS, region) or (0, 0)
    return PolicyBundle(
        version=version,
        document=(await read_limits(connection)).document,
        subscriptions={row["tenant"]: row["plan"] for row in await connection.fetch(_SUBSCRIPTIONS)},
        weight=weight,
        total_weight=max(total, 1),
    )


_WEIGHTS = """
SELECT coalesce(sum(weight) FILTER (WHERE name = $1), 0)::bigint, coalesce(sum(weight), 0)::bigint
FROM region WHERE status = 'active'
"""
_SUBSCRIPTIONS = "SELECT tenant, plan FROM subscription ORDER BY tenant"
