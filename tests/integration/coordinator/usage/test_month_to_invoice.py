"""A month of three tenants, from the first request at an agent to an invoice: each unit is invoiced once."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from coordinator.access.issue_token import issue_token
from regional_agent.settings import AgentSettings
from tests.budget import size
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, sealed
from tests.integration.coordinator.fixtures import put_off, served
from tests.integration.coordinator.usage.test_changes import Invoicing, invoicing_system, push_until_done
from tests.integration.regional_agent.world import Agent, running
from tests.waiting import attempts

pytestmark = pytest.mark.anyio

NOVEMBER = "2026-11"
IN_DECEMBER = datetime(2026, 12, 1, 6, tzinfo=UTC)
REGIONS = ("us-east", "eu-west")
CUSTOMERS = {"acme": "customer-1", "globex": "customer-2", "initech": "initech"}  # one is not registered
REQUESTS = size("LEASEHOLD_TEST_MONTH_REQUESTS", 8, short=4)  # of each tenant, in each region and half
STRIDE = size("LEASEHOLD_TEST_WORKER_STRIDE", 7, short=20)  # lines of the worker from one kill to the next


class InvoicesToo(Invoicing):
    """An invoicing system that makes an invoice of the events of a customer, and takes no event of it after that."""

    def __init__(self) -> None:
        super().__init__()
        self.invoices: dict[str, int] = {}

    def take(self, path: str, body: bytes) -> tuple[int, str]:
        if path != "/v1/invoices":
            assert not self.invoices, "an event came after the invoices"
            return super().take(path, body)
        customer = json.loads(body)["customer"]
        self.invoices.setdefault(customer, self.owed[customer])
        return 200, json.dumps({"customer": customer, "units": self.invoices[customer]})


@asynccontextmanager
async def agents_of(admin_harness: AdminHarness, coordinator: str, store: str) -> AsyncIterator[list[Agent]]:
    """Start an agent in each region. At its end it reports what was used, and returns the rest."""
    settings = []
    for number, region in enumerate(REGIONS):
        issued = await issue_token(admin_harness.owner, [f"region:{region}"], region, admin_harness.clock.now())
        settings.append(
            AgentSettings(
                region=region,
                coordinator_url=coordinator,
                coordinator_token=SecretStr(issued.token),
                store_url=SecretStr(f"{store.rpartition('/')[0]}/{number}"),
                report_interval_ms=20,
                store_timeout_ms=5_000,
                decision_timeout_ms=5_000,
                lame_duck_ms=0,
                return_on_stop=True,
            )
        )
    async with running(settings[0]) as first, running(settings[1]) as second:
        for agent in (first, second):
            await agent.ready()
        yield [first, second]


async def use(agents: list[Agent], half: str, admitted: Counter[str]) -> None:
    """Send the requests of half a month, each twice, as after a lost answer. Count what was admitted."""
    for number in range(REQUESTS):
        for tenant in CUSTOMERS:
            for region, agent in zip(REGIONS, agents, strict=True):
                subject = {"tenant": tenant, "route": "/v1/exports", "method": "POST"}
                request = {"cost": 1 + number % 3, "operation_id": f"{half}-{region}-{tenant}-{number}"}
                first, again = await agent.check(subject, **request), await agent.check(subject, **request)
                assert (first.status_code, again.status_code) == (200, 200), first.text
                admitted[tenant] += 1 + number % 3


async def booked(finance: httpx.AsyncClient, units: int) -> None:
    """Wait until all of it is in the ledger."""
    async for _ in attempts():
        answer = await finance.get(f"/v1/usage?period={NOVEMBER}&from=2026-01-01&to=2027-01-01")
        found = answer.json()["data"]
        if sum(row["units"] for row in found) == units:
            return
    raise AssertionError(f"{units} units are not booked: {found}")


async def close_november(admin_harness: AdminHarness) -> None:
    admin_harness.clock.time = IN_DECEMBER
    closer = await admin_harness.caller("period:close")
    async for _ in attempts():
        answer = await closer.post(f"/v1/periods/{NOVEMBER}:close", json={})
        assert answer.status_code in (200, 202), answer.text
        if answer.status_code == 200:
            return
        admin_harness.clock.move(minutes=1)
    raise AssertionError(answer.text)


@pytest.mark.extended
async def test_each_unit_of_a_month_is_invoiced_once(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, store: str, tmp_path: Path
) -> None:
    """The worker that pushes usage is killed at every step, in the middle of the month and after its end."""
    await put_off(admin_harness.owner, "seal")
    await admin.put("/v1/limits", json=DOCUMENT)
    for tenant in ("acme", "globex"):
        registered = {"name": tenant.title(), "external_ids": {"lago": CUSTOMERS[tenant]}}
        assert (await admin.put(f"/v1/tenants/{tenant}", json=registered)).is_success
    for region in REGIONS:
        assert (await admin.post("/v1/regions", json={"name": region})).is_success
    token = (await issue_token(admin_harness.owner, ["usage:read"], "push", admin_harness.clock.now())).token
    coordinator = admin_harness.transport.app
    assert isinstance(coordinator, FastAPI)
    admitted: Counter[str] = Counter()
    options = ("--as", "lago", "--position", str(tmp_path / "position"))
    with invoicing_system(InvoicesToo()) as (system, invoicing):
        async with served(coordinator) as url:
            async with agents_of(admin_harness, url, store) as agents:
                await use(agents, "first", admitted)
                await booked(finance, admitted.total())
                await sealed(admin_harness)
                assert await push_until_done(url, invoicing, token, *options, stride=STRIDE)
                assert sum(system.owed.values()) == admitted.total()
                await use(agents, "second", admitted)
            await booked(finance, admitted.total())
            await close_november(admin_harness)
            await sealed(admin_harness)
            assert await push_until_done(url, invoicing, token, *options, stride=STRIDE)
            statements = (await finance.get(f"/v1/periods/{NOVEMBER}/statements")).json()["data"]
        assert all(row["is_final"] for row in statements)
        async with httpx.AsyncClient(base_url=invoicing, trust_env=False) as biller:
            for row in statements:
                customer = row["external_ids"].get("lago", row["tenant"])
                made = (await biller.post("/v1/invoices", json={"customer": customer})).json()
                assert made["units"] == row["billed"] == admitted[row["tenant"]], row["tenant"]
    assert system.invoices == {CUSTOMERS[tenant]: units for tenant, units in admitted.items()}
    assert system.refused > 0, "no event was sent twice, so the kills came too early"
