"""Migrations create the schema, apply later steps, run one at a time, and fail without changes."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import asyncpg
import pytest
from alembic.config import Config

import migrations
from migrations import run
from migrations.revisions import known_revisions
from migrations.run import ONE_MIGRATION_AT_A_TIME, SchemaIsNewer, alembic_config, needed_release, upgrade
from protocol.compatibility.releases import OLDEST_PEER, minor_of

VERSIONS = Path(migrations.__path__[0]) / "versions"
NEWEST = known_revisions()[-1]
LATER = f"{int(NEWEST) + 1:04}"
LATER_STEP = """
from migrations.statements import execute

revision = {revision!r}
down_revision = {down_revision!r}
{more}

def upgrade() -> None:
    execute({sql!r})
"""
BOOKED = """
INSERT INTO period (id, kind, starts_at, ends_at) VALUES
    ('2026-11', 'month', '2026-11-01', '2026-12-01'), ('2026-11-18T09', 'hour', '2026-11-18 09:00', '2026-11-18 10:00');
INSERT INTO pool (quota, period, name, tenant)
VALUES ('a:tenant=t', '2026-11', 'a', 't'), ('b', '2026-11-18T09', 'b', NULL);
INSERT INTO transfer (period, quota, src, dst, units, cause, region, epoch, lane, seq, line, window_at, dimensions,
    charge_period, recorded_at)
SELECT '2026-11', 'a:tenant=t', 'outstanding', 'consumed', n, 'usage', 'r', 1, 1, n, 0,
    timestamptz '2026-11-18 08:00Z' + n * interval '7 minutes', jsonb '{"policy": "p"}', '2026-11', now()
FROM generate_series(1, 1000) AS n
UNION ALL
SELECT '2026-11-18T09', 'b', 'outstanding', 'consumed', n, 'usage', 'r', 1, 2, n, 0,
    timestamptz '2026-11-18 09:00Z' + n * interval '1 minute', jsonb '{"tenant": "z"}', '2026-11-18T09', now()
FROM generate_series(1, 50) AS n;
INSERT INTO transfer (period, quota, src, dst, units, cause, movement_id, charge_period, recorded_at)
VALUES ('2026-11', 'a:tenant=t', 'funding', 'unallocated', 9, 'funded', gen_random_uuid(), '2026-11', now());
"""
TRANSFERS = "SELECT array_agg(transfer ORDER BY id)::text FROM transfer"
PARTITIONS = "SELECT tableoid::regclass::text AS name, count(*) AS rows FROM transfer GROUP BY 1"
ROLLED_UP = """
SELECT name, tenant, policy, sum(units)::bigint AS units,
    (SELECT sum(units)::bigint FROM usage_day WHERE usage_day.name = usage_hour.name) AS by_day
FROM usage_hour GROUP BY name, tenant, policy
"""
REVISION = "SELECT version_num FROM alembic_version"
NEEDED = "SELECT obj_description('alembic_version'::regclass)"
WAITING = """
SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted
"""


@pytest.fixture
def add_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Add a step after the newest, as a later release would, that executes some SQL."""

    def config_with_steps(output: TextIO | None = None) -> Config:
        config = alembic_config(output)
        config.set_main_option("version_locations", f"{VERSIONS}{os.pathsep}{tmp_path}")
        return config

    def add(sql: str, more: str = "") -> None:
        step = LATER_STEP.format(revision=LATER, down_revision=NEWEST, sql=sql, more=more)
        (tmp_path / f"{LATER}_later.py").write_text(step)

    monkeypatch.setattr(run, "alembic_config", config_with_steps)
    return add


async def execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def fetch(url: str, sql: str) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row.values()) for row in await connection.fetch(sql)]
    finally:
        await connection.close()


def test_an_empty_database_gets_the_schema_with_its_triggers(empty_database: str) -> None:
    upgrade(empty_database)
    asyncio.run(execute(empty_database, BOOKED))
    assert asyncio.run(fetch(empty_database, "SELECT min(id), max(id) FROM transfer")) == [(1, 1051)]
    partitions = asyncio.run(fetch(empty_database, PARTITIONS))
    assert sorted(partitions, key=str) == [('"transfer_2026-11"', 1001), ('"transfer_2026-11-18T09"', 50)]
    rolled_up = asyncio.run(fetch(empty_database, ROLLED_UP))
    assert sorted(rolled_up, key=str) == [("a", "t", "p", 500_500, 500_500), ("b", "z", None, 1275, 1275)]


def test_a_later_step_keeps_what_was_booked(database: str, add_step: Callable[[str], None]) -> None:
    asyncio.run(execute(database, BOOKED))
    before = asyncio.run(fetch(database, TRANSFERS))
    add_step("ALTER TABLE pool ADD COLUMN later bigint")
    upgrade(database)
    assert asyncio.run(fetch(database, REVISION)) == [(LATER,)]
    assert asyncio.run(fetch(database, "SELECT count(*) - count(later) FROM pool")) == [(2,)]
    assert asyncio.run(fetch(database, TRANSFERS)) == before
    one_more = BOOKED[BOOKED.rindex("INSERT") :].rstrip(";\n")
    assert asyncio.run(fetch(database, f"{one_more} RETURNING id")) == [(1052,)]


def test_a_step_that_removes_states_which_release_the_schema_needs(
    database: str, add_step: Callable[..., None]
) -> None:
    assert asyncio.run(fetch(database, NEEDED)) == [(None,)]
    add_step("ALTER TABLE region DROP COLUMN weight", more='needs_release = "0.999"')
    upgrade(database)
    upgrade(database)
    assert asyncio.run(fetch(database, NEEDED)) == [("needs release 0.999",)]


def test_no_step_needs_more_than_the_oldest_release_that_this_one_works_with() -> None:
    """Coordinators of the release before run on the newest schema, so that a rolling upgrade has no gap."""
    needed = needed_release(alembic_config())
    assert needed is None or minor_of(needed) <= minor_of(OLDEST_PEER)


def test_a_failed_step_changes_nothing(database: str, add_step: Callable[[str], None]) -> None:
    add_step("CREATE TABLE later (); SELECT 1 / 0")
    with pytest.raises(asyncpg.DivisionByZeroError):
        upgrade(database)
    assert asyncio.run(fetch(database, REVISION)) == [(NEWEST,)]
    assert asyncio.run(fetch(database, "SELECT to_regclass('later')")) == [(None,)]


def test_a_newer_schema_stays_as_it_is(database: str) -> None:
    asyncio.run(execute(database, "UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaIsNewer, match="9999"):
        upgrade(database)
    assert asyncio.run(fetch(database, REVISION)) == [("9999",)]


def test_a_step_waits_a_bounded_time_for_its_locks(
    database: str, add_step: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy table fails the migration instead of stopping the service."""
    add_step("ALTER TABLE region ADD COLUMN later bigint")
    monkeypatch.setattr(run, "LOCK_TIMEOUT_MS", 50)

    async def while_the_table_is_read() -> None:
        reader = await asyncpg.connect(database)
        try:
            async with reader.transaction():
                await reader.fetch("SELECT FROM region")
                with pytest.raises(asyncpg.LockNotAvailableError):
                    await asyncio.to_thread(upgrade, database)
        finally:
            await reader.close()

    asyncio.run(while_the_table_is_read())
    assert asyncio.run(fetch(database, REVISION)) == [(NEWEST,)]
    upgrade(database)
    assert asyncio.run(fetch(database, REVISION)) == [(LATER,)]


def test_two_migrations_at_once_run_one_after_the_other(empty_database: str) -> None:
    """Both wait for the advisory lock; then one migrates, and the other finds nothing to do."""

    async def at_once() -> None:
        owner = await asyncpg.connect(empty_database)
        try:
            await owner.execute(f"SELECT pg_advisory_lock({ONE_MIGRATION_AT_A_TIME})")
            both = [asyncio.create_task(asyncio.to_thread(upgrade, empty_database)) for _ in range(2)]
            async with asyncio.timeout(60):
                while await owner.fetchval(WAITING) < 2:
                    assert not any(each.done() for each in both), "a migration did not wait"
                    await asyncio.sleep(0.01)
            assert await owner.fetchval("SELECT to_regclass('alembic_version')") is None
            await owner.execute("SELECT pg_advisory_unlock_all()")
            await asyncio.gather(*both)
        finally:
            await owner.close()

    asyncio.run(at_once())
    asyncio.run(execute(empty_database, BOOKED))
