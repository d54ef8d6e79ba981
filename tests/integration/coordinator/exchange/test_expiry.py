"""An expired lease goes to suspense, once, by any coordinator, and is settled by the region's next report."""

import asyncio

import pytest
from pydantic import SecretStr

from coordinator.exchange.expire_leases import Expired, expire_leases
from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings
from protocol.outcomes import GrantRefusal
from tests.integration.coordinator.agent_harness import EXPORTS, MAILS, Agent, AgentHarness, lease, leased, want
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio


async def expired(agent_harness: AgentHarness, at_most: int = 100) -> Expired:
    async with connected(agent_harness.url) as coordinator, coordinator.transaction():
        return await expire_leases(coordinator, agent_harness.clock.now(), at_most)


async def test_unaccounted_units_go_to_suspense_and_are_not_free(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    agent_harness.clock.move(seconds=65.9)  # the lease has expired after 60 s, but not the margin
    assert await expired(agent_harness) == Expired(0, 0, is_all=True)
    agent_harness.clock.move(seconds=0.1)
    assert await expired(agent_harness) == Expired(1, 10, is_all=True)
    pool, mine = await agent_harness.pool(), await agent_harness.lease(agent)
    assert (pool["suspense"], pool["outstanding"], pool["unallocated"]) == (10, 0, 990)
    assert (mine["state"], mine["suspense"]) == ("expired", 10)
    assert await expired(agent_harness) == Expired(0, 0, is_all=True)


async def test_each_lease_is_expired_once_by_any_coordinator(agent_harness: AgentHarness, agent: Agent) -> None:
    for seq in range(1, 4):
        other = await agent_harness.agent(f"r-{seq}")
        await other.say(1, demands=[want(waiting=10)])
    await agent.say(1, demands=[want(waiting=10)])
    agent_harness.clock.move(seconds=70)
    for _ in range(20):
        await asyncio.gather(*(expired(agent_harness, at_most=2) for _ in range(4)))
    assert await agent_harness.one("SELECT count(*) FROM transfer WHERE cause = 'expired'") == 4
    assert (await agent_harness.pool())["suspense"] == 40


async def test_locked_pools_are_left_for_the_next_run(agent_harness: AgentHarness, agent: Agent) -> None:
    agent.lanes = 1
    await agent_harness.owner.execute("UPDATE region_epoch SET lanes = 1")
    await agent_harness.owner.execute(
        "INSERT INTO subscription (tenant, plan, changed_at) VALUES ('acme', 'pro', now())"
    )
    await agent.say(1, demands=[want(waiting=10), want(MAILS, waiting=5)])
    agent_harness.clock.move(seconds=70)
    async with connected(agent_harness.url) as busy, busy.transaction():
        await busy.execute("SELECT FROM pool WHERE quota = $1 FOR UPDATE", EXPORTS)
        async with asyncio.timeout(20):  # a transaction that waited here would wait for ever
            assert (await expired(agent_harness)).units == 5
    assert (await expired(agent_harness)).units == 10


async def test_an_expired_lease_first_returns_what_is_left_and_is_granted_only_then(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    agent_harness.clock.move(seconds=70)
    await expired(agent_harness)
    told = leased(await agent.say(2, lease(granted=10, consumed=7), demands=[want(waiting=5)]))
    assert (told.granted, told.expires_in_ms, told.recall_keep) == (10, 0, 0)
    assert (told.refusal, told.final) == (GrantRefusal.LEASE_EXPIRED, False)
    assert (await agent_harness.lease(agent))["suspense"] == 3
    again = leased(await agent.say(3, lease(granted=10, consumed=7, returned=3, units=0), demands=[want(waiting=5)]))
    assert (again.granted, again.refusal, again.recall_keep, again.expires_in_ms) == (15, None, None, 60_000)
    assert await agent_harness.transfers() == [
        ("funded", 1000),
        ("grant", 10),
        ("expired", 10),
        ("usage", 7),
        ("returned", 3),
        ("grant", 5),
    ]


async def test_a_grant_whose_reply_was_lost_comes_back_too(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=7), demands=[want(waiting=5)])  # this reply never arrived
    agent_harness.clock.move(seconds=70)
    await expired(agent_harness)
    told = leased(await agent.say(3, lease(granted=10, consumed=10, units=3), demands=[want(waiting=5)]))
    assert (told.granted, told.refusal) == (15, GrantRefusal.LEASE_EXPIRED)
    again = leased(await agent.say(4, lease(granted=15, consumed=10, returned=5, units=0), demands=[want(waiting=5)]))
    assert (again.granted, again.refusal) == (20, None)


async def test_a_coordinator_expires_leases_by_itself(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    agent_harness.clock.move(seconds=70)
    settings = CoordinatorSettings(database_url=SecretStr(agent_harness.url), expire_every_ms=20, clock_limit_ms=0)
    await agent_harness.owner.execute("DELETE FROM job WHERE name = 'expire_leases'")
    app = create_app(settings, agent_harness.clock)
    async with app.router.lifespan_context(app), asyncio.timeout(20):
        while (await agent_harness.lease(agent))["state"] != "expired":  # noqa: ASYNC110 - another process would do it, too
            await asyncio.sleep(0.02)


async def test_an_expiry_and_a_report_at_once(agent_harness: AgentHarness, agent: Agent) -> None:
    """In either order the ledger is right, and nothing is booked twice."""
    await agent.say(1, demands=[want(waiting=200)])
    consumed = 0
    for seq in range(2, 12):
        agent_harness.clock.move(seconds=70)
        report = lease(granted=200, consumed=consumed + 7, units=7)
        await asyncio.gather(expired(agent_harness), agent.say(seq, report), expired(agent_harness))
        consumed += 7
        mine = await agent_harness.lease(agent)
        assert (mine["consumed"], mine["outstanding"] + mine["suspense"]) == (consumed, 200 - consumed)
