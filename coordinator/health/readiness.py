"""Statements of health checks: the schema's revision, the database's clock, and a commit to prove that it works."""

from datetime import datetime

import asyncpg

from coordinator.database.connection import Connection
from migrations.revisions import NEEDS


async def schema_revision(connection: Connection) -> str | None:
    """Return the revision of the schema, or None if no migration has run."""
    try:
        found: str | None = await connection.fetchval("SELECT version_num FROM alembic_version")
    except asyncpg.UndefinedTableError:
        return None
    return found


async def oldest_release(connection: Connection) -> str | None:
    """Return the oldest release that runs on the schema, if a step has removed what older ones need.

    `leasehold migrate` writes it into a comment, from what the steps state (`needs_release`).
    """
    comment: str | None = await connection.fetchval("SELECT obj_description('alembic_version'::regclass)")
    return comment.removeprefix(NEEDS) if comment and comment.startswith(NEEDS) else None


async def read_database_clock(connection: Connection) -> datetime:
    now: datetime = await connection.fetchval("SELECT clock_timestamp()")
    return now


async def write_message(connection: Connection) -> None:
    """Write a message to the log, so that the transaction's commit is as durable as any when it returns.

    It changes no table. A transaction that writes nothing would not wait for the disk and the synchronous standby.
    """
    await connection.execute("SELECT pg_logical_emit_message(true, 'leasehold', 'ready')")
