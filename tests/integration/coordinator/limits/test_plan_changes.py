"""A change of a tenant's plan within a period changes its limit at once, and the right regions are signalled."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region, problem
from tests.integration.coordinator.limits.test_catalogue_changes import THE_END, notices
from tests.integration.coordinator.usage.test_statements import at

pytestmark = pytest.mark.anyio

__all__ = ["notices"]

MAILS, DAY = "mails:tenant=acme", "2026-11-18"


async def put(admin: httpx.AsyncClient, plan: str) -> dict[str, Any]:
    answer = await admin.put("/v1/subscriptions/acme", json={"plan": plan})
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
async def region(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> Region:
    await admin.put("/v1/limits", json=DOCUMENT)
    return await open_region(admin_harness, admin, "eu-west")


async def pool(admin_harness: AdminHarness) -> dict[str, int]:
    """Check that both identities hold, and that the leases add up to their pool."""
    row = await admin_harness.owner.fetchrow("SELECT * FROM pool WHERE quota = $1", MAILS)
    held = await admin_harness.owner.fetchrow(_HELD, MAILS)
    assert row is not None
    assert held is not None
    assert row["funded"] == row["unallocated"] + row["outstanding"] + row["consumed"]
    assert (held["outstanding"], held["consumed"]) == (row["outstanding"], row["consumed"])
    assert held["kept"] == held["consumed"] + held["outstanding"]
    return {name: row[name] for name in ("funded", "unallocated", "outstanding", "consumed")}


_HELD = """
SELECT sum(granted - returned) AS kept, sum(consumed) AS consumed, sum(outstanding) AS outstanding
FROM lease WHERE quota = $1
"""


async def heard(admin_harness: AdminHarness, notices: asyncio.Queue[str]) -> list[tuple[object, ...]]:
    """Return the signals about the quota: kind, region, keep."""
    await admin_harness.owner.execute("SELECT pg_notify('leasehold_signals', $1)", THE_END)
    found = []
    async with asyncio.timeout(30):
        while (notice := await notices.get()) != THE_END:
            found.append(msgspec.json.decode(notice))
    of_quota = [each for each in found if each["signal"].get("quota") == MAILS]
    return [(each["signal"]["kind"], each.get("region"), each["signal"].get("keep", 0)) for each in of_quota]


async def test_a_higher_limit_applies_at_once(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region, notices: asyncio.Queue[str]
) -> None:
    await region.use(MAILS, DAY, [Used(at("18T09:05"), 100, "mail")])
    await heard(admin_harness, notices)
    [effect] = (await put(admin, "pro"))["effects"]
    about = {"quota": MAILS, "period": DAY}
    assert effect == about | {"was": 100, "limit": 500, "consumed": 100, "outstanding": 0, "over": 0}
    assert await heard(admin_harness, notices) == [("grant", None, 0)]
    assert await pool(admin_harness) == {"funded": 500, "unallocated": 400, "outstanding": 0, "consumed": 100}
    await region.use(MAILS, DAY, [Used(at("18T10:05"), 400, "mail")])
    assert (await pool(admin_harness))["consumed"] == 500


async def test_a_lower_limit_keeps_what_was_used_and_recalls_what_regions_hold(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region, notices: asyncio.Queue[str]
) -> None:
    await put(admin, "pro")
    await region.use(MAILS, DAY, [Used(at("18T09:05"), 130, "mail")])
    await region.exchange(MAILS, demands=[{"quota": MAILS, "waiting": 200}])
    await heard(admin_harness, notices)
    [effect] = (await put(admin, "free"))["effects"]
    about = {"quota": MAILS, "period": DAY}
    assert effect == about | {"was": 500, "limit": 100, "consumed": 130, "outstanding": 200, "over": 230}
    assert await pool(admin_harness) == {"funded": 330, "unallocated": 0, "outstanding": 200, "consumed": 130}
    assert await heard(admin_harness, notices) == [("recall", "eu-west", 0)]
    # Returned units leave the pool, because the limit is used up.
    lease = region.leases[MAILS, DAY]
    lease["returned"] += 200
    await region.exchange(MAILS, frozen=[lease | {"lines": []}], demands=[{"quota": MAILS, "waiting": 5}])
    assert region.leases[MAILS, DAY]["granted"] == 330
    assert await pool(admin_harness) == {"funded": 130, "unallocated": 0, "outstanding": 0, "consumed": 130}


async def test_each_region_is_recalled_its_part_of_the_excess(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region, notices: asyncio.Queue[str]
) -> None:
    other = await open_region(admin_harness, admin, "us-east")
    await put(admin, "pro")
    await region.exchange(MAILS, demands=[{"quota": MAILS, "waiting": 150}])
    await other.exchange(MAILS, demands=[{"quota": MAILS, "waiting": 50}])
    await heard(admin_harness, notices)
    [effect] = (await put(admin, "free"))["effects"]
    assert (effect["outstanding"], effect["over"]) == (200, 100)
    assert sorted(await heard(admin_harness, notices), key=str) == [
        ("recall", "eu-west", 75),
        ("recall", "us-east", 25),
    ]


async def test_changes_of_plans_are_in_the_audit(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region
) -> None:
    await region.use(MAILS, DAY, [Used(at("18T09:05"), 100, "mail")])
    raised = await put(admin, "pro")
    admin_harness.clock.move(minutes=5)
    assert (await admin.delete("/v1/subscriptions/acme")).status_code == 204
    deeds = (await admin.get("/v1/audit", params={"object": "acme"})).json()["data"]
    deleted, put_ = (each["details"] for each in deeds)
    assert put_["effects"] == raised["effects"]
    [effect] = deleted["effects"]
    assert (effect["was"], effect["limit"], effect["over"]) == (500, 100, 0)
    assert [each["recorded_at"] for each in deeds] == ["2026-11-18T12:05:00Z", "2026-11-18T12:00:00Z"]
    assert len({each["actor"] for each in deeds}) == 1
    assert await pool(admin_harness) == {"funded": 100, "unallocated": 0, "outstanding": 0, "consumed": 100}


async def test_the_same_plan_again_changes_nothing(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region
) -> None:
    await put(admin, "pro")
    await region.use(MAILS, DAY, [Used(at("18T09:05"), 100, "mail")])
    transfers = await admin_harness.owner.fetchval("SELECT count(*) FROM transfer")
    assert (await put(admin, "pro"))["effects"] == []
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM transfer") == transfers


async def test_the_beginning_of_a_subscription_is_never_changed(admin: httpx.AsyncClient, region: Region) -> None:
    body = {"plan": "free", "began_at": "2025-01-31T09:00:00+01:00"}
    made = await admin.put("/v1/subscriptions/acme", json=body)
    assert (made.status_code, made.json()["began_at"]) == (201, "2025-01-31T08:00:00Z")
    assert (await put(admin, "pro"))["began_at"] == "2025-01-31T08:00:00Z"
    for began_at, rule in (("2025-02-01T00:00:00Z", "fixed"), ("2026-11-18T12:00:01Z", "past")):
        refused = await admin.put("/v1/subscriptions/acme", json=body | {"began_at": began_at})
        assert problem(refused) == (422, [("began_at", rule)])
    assert (await admin.get("/v1/subscriptions/acme")).json()["plan"] == "pro"
