"""Subscribe tenants to plans, and read which plan each is on."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec import Struct, structs

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.limits.change_limits import change_limits
from coordinator.limits.in_force import Documents
from coordinator.limits.read_limits import read_limits
from coordinator.limits.rules.plan_change import LimitEffect
from coordinator.limits.rules.validation import DocumentFault
from coordinator.limits.version import advance_catalogue, lock_catalogue


class Subscription(Struct, frozen=True):
    tenant: str
    plan: str
    changed_at: datetime
    began_at: datetime  # when the tenant first had a plan: anniversary periods begin on its day


class PutSubscription(NamedTuple):
    """`subscription` is None if the request was refused; `fault` says why."""

    subscription: Subscription | None
    fault: DocumentFault | None = None
    is_new: bool = False
    effects: Sequence[LimitEffect] = ()


async def put_subscription(
    connection: Connection,
    documents: Documents,
    tenant: str,
    plan: str,
    by: Actor | None,
    now: datetime,
    began_at: datetime | None = None,
) -> PutSubscription:
    """Put a tenant on a plan.

    `began_at` is for a new subscription that began in the past. Anniversaries depend on it, so it never changes.
    """
    await lock_catalogue(connection)
    found = await read_subscription(connection, tenant)
    if found is not None and began_at not in (None, found.began_at):
        reason = f"the subscription began at {found.began_at.isoformat()}, which is kept"
        return PutSubscription(None, DocumentFault("began_at", "fixed", reason))
    if found is not None and found.plan == plan:
        return PutSubscription(found)
    if plan not in (await read_limits(connection)).document.plans:
        return PutSubscription(None, DocumentFault("plan", "known", "the limits document has no such plan"))
    put = Subscription(tenant, plan, now, found.began_at if found else (began_at or now).astimezone(UTC))
    await connection.execute(_UPSERT, *structs.astuple(put))
    await advance_catalogue(connection)
    effects = await change_limits(connection, documents, tenant, now)
    was = found.plan if found else None
    details = {"plan": plan, "was": was, "began_at": put.began_at, "effects": effects}
    await record(connection, by, Action.SUBSCRIPTION_PUT, tenant, details, now)
    return PutSubscription(put, is_new=found is None, effects=effects)


async def delete_subscription(
    connection: Connection, documents: Documents, tenant: str, by: Actor | None, now: datetime
) -> bool:
    """Put a tenant on the document's default plan, and return whether it had a subscription."""
    await lock_catalogue(connection)
    plan = await connection.fetchval("DELETE FROM subscription WHERE tenant = $1 RETURNING plan", tenant)
    if plan is None:
        return False
    await advance_catalogue(connection)
    effects = await change_limits(connection, documents, tenant, now)
    await record(connection, by, Action.SUBSCRIPTION_DELETED, tenant, {"was": plan, "effects": effects}, now)
    return True


async def read_subscription(connection: Connection, tenant: str) -> Subscription | None:
    row = await connection.fetchrow(_ONE, tenant)
    return Subscription(*row.values()) if row else None


async def read_subscriptions(connection: Connection, after: str, count: int) -> list[Subscription]:
    """Return up to `count` subscriptions by tenant, from the one after `after`."""
    return [Subscription(*row.values()) for row in await connection.fetch(_SOME, after, count)]


_UPSERT = """
INSERT INTO subscription (tenant, plan, changed_at, began_at) VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant) DO UPDATE SET plan = excluded.plan, changed_at = excluded.changed_at
"""
_ONE = "SELECT tenant, plan, changed_at, began_at FROM subscription WHERE tenant = $1"
_SOME = "SELECT tenant, plan, changed_at, began_at FROM subscription WHERE tenant > $1 ORDER BY tenant LIMIT $2"
