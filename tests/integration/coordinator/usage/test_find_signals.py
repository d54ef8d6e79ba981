"""Sudden growth of a tenant's usage and allowances that stay used up are found, announced once, and shown."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from coordinator.health.figures import Figures, measure, read_measured
from coordinator.usage.find_signals import SignalTerms, find_signals
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region
from tests.integration.coordinator.fixtures import put_off

pytestmark = pytest.mark.anyio

TERMS = SignalTerms(growth_factor=10, growth_floor_units=100, used_up_after=timedelta(minutes=5))
ACME, MONTH = "exports:tenant=acme", "2026-11"


@pytest.fixture
async def region(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> Region:
    await put_off(admin_harness.owner, "find_signals", "measure", "deliver_webhooks")
    await admin.put("/v1/limits", json=DOCUMENT)
    hook = {"url": "http://127.0.0.1:9/", "events": ["usage.grown", "allowance.used_up"]}
    assert (await admin.post("/v1/webhooks", json=hook)).is_success
    return await open_region(admin_harness, admin, "eu-west")


async def found(admin_harness: AdminHarness, terms: SignalTerms = TERMS) -> tuple[list[dict[str, Any]], Figures]:
    """Run the job as coordinators do; return all events so far, and the figures that every coordinator shows."""
    owner, now = admin_harness.owner, admin_harness.clock.now()
    async with owner.transaction():
        await measure(owner, now)
        await find_signals(owner, terms, now)
        await measure(owner, now)
    rows = await owner.fetch("SELECT kind, data FROM outbox ORDER BY kind, id")
    figures = (await read_measured(owner)).figures
    assert figures is not None
    return [{"kind": row["kind"]} | json.loads(row["data"]) for row in rows], figures


async def use_in_hours(region: Region, at: datetime, units: list[int]) -> None:
    """Use so many units in each of the hours before one."""
    hours = [at - timedelta(hours=len(units) - place) for place in range(len(units))]
    await region.use(ACME, MONTH, [Used(hour, each) for hour, each in zip(hours, units, strict=True)])


async def test_usage_of_ten_times_its_own_past_is_found_once_a_day(admin_harness: AdminHarness, region: Region) -> None:
    now = admin_harness.clock.now()
    await use_in_hours(region, now - timedelta(hours=1), [10, 12] * 20)
    await region.use(ACME, MONTH, [Used(now, 119)])
    assert (await found(admin_harness))[0] == [], "one less than ten times"
    await region.use(ACME, MONTH, [Used(now, 1)])
    for _ in range(3):
        events, figures = await found(admin_harness)
        [event] = events
        hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        assert event == {
            "kind": "usage.grown",
            "quota": ACME,
            "hour": hour.isoformat().replace("+00:00", "Z"),
            "units": 120,
            "usual_units": 12,
        }
        assert (figures.growing, list(figures.regions)) == ({"exports": 1}, ["eu-west"])
    assert (await found(admin_harness, TERMS._replace(growth_factor=0)))[1].growing == {}


@pytest.mark.parametrize(
    ("past", "units", "terms"),
    [
        ([10] * 23, 300, TERMS),
        ([10] * 30, 300, TERMS._replace(growth_floor_units=301)),
        ([10] * 28 + [300, 300], 300, TERMS),
    ],
    ids=["a short past", "below the floor", "it was as high before"],
)
async def test_usage_that_is_not_sudden_growth(
    admin_harness: AdminHarness, region: Region, past: list[int], units: int, terms: SignalTerms
) -> None:
    now = admin_harness.clock.now()
    await use_in_hours(region, now - timedelta(hours=1), past)
    await region.use(ACME, MONTH, [Used(now, units - 200)])
    await region.use(ACME, MONTH, [Used(now, 200)])
    events, figures = await found(admin_harness, terms)
    assert (events, figures.growing) == ([], {})


async def test_an_allowance_that_stays_used_up_is_found_once_a_period(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region
) -> None:
    now = admin_harness.clock.now()
    await region.use("exports:tenant=globex", MONTH, [Used(now, 999)])
    await region.use(ACME, MONTH, [Used(now, 1000)])
    assert (await found(admin_harness))[0] == [], "it was used up just now"
    admin_harness.clock.move(minutes=6)
    for _ in range(3):
        events, figures = await found(admin_harness)
        [event] = events
        assert (event["kind"], event["quota"], event["period"]) == ("allowance.used_up", ACME, MONTH)
        assert (event["consumed"], figures.used_up) == (1000, {"exports": 1})
    raised = {"quota": "exports", "subject": {"tenant": "acme"}, "limit": 2000, "reason": "they asked"}
    assert (await admin.post("/v1/overrides", json=raised)).is_success
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 1}])
    assert (await found(admin_harness))[1].used_up == {}
