"""A soft cap extends the limit; usage beyond the limit is booked apart once, to the unit, in any order of reports."""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from itertools import permutations
from typing import Any

import httpx
import pytest

from coordinator.exchange.expire_leases import expire_leases
from protocol.periods import minute_of
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, open_region, sealed

pytestmark = pytest.mark.anyio

ACME, NOVEMBER = "exports:tenant=acme", "2026-11"
AT = datetime(2026, 11, 18, 9, 5, tzinfo=UTC)
NAMES = ("eu-west", "us-east", "ap-south")


async def limited(admin: httpx.AsyncClient, **changes: Any) -> None:
    first, *others = DOCUMENT["quotas"]
    answer = await admin.put("/v1/limits", json=DOCUMENT | {"quotas": [first | changes, *others]})
    assert answer.status_code == 200, answer.text


@pytest.fixture
async def regions(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> list[Region]:
    await limited(admin, cap="soft")
    return [await open_region(admin_harness, admin, name) for name in NAMES]


async def lease(region: Region, units: int) -> int:
    """Request so many units, and return the region's lease."""
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": units}])
    return int(region.leases[ACME, NOVEMBER]["granted"])


async def report(region: Region, *units: int, policy: str = "export") -> None:
    """Return lines of so many units in one minute each."""
    held = region.leases[ACME, NOVEMBER]
    held["consumed"] += sum(units)
    dimensions = {"tenant": "acme", "policy": policy}
    lines = [{"minute": minute_of(AT) + n, "dimensions": dimensions, "units": each} for n, each in enumerate(units)]
    await region.exchange(ACME, frozen=[held | {"lines": lines}])


async def billed(finance: httpx.AsyncClient, period: str = NOVEMBER) -> dict[str, int]:
    answer = await finance.get(f"/v1/periods/{period}/statement?tenant=acme")
    assert answer.status_code == 200, answer.text
    kinds = Counter[str]()
    for line in answer.json()["lines"]:
        kinds[line["kind"]] += line["units"]
    assert sum(kinds.values()) == answer.json()["billed"]
    return dict(kinds)


async def used(finance: httpx.AsyncClient, query: str = "") -> dict[str, int]:
    answer = await finance.get(f"/v1/usage?group_by=counted_as{query}")
    assert answer.status_code == 200, answer.text
    return {row["dimensions"]["counted_as"]: row["units"] for row in answer.json()["data"]}


async def agrees(finance: httpx.AsyncClient, period: str = NOVEMBER) -> None:
    reconciled = (await finance.get(f"/v1/periods/{period}/reconciliation")).json()
    assert (reconciled["status"], reconciled["findings"]) == ("balanced", [])
    balance = (await finance.get(f"/v1/periods/{period}/trial-balance")).json()
    assert (balance["status"], balance["sources"]) == ("balanced", balance["uses"])


@pytest.mark.parametrize("order", list(permutations(range(3)))[::2])
async def test_included_usage_is_the_limit_in_any_order_of_reports(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, regions: list[Region], order: tuple[int, ...]
) -> None:
    for region in regions:
        assert await lease(region, 470) >= 470  # 1,410 of 1,000
    for place in order:
        await report(regions[place], 7, 400, 63)
        await agrees(finance)
    await sealed(admin_harness)
    assert await billed(finance) == {"usage": 1000, "overage": 410}
    assert await used(finance) == {"included": 1000, "overage": 410}  # of rollups
    assert await used(finance, "&granularity=PT1M&from=2026-11-18T09:06:00Z&to=2026-11-18T09:07:00Z") != {}
    assert await used(finance, "&counted_as=overage") == {"overage": 410}
    by_region = (await finance.get("/v1/usage?group_by=counted_as,region&counted_as=overage")).json()["data"]
    assert {row["dimensions"]["region"] for row in by_region} == {NAMES[order[2]]}


async def test_regions_that_report_at_once_share_the_limit_to_the_unit(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, regions: list[Region]
) -> None:
    for region in regions:
        await lease(region, 500)
    for _ in range(5):
        await asyncio.gather(*(report(region, 37, 63) for region in regions))
    await sealed(admin_harness)
    assert await billed(finance) == {"usage": 1000, "overage": 500}
    await agrees(finance)


async def test_a_soft_cap_ends_at_its_ceiling(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient
) -> None:
    await limited(admin, cap={"overage": 50})
    regions = [await open_region(admin_harness, admin, name) for name in NAMES]
    assert sum([await lease(region, 900) for region in regions]) == 1050
    pool = await admin_harness.owner.fetchrow("SELECT funded, soft_cap_extension, unallocated FROM pool")
    assert tuple(pool or ()) == (1000, 50, 0)
    await limited(admin, cap="hard")  # the excess leaves the pool as it is returned
    first = regions[0].leases[ACME, NOVEMBER]
    first["returned"] += 80
    await regions[0].exchange(ACME, frozen=[first], demands=[{"quota": ACME}])
    pool = await admin_harness.owner.fetchrow("SELECT funded, soft_cap_extension FROM pool")
    assert tuple(pool or ()) == (1000, 0)
    await agrees(finance)


async def test_a_raised_limit_includes_later_usage(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, regions: list[Region]
) -> None:
    """Usage booked as overage stays overage."""
    await lease(regions[0], 1500)
    await report(regions[0], 1200)
    await limited(admin, cap="soft", limit=1100)
    await lease(regions[1], 300)
    await report(regions[1], 250)
    await sealed(admin_harness)
    assert await billed(finance) == {"usage": 1100, "overage": 350}
    await agrees(finance)


async def test_late_usage_counts_against_the_limit_of_its_own_period(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, regions: list[Region]
) -> None:
    """Two regions report 60 units each for a closed month that had 70 left, and others in the new one meanwhile."""
    for region in regions:
        await lease(region, 600)
    await report(regions[0], 930)
    admin_harness.clock.time = datetime(2026, 12, 2, tzinfo=UTC)
    closer = await admin_harness.caller("period:close")
    await admin_harness.owner.execute("UPDATE lease SET expires_at = '2026-12-01'")
    for _ in range(3):
        async with admin_harness.owner.transaction():
            await expire_leases(admin_harness.owner, admin_harness.clock.now())
        closed = await closer.post(f"/v1/periods/{NOVEMBER}:close", json={"carry_suspense": True})
        admin_harness.clock.move(minutes=20)
    assert (closed.status_code, closed.json()["period"]["state"]) == (200, "closed"), closed.text
    for region in regions[1:]:
        await report(region, 60)
    await sealed(admin_harness)
    assert await billed(finance) == {"usage": 930}
    assert await billed(finance, "2026-12") == {"late_usage": 70, "late_overage": 50}
    pool = await admin_harness.owner.fetchrow("SELECT consumed, overage_used FROM pool WHERE period = '2026-12'")
    assert tuple(pool or ()) == (120, 0)  # nothing of the new month
    await agrees(finance, "2026-12")
    await agrees(finance)
