"""`schema.sql`, the migrations and the metadata of SQLAlchemy state the same schema."""

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from coordinator.database.tables import metadata
from coordinator.proof.verify_guards import read_guards
from migrations.statements import statements_of
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio

# Objects that `read_guards` omits, because they refuse no change.
REST = """
SELECT 'table ' || relname AS name, concat_ws(' ', relkind::text, relpersistence::text, pg_get_partkeydef(oid)) AS made
FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'S', 'v', 'm')
UNION ALL
SELECT format('default %s.%s', relname, attname), pg_get_expr(adbin, adrelid)
FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = current_schema()::regnamespace
UNION ALL
SELECT format('storage %s.%s', relname, attname), concat_ws(' ', attstorage::text, reloptions::text)
FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND attnum > 0
UNION ALL
SELECT 'secondary index ' || indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()
UNION ALL
SELECT 'rows of policy_version', array_agg(version)::text FROM policy_version
UNION ALL
SELECT 'rows of block_version', array_agg(version)::text FROM block_version
"""
# The metadata declares columns with their types, defaults and NOT NULL, and keys; no checks, indexes or triggers.
DECLARED = ("table ", "column ", "default ", "constraint ")


async def catalogue(url: str) -> dict[str, str]:
    """Return the definition of each object of a database, without alembic's table."""
    async with connected(url) as owner:
        objects = await read_guards(owner) | {row["name"]: row["made"] for row in await owner.fetch(REST)}
    return {name: made for name, made in objects.items() if "alembic_version" not in name}


def declared(objects: dict[str, str]) -> dict[str, str]:
    return {name: made for name, made in objects.items() if name.startswith(DECLARED) and not made.startswith("CHECK ")}


async def test_migrations_make_what_the_schema_says(database: str, empty_database: str) -> None:
    async with connected(empty_database) as owner:
        await owner.execute(statements_of("schema.sql"))
    assert await catalogue(empty_database) == await catalogue(database)


async def test_metadata_declares_what_the_schema_says(database: str, empty_database: str) -> None:
    await create_all(empty_database)
    assert declared(await catalogue(empty_database)) == declared(await catalogue(database))


async def create_all(url: str) -> None:
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(url), poolclass=NullPool
    )
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
