"""Migrate a database to the newest schema.

Only the owner of the schema migrates; the coordinator merely checks the revision. Each run waits a bounded time for its
locks, so that a busy table fails the migration instead of stopping the service. An advisory lock serialises runs: of
two at once, the second finds nothing to do.
"""

import asyncio
from pathlib import Path
from typing import TextIO

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from migrations.connect import connect
from migrations.revisions import NEEDS
from migrations.roles import allow_coordinator
from protocol.compatibility.releases import GUIDE, RELEASE, is_too_old, minor_of, too_old

LOCK_TIMEOUT_MS = 5_000
ONE_MIGRATION_AT_A_TIME = 0x1EA5E401D


class SchemaIsNewer(Exception):
    """The database has a revision that this release does not know."""


class AgentsTooOld(Exception):
    """Agents are running that do not work with this release."""


def upgrade(url: str, coordinator_url: str | None = None) -> bool:
    """Run the steps that the database has not had, and grant the coordinator's role its privileges.

    `url` is the owner's: postgresql://owner:secret@host:port/db. The user of `coordinator_url` is made a member of the
    role. Return False if the role does not exist and this owner may not create it.
    """
    return asyncio.run(_upgrade(url, coordinator_url))


async def _upgrade(url: str, coordinator_url: str | None) -> bool:
    # The URL is read as it is for the coordinator: SQLAlchemy knows nothing of sslmode and its like.
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: connect(url), poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            # The wait for other migrations is not bounded; the wait for tables is.
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({ONE_MIGRATION_AT_A_TIME})"))
            await connection.execute(text(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"))
            await connection.run_sync(_migrate)
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            return await allow_coordinator(driver, coordinator_url)
    finally:
        await engine.dispose()


def _migrate(connection: Connection) -> None:
    config = alembic_config()
    revision = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise SchemaIsNewer(
            f"the schema has the revision {revision}, which only a newer release than {RELEASE} knows. To go back, "
            f"leave the schema as it is: the coordinators of the release before run on it ({GUIDE})"
        )
    _refuse_too_old_agents(connection)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if oldest := needed_release(config):
        connection.execute(text(f"COMMENT ON TABLE alembic_version IS '{NEEDS}{oldest}'"))


def needed_release(config: Config) -> str | None:
    """Return the newest release that a step needs because it removed something, or None if no step states one."""
    steps = ScriptDirectory.from_config(config).walk_revisions()
    stated = [step.module.needs_release for step in steps if hasattr(step.module, "needs_release")]
    return max(stated, key=minor_of, default=None)


def _refuse_too_old_agents(connection: Connection) -> None:
    """Stop before the first change if agents are running that the coordinators of this release would refuse."""
    if connection.execute(text("SELECT to_regclass('region_agent')")).scalar() is None:
        return
    too_old_ones = [row for row in connection.execute(text(_RUNNING_AGENTS)) if is_too_old(row.release)]
    if too_old_ones:
        first = too_old_ones[0]
        raise AgentsTooOld(
            f"{too_old(f'agent {first.agent!r} of {first.region}', first.release, 'This schema')} Agents that are too "
            f"old and were seen within ten minutes: {len(too_old_ones)}."
        )


_RUNNING_AGENTS = """
SELECT region, agent, release FROM region_agent WHERE last_seen_at > clock_timestamp() - interval '10 minutes'
ORDER BY region, agent
"""


def alembic_config(output: TextIO | None = None) -> Config:
    """Return alembic's settings; `output` receives the SQL in its offline mode."""
    config = Config(output_buffer=output) if output else Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
