"""Units left of a month carry over into the next, once, at its close; late usage cannot use them."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from coordinator.exchange.expire_leases import expire_leases
from coordinator.periods.close import period_root
from protocol.units import MAX_UNITS
from tests.integration.coordinator.adjustments.test_adjustments import People
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region, sealed
from tests.integration.coordinator.interleaving import until_it_waits
from tests.integration.coordinator.limits.test_catalogue_changes import heard, notices
from tests.integration.coordinator.limits.test_soft_caps import ACME, AT, NAMES, NOVEMBER, agrees, billed, limited

__all__ = ["notices"]
pytestmark = pytest.mark.anyio

DECEMBER, JANUARY = "2026-12", "2027-01"
IN_DECEMBER, IN_JANUARY = datetime(2026, 12, 2, tzinfo=UTC), datetime(2027, 1, 2, tzinfo=UTC)


@pytest.fixture
async def region(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> Region:
    await limited(admin, carry_over={"free": 300, "pro": "all"})
    return await open_region(admin_harness, admin, NAMES[0])


async def use(region: Region, units: int) -> None:
    """Use so many units, and return the rest of the lease."""
    await region.use(ACME, NOVEMBER, [Used(AT, units)])
    await give_back(region, NOVEMBER)


async def give_back(region: Region, period: str) -> None:
    held = region.leases[ACME, period]
    held["returned"] = held["granted"] + held["overage"] - held["consumed"]
    await region.exchange(ACME, frozen=[held])


async def close(
    admin_harness: AdminHarness, period: str = NOVEMBER, at: datetime = IN_DECEMBER, **asked: Any
) -> httpx.Response:
    admin_harness.clock.time = max(admin_harness.clock.time, at)
    closer = await admin_harness.caller("period:close")
    await admin_harness.owner.execute("UPDATE lease SET expires_at = $1 WHERE period = $2", at, period)
    for _ in range(3):
        async with admin_harness.owner.transaction():
            await expire_leases(admin_harness.owner, admin_harness.clock.now())
        answer = await closer.post(f"/v1/periods/{period}:close", json={"carry_suspense": True} | asked)
        if asked.get("dry_run") or answer.status_code not in (200, 202):
            return answer
        admin_harness.clock.move(minutes=20)
    assert answer.json()["period"]["state"] == "closed", answer.text
    return answer


async def pool(admin_harness: AdminHarness, period: str) -> tuple[int, ...]:
    row = await admin_harness.owner.fetchrow(
        "SELECT funded, carried_over_in, carried_over_out, unallocated FROM pool WHERE (quota, period) = ($1, $2)",
        ACME,
        period,
    )
    return tuple(row or ())


async def grants(region: Region, units: int, period: str = DECEMBER) -> int:
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": units}])
    return int(region.leases[ACME, period]["granted"])


async def test_unused_units_carry_over_up_to_the_plans_amount(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    await use(region, 600)
    over = [{"quota": ACME, "into": DECEMBER, "units": 300}]
    assert (await close(admin_harness, dry_run=True)).json()["carried_over"] == over
    assert await pool(admin_harness, NOVEMBER) == (1000, 0, 0, 400), "who only looks moves nothing"
    assert (await close(admin_harness)).json()["carried_over"] == over
    closer = await admin_harness.caller("period:close")
    again = await closer.post(f"/v1/periods/{NOVEMBER}:close", json={})
    assert again.json()["carried_over"] == over, "told again, and not done again"
    assert await pool(admin_harness, NOVEMBER) == (1000, 0, 300, 100)
    assert await pool(admin_harness, DECEMBER) == (0, 300, 0, 300)
    for period in (NOVEMBER, DECEMBER):
        await agrees(finance, period)
    assert await grants(region, 1300) == 1300, "before anybody had asked for any of the new month"
    assert await grants(region, 1301) == 1300
    await agrees(finance, DECEMBER)
    await sealed(admin_harness)
    limits = (await finance.get(f"/v1/periods/{DECEMBER}/statement?tenant=acme")).json()["limits"]
    assert [(each["kind"], each["units"], each["reason"]) for each in limits] == [
        ("plan", 1000, None),
        ("carry_over", 300, f"carried over from {NOVEMBER}"),
    ]


@pytest.mark.extended
async def test_carry_over_of_all_units_and_of_a_percentage(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region
) -> None:
    await use(region, 777)
    for carry_over, units in (("all", 223), ("10%", 100), (0, 0), ({"pro": "all"}, 0), (None, 0)):
        await limited(admin, carry_over=carry_over)
        found = (await close(admin_harness, dry_run=True)).json()["carried_over"]
        assert [each["units"] for each in found] == [units] * bool(units)


async def test_carried_over_units_are_spent_first_and_do_not_carry_over_again(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region
) -> None:
    await limited(admin, carry_over="all")
    await use(region, 600)
    await close(admin_harness)
    assert await grants(region, 100) >= 100
    await give_back(region, DECEMBER)
    region.leases[ACME, DECEMBER]["consumed"] += 0
    closed = await close(admin_harness, DECEMBER, IN_JANUARY)
    assert closed.json()["carried_over"] == [{"quota": ACME, "into": JANUARY, "units": 1000}]
    assert await pool(admin_harness, DECEMBER) == (1000, 400, 1000, 400)
    await agrees(finance, DECEMBER)
    await agrees(finance, JANUARY)


async def test_late_usage_is_included_up_to_the_units_not_carried_over(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region
) -> None:
    """900 of 1,000 units are used, 60 in suspense and 40 carried over: of 100 late units 60 are within their month's
    limit.
    """
    await limited(admin, carry_over="all")
    other = await open_region(admin_harness, admin, NAMES[1])
    await use(region, 900)
    await other.exchange(ACME, demands=[{"quota": ACME, "waiting": 60}])
    held = other.leases[ACME, NOVEMBER]
    held["returned"] = held["granted"] - 60
    await other.exchange(ACME, frozen=[held])
    assert (await close(admin_harness)).json()["carried_over"] == [{"quota": ACME, "into": DECEMBER, "units": 40}]
    held["consumed"] += 100
    line = {"minute": 0, "dimensions": {"tenant": "acme", "policy": "export"}, "units": 100}
    await other.exchange(ACME, frozen=[held | {"lines": [line]}])
    await sealed(admin_harness)
    assert await billed(finance, DECEMBER) == {"late_usage": 60, "late_overage": 40}
    assert await pool(admin_harness, NOVEMBER) == (1000, 0, 40, 0)
    assert await pool(admin_harness, DECEMBER) == (0, 40, 0, 40), "and takes nothing of what went over"
    await agrees(finance, DECEMBER)
    await agrees(finance)
    assert await grants(region, 10) >= 10
    await give_back(region, DECEMBER)
    closed = await close(admin_harness, DECEMBER, IN_JANUARY)
    assert closed.json()["carried_over"] == [{"quota": ACME, "into": JANUARY, "units": 1000}], (
        "nor of what is left here"
    )


async def test_months_are_closed_one_after_the_other(admin_harness: AdminHarness, region: Region) -> None:
    await use(region, 600)
    admin_harness.clock.time = IN_DECEMBER
    await grants(region, 10)
    await give_back(region, DECEMBER)
    refused = await close(admin_harness, DECEMBER, IN_JANUARY)
    assert refused.status_code == 409
    assert "earlier" in [each["what"] for each in refused.json()["missing"]]
    assert (await close(admin_harness)).json()["carried_over"][0]["into"] == DECEMBER
    assert (await close(admin_harness, DECEMBER, IN_JANUARY)).status_code == 200


async def test_units_without_a_next_period_stay(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region
) -> None:
    """The quota has other periods by now, is gone, or its next month is closed already."""
    await use(region, 600)
    await limited(admin, carry_over="all", period="day")
    assert (await close(admin_harness, dry_run=True)).json()["carried_over"] == []
    assert (await admin.put("/v1/limits", json={"quotas": [], "policies": []})).status_code == 200
    assert (await close(admin_harness, dry_run=True)).json()["carried_over"] == []
    await limited(admin)
    await grants(region, 10)
    await give_back(region, DECEMBER)
    await close(admin_harness, DECEMBER, IN_JANUARY)
    await limited(admin, carry_over="all")
    assert (await close(admin_harness, at=IN_JANUARY)).json()["carried_over"] == []


async def test_parallel_closes_carry_over_once(admin_harness: AdminHarness, region: Region) -> None:
    await use(region, 600)
    admin_harness.clock.time = IN_DECEMBER
    closer = await admin_harness.caller("period:close")
    for _ in range(2):
        await asyncio.gather(*(closer.post(f"/v1/periods/{NOVEMBER}:close", json={}) for _ in range(4)))
        admin_harness.clock.move(minutes=20)
    assert await pool(admin_harness, DECEMBER) == (0, 300, 0, 300)
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM transfer WHERE cause = 'carried_over'") == 2


async def test_unused_credits_carry_over_too(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region
) -> None:
    await use(region, 40)
    people = People(await admin_harness.caller("adjust:propose"), await admin_harness.caller("adjust:approve"))
    await people.adjusted()
    for carry_over, units in (("all", 1060), ("100%", 1000)):
        await limited(admin, carry_over=carry_over)
        assert [each["units"] for each in (await close(admin_harness, dry_run=True)).json()["carried_over"]] == [units]
    await close(admin_harness)
    assert await pool(admin_harness, NOVEMBER) == (1000, 0, 1000, 60)
    await agrees(finance)
    await agrees(finance, DECEMBER)


@pytest.mark.extended
async def test_carry_over_never_exceeds_what_a_store_can_count(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient
) -> None:
    await limited(admin, carry_over="all", limit=MAX_UNITS - 7)
    region = await open_region(admin_harness, admin, NAMES[0])
    await use(region, 1)
    assert (await close(admin_harness)).json()["carried_over"][0]["units"] == 7
    assert await grants(region, 1) >= 1
    await agrees(finance, DECEMBER)


@pytest.mark.extended
async def test_unused_units_of_a_central_quota_carry_over(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient
) -> None:
    """The units carried over are granted as requests wait for them, and no others."""
    first = DOCUMENT["policies"][0] | {"wait": "400ms"}
    quota = DOCUMENT["quotas"][0] | {"mode": "central", "carry_over": "all"}
    changed = {"quotas": [quota, *DOCUMENT["quotas"][1:]], "policies": [first, *DOCUMENT["policies"][1:]]}
    assert (await admin.put("/v1/limits", json=DOCUMENT | changed)).status_code == 200
    region = await open_region(admin_harness, admin, NAMES[0])
    await use(region, 600)
    assert (await close(admin_harness)).json()["carried_over"] == [{"quota": ACME, "into": DECEMBER, "units": 400}]
    assert await grants(region, 1500) == 1400
    await agrees(finance, DECEMBER)


@pytest.mark.extended
async def test_an_anniversary_of_another_zone_carries_over_into_the_next(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient
) -> None:
    """An anniversary on the 31st in Berlin: November has none, so the period ends after the 29th, and the next on the
    31st.
    """
    first, then = "2026-10-31a31_Europe:Berlin_60", "2026-11-30a31_Europe:Berlin_60"
    began_at = datetime(2026, 1, 30, 23, 30, tzinfo=UTC)
    await admin_harness.owner.execute("INSERT INTO subscription VALUES ('acme', 'free', $1, $1)", began_at)
    await limited(admin, carry_over="all", period="anniversary", time_zone="Europe/Berlin")
    region = await open_region(admin_harness, admin, NAMES[0])
    await region.use(ACME, first, [Used(AT, 600)])
    await give_back(region, first)
    admin_harness.clock.time = datetime(2026, 11, 29, 23, 30, tzinfo=UTC)
    await grants(region, 10, then)
    await give_back(region, then)
    refused = await close(admin_harness, then, datetime(2026, 12, 31, tzinfo=UTC))
    assert "earlier" in [each["what"] for each in refused.json()["missing"]]
    assert (await close(admin_harness, first)).json()["carried_over"] == [{"quota": ACME, "into": then, "units": 400}]
    assert await pool(admin_harness, then) == (1000, 400, 0, 1400)
    for period in (first, then):
        await agrees(finance, period)


@pytest.mark.extended
@pytest.mark.parametrize(("units", "left"), [(600, 400), (1300, 0)])
async def test_a_soft_cap_does_not_carry_over(
    admin_harness: AdminHarness,
    admin: httpx.AsyncClient,
    finance: httpx.AsyncClient,
    region: Region,
    units: int,
    left: int,
) -> None:
    await limited(admin, carry_over="all", cap={"overage": 500})
    await grants(region, 1400, NOVEMBER)
    await use(region, units)
    await close(admin_harness)
    kept = await admin_harness.owner.fetchrow(
        "SELECT carried_over_out, soft_cap_extension > 0 FROM pool WHERE period = $1", NOVEMBER
    )
    assert tuple(kept or ()) == (left, True)
    await agrees(finance)


async def test_units_in_suspense_do_not_carry_over(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region
) -> None:
    """The region's store was lost, so it is unknown whether the units were used, and they stay in suspense."""
    await limited(admin, carry_over="all")
    await grants(region, 250, NOVEMBER)
    region.leases[ACME, NOVEMBER]["returned"] = region.leases[ACME, NOVEMBER]["granted"] - 250
    await region.exchange(ACME, frozen=[region.leases[ACME, NOVEMBER]])
    assert [each["units"] for each in (await close(admin_harness)).json()["carried_over"]] == [750]


@pytest.mark.extended
async def test_waiting_regions_are_signalled_about_carried_over_units(
    admin_harness: AdminHarness, region: Region, notices: asyncio.Queue[str]
) -> None:
    await use(region, 600)
    admin_harness.clock.time = IN_DECEMBER
    assert await grants(region, 1500) == 1000
    await heard(admin_harness, notices)
    await close(admin_harness)
    assert ("grant", None) in await heard(admin_harness, notices)


@pytest.mark.extended
async def test_the_root_covers_carried_over_units(admin_harness: AdminHarness, region: Region) -> None:
    await use(region, 600)
    await close(admin_harness)
    root = await admin_harness.owner.fetchval("SELECT root FROM period WHERE id = $1", NOVEMBER)
    async with admin_harness.owner.transaction():
        assert await period_root(admin_harness.owner, NOVEMBER) == root
        await admin_harness.owner.execute("ALTER TABLE pool DISABLE TRIGGER USER")
        await admin_harness.owner.execute(
            "UPDATE pool SET carried_over_in = carried_over_in + 1, carried_over_out = carried_over_out + 1"
        )
        assert await period_root(admin_harness.owner, NOVEMBER) != root


async def test_a_grant_of_the_next_period_meanwhile_loses_nothing(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, region: Region
) -> None:
    """The close waits for the lock of the next period's pool, and adds to what the other transaction left there."""
    await use(region, 600)
    admin_harness.clock.time = IN_DECEMBER
    await grants(region, 1)
    closer = await admin_harness.caller("period:close")
    assert (await closer.post(f"/v1/periods/{NOVEMBER}:close", json={})).json()["period"]["state"] == "closing"
    admin_harness.clock.move(minutes=20)
    async with admin_harness.owner.transaction():
        await admin_harness.owner.execute(
            "UPDATE pool SET funded = funded + 5, unallocated = unallocated + 5 WHERE period = $1", DECEMBER
        )
        closing = asyncio.create_task(closer.post(f"/v1/periods/{NOVEMBER}:close", json={}))
        await until_it_waits(admin_harness.owner, closing)
    assert (await closing).json()["period"]["state"] == "closed"
    funded, carried_over_in, *_ = await pool(admin_harness, DECEMBER)
    assert (funded, carried_over_in) == (1005, 300)
