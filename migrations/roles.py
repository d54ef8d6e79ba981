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

# By table.
PRIVILEGES: Mapping[str, str] = {
    "alembic_version": "SELECT",
    "region": "SELECT, INSERT",
    "region_epoch": "SELECT, INSERT",
    "lane": "SELECT, INSERT",
    "period": "SELECT, INSERT",
    "pool": "SELECT, INSERT",
    "lease": "SELECT, INSERT",
    "report": "SELECT, INSERT",
    "transfer": "SELECT, INSERT",  # its partitions are nobody's but the owner's
    "usage_hour": "SELECT",  # the transfers' trigger writes them, as the owner
    "usage_day": "SELECT",
    "quarantine": "SELECT, INSERT",
    "policy_version": "SELECT",
    "limits_version": "SELECT, INSERT",
    "subscription": "SELECT, INSERT, DELETE",
    "token": "SELECT",  # tokens are issued and revoked by the owner
    "audit": "SELECT, INSERT",
    # proof
    "position_gate": "SELECT, UPDATE",  # it has no rows: this is the right to lock it
    "rate_share": "SELECT, INSERT, DELETE",
    "seal": "SELECT, INSERT",
    "job": "SELECT, INSERT",
    "verification": "SELECT, INSERT",
    "export": "SELECT, INSERT",
    "export_part": "SELECT, INSERT, DELETE",
    # suspense
    "resolution": "SELECT, INSERT",
    "adjustment": "SELECT, INSERT",
    # who is told
    "webhook": "SELECT, INSERT, DELETE",
    "outbox": "SELECT, INSERT, DELETE",
    "delivery": "SELECT, INSERT",
    "installation": "SELECT, INSERT",
    # what changes all day
    "limit_override": "SELECT, INSERT, DELETE",
    "block": "SELECT, INSERT, DELETE",
    "block_version": "SELECT",
    "first_answer": "SELECT, INSERT, DELETE",
    # what comes late for a closed period
    "correction": "SELECT, INSERT",
    # health that coordinators share
    "measurement": "SELECT, INSERT",
    "region_heard": "SELECT, INSERT",
    # how people divide a quota over the regions
    "region_setting": "SELECT, INSERT, DELETE",
    "rebalance": "SELECT, INSERT",
    "rebalance_move": "SELECT, INSERT",
}
# The columns that it may change; the others stay as they were inserted. A row lock, too, needs one of them.
CHANGES: Mapping[str, str] = {
    "region": "weight status",
    "region_epoch": "state fingerprint fenced_at lost_data loss_is_assumed retired_at retired_by retired_because",
    "lane": "last_seq last_hash head",
    "period": "state closing_at closing_by carries_suspense leaves_holds closed_at position transfers root",
    "pool": """funded overage carried_in correction unallocated outstanding suspense carried carried_out estimated
        consumed written_off adjustment credited extended beyond unused_in unused_out moves""",
    "lease": """state granted overage consumed returned outstanding suspense carried_out estimated written_off
        region_consumed region_returned demand_milli waiting last_grant overdraft overdrawn reported_at expires_at""",
    "policy_version": "version stamp",
    "subscription": "plan changed_at",
    "rate_share": "state reported_at",
    "job": "due_at",
    "verification": "finished_at result",
    "export": """finished_at reached rows bytes sha256 marks attempt rows_expected wanted_by cancelled_at
        kept_until""",
    "correction": """carried_in correction carried carried_out estimated consumed written_off replaced recovered
        beyond region_consumed region_returned quarantined""",
    "resolution": "id kind suspense charged seq reason proposed_by proposed_at approved_by approved_at",
    "adjustment": "approved_by approved_at booked_in withdrawn_by withdrawn_at",
    "webhook": "paused secret previous_secret previous_until",
    "installation": "id system_identifier database_oid places confirmed_at",
    "delivery": "attempts next_at delivered_at dead_at status error",
    "block": "reason created_at created_by valid_until",
    "block_version": "version stamp",
    "first_answer": "asked claim claimed_at status headers body",
    "measurement": "figures measured_at",
    "region_heard": "heard_at",
    "region_setting": "weight floor ceiling changed_at changed_by",
    "rebalance": "state ended_at returned reason",
    "rebalance_move": "returned regranted reason ended_at",
}


class RoleMissing(Exception):
    """Why the coordinator's role has not been given what it needs, in one sentence."""


async def allow_coordinator(connection: Connection, login_url: str | None = None) -> bool:
    """Make the role and give it exactly its privileges. False if it is not there and this owner may not make it.

    `login_url` is what coordinators are told: its user is made, or given that password, and made a member.
    """
    if not await _made(connection, f"CREATE ROLE {COORDINATOR} NOLOGIN", COORDINATOR):
        if login_url is not None:
            raise RoleMissing(f"the role {COORDINATOR} is not there, and this owner may not create roles")
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
    """All away, and then what is in the tables above; nothing for what this schema does not have."""
    schema = await connection.fetchval("SELECT quote_ident(current_schema())")
    there = {(row["relname"], row["attname"]) for row in await connection.fetch(_COLUMNS)}
    tables = {table for table, _ in there}
    changes = {
        table: [column for column in columns.split() if (table, column) in there] for table, columns in CHANGES.items()
    }
    return [
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {COORDINATOR}",
        f"GRANT USAGE ON SCHEMA {schema} TO {COORDINATOR}",
        *(f"GRANT {may} ON {schema}.{table} TO {COORDINATOR}" for table, may in PRIVILEGES.items() if table in tables),
        *(
            f"GRANT UPDATE ({', '.join(columns)}) ON {schema}.{table} TO {COORDINATOR}"
            for table, columns in changes.items()
            if columns
        ),
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
_COLUMNS = """
SELECT relname, attname FROM pg_class LEFT JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
"""
