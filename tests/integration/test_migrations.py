"""What was booked under an older schema is there under the newest, and in all that was added since."""

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest

from leasehold import embedded
from migrations.run import ONE_MIGRATION_AT_A_TIME, upgrade
from tests.conftest import Server

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
EVERYTHING = "SELECT array_agg(transfer ORDER BY id)::text FROM transfer"
TABLES = "SELECT tableoid::regclass::text AS name, count(*) AS rows FROM transfer GROUP BY 1"
ROLLED_UP = """
SELECT name, tenant, policy, sum(units)::bigint AS units,
    (SELECT sum(units)::bigint FROM usage_day WHERE usage_day.name = usage_hour.name) AS by_day
FROM usage_hour GROUP BY name, tenant, policy
"""

WAITING = """
SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted
"""


@pytest.fixture
def released(postgres_server: Server) -> Iterator[str]:
    """A database as the release before made it."""
    name = "released"
    asyncio.run(run(embedded.postgres_url(postgres_server.port, postgres_server.password), f"CREATE DATABASE {name}"))
    url = embedded.postgres_url(postgres_server.port, postgres_server.password, name)
    upgrade(url, to="0001")
    yield url
    asyncio.run(
        run(embedded.postgres_url(postgres_server.port, postgres_server.password), f"DROP DATABASE {name} WITH (FORCE)")
    )


async def run(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def ask(url: str, sql: str) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row.values()) for row in await connection.fetch(sql)]
    finally:
        await connection.close()


def test_what_was_booked_is_carried_over(released: str) -> None:
    asyncio.run(run(released, BOOKED))
    before = asyncio.run(ask(released, EVERYTHING))
    upgrade(released)
    assert asyncio.run(ask(released, EVERYTHING)) == before
    parts = asyncio.run(ask(released, TABLES))
    assert sorted(parts, key=str) == [('"transfer_2026-11"', 1001), ('"transfer_2026-11-18T09"', 50)]
    rolled_up = asyncio.run(ask(released, ROLLED_UP))
    assert sorted(rolled_up, key=str) == [("a", "t", "p", 500_500, 500_500), ("b", "z", None, 1275, 1275)]
    one_more = BOOKED[BOOKED.rindex("INSERT") :].rstrip(";\n")
    assert asyncio.run(ask(released, f"{one_more} RETURNING id")) == [(1052,)]


def test_an_empty_ledger_is_carried_over_too(released: str) -> None:
    upgrade(released)
    asyncio.run(run(released, BOOKED))
    assert asyncio.run(ask(released, "SELECT min(id), max(id) FROM transfer")) == [(1, 1051)]


def test_two_that_migrate_at_once_do_it_one_after_the_other(released: str) -> None:
    """Somebody is at it: both are seen to wait, and then one migrates and the other finds it done."""

    async def at_once() -> None:
        owner = await asyncpg.connect(released)
        try:
            await owner.execute(f"SELECT pg_advisory_lock({ONE_MIGRATION_AT_A_TIME})")
            both = [asyncio.create_task(asyncio.to_thread(upgrade, released)) for _ in range(2)]
            async with asyncio.timeout(60):
                while await owner.fetchval(WAITING) < 2:
                    assert not any(each.done() for each in both), "it waited for nobody"
                    await asyncio.sleep(0.01)
            assert await owner.fetchval("SELECT version_num FROM alembic_version") == "0001"
            await owner.execute("SELECT pg_advisory_unlock_all()")
            await asyncio.gather(*both)
        finally:
            await owner.close()

    asyncio.run(at_once())
    asyncio.run(run(released, BOOKED))
