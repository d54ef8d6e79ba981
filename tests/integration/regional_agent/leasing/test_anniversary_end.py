"""A period by anniversary ends in a zone with a half-hour offset, while demand exceeds the limit."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest
from pydantic import SecretStr

from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from protocol.clock import SystemClock
from tests.conftest import restricted
from tests.integration.regional_agent.leasing.test_exchange_loop import eventually
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, World, serving

pytestmark = pytest.mark.anyio

LIMIT = 150
ENDED, BEGUN = "2027-01-31a31_Asia:Kolkata_330", "2027-02-28a31_Asia:Kolkata_330"
END = datetime(2027, 2, 27, 18, 30, tzinfo=UTC)  # midnight in Kolkata, of the last day of a month without a 31st
BEFORE = timedelta(seconds=4)


class MovableClock(SystemClock):
    """A coordinator's clock, which continues from any time it is set to."""

    def __init__(self) -> None:
        self.put(END - timedelta(hours=1))

    def put(self, at: datetime) -> None:
        self._by = at - super().now()

    def now(self) -> datetime:
        return super().now() + self._by


async def limit(world: World) -> None:
    quota = {
        "name": "exports",
        "kind": "allowance",
        "limit": LIMIT,
        "period": "anniversary",
        "time_zone": "Asia/Kolkata",
    }
    export = {
        "name": "export",
        "match": {"route": EXPORT["route"]},
        "by": ["tenant"],
        "quota": "exports",
        "wait": "20ms",
    }
    assert (await world.admin.put("/v1/limits", json=DOCUMENT | {"quotas": [quota], "policies": [export]})).is_success
    began = {"plan": "free", "began_at": "2026-01-31T00:00:00+05:30"}
    assert (await world.admin.put("/v1/subscriptions/acme", json=began)).is_success


async def admitted(agents: list[Agent], units: int) -> None:
    """Send parallel checks until so many were admitted, whatever is denied."""
    left = units

    async def ask(agent: Agent) -> None:
        nonlocal left
        while left > 0:
            answer = await agent.check()
            assert answer.status_code in (200, 429), answer.text
            left -= answer.status_code == 200
            await asyncio.sleep(0.01)

    async with asyncio.timeout(90):
        await asyncio.gather(*(ask(agent) for agent in agents for _ in range(3)))
    assert left <= 0


@pytest.mark.extended
async def test_each_period_has_exactly_its_limit_and_its_statement(world: World, database: str) -> None:
    await limit(world)
    clock, hub = MovableClock(), SignalHub()
    settings = CoordinatorSettings(
        database_url=SecretStr(restricted(database)), lease_ms=10_000, close_grace_ms=0, clock_limit_ms=0
    )
    async with serving(create_app(settings, clock, hub), hub) as url:
        agents = [await world.agent(region, coordinator_url=url) for region in ("us-east", "eu-west")]
        await admitted(agents, LIMIT)
        clock.put(END - BEFORE)
        await admitted(agents, LIMIT)
        for agent in agents:
            assert (await agent.check()).status_code == 429
        await eventually(lambda: consumed(database), {ENDED: LIMIT, BEGUN: LIMIT})
        await world.agents.aclose()
        async with httpx.AsyncClient(base_url=url, headers=world.admin.headers, timeout=30) as admin:
            await eventually(lambda: closed(admin), 200)
            statement = (await admin.get(f"/v1/periods/{ENDED}/statement", params={"tenant": "acme"})).json()
            balanced = (await admin.get(f"/v1/periods/{BEGUN}/reconciliation")).json()
    told = {name: statement[name] for name in ("from", "to", "is_final", "billed", "unaccounted")}
    began = "2027-01-30T18:30:00Z"
    assert told == {"from": began, "to": "2027-02-27T18:30:00Z", "is_final": True, "billed": LIMIT, "unaccounted": 0}
    assert {line["kind"] for line in statement["lines"]} == {"usage"}
    assert (balanced["status"], balanced["drift"]) == ("balanced", 0)


async def consumed(database: str) -> dict[str, int]:
    rows = await _rows(database, "SELECT period, sum(consumed)::bigint FROM pool GROUP BY period")
    return {str(row[0]): int(row[1]) for row in rows if row[1]}


async def closed(admin: httpx.AsyncClient) -> int:
    return (await admin.post(f"/v1/periods/{ENDED}:close", json={})).status_code


async def _rows(database: str, sql: str) -> list[Any]:
    connection = await asyncpg.connect(database)
    try:
        return await connection.fetch(sql)
    finally:
        await connection.close()
