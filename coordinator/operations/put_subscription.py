"""Put a tenant on a plan."""

from datetime import datetime
from typing import NamedTuple

from coordinator.database.audit import record
from coordinator.database.catalogue import advance_catalogue, lock_catalogue
from coordinator.database.connection import Connection
from coordinator.domain.audit import Action, Actor
from coordinator.operations.read_limits import read_limits
from coordinator.operations.read_subscriptions import Subscription, read_subscription


class PutSubscription(NamedTuple):
    """Without a subscription: the document in force has no such plan."""

    subscription: Subscription | None
    is_new: bool = False


async def put_subscription(
    connection: Connection, tenant: str, plan: str, by: Actor | None, now: datetime
) -> PutSubscription:
    await lock_catalogue(connection)
    found = await read_subscription(connection, tenant)
    if found is not None and found.plan == plan:
        return PutSubscription(found)
    if plan not in (await read_limits(connection)).document.plans:
        return PutSubscription(None)
    await connection.execute(_UPSERT, tenant, plan, now)
    await advance_catalogue(connection)
    details = {"plan": plan, "was": found.plan if found else None}
    await record(connection, by, Action.SUBSCRIPTION_PUT, tenant, details, now)
    return PutSubscription(Subscription(tenant, plan, now), is_new=found is None)


_UPSERT = """
INSERT INTO subscription (tenant, plan, changed_at) VALUES ($1, $2, $3)
ON CONFLICT (tenant) DO UPDATE SET plan = excluded.plan, changed_at = excluded.changed_at
"""
