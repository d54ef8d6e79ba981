"""Fixtures of a ledger with closed periods that are to be archived, and a coordinator with a place for archives."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import SecretStr

from coordinator.archives.job import archive_periods
from coordinator.archives.store import ArchiveStore
from coordinator.database.engine import Database, open_database
from coordinator.exchange.expire_leases import expire_leases
from coordinator.main import create_app
from coordinator.proof.seal import seal
from coordinator.settings import CoordinatorSettings
from protocol.identifiers import lane_of
from tests.conftest import PostgresServer, copied, restricted
from tests.integration.coordinator.admin_harness import AdminHarness, open_region
from tests.integration.coordinator.fixtures import StandingClock, connected, put_off
from tests.integration.coordinator.proof.conftest import harness_on
from tests.integration.coordinator.proof.history import ACME, IN_DECEMBER, write_history

SECOND_DAY = "2026-12-02"
WITHOUT_JOBS = ("seal", "expire_leases", "close_periods", "recall_suspense", "archive_periods", "run_verifications")


@pytest.fixture(scope="session")
def closed_template(postgres_server: PostgresServer) -> Iterator[str]:
    """Yield the name of a database with two months, of which one and a day of it are closed, settled and sealed."""
    with copied(postgres_server) as url:
        asyncio.run(_write(url))
        yield urlsplit(url).path.strip("/")


async def _write(url: str) -> None:
    async with harness_on(url) as harness:
        await write_history(harness)
        admin = await harness.caller("admin")
        await use_two_periods_at_once(harness, admin)
        harness.clock.time = IN_DECEMBER.replace(day=3)
        await close(harness, SECOND_DAY)
        await seal_now(harness)


async def use_two_periods_at_once(harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    """Report usage of a month and of a day in one report: its lines are in two periods."""
    region = await open_region(harness, admin, "ap-south")
    lane = lane_of(ACME, region.lanes)
    mails = next(key for n in range(100) if lane_of(key := f"mails:tenant=t{n}", region.lanes) == lane)
    await region.exchange(ACME, demands=[{"quota": quota, "waiting": 5} for quota in (ACME, mails)])
    frozen = []
    for (quota, _), lease in region.leases.items():
        tenant, minute = quota.partition("tenant=")[2], int(IN_DECEMBER.timestamp()) // 60
        line = {"minute": minute, "dimensions": {"tenant": tenant}, "units": 5}
        frozen.append(lease | {"consumed": 5, "returned": lease["granted"] - 5, "lines": [line]})
    assert len(frozen) == 2
    await region.exchange(ACME, frozen=frozen)


async def close(harness: AdminHarness, period: str) -> None:
    """Close a period, and end whatever people would have to decide about any closed one."""
    closer = await harness.caller("period:close")
    for _ in range(3):
        async with harness.owner.transaction():
            await expire_leases(harness.owner, harness.clock.now())
        answer = await closer.post(f"/v1/periods/{period}:close", json={"carry_suspense": True})
        assert answer.status_code < 300, answer.text
        harness.clock.move(minutes=20)
    assert answer.json()["period"]["state"] == "closed", answer.text
    await settle(harness)


async def settle(harness: AdminHarness) -> None:
    proposer, approver = [await harness.caller(scope) for scope in ("adjust:propose", "adjust:approve")]
    for row in await harness.owner.fetch(SUSPENDED):
        body = dict(row) | {"kind": "write_off", "reason": "the region is gone"}
        made = await proposer.post("/v1/suspense:propose", json=body)
        assert made.status_code < 300, made.text
        approved = await approver.post(f"/v1/suspense/{made.json()['id']}:approve")
        assert approved.status_code < 300, approved.text
    for row in await harness.owner.fetch(PROPOSED):
        ended = await proposer.post(f"/v1/adjustments/{row['id']}:withdraw")
        assert ended.status_code == 200, ended.text


SUSPENDED = "SELECT epoch, quota, charge_period AS period FROM correction WHERE suspense_carried > 0 ORDER BY 1, 2, 3"
PROPOSED = "SELECT id FROM adjustment WHERE approved_at IS NULL AND withdrawn_at IS NULL"


async def seal_now(harness: AdminHarness) -> None:
    harness.clock.move(minutes=1)
    async with harness.owner.transaction():
        await seal(harness.owner, harness.clock.now())


@pytest.fixture
def closed_database(postgres_server: PostgresServer, closed_template: str) -> Iterator[str]:
    with copied(postgres_server, closed_template) as url:
        yield url


class Archivist:
    """A coordinator with a place for archives, and people who call it. Its jobs run when a test runs them."""

    def __init__(self, harness: AdminHarness, store: ArchiveStore, database: Database) -> None:
        self.harness, self.store, self.database = harness, store, database
        self.owner, self.clock = harness.owner, harness.clock

    async def request(self, period: str, **body: Any) -> httpx.Response:
        closer = await self.harness.caller("period:close")
        return await closer.post("/v1/archives", json={"period": period, **body})

    async def run(self) -> None:
        await archive_periods(self.database, self.store, self.clock)

    async def archive(self, *periods: str) -> list[dict[str, Any]]:
        """Archive periods, one after the other, and return what the coordinator says of each."""
        found = []
        for period in periods:
            answer = await self.request(period)
            assert answer.status_code == 202, answer.text
            await self.run()
            found.append(await self.progress(period))
        return found

    async def progress(self, period: str) -> dict[str, Any]:
        finance = await self.harness.caller("usage:read")
        return dict((await finance.get(f"/v1/archives/{period}")).json())

    async def seal(self) -> None:
        await seal_now(self.harness)


@asynccontextmanager
async def archivist_on(url: str, location: str) -> AsyncIterator[Archivist]:
    clock = StandingClock()
    clock.time = IN_DECEMBER.replace(day=5)
    settings = CoordinatorSettings(
        database_url=SecretStr(restricted(url)),
        database_pool_size=4,
        lease_ms=60_000,
        clock_limit_ms=0,
        archive=location,
    )
    app = create_app(settings, clock)
    async with connected(url) as owner:
        await put_off(owner, *WITHOUT_JOBS)
        async with app.router.lifespan_context(app), open_database(restricted(url), 3) as database:
            harness = AdminHarness(httpx.ASGITransport(app, raise_app_exceptions=False), owner, clock)
            yield Archivist(harness, ArchiveStore(location), database)
            for client in harness.clients:
                await client.aclose()


@pytest.fixture
async def archivist(closed_database: str, tmp_path: Path) -> AsyncIterator[Archivist]:
    async with archivist_on(closed_database, str(tmp_path / "archives")) as archivist:
        yield archivist
