"""Fixtures of a ledger to tamper with: a few hundred sealed reports in several lanes, epochs and periods.

They are made once. A forger works in a transaction as the owner of a copy without constraints, with triggers and
foreign keys off, and is rolled back.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import pytest
from pydantic import SecretStr

from coordinator.database.connection import Connection
from coordinator.main import create_app
from coordinator.proof.seal import seal
from coordinator.settings import CoordinatorSettings
from tests.conftest import PostgresServer, copied
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region
from tests.integration.coordinator.fixtures import NOON, WIN_DEADLOCKS, StandingClock, connected, put_off
from tests.integration.coordinator.proof.history import write_history

MONTH, DAY = "2026-11", "2026-11-18"
POOLS = [
    *((f"exports:tenant={tenant}", MONTH) for tenant in ("acme", "globex", "initech", "umbrella")),
    ("mails:tenant=acme", DAY),
]
SEALS = 6


@pytest.fixture(scope="session")
def books(postgres_server: PostgresServer) -> Iterator[str]:
    with copied(postgres_server) as url:
        asyncio.run(write_books(url))
        with forgeable(postgres_server, url):
            yield url


@pytest.fixture(scope="session")
def history(postgres_server: PostgresServer) -> Iterator[str]:
    """Yield a database with two months of everything that finance reads, for tests that tamper with it."""
    with copied(postgres_server) as url:
        asyncio.run(_write_history(url))
        with forgeable(postgres_server, url):
            yield url


async def _write_history(url: str) -> None:
    async with harness_on(url) as admin_harness:
        await write_history(admin_harness)


@asynccontextmanager
async def harness_on(url: str) -> AsyncIterator[AdminHarness]:
    async with connected(url) as owner:
        await put_off(owner, "seal")  # the test seals by itself
    clock = StandingClock()
    app = create_app(
        CoordinatorSettings(database_url=SecretStr(url), database_pool_size=4, lease_ms=60_000, clock_limit_ms=0), clock
    )
    async with app.router.lifespan_context(app), connected(url) as owner:
        admin_harness = AdminHarness(httpx.ASGITransport(app, raise_app_exceptions=False), owner, clock)
        yield admin_harness
        for client in admin_harness.clients:
            await client.aclose()


async def write_books(url: str) -> None:
    chance = random.Random(7)
    async with harness_on(url) as admin_harness:
        admin = await admin_harness.caller("admin")
        limits = DOCUMENT | {
            "quotas": [quota | {"limit": 1_000_000} if quota["kind"] == "allowance" else quota for quota in QUOTAS]
        }
        assert (await admin.put("/v1/limits", json=limits)).status_code == 200
        regions = [
            await open_region(admin_harness, admin, name) for name in ("us-east", "eu-west", "us-east", "ap-south")
        ]
        for number in range(1, SEALS + 1):
            for _ in range(20):
                # The first epoch of us-east was fenced by its third, and has nothing to report.
                await use_something(chance, admin_harness.clock, chance.choice(regions[1:]))
            await regions[1].exchange(POOLS[0][0], demands=[{"quota": POOLS[0][0], "waiting": 5}])
            await move_something(admin_harness.owner, number, admin_harness.clock.now())
            await do_something(admin_harness.owner, number, admin_harness.clock.now())
            async with admin_harness.owner.transaction():
                await seal(admin_harness.owner, admin_harness.clock.now())
        await use_something(chance, admin_harness.clock, regions[1])


QUOTAS = DOCUMENT["quotas"]


async def use_something(chance: random.Random, clock: StandingClock, region: Region) -> None:
    clock.time += timedelta(seconds=1)
    lines = [
        Used(NOON - timedelta(minutes=chance.randrange(60)), chance.randint(1, 9)) for _ in range(chance.randint(1, 3))
    ]
    await region.use(*chance.choice(POOLS), lines)


async def move_something(owner: Connection, number: int, now: datetime) -> None:
    """Move a region's outstanding units into suspense, as the coordinator does by itself."""
    async with owner.transaction():
        row = await owner.fetchrow("SELECT * FROM lease WHERE outstanding > 0 ORDER BY epoch, quota LIMIT 1")
        assert row is not None
        names = row["epoch"], row["quota"], row["period"]
        change = "SET outstanding = outstanding - 1, suspense = suspense + 1"
        await owner.execute(f"UPDATE pool {change} WHERE quota = $1 AND period = $2", *names[1:])
        await owner.execute(f"UPDATE lease {change} WHERE epoch = $1 AND quota = $2 AND period = $3", *names)
        await owner.execute(
            """INSERT INTO transfer (epoch, quota, period, charge_period, region, src, dst, units, cause, movement_id,
                recorded_at) VALUES ($1, $2, $3, $3, $4, 'outstanding', 'suspense', 1, 'quarantined', $5, $6)""",
            *names,
            row["region"],
            UUID(int=number),
            now,
        )


async def do_something(owner: Connection, number: int, now: datetime) -> None:
    await owner.execute(
        """INSERT INTO audit (recorded_at, actor, action, object, request_id, details)
        VALUES ($1, 'token:1', 'limits.put', $2, 'a-request', '{"version": 1, "was": {"b": 1, "a": null}}')""",
        now,
        f"version {number}",
    )


_forgeable: dict[str, str] = {}  # by the URL of the database of which it is a copy


@contextmanager
def forgeable(server: PostgresServer, url: str) -> Iterator[None]:
    """Copy a database for its forgers, once: to drop all constraints takes longer than to forge a row and verify it."""
    with copied(server, urlsplit(url).path.strip("/")) as copy:
        asyncio.run(_drop_constraints_of(copy))
        _forgeable[url] = copy
        yield
        del _forgeable[url]


async def _drop_constraints_of(url: str) -> None:
    async with connected(url) as owner, owner.transaction():
        await _drop_constraints(owner)


async def _drop_constraints(owner: Connection) -> None:
    for table, constraint in await owner.fetch(_CONSTRAINTS):
        await owner.execute(f'ALTER TABLE {table} DROP CONSTRAINT IF EXISTS "{constraint}" CASCADE')
    for table, column in await owner.fetch(_IDENTITIES):
        await owner.execute(f"ALTER TABLE {table} ALTER {column} DROP IDENTITY")


@asynccontextmanager
async def forging(url: str) -> AsyncIterator[Connection]:
    """Yield a connection of the owner, with all guards and constraints off, in a transaction that is rolled back."""
    async with connected(_forgeable.get(url, url)) as forger:
        transaction = forger.transaction()
        await transaction.start()
        await forger.execute(WIN_DEADLOCKS)
        await forger.execute("SET LOCAL session_replication_role = replica")
        await _drop_constraints(forger)  # of a database that has no copy for forgers
        try:
            yield forger
        finally:
            await transaction.rollback()


_CONSTRAINTS = """
SELECT conrelid::regclass::text, conname FROM pg_constraint
WHERE contype IN ('c', 'p', 'u') AND conparentid = 0
    AND connamespace = current_schema()::regnamespace
    AND NOT (SELECT relispartition FROM pg_class WHERE pg_class.oid = conrelid)
"""
_IDENTITIES = """
SELECT attrelid::regclass::text, attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE attidentity <> '' AND NOT relispartition AND relnamespace = current_schema()::regnamespace
"""
