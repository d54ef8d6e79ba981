"""Take a tenant off its plan: from then on it is on the document's default plan."""

from coordinator.database.catalogue import advance_catalogue, lock_catalogue
from coordinator.database.connection import Connection


async def delete_subscription(connection: Connection, tenant: str) -> bool:
    """False if it was on none: nothing changes, and no agent is told."""
    await lock_catalogue(connection)
    if not await connection.fetchval("DELETE FROM subscription WHERE tenant = $1 RETURNING true", tenant):
        return False
    await advance_catalogue(connection)
    return True
