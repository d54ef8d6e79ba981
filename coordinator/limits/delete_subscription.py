"""Take a tenant off its plan: from then on it is on the document's default plan."""

from datetime import datetime

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.limits.change_limits import change_limits
from coordinator.limits.in_force import Documents
from coordinator.limits.version import advance_catalogue, lock_catalogue


async def delete_subscription(
    connection: Connection, documents: Documents, tenant: str, by: Actor | None, now: datetime
) -> bool:
    """False if it was on none: nothing changes, and no agent is told."""
    await lock_catalogue(connection)
    plan = await connection.fetchval("DELETE FROM subscription WHERE tenant = $1 RETURNING plan", tenant)
    if plan is None:
        return False
    await advance_catalogue(connection)
    effects = await change_limits(connection, documents, tenant, now)
    await record(connection, by, Action.SUBSCRIPTION_DELETED, tenant, {"was": plan, "effects": effects}, now)
    return True
