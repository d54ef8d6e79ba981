"""Register tenants: their names, their ids in other systems, and their addresses.

A tenant is whatever services call one, so the ledger needs no registration. It is for people and invoicing systems:
statements on paper, spreadsheets and webhooks show what is registered now, also for periods that are closed. The units
of a statement never depend on it.
"""

from collections.abc import Collection
from datetime import datetime

import asyncpg
import msgspec
from msgspec import Struct, structs

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection


class TenantProfile(Struct, frozen=True):
    """The registered name, external ids, address and time zone of a tenant."""

    name: str
    external_ids: dict[str, str] = {}  # by system, such as {"stripe": "cus_9s6XKzkNRiz8i3"}
    address: list[str] = []  # its lines, as they are printed
    time_zone: str = "UTC"  # of the times on paper


class Tenant(TenantProfile, frozen=True, kw_only=True):
    tenant: str
    changed_at: datetime


async def put_tenant(
    connection: Connection, tenant: str, profile: TenantProfile, by: Actor, now: datetime
) -> tuple[Tenant, bool]:
    """Register a tenant, or replace what is registered. Return it, and whether it is new."""
    row = await connection.fetchrow(_PUT, tenant, msgspec.json.encode(profile).decode(), now)
    if row is None:  # it is registered like this already
        row = await connection.fetchrow(f"{_TENANTS} WHERE id = $1", tenant)
        assert row is not None
        return _tenant(row), False
    await record(connection, by, Action.TENANT_PUT, tenant, structs.asdict(profile), now)
    return _tenant(row), row["is_new"]


async def delete_tenant(connection: Connection, tenant: str, by: Actor, now: datetime) -> bool:
    """Delete what is registered of a tenant, and return whether anything was. Its usage stays."""
    if await connection.fetchval("DELETE FROM tenant WHERE id = $1 RETURNING true", tenant) is None:
        return False
    await record(connection, by, Action.TENANT_DELETED, tenant, {}, now)
    return True


async def read_tenant(connection: Connection, tenant: str) -> Tenant | None:
    return (await read_tenants_by_id(connection, [tenant])).get(tenant)


async def read_tenants_by_id(connection: Connection, tenants: Collection[str]) -> dict[str, Tenant]:
    """Return those of the tenants that are registered."""
    rows = await connection.fetch(f"{_TENANTS} WHERE id = ANY ($1::text[])", list(tenants))
    return {row["id"]: _tenant(row) for row in rows}


async def read_tenants(connection: Connection, after: str, count: int) -> list[Tenant]:
    """Return up to `count` registered tenants by id, from the one after `after`."""
    rows = await connection.fetch(f"{_TENANTS} WHERE id > $1 ORDER BY id LIMIT $2", after, count)
    return [_tenant(row) for row in rows]


def _tenant(row: asyncpg.Record) -> Tenant:
    profile = msgspec.json.decode(row["profile"], type=TenantProfile)
    return Tenant(**structs.asdict(profile), tenant=row["id"], changed_at=row["changed_at"])


_TENANTS = "SELECT id, profile::text AS profile, changed_at FROM tenant"
_PUT = """
INSERT INTO tenant (id, profile, changed_at) VALUES ($1, $2::jsonb, $3)
ON CONFLICT (id) DO UPDATE SET profile = excluded.profile, changed_at = excluded.changed_at
    WHERE tenant.profile <> excluded.profile
RETURNING id, profile::text AS profile, changed_at, xmax = 0 AS is_new
"""
