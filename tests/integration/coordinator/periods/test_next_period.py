"""The next period's lease is granted before the period begins, and the current one ends in order."""

from datetime import UTC, datetime
from typing import Any

import pytest

from protocol.messages import ExchangeReply, LeaseReply
from protocol.outcomes import GrantRefusal
from tests.integration.coordinator.agent_harness import EXPORTS, Agent, AgentHarness, exchange, lease, leased, want
from tests.integration.coordinator.exchange.test_expiry import expired
from tests.integration.coordinator.exchange.test_grants import allowance

pytestmark = pytest.mark.anyio

MIDNIGHT = datetime(2026, 12, 1, tzinfo=UTC)
NEXT = "2026-12"


def by_period(reply: ExchangeReply) -> list[LeaseReply]:
    return sorted(reply.leases, key=lambda each: each.period)


def ahead(**totals: Any) -> dict[str, Any]:
    return lease(**totals) | {"period": NEXT}


@pytest.fixture
async def late(agent_harness: AgentHarness, agent: Agent) -> Agent:
    """Return an agent with a lease, twenty seconds before the month ends."""
    agent_harness.clock.time = MIDNIGHT
    agent_harness.clock.move(seconds=-20)
    await agent.say(1, demands=[want(waiting=10)])
    return agent


async def next_pool(agent_harness: AgentHarness) -> dict[str, int]:
    row = await agent_harness.owner.fetchrow("SELECT * FROM pool WHERE quota = $1 AND period = $2", EXPORTS, NEXT)
    assert row is not None
    return {name: units for name, units in row.items() if isinstance(units, int)}


async def test_near_the_end_of_a_period_a_request_gets_a_lease_of_the_next_too(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    agent_harness.clock.time = MIDNIGHT
    agent_harness.clock.move(seconds=-60.001)
    alone = leased(await agent.say(1, demands=[want(waiting=10, demand_milli=20_000)]))
    assert alone.period == "2026-11"
    agent_harness.clock.move(seconds=0.001)
    frozen = lease(granted=20, consumed=3)
    current, following = by_period(await agent.say(2, frozen, demands=[want(demand_milli=20_000)]))
    assert (current.period, current.starts_in_ms, current.expires_in_ms, current.ends_in_ms) == (
        "2026-11",
        0,
        60_000,
        60_000,
    )
    assert (following.period, following.starts_in_ms, following.expires_in_ms) == (NEXT, 60_000, 60_000)
    assert following.ends_in_ms == 60_000 + 31 * 86_400_000
    assert (following.granted, following.unallocated, following.final) == (20, 980, False)
    pool = await next_pool(agent_harness)
    assert (pool["funded"], pool["outstanding"], pool["unallocated"]) == (1000, 20, 980)
    assert (await agent_harness.pool())["consumed"] == 3


async def test_a_waiting_request_gets_no_units_of_the_next_period(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([allowance(5)])
    agent_harness.clock.time = MIDNIGHT
    agent_harness.clock.move(seconds=-20)
    current, following = by_period(await agent.say(1, demands=[want(waiting=9)]))
    assert (current.granted, current.refusal) == (5, GrantRefusal.EXHAUSTED)
    assert (following.granted, following.refusal) == (0, None), "no demand is known, and nobody waits in it"


async def test_the_limit_in_force_is_the_next_periods(agent_harness: AgentHarness, late: Agent) -> None:
    await agent_harness.limit([allowance(2000)])
    _, following = by_period(await late.say(2, lease(granted=10), demands=[want()]))
    assert ((await next_pool(agent_harness))["funded"], following.granted) == (2000, 1)
    await agent_harness.limit([allowance(50)])
    _, following = by_period(await late.say(3, lease(granted=10), ahead(granted=1), demands=[want()]))
    assert ((await next_pool(agent_harness))["funded"], following.granted) == (50, 1)


async def test_a_region_that_is_drained_gets_nothing_ahead(agent_harness: AgentHarness, late: Agent) -> None:
    await agent_harness.drain()
    before = await agent_harness.one("SELECT count(*) FROM pool WHERE period = $1", NEXT)
    response = await late.call(exchange(late.frozen(2, lease(granted=10)), [want()]))
    assert [each.period for each in response.replies[0].leases] == ["2026-11"]
    assert (before, await agent_harness.one("SELECT sum(granted) FROM lease WHERE period = $1", NEXT)) == (1, 1)


async def test_regions_share_what_the_next_period_has(agent_harness: AgentHarness) -> None:
    await agent_harness.limit([allowance(7)])
    agents = [await agent_harness.agent(name) for name in ("us-east", "eu-west", "ap-south")]
    agent_harness.clock.time = MIDNIGHT
    agent_harness.clock.move(seconds=-20)
    granted = 0
    for agent in agents:
        _, following = by_period(await agent.say(1, demands=[want(demand_milli=100_000)]))
        granted += following.granted
    pool = await next_pool(agent_harness)
    assert (granted, pool["outstanding"], pool["unallocated"]) == (7, 7, 0)


async def test_a_lease_ahead_is_renewed_while_its_region_reports(agent_harness: AgentHarness, late: Agent) -> None:
    for seq in range(2, 5):
        agent_harness.clock.move(seconds=30)
        now = agent_harness.clock.now() < MIDNIGHT
        frozen = [lease(granted=10), ahead(granted=1)] if now else [ahead(granted=1)]
        await late.say(seq, *frozen, demands=[want()])
        assert (await expired(agent_harness)).units in (0, 10), "the old period's may be set aside, but not this one"
    assert await agent_harness.one("SELECT state FROM lease WHERE period = $1", NEXT) == "active"
    assert await agent_harness.one("SELECT outstanding FROM lease WHERE period = $1", NEXT) == 1


async def test_a_lease_ahead_of_a_silent_region_expires_and_returns_like_any_other(
    agent_harness: AgentHarness, late: Agent
) -> None:
    agent_harness.clock.move(seconds=66)
    assert (await expired(agent_harness)).units == 11
    assert (await next_pool(agent_harness))["suspense"] == 1
    reply = await late.say(2, lease(granted=10, returned=10), ahead(granted=1, returned=1), demands=[want()])
    old, new = by_period(reply)
    assert (old.final, new.refusal, new.granted) == (True, None, 2)
    pools = (await agent_harness.pool(), await next_pool(agent_harness))
    assert [(pool["suspense"], pool["outstanding"]) for pool in pools] == [(0, 0), (0, 1)]


async def test_usage_of_a_store_ahead_of_time_belongs_to_its_leases_period(
    agent_harness: AgentHarness, late: Agent
) -> None:
    reply = await late.say(2, lease(granted=10, returned=10), ahead(granted=1, consumed=1))
    assert [each.granted for each in by_period(reply)] == [10, 1]
    pool = await next_pool(agent_harness)
    assert (pool["consumed"], (await agent_harness.pool())["unallocated"]) == (1, 1000)
    window = await agent_harness.one("SELECT window_at FROM transfer WHERE period = $1 AND cause = 'usage'", NEXT)
    assert window == MIDNIGHT


async def test_an_ended_period_grants_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([allowance(10)])
    waiter = await agent_harness.agent("eu-west")
    agent_harness.clock.time = MIDNIGHT
    agent_harness.clock.move(seconds=-1)
    await agent.say(1, demands=[want(waiting=10)])
    await waiter.say(1, demands=[want(waiting=4)])
    agent_harness.clock.move(seconds=1)
    await agent.say(2, lease(granted=10, returned=10), demands=[want(waiting=2)])
    old, new = by_period(await waiter.say(2, lease(), demands=[want(waiting=4)]))
    assert (old.granted, old.final, new.granted, new.starts_in_ms) == (0, True, 4, 0)
    assert (await agent_harness.pool())["unallocated"] == 10


async def test_evidence_of_loss_counts_for_a_lease_ahead(agent_harness: AgentHarness, late: Agent) -> None:
    reply = await late.say(2, lease(granted=10), ahead(granted=99))
    assert reply.outcome == "ledger_regressed"
    await late.say(2, lease(granted=10), ahead(granted=1, returned=1))
    assert (await late.say(3, lease(granted=10), ahead(granted=1))).outcome == "store_regressed"
