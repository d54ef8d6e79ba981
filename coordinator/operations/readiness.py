"""What the health doors ask the database."""

import asyncpg

from coordinator.database.connection import Connection


async def schema_revision(connection: Connection) -> str | None:
    """Where the migrations stand; None if none ever ran."""
    try:
        found: str | None = await connection.fetchval("SELECT version_num FROM alembic_version")
    except asyncpg.UndefinedTableError:
        return None
    return found


async def unit_figures(connection: Connection) -> list[tuple[str, str, int]]:
    """(quota, account, units) of all the periods that are not over, for the gauges."""
    return [(row["name"], account, row[account]) for row in await connection.fetch(_UNITS) for account in ACCOUNTS]


ACCOUNTS = ("funded", "unallocated", "outstanding", "consumed", "suspense", "overage")
_SUMS = ", ".join(f"sum({account}) AS {account}" for account in ACCOUNTS)
_UNITS = f"""
SELECT name, {_SUMS} FROM pool JOIN period ON period.id = pool.period WHERE period.ends_at > now() GROUP BY name
"""  # noqa: S608 - the names come from the line above
