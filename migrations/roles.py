"""What the coordinator may do in the database, and nothing beyond it: the outermost wall around the ledger.

`leasehold_coordinator` is a role that nobody logs in as; what a coordinator logs in as is a member of it. It may not
change, delete or truncate what was booked, whatever its code does. The table below is the whole of what it may, and is
applied at the end of every `leasehold migrate`: so it is always the one that belongs to the newest schema, and an owner
who may not create roles has the role made by somebody who may, and migrates again.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

import asyncpg

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Connection: TypeAlias = asyncpg.Connection

COORDINATOR = "leasehold_coordinator"

# By table. Columns in brackets: the others stay as they were inserted. Row locks need one column that may be changed.
PRIVILEGES: Mapping[str, str] = {
    "alembic_version": "SELECT",
    "region": "SELECT, INSERT, UPDATE (weight, status)",
    "region_epoch": "SELECT, INSERT, UPDATE (state, fenced_at)",
    "lane": "SELECT, INSERT, UPDATE (last_seq, last_hash, head)",
    "period": "SELECT, INSERT, UPDATE (state)",
    "pool": """SELECT, INSERT, UPDATE (funded, overage, carried_in, correction, unallocated, outstanding, suspense,
        carried, carried_out, estimated, consumed, written_off)""",
    "lease": """SELECT, INSERT, UPDATE (state, granted, overage, consumed, returned, outstanding, suspense, carried_out,
        estimated, written_off, region_consumed, region_returned, demand_milli, waiting, last_grant, reported_at,
        expires_at)""",
    "report": "SELECT, INSERT",
    "transfer": "SELECT, INSERT",  # its partitions are nobody's but the owner's
    "usage_hour": "SELECT",  # the transfers' trigger writes them, as the owner
    "usage_day": "SELECT",
    "quarantine": "SELECT, INSERT",
    "policy_version": "SELECT, UPDATE (version)",
    "limits_version": "SELECT, INSERT",
    "subscription": "SELECT, INSERT, DELETE, UPDATE (plan, changed_at)",
    "token": "SELECT",  # tokens are issued and revoked by the owner
    "audit": "SELECT, INSERT",
}


class RoleMissing(Exception):
    """Why the coordinator's role has not been given what it needs, in one sentence."""


async def allow_coordinator(connection: Connection, login_url: str | None = None) -> bool:
    """Make the role and give it exactly its privileges. False if it is not there and this owner may not make it.

    `login_url` is what coordinators are told: its user is made, or given that password, and made a member.
    """
    if not await _made(connection, f"CREATE ROLE {COORDINATOR} NOLOGIN", COORDINATOR):
        return False
    for statement in await _grants(connection):
        await connection.execute(statement)
    if login_url is not None:
        await _allow_login(connection, login_url)
    return True


async def _made(connection: Connection, statement: str, role: str) -> bool:
    """Roles are the cluster's: another database's migration may be making the same one now."""
    if await connection.fetchval(_IS_THERE, role):
        return True
    try:
        async with connection.transaction():
            await connection.execute(statement)
    except (asyncpg.DuplicateObjectError, asyncpg.UniqueViolationError):
        return True
    except asyncpg.InsufficientPrivilegeError:
        return False
    return True


async def _grants(connection: Connection) -> list[str]:
    """All away, and then what is in the table. Of tables that are not there yet, nothing."""
    schema = await connection.fetchval("SELECT quote_ident(current_schema())")
    there = {row["relname"] for row in await connection.fetch(_TABLES)}
    return [
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {COORDINATOR}",
        f"GRANT USAGE ON SCHEMA {schema} TO {COORDINATOR}",
        *(f"GRANT {what} ON {schema}.{table} TO {COORDINATOR}" for table, what in PRIVILEGES.items() if table in there),
    ]


async def _allow_login(connection: Connection, url: str) -> None:
    parts = urlsplit(url)
    name, password = unquote(parts.username or ""), unquote(parts.password or "")
    if not name or not password:
        raise RoleMissing("the coordinator's URL must name a user and a password")
    if name == await connection.fetchval("SELECT session_user"):
        raise RoleMissing("the coordinator's URL must not be the owner's: it would be allowed everything")
    quoted = await connection.fetchrow("SELECT quote_ident($1), quote_literal($2)", name, password)
    assert quoted is not None
    user, secret = quoted
    if not await _made(connection, f"CREATE ROLE {user} LOGIN", name):
        raise RoleMissing(f"the role {name} is not there, and this owner may not create roles")
    await connection.execute(f"ALTER ROLE {user} LOGIN PASSWORD {secret}")
    await connection.execute(f"GRANT {COORDINATOR} TO {user}")


_IS_THERE = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)"
_TABLES = "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')"
