"""Brings a database to the newest schema.

Run by the owner of the schema and by nobody else: the coordinator only checks. Every migration waits a bounded time
for its locks, so that a busy table fails the migration and not the service. Two runs at once are one run and a
no-op: an advisory lock puts them in a row.
"""

import asyncio
from pathlib import Path
from typing import TextIO

import asyncpg
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from migrations.roles import allow_coordinator

LOCK_TIMEOUT_MS = 5_000
ONE_MIGRATION_AT_A_TIME = 0x1EA5E401D


def upgrade(url: str, coordinator_url: str | None = None, *, to: str = "head") -> bool:
    """To the newest revision, or an earlier one; nothing happens if it is there already. `url` as postgresql://owner:…@host:port/db.

    True if the coordinator's role has what it needs; with `coordinator_url` the user that it names is a member.
    """
    return asyncio.run(_upgrade(url, coordinator_url, to))


async def _upgrade(url: str, coordinator_url: str | None, to: str) -> bool:
    # The driver reads the URL itself, as it does for the coordinator: SQLAlchemy knows nothing of sslmode and its like.
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(url), poolclass=NullPool
    )
    try:
        async with engine.begin() as connection:
            # First the row of migrations, as long as it takes; then the tables, for a bounded time.
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({ONE_MIGRATION_AT_A_TIME})"))
            await connection.execute(text(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"))
            await connection.run_sync(_migrate, to)
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            return await allow_coordinator(driver, coordinator_url)
    finally:
        await engine.dispose()


def _migrate(connection: Connection, to: str) -> None:
    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, to)


def alembic_config(output: TextIO | None = None) -> Config:
    """What alembic needs to know; `output` takes the SQL where it only prints."""
    config = Config(output_buffer=output) if output else Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
