"""Units of many pools add up to more than 2^63, and every sum of them is still exact."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import SecretStr

from coordinator.main import create_app
from coordinator.proof.verify import verify
from coordinator.settings import CoordinatorSettings
from coordinator.usage.find_drift import find_drift
from protocol.identifiers import lane_of
from protocol.periods import minute_of
from protocol.units import MAX_UNITS
from tests.conftest import restricted
from tests.integration.coordinator.admin_harness import DOCUMENT, FINGERPRINT, AdminHarness, Region, open_region, sealed
from tests.integration.coordinator.exports.test_exports import data, exported
from tests.integration.coordinator.fixtures import NOON, StandingClock, connected

pytestmark = pytest.mark.anyio
TENANTS = 1100
DAY = "2026-11-18"
IN_ALL = TENANTS * MAX_UNITS
assert IN_ALL > 2**63


@pytest.fixture
async def admin_harness(database: str) -> AsyncIterator[AdminHarness]:
    clock = StandingClock()
    settings = CoordinatorSettings(
        database_url=SecretStr(restricted(database)),
        database_pool_size=4,
        implausible_floor_units=MAX_UNITS,
        clock_limit_ms=0,
    )
    app = create_app(settings, clock)
    async with app.router.lifespan_context(app), connected(database) as owner:
        admin_harness = AdminHarness(httpx.ASGITransport(app, raise_app_exceptions=False), owner, clock)
        yield admin_harness
        for client in admin_harness.clients:
            await client.aclose()


@pytest.fixture
async def region(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> Region:
    """A region whose agent booked the largest possible adjustment for each of very many tenants."""
    await admin.put("/v1/limits", json=DOCUMENT)
    region = await open_region(admin_harness, admin, "eu-west")
    lanes: dict[int, list[Any]] = {}
    for number in range(TENANTS):
        quota = f"mails:tenant=t{number}"
        lanes.setdefault(lane_of(quota, region.lanes), []).append(_used(quota))
    exchanges = [
        {"frozen": msgspec.json.encode({"epoch": region.epoch, "lane": lane, "seq": 1, "leases": leases}).decode()}
        for lane, leases in lanes.items()
    ]
    body = {"fingerprint": FINGERPRINT, "exchanges": exchanges}
    answer = await region.client.post(f"/v1/regions/{region.name}/exchanges", json=body)
    assert answer.status_code == 200, answer.text
    assert {reply["outcome"] for reply in answer.json()["replies"]} == {"applied"}
    return region


def _used(quota: str) -> dict[str, Any]:
    line = {"minute": minute_of(NOON), "dimensions": {"policy": "mail"}, "units": MAX_UNITS}
    totals = {"granted": 0, "overage": 0, "consumed": MAX_UNITS, "returned": 0}
    return {"quota": quota, "period": DAY, **totals, "lines": [line]}


async def test_the_ledger_is_sealed_read_and_proven(
    admin_harness: AdminHarness, region: Region, finance: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    await sealed(admin_harness)
    for query in ("", "?group_by=quota", "?group_by=region"):
        usage = await finance.get(f"/v1/usage{query}")
        assert usage.status_code == 200, usage.text
        assert sum(row["units"] for row in usage.json()["data"]) == IN_ALL
    statement = await finance.get(f"/v1/periods/{DAY}/statement?tenant=t7")
    assert statement.status_code == 200
    assert statement.json()["billed"] == MAX_UNITS
    metrics = await admin.get("/metrics")
    assert metrics.status_code == 200
    for path in ("reconciliation", "trial-balance"):
        answer = await finance.get(f"/v1/periods/{DAY}/{path}")
        assert answer.status_code == 200, answer.text
    await find_drift(admin_harness.owner, admin_harness.clock.now())
    async with admin_harness.owner.transaction(isolation="repeatable_read", readonly=True):
        assert (await verify(admin_harness.owner, admin_harness.clock.now())).intact


async def test_the_period_is_exported_and_closed(
    admin_harness: AdminHarness, region: Region, finance: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    await sealed(admin_harness)
    for format_ in ("csv", "parquet"):
        manifest = await exported(finance, period=DAY, format=format_)
        assert manifest["rows"] >= TENANTS
        assert (await data(finance, manifest)).status_code == 200
    admin_harness.clock.move(days=1, hours=1)
    for status in (202, 200):
        answer = await admin.post(f"/v1/periods/{DAY}:close", json={})
        assert answer.status_code == status, answer.text
        admin_harness.clock.move(minutes=20)
    await sealed(admin_harness)
    period = await finance.get(f"/v1/periods/{DAY}/reconciliation")
    assert (period.json()["state"], period.json()["status"]) == ("closed", "balanced")
