"""Take a tenant off its plan: from then on it is on the document's default plan."""

from datetime import datetime

from coordinator.database.audit import record
from coordinator.database.catalogue import advance_catalogue, lock_catalogue
from coordinator.database.connection import Connection
from coordinator.domain.audit import Action, Actor


async def delete_subscription(connection: Connection, tenant: str, by: Actor | None, now: datetime) -> bool:
    """False if it was on none: nothing changes, and no agent is told."""
    await lock_catalogue(connection)
    plan = await connection.fetchval("DELETE FROM subscription WHERE tenant = $1 RETURNING plan", tenant)
    if plan is None:
        return False
    await advance_catalogue(connection)
    await record(connection, by, Action.SUBSCRIPTION_DELETED, tenant, {"was": plan}, now)
    return True
