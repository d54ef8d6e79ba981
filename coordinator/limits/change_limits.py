"""Bring a tenant's allowances to the limits of its current plan, in the transaction that changed the plan.

So the reply and the audit entry describe what was booked, and no exchange has to happen first.
"""

from datetime import datetime
from uuid import uuid4

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.exchange.book_entries import book_entries
from coordinator.exchange.rules.balances import Key
from coordinator.exchange.rules.posting import Movement
from coordinator.exchange.statements.balances import write_balances
from coordinator.exchange.statements.leases import read_leases
from coordinator.exchange.statements.pools import lock_pools
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from coordinator.limits.rules.entitlement import Entitlement, entitlement
from coordinator.limits.rules.plan_change import LimitEffect, change_limit
from coordinator.rebalancing.rules.division import by_weight, division_of, funded_for
from protocol.outcomes import GrantRefusal

MOST = 1000  # allowances of one tenant; the limits of others apply when units of them are requested


async def change_limits(connection: Connection, documents: Documents, tenant: str, now: datetime) -> list[LimitEffect]:
    """Change the limits of the current periods. Return those allowances whose limit changed."""
    keys = [Key(*row) for row in await connection.fetch(_RUNNING, tenant, now, MOST)]
    catalogue = await read_catalogue(connection, documents, [key.quota for key in keys], now)
    found = {key: _limit(entitlement(catalogue, key.quota)) for key in keys}
    limits = {key: limit for key, limit in found.items() if limit is not None}
    pools = {key: each.pool for key, each in (await lock_pools(connection, limits, ())).items()}
    divisions = {key: division_of(catalogue, key, (), by_weight(catalogue)) for key in pools}
    own = [key for key, division in divisions.items() if division.is_regional]
    leases = await read_leases(connection, pools, (), own)
    entry = Movement(uuid4(), None, None)
    of_pool = {key: [lease for lease in leases if lease.key == key] for key in pools}
    changed = [
        change_limit(entry, pool, of_pool[key], limits[key], divisions[key])
        for key, pool in pools.items()
        if pool.funded != funded_for(limits[key], pool, of_pool[key], divisions[key])
    ]
    # All decisions are made: from here on only the database can fail, and then the transaction is rolled back.
    if entry.transfers:
        await write_balances(connection, [pools[key] for key in pools], [], {})
        await book_entries(connection, [entry], now)
    await notify(connection, [notice for each in changed for notice in each.notices])
    return [each.effect for each in changed]


def _limit(found: Entitlement | GrantRefusal) -> int | None:
    """Return the limit; None if the document has no such allowance now. Without a limit in the plan it is zero."""
    if isinstance(found, Entitlement):
        return found.limit
    return 0 if found is GrantRefusal.NO_LIMIT else None


_RUNNING = """
SELECT quota, period FROM pool JOIN period ON period.id = pool.period
WHERE pool.tenant = $1 AND period.state = 'open' AND starts_at <= $2 AND ends_at > $2 ORDER BY 1, 2 LIMIT $3
"""
