"""A quota gets another period, which may begin earlier than the current one: its units can be spent at once."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

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

LIMIT, COST = 100, 5
Change = Callable[[World], Awaitable[None]]


def document(period: str, time_zone: str = "UTC") -> dict[str, Any]:
    """Return a service whose checks are denied after two seconds without units, which bounds the delay."""
    quota = {"name": "exports", "kind": "allowance", "limit": LIMIT, "period": period, "time_zone": time_zone}
    policy = {
        "name": "export",
        "match": {"route": EXPORT["route"]},
        "by": ["tenant"],
        "quota": "exports",
        "wait": "2s",
    }
    return DOCUMENT | {"quotas": [quota], "policies": [policy]}


async def apply(world: World, period: str, time_zone: str = "UTC") -> None:
    version = (await world.admin.get("/v1/limits")).headers["etag"]
    answer = await world.admin.put("/v1/limits", json=document(period, time_zone), headers={"If-Match": version})
    assert answer.is_success, answer.text


async def subscribe(world: World, day: int) -> None:
    body = {"plan": "free", "began_at": f"2025-01-{day:02}T00:00:00Z"}
    assert (await world.admin.put("/v1/subscriptions/acme", json=body)).is_success


def periods(*kinds: str) -> tuple[Change, Change]:
    """Change from the first kind of period to the last."""

    async def before(world: World) -> None:
        await apply(world, kinds[0])

    async def after(world: World) -> None:
        for kind in kinds[1:]:
            await apply(world, kind)

    return before, after


def another_zone() -> tuple[Change, Change]:
    async def to_an_eastern_zone(world: World) -> None:
        await apply(world, "month", "Asia/Tokyo")

    return periods("month")[0], to_an_eastern_zone


def another_begin() -> tuple[Change, Change]:
    """A tenant of calendar months subscribes: its months begin on the last day of a month."""

    async def before(world: World) -> None:
        if (datetime.now(UTC) + timedelta(days=1)).day == 1:
            pytest.skip("the anniversary's month begins today")
        await apply(world, "anniversary")

    async def after(world: World) -> None:
        await subscribe(world, 31)

    return before, after


def no_subscription() -> tuple[Change, Change]:
    async def before(world: World) -> None:
        day = datetime.now(UTC).day
        if day == 1:
            pytest.skip("no anniversary began later than the calendar's month does")
        await apply(world, "anniversary")
        await subscribe(world, min(day, 28))

    async def after(world: World) -> None:
        assert (await world.admin.delete("/v1/subscriptions/acme")).is_success

    return before, after


async def policies_in_force(world: World, agents: list[Agent]) -> None:
    headers = {"Authorization": f"Bearer {world.tokens['us-east']}"}
    version = (await world.admin.get("/v1/policies", headers=headers)).json()["version"]

    async def in_force() -> bool:
        return all((p := agent.whole.admission.policies) is not None and p.version == version for agent in agents)

    await eventually(in_force, True)


async def spend(agent: Agent, units: int) -> None:
    for _ in range(units // COST):
        answer = await agent.check(cost=COST)
        assert answer.status_code == 200, answer.text


CHANGES = {
    "day to month": periods("day", "month"),
    "hour to day": periods("hour", "day"),
    "month to day to month": periods("month", "day", "month"),
    "UTC to a zone east of it": another_zone(),
    "a subscription that began": another_begin(),
    "a subscription deleted": no_subscription(),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_period_that_began_earlier_is_spent_at_once_in_all_regions(world: World, change: str) -> None:
    before, after = CHANGES[change]
    await before(world)
    east, west = await world.agent("us-east"), await world.agent("eu-west")
    await policies_in_force(world, [east, west])
    await spend(east, 15)
    await after(world)
    await policies_in_force(world, [east, west])
    left = LIMIT - 15 if change == "month to day to month" else LIMIT
    await spend(west, 40)
    await spend(east, left - 40)
    await eventually(world.usage, 15 + left)
    await eventually(partial(units, world, "suspense"), 0)


@pytest.mark.extended
async def test_a_period_is_changed_back_after_the_other_one_was_spent(world: World) -> None:
    """Each period's totals are kept while another is in force."""
    await apply(world, "month")
    agent = await world.agent()
    await policies_in_force(world, [agent])
    await spend(agent, 60)
    for period, left in (("day", 100), ("month", 40)):
        await apply(world, period)
        await policies_in_force(world, [agent])
        await renewed(agent, period)
        await spend(agent, left)
        assert (await agent.check(cost=COST)).status_code == 429, "no more than the limit"
    await eventually(world.usage, 200)
    await eventually(partial(units, world, "suspense + outstanding"), 0)


class Ahead(SystemClock):
    """Return a clock that is three hours ahead."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=3)


@asynccontextmanager
async def wrong_coordinator(database: str) -> AsyncIterator[str]:
    hub = SignalHub()
    settings = CoordinatorSettings(database_url=SecretStr(restricted(database)), clock_limit_ms=0)
    app = create_app(settings, Ahead(), hub)
    async with serving(app, hub) as url:
        yield url


async def test_a_coordinator_whose_clock_was_ahead_stops_no_quota(world: World, database: str) -> None:
    """An agent of that coordinator installs a lease of a later hour, and another agent of the region the right one."""
    await apply(world, "hour")
    agent, other_region = await world.agent(), await world.agent("eu-west")
    await policies_in_force(world, [agent, other_region])
    await spend(agent, 20)
    async with wrong_coordinator(database) as url:
        misled = await world.agent(coordinator_url=url)
        later = f"{datetime.now(UTC) + timedelta(hours=3):%Y-%m-%dT%H}"

        async def installed() -> bool:
            await misled.check(cost=COST)
            return (await lease_fields(misled))["period"] == later

        agent.region.exchange_loop.offer_again_ms = 10**9
        agent.region.quotas.schedule_renewal("exports:tenant=acme", None)
        await eventually(installed, True)
        await world.agents.aclose()
    agent, other_region = await world.agent(), await world.agent("eu-west")
    spent = await world.usage()
    for each in (agent, other_region):
        await spend(each, 20)
    await eventually(world.usage, spent + 40)


async def lease_fields(agent: Agent) -> dict[str, str]:
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    return await agent.region.scripts.lease_fields(incarnation, "exports:tenant=acme")


async def renewed(agent: Agent, period: str) -> None:
    """Wait for the lease of the new period: the test spends nothing of the one before."""
    length = {"month": 7, "day": 10}[period]

    async def is_installed() -> bool:
        agent.region.quotas.fetch("exports:tenant=acme")
        return len((await lease_fields(agent))["period"]) == length

    await eventually(is_installed, True)


async def units(world: World, account: str) -> int:
    [row] = await world._rows(f"SELECT sum({account}) AS units FROM lease")
    return int(row["units"])
