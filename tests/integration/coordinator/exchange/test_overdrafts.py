"""The overdrafts of all partitioned regions share one bound, and each is reported once."""

import httpx
import pytest

from protocol.periods import minute_of
from tests.integration.coordinator.admin_harness import FINGERPRINT, AdminHarness, Region, open_region, sealed
from tests.integration.coordinator.limits.test_soft_caps import (
    ACME,
    AT,
    NAMES,
    NOVEMBER,
    agrees,
    billed,
    lease,
    limited,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def regions(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> list[Region]:
    await limited(admin, cap={"overdraft": 50})
    return [await open_region(admin_harness, admin, name) for name in NAMES]


async def kept(admin_harness: AdminHarness) -> list[int]:
    return [row["overdraft"] for row in await admin_harness.owner.fetch("SELECT overdraft FROM lease ORDER BY epoch")]


async def report(region: Region, units: int, overdrawn: int) -> None:
    held = region.leases[ACME, NOVEMBER]
    held["consumed"] += units
    line = {"minute": minute_of(AT), "dimensions": {"tenant": "acme", "policy": "export"}, "units": units}
    await region.exchange(ACME, frozen=[held | {"overdrawn": overdrawn, "lines": [line]}])


async def told(region: Region) -> int:
    """Return the overdraft that a reply grants the region."""
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 1}])
    return region.overdrafts[ACME, NOVEMBER]


async def new_epoch(region: Region) -> None:
    body = {"nonce": "e" * 32, "fingerprint": FINGERPRINT}
    opened = await region.client.post(f"/v1/regions/{region.name}/epochs", json=body)
    assert opened.status_code == 200, opened.text
    region.epoch, region.seqs, region.leases = opened.json()["epoch"], {}, {}


async def test_all_regions_together_may_overdraw_what_the_quota_says_to_the_unit(
    admin_harness: AdminHarness, regions: list[Region]
) -> None:
    assert [await told(region) for region in regions] == [
        17,
        17,
        16,
    ], "by name, ap-south is first"
    assert sum(await kept(admin_harness)) == 50


async def test_a_new_incarnation_gets_no_second_overdraft_in_the_period(
    admin_harness: AdminHarness, regions: list[Region]
) -> None:
    assert await told(regions[0]) == 17
    await new_epoch(regions[0])
    assert await told(regions[0]) == 0
    assert [await told(region) for region in regions[1:]] == [17, 16]
    assert sum(await kept(admin_harness)) == 50


async def test_a_changed_weight_takes_nothing_back_and_gives_only_what_is_free(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, regions: list[Region]
) -> None:
    """A region that is partitioned now does not learn of it."""
    first, second, third = regions
    assert [await told(first), await told(second)] == [17, 17]
    changed = await admin.post("/v1/regions", json={"name": first.name, "status": "down"})
    assert changed.status_code in (200, 201), changed.text
    assert await told(second) == 25, "half of it, of which 33 are free"
    assert await told(third) == 8
    assert sum(await kept(admin_harness)) == 50


async def test_a_cap_that_becomes_hard_reaches_connected_regions(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, regions: list[Region]
) -> None:
    assert await told(regions[0]) == 17
    await limited(admin, cap="hard")
    assert await told(regions[0]) == 0
    assert await kept(admin_harness) == [17], "it was told, and is kept"


async def test_an_overdraft_is_covered_first_and_the_rest_is_overage(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, regions: list[Region]
) -> None:
    """Ten units beyond its lease while units were left, then ten when none were; a replay books nothing more."""
    first, second, _ = regions
    has = await lease(first, 100)
    await report(first, has + 10, 10)
    pool = await admin_harness.owner.fetchrow("SELECT overage, overage_used FROM pool")
    assert tuple(pool or ()) == (0, 0), "it was there: granted afterwards"
    rest = 1000 - has - 10
    assert await lease(second, rest) == rest
    await report(second, rest, 0)
    await report(first, 7, 17)
    pool = await admin_harness.owner.fetchrow("SELECT overage, overage_used, consumed FROM pool")
    assert tuple(pool or ()) == (7, 7, 1007)
    await sealed(admin_harness)
    assert await billed(finance) == {"usage": 1000, "overage": 7}
    await agrees(finance)
    found = (await finance.get(f"/v1/periods/{NOVEMBER}/reconciliation")).json()["quotas"][0]
    assert [(each["region"], each["overage"], each["overdrawn"]) for each in found["regions"]] == [
        ("eu-west", 7, 17),
        ("us-east", 0, 0),
    ]


async def test_an_overdraft_is_announced_once_per_return_of_a_region(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, regions: list[Region]
) -> None:
    body = {"url": "http://127.0.0.1:9/hook", "events": ["allowance.overdrawn"]}
    assert (await admin.post("/v1/webhooks", json=body)).status_code == 201
    has = await lease(regions[0], 10)
    for units, overdrawn in ((has + 4, 4), (1, 4), (3, 7)):
        await report(regions[0], units, overdrawn)
    rows = await admin_harness.owner.fetch("SELECT data ->> 'units' AS units FROM outbox ORDER BY data ->> 'overdrawn'")
    assert [row["units"] for row in rows] == ["4", "3"]


async def test_an_overdraft_is_shown_in_allocations(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, regions: list[Region]
) -> None:
    reader = await admin_harness.caller("quota:read")
    has = await lease(regions[0], 10)
    await report(regions[0], has + 4, 4)
    (allocation,) = (await reader.get("/v1/allocations?quota=exports")).json()["data"]
    (region,) = allocation["regions"]
    assert (region["overdraft"], region["overdrawn"]) == (17, 4)
