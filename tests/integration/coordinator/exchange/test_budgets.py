"""One region's token can make a coordinator store and read only so much a minute, and other regions do not notice."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr

from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from protocol.identifiers import lane_of
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from tests.conftest import restricted
from tests.integration.coordinator.agent_harness import (
    DOCUMENT,
    EXPORTS,
    NEVER_MS,
    Agent,
    AgentHarness,
    exchange,
    lease,
    leased,
    want,
)
from tests.integration.coordinator.fixtures import StandingClock, connected

pytestmark = pytest.mark.anyio
BUDGETS: dict[str, Any] = {
    "new_keys_per_minute": 10,
    "new_periods_per_minute": 3,
    "epochs_per_minute": 5,
    "journal_epochs_per_minute": 4,
    "quarantine_rows_per_minute": 6,
    "quarantine_bytes_per_minute": 2_000,
}
HOURLY = {"name": "hourly", "kind": "allowance", "limit": 1000, "period": "hour"}


@pytest.fixture
async def agent_harness(database: str) -> AsyncIterator[AgentHarness]:
    clock, hub = StandingClock(), SignalHub()
    settings = CoordinatorSettings(
        database_url=SecretStr(restricted(database)),
        database_pool_size=8,
        expire_every_ms=NEVER_MS,
        clock_limit_ms=0,
        **BUDGETS,
    )
    app = create_app(settings, clock, hub)
    async with app.router.lifespan_context(app), connected(database) as owner:
        agent_harness = AgentHarness(database, app, hub, clock, owner)
        await agent_harness.limit([*DOCUMENT["quotas"], HOURLY])
        yield agent_harness
        for client in agent_harness.clients:
            await client.aclose()


def tenants(agent: Agent, count: int, first: int = 0) -> list[str]:
    """Return quota keys of new tenants, all of one lane."""
    keys = (f"exports:tenant=t{number}" for number in range(first, first + 100 * count))
    return [key for key in keys if lane_of(key, agent.lanes) == lane_of(EXPORTS, agent.lanes)][:count]


async def over_budget(agent_harness: AgentHarness, budget: str, region: str = "us-east") -> float:
    client = await agent_harness.client()
    name = f'leasehold_coordinator_region_budget_exceeded_total{{budget="{budget}",region="{region}"}} '
    lines = (await client.get("/metrics")).text.splitlines()
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0)


async def test_new_keys_beyond_the_budget_are_refused_by_name_and_granted_later(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    keys = tenants(agent, 15)
    reply = await agent.say(1, demands=[want(key, waiting=1) for key in keys])
    assert (len(reply.leases), len(reply.refused)) == (10, 5)
    assert {each.refusal for each in reply.refused} == {GrantRefusal.OVER_BUDGET}
    assert {each.quota for each in reply.refused} == set(keys[10:])
    assert await agent_harness.one("SELECT count(*) FROM pool") == 10
    assert await over_budget(agent_harness, "new_keys") == 5
    other = await agent_harness.agent("eu-west")
    assert len((await other.say(1, demands=[want(key, waiting=1) for key in tenants(other, 5, 5000)])).leases) == 5
    known = await agent.say(2, demands=[want(key, waiting=1) for key in keys[:10]])
    assert (len(known.leases), known.refused) == (10, [])
    agent_harness.clock.move(seconds=30)
    assert (await agent.say(3, demands=[want(key, waiting=1) for key in keys[10:]])).refused == []


async def test_keys_of_earlier_periods_cost_nothing_when_the_next_begins(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    keys = tenants(agent, 10)
    await agent.say(1, demands=[want(key, waiting=1) for key in keys])
    agent_harness.clock.move(days=20)
    await agent_harness.owner.execute("UPDATE region_epoch SET state = 'current'")
    agent_harness.clock.move(seconds=-agent_harness.clock.time.second)
    await agent.say(2, demands=[want(key, waiting=1) for key in tenants(agent, 10, 7000)])
    reply = await agent.say(3, demands=[want(key, waiting=1) for key in keys])
    assert (len(reply.leases), reply.refused) == (10, [])


async def test_usage_of_new_keys_beyond_the_budget_waits_for_people(agent_harness: AgentHarness, agent: Agent) -> None:
    keys = tenants(agent, 12)
    reply = await agent.say(1, *(lease(key, consumed=1) for key in keys))
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await agent_harness.one("SELECT sum(consumed) FROM pool") == 10
    assert await agent_harness.one("SELECT count(*) FROM quarantine WHERE reason = 'over_budget'") == 2


async def test_new_periods_beyond_the_budget_make_no_tables(agent_harness: AgentHarness, agent: Agent) -> None:
    quota = "hourly:tenant=acme"
    hours = [lease(quota, period=f"2026-11-17T{hour:02}", consumed=1) for hour in range(5)]
    before = await agent_harness.one("SELECT count(*) FROM period")
    await agent.say(1, *hours, quota=quota)
    assert await agent_harness.one("SELECT count(*) FROM period") == before + 3
    assert await agent_harness.one("SELECT count(*) FROM quarantine WHERE reason = 'over_budget'") == 2


@pytest.mark.parametrize(("more", "budget", "most"), [({}, "epochs", 5), ({"journal": True}, "journal_epochs", 4)])
async def test_epochs_beyond_the_budget_are_refused_until_later(
    agent_harness: AgentHarness, more: dict[str, Any], budget: str, most: int
) -> None:
    await agent_harness.add_region("us-east")
    agent = Agent(await agent_harness.client("region:us-east"), "us-east")
    for _ in range(most):
        assert (await agent.open(**more)).status_code == 200
    refused = await agent.open(**more)
    assert (refused.status_code, refused.json()["type"].split("/")[-1]) == (429, "over-budget")
    assert refused.json()["budget"] == budget
    assert await over_budget(agent_harness, budget) == 1
    agent_harness.clock.move(seconds=int(refused.headers["Retry-After"]))
    assert (await agent.open(**more)).status_code == 200


async def test_the_oldest_evidence_is_kept_within_the_rows(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, *(lease(period=f"2031-{month:02}", consumed=1) for month in range(1, 11)))
    periods = await agent_harness.owner.fetch("SELECT period FROM quarantine ORDER BY period")
    assert [row["period"] for row in periods] == [f"2031-{month:02}" for month in range(1, 7)]
    assert await over_budget(agent_harness, "quarantine_rows") == 4
    assert await agent.say(2)


async def test_evidence_beyond_the_bytes_is_kept_without_its_lines(agent_harness: AgentHarness, agent: Agent) -> None:
    large = lease(period="2031-01", consumed=40, units=1)
    large["lines"] = [large["lines"][0] | {"dimensions": {"tenant": "a" * 200}} for _ in range(40)]
    await agent.say(1, large)
    await agent.say(2, lease(period="2031-02", consumed=7))
    rows = await agent_harness.owner.fetch("SELECT evidence::text FROM quarantine ORDER BY period")
    assert rows[0][0].count('"tenant"') == 40
    assert '"lines": []' in rows[1][0]
    assert '"lines_left_out": 1' in rows[1][0]
    assert '"consumed": 7' in rows[1][0]


async def test_batches_with_a_gap_are_kept_within_the_bytes(agent_harness: AgentHarness, agent: Agent) -> None:
    for seq in range(10, 20):
        line = {"minute": 1, "dimensions": {"tenant": "x" * 250}, "units": 1}
        large = lease(granted=1, consumed=20) | {"lines": [line] * 20}
        reply = await agent.say(seq, large)
        assert reply.outcome is ExchangeOutcome.GAP
    assert await agent_harness.one("SELECT count(*) FROM quarantine") == 1


async def test_a_want_of_more_than_the_limit_counts_as_the_limit(agent_harness: AgentHarness, agent: Agent) -> None:
    """Otherwise impossible demand would outweigh the demand of others."""
    honest = await agent_harness.agent("eu-west")
    await honest.say(1, demands=[want(demand_milli=1_000_000)])
    leased(await agent.say(1, demands=[want(demand_milli=2**53 - 1)]))
    demand = await agent_harness.one("SELECT demand_milli FROM lease WHERE region = 'us-east'")
    assert demand == 1_000_000_000
    batch = agent.frozen(2)
    await agent.call(exchange(batch, [want(waiting=2**53 - 1)]))
    assert await agent_harness.one("SELECT waiting FROM lease WHERE region = 'us-east'") <= 1000
