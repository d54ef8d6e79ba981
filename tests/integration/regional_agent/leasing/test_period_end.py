"""A period ends under load: no request is denied for lack of a lease, and none waits for the coordinator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from pydantic import SecretStr

from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from protocol.clock import SystemClock
from tests.budget import cases
from tests.conftest import restricted
from tests.integration.regional_agent.leasing.test_exchange_loop import eventually
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, Weather, World, serving

pytestmark = pytest.mark.anyio

QUOTA = "exports:tenant=acme"
BEFORE = timedelta(seconds=8)  # enough for a busy machine to get there, and within the time ahead
MOST_CHECKS = 20_000


class ShortlyBefore(SystemClock):
    """A coordinator's clock, by which the hour is about to end."""

    def __init__(self) -> None:
        now = datetime.now(UTC)
        self.end = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        self._by = self.end - BEFORE - now

    def now(self) -> datetime:
        return super().now() + self._by


@asynccontextmanager
async def coordinator(database: str, clock: ShortlyBefore) -> AsyncIterator[tuple[Weather, str]]:
    hub = SignalHub()
    settings = CoordinatorSettings(database_url=SecretStr(restricted(database)), lease_ms=10_000, clock_limit_ms=0)
    weather = Weather(create_app(settings, clock, hub))
    async with serving(weather, hub) as url:
        yield weather, url


async def fields(agent: Agent) -> dict[str, str]:
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    return await agent.region.scripts.lease_fields(incarnation, QUOTA)


async def admitted_until(agent: Agent, period: str, checks: int = 0) -> int:
    """Check, one after the other, until the period is the current one and then so many more. Nothing may be denied."""
    after = 0
    for admitted in range(1, MOST_CHECKS):
        answer = await agent.check()
        assert answer.status_code == 200, answer.text
        after += (await fields(agent))["period"] == period
        if after > checks:
            return admitted
        await asyncio.sleep(0.005)
    raise AssertionError("the period did not begin")


@pytest.mark.extended
@pytest.mark.parametrize("is_cut_off", cases([True, False], short=1))
async def test_no_request_is_denied_over_the_end_of_a_period(world: World, database: str, is_cut_off: bool) -> None:
    exports = {"name": "exports", "kind": "allowance", "limit": 100_000, "period": "hour"}
    export = {"name": "export", "match": {"route": EXPORT["route"]}, "by": ["tenant"], "quota": "exports"}
    limits = DOCUMENT | {"quotas": [exports], "policies": [export]}
    clock = ShortlyBefore()
    ended, begun = (f"{moment:%Y-%m-%dT%H}" for moment in (clock.end - BEFORE, clock.end))
    has = {"If-Match": (await world.admin.get("/v1/limits")).headers["etag"]}
    assert (await world.admin.put("/v1/limits", json=limits, headers=has)).is_success
    async with coordinator(database, clock) as (weather, url):
        agent = await world.agent(coordinator_url=url)
        await agent.lease(MOST_CHECKS)  # all that can be requested before the end
        await eventually(lambda: has_both(agent, at_least=1), True)
        before = await admitted_until(agent, ended, checks=100)
        await eventually(lambda: has_both(agent, at_least=50), True)
        weather.swallows_requests = is_cut_off
        after = await admitted_until(agent, begun, checks=50)
        weather.swallows_requests = False
        await eventually(lambda: booked(database), before + after)
        assert await outstanding(database, ended) == 0
        await world.agents.aclose()


async def has_both(agent: Agent, at_least: int) -> bool:
    """Return a lease of the current period, and so many units of the next one."""
    kept = await fields(agent)
    return int(kept.get("granted", 0)) > 0 and int(kept.get("next:granted", 0)) >= at_least


async def booked(database: str) -> int:
    return await one(database, "SELECT sum(consumed) FROM lease")


async def outstanding(database: str, period: str) -> int:
    return await one(database, f"SELECT sum(outstanding + suspense) FROM lease WHERE period = '{period}'")


async def one(database: str, sql: str) -> int:
    connection = await asyncpg.connect(database)
    try:
        return int(await connection.fetchval(sql) or 0)
    finally:
        await connection.close()
