"""Register this installation once, and compare where a coordinator runs with where it was confirmed."""

from datetime import datetime
from uuid import UUID, uuid4

import asyncpg
from msgspec import Struct

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.installation.rules import Home, why_unconfirmed


class Installation(Struct, frozen=True):
    """The identity of an installation. Unless it is confirmed, events wait in the outbox and are not sent."""

    id: UUID
    is_confirmed: bool
    reason: str | None  # why it is not confirmed
    confirmed_at: datetime


async def look_at_installation(connection: Connection, addresses: frozenset[str], now: datetime) -> Installation:
    """Return the installation, as seen by this coordinator. The first coordinator of a new database registers it."""
    here = await _here(connection, addresses)
    row = await connection.fetchrow(_READ)
    if row is None:
        await connection.execute(_REGISTER, uuid4(), *_columns(here), now)
        row = await connection.fetchrow(_READ)
    assert row is not None
    reason = why_unconfirmed(_home(row), here)
    return Installation(row["id"], reason is None, reason, row["confirmed_at"])


async def confirm_installation(
    connection: Connection, addresses: frozenset[str], is_new: bool, by: Actor, now: datetime
) -> Installation:
    """Confirm that this database is the installation, at these addresses too; `is_new` gives it another id."""
    here = await _here(connection, addresses)
    await look_at_installation(connection, addresses, now)
    row = await connection.fetchrow(f"{_READ} FOR UPDATE")
    assert row is not None
    home = _home(row)
    is_same = (home.system_identifier, home.database_oid) == here[:2]
    here = here._replace(addresses=here.addresses | home.addresses) if is_same and not is_new else here
    id_ = uuid4() if is_new else row["id"]
    await connection.execute(_CONFIRM, id_, *_columns(here), now)
    details = {"id": str(id_), "system_identifier": here.system_identifier, "database_oid": here.database_oid}
    await record(
        connection, by, Action.INSTALLATION_CONFIRMED, str(id_), details | {"addresses": sorted(here.addresses)}, now
    )
    return Installation(id_, True, None, now)


async def _here(connection: Connection, addresses: frozenset[str]) -> Home:
    oid = await connection.fetchval("SELECT oid::bigint FROM pg_database WHERE datname = current_database()")
    try:
        async with connection.transaction():
            identifier = await connection.fetchval("SELECT system_identifier::text FROM pg_control_system()")
    except asyncpg.InsufficientPrivilegeError:
        identifier = ""  # a managed Postgres may not reveal it
    return Home(identifier, oid, addresses)


def _home(row: asyncpg.Record) -> Home:
    return Home(row["system_identifier"], row["database_oid"], frozenset(row["addresses"]))


def _columns(home: Home) -> tuple[str, int, list[str]]:
    return home.system_identifier, home.database_oid, sorted(home.addresses)


_READ = "SELECT id, system_identifier, database_oid, addresses, confirmed_at FROM installation"
_REGISTER = """
INSERT INTO installation (id, system_identifier, database_oid, addresses, confirmed_at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT DO NOTHING
"""
_CONFIRM = """
UPDATE installation SET id = $1, system_identifier = $2, database_oid = $3, addresses = $4, confirmed_at = $5
"""
