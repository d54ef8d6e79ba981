"""The privileges of the coordinator's role: whatever its code does, it cannot change or delete what was booked.

`leasehold_coordinator` is a role without a login; the users of coordinators are its members. The tables below list all
of its privileges. Each `leasehold migrate` applies them at its end, so they always belong to the newest schema. An
owner who may not create roles has a superuser create this one, and migrates again.
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

# The privileges on whole tables.
PRIVILEGES: Mapping[str, str] = {
    "alembic_version": "SELECT",
    "region": "SELECT, INSERT",
    "region_identity": "SELECT, INSERT, DELETE",
    "region_epoch": "SELECT, INSERT",
    "lane": "SELECT, INSERT",
    "period": "SELECT, INSERT",
    "pool": "SELECT, INSERT",
    "lease": "SELECT, INSERT",
    "report": "SELECT, INSERT",
    "transfer": "SELECT, INSERT",  # through the partitioned table: partitions are the owner's
    "usage_hour": "SELECT",  # a trigger of `transfer` writes both, as the owner
    "usage_day": "SELECT",
    "labelled_usage": "SELECT",
    "label_set": "SELECT, INSERT",
    "quarantine": "SELECT, INSERT",
    "policy_version": "SELECT",
    "limits_version": "SELECT, INSERT",
    "subscription": "SELECT, INSERT, DELETE",
    "tenant": "SELECT, INSERT, DELETE",
    "token": "SELECT",  # tokens are issued and revoked by the owner
    "identity": "SELECT, INSERT",
    "audit": "SELECT, INSERT",
    # proof
    "position_gate": "SELECT, UPDATE",  # it has no rows: UPDATE is the right to lock it
    "shared_limit": "SELECT, INSERT, DELETE",
    "seal": "SELECT, INSERT",
    "job": "SELECT, INSERT",
    "verification": "SELECT, INSERT",
    "export": "SELECT, INSERT",
    "export_part": "SELECT, INSERT, DELETE",
    "archive": "SELECT, INSERT",  # what is recorded of a complete one is written by a function, as the owner
    "archived_sum": "SELECT",
    # suspense
    "resolution": "SELECT, INSERT",
    "adjustment": "SELECT, INSERT",
    # webhooks
    "webhook": "SELECT, INSERT, DELETE",
    "outbox": "SELECT, INSERT, DELETE",
    "delivery": "SELECT, INSERT",
    "installation": "SELECT, INSERT",
    # overrides, blocks and idempotency
    "limit_override": "SELECT, INSERT, DELETE",
    "block": "SELECT, INSERT, DELETE",
    "block_version": "SELECT",
    "reset": "SELECT, INSERT, DELETE",
    "idempotency_record": "SELECT, INSERT, DELETE",
    # late usage of closed periods
    "correction": "SELECT, INSERT",
    # health
    "measurement": "SELECT, INSERT",
    "region_last_seen": "SELECT, INSERT",
    "region_agent": "SELECT, INSERT, DELETE",
    # the decision log
    "decision": "SELECT, INSERT",  # its partitions are the owner's, made and dropped by a function
    "decision_hash_key": "SELECT",
    # rebalancing
    "region_setting": "SELECT, INSERT, DELETE",
    "rebalance": "SELECT, INSERT",
    "rebalance_move": "SELECT, INSERT",
    "floor_hold": "SELECT, INSERT, DELETE",
}
# The columns that may be updated; all others stay as they were inserted. A row lock needs this privilege as well.
CHANGES: Mapping[str, str] = {
    "region": "weight status",
    "region_epoch": "state fingerprint fenced_at lost_data loss_is_assumed retired_at retired_by retired_because",
    "lane": "last_seq last_hash head",
    "period": """state close_requested_at close_requested_by carries_suspense leaves_holds closed_at position transfers
        root""",
    "pool": """funded overage suspense_carried_in correction unallocated outstanding suspense suspense_carried
        suspense_carried_out estimated consumed written_off adjustment credited soft_cap_extension overage_used
        carried_over_in carried_over_out open_moves""",
    "lease": """state granted overage consumed returned outstanding suspense suspense_carried_out estimated written_off
        region_consumed region_returned demand_milli waiting last_grant overdraft overdrawn reported_at expires_at""",
    "policy_version": "version stamp",
    "subscription": "plan changed_at",
    "tenant": "profile changed_at",
    "shared_limit": "state reported_at",
    "identity": "name",
    "job": "due_at",
    "verification": "finished_at result",
    "export": """finished_at last_transfer rows bytes sha256 resume_points attempt rows_expected requesters cancelled_at
        expires_at""",
    "archive": "attempt rows bytes failure requested_by requested_at",
    "correction": """suspense_carried_in correction suspense_carried suspense_carried_out estimated consumed written_off
        replaced recovered overage_used region_consumed region_returned quarantined""",
    "resolution": "id kind suspense charged seq reason proposed_by proposed_at approved_by approved_at bulk",
    "adjustment": "approved_by approved_at booked_in withdrawn_by withdrawn_at",
    "webhook": "paused secret previous_secret previous_until",
    "installation": "id system_identifier database_oid addresses confirmed_at",
    "delivery": "attempts next_attempt_at delivered_at dead_at status error",
    "block": "reason created_at created_by valid_until",
    "block_version": "version stamp",
    "idempotency_record": "request_hash claim claimed_at status headers body",
    "measurement": "figures measured_at",
    "region_last_seen": "last_seen_at",
    "region_agent": "release capabilities last_seen_at",
    "region_setting": "weight floor ceiling changed_at changed_by",
    "rebalance": "state ended_at returned reason",
    "rebalance_move": "returned regranted reason ended_at",
}
# The functions that run as the owner of the schema. Triggers need no privilege.
FUNCTIONS = ("archive_transfers", "keep_decisions")


class RoleMissing(Exception):
    """The coordinator's role could not be created or granted its privileges; the message says why."""


async def allow_coordinator(connection: Connection, login_url: str | None = None) -> bool:
    """Create the role and grant it exactly its privileges. Return False if this owner may not create it.

    The user of `login_url`, with which coordinators connect, is created or given that password, and made a member.
    """
    if not await _create_role(connection, f"CREATE ROLE {COORDINATOR} NOLOGIN", COORDINATOR):
        if login_url is not None:
            raise RoleMissing(f"the role {COORDINATOR} does not exist, and this owner may not create roles")
        return False
    for statement in await _grant_statements(connection):
        await connection.execute(statement)
    if login_url is not None:
        await _allow_login(connection, login_url)
    return True


async def _create_role(connection: Connection, statement: str, role: str) -> bool:
    """Create a role unless it exists: another database of the cluster may be migrated at the same time."""
    if await connection.fetchval(_EXISTS, role):
        return True
    try:
        async with connection.transaction():
            await connection.execute(statement)
    except (asyncpg.DuplicateObjectError, asyncpg.UniqueViolationError):
        return True
    except asyncpg.InsufficientPrivilegeError:
        return False
    return True


async def _grant_statements(connection: Connection) -> list[str]:
    """Return statements that revoke everything and grant the privileges above, as far as this schema has the tables."""
    schema = await connection.fetchval("SELECT quote_ident(current_schema())")
    there = {(row["relname"], row["attname"]) for row in await connection.fetch(_COLUMNS)}
    tables = {table for table, _ in there}
    functions = [row["proname"] for row in await connection.fetch(_FUNCTIONS, FUNCTIONS)]
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
        *(f"GRANT EXECUTE ON FUNCTION {schema}.{name} TO {COORDINATOR}" for name in functions),
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
    if not await _create_role(connection, f"CREATE ROLE {user} LOGIN", name):
        raise RoleMissing(f"the role {name} does not exist, and this owner may not create roles")
    await connection.execute(f"ALTER ROLE {user} LOGIN PASSWORD {secret}")
    await connection.execute(f"GRANT {COORDINATOR} TO {user}")


_EXISTS = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)"
_COLUMNS = """
SELECT relname, attname FROM pg_class LEFT JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
"""
_FUNCTIONS = """
SELECT proname FROM pg_proc WHERE pronamespace = current_schema()::regnamespace AND proname = ANY ($1::text[])
"""
