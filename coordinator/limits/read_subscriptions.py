"""Who is on which plan."""

from datetime import datetime

from msgspec import Struct

from coordinator.database.connection import Connection


class Subscription(Struct, frozen=True):
    tenant: str
    plan: str
    changed_at: datetime
    began_at: datetime  # when the tenant first had one: its day is that of anniversaries


async def read_subscription(connection: Connection, tenant: str) -> Subscription | None:
    row = await connection.fetchrow(_ONE, tenant)
    return Subscription(*row.values()) if row else None


async def read_subscriptions(connection: Connection, after: str, count: int) -> list[Subscription]:
    """At most so many, by tenant, that come after the given one."""
    return [Subscription(*row.values()) for row in await connection.fetch(_SOME, after, count)]


_ONE = "SELECT tenant, plan, changed_at, began_at FROM subscription WHERE tenant = $1"
_SOME = "SELECT tenant, plan, changed_at, began_at FROM subscription WHERE tenant > $1 ORDER BY tenant LIMIT $2"
