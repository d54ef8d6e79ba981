"""Grants follow limits, plans, the end of an allowance, and the end of a period."""

import asyncio
from datetime import UTC, datetime

import pytest

from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from protocol.messages import Signal
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from protocol.units import MAX_UNITS
from tests.integration.coordinator.agent_harness import (
    API,
    EXPORTS,
    MAILS,
    Agent,
    AgentHarness,
    exchange,
    lease,
    leased,
    want,
)
from tests.integration.coordinator.fixtures import NOON

pytestmark = pytest.mark.anyio


def allowance(limit: int, name: str = "exports", period: str = "month") -> dict[str, object]:
    return {"name": name, "kind": "allowance", "limit": limit, "period": period, "horizon": "10s"}


async def test_a_lease_has_its_duration_and_its_terms(agent: Agent) -> None:
    given = leased(await agent.say(1, demands=[want(demand_milli=100_000)]))
    assert (given.granted, given.unallocated) == (100, 900)
    assert (given.starts_in_ms, given.expires_in_ms) == (0, 60_000)
    assert (given.first_minute, given.last_minute, given.final) == (29_891_520, 29_934_719, False)
    assert given.ends_in_ms == (datetime(2026, 12, 1, tzinfo=UTC) - NOON).total_seconds() * 1000


@pytest.mark.parametrize(
    ("quota", "refusal"),
    [
        ("faxes:tenant=acme", GrantRefusal.UNKNOWN_QUOTA),
        (API, GrantRefusal.NOT_LEASED),
        (MAILS, GrantRefusal.NO_LIMIT),  # the default plan has none
    ],
)
async def test_wants_that_are_refused(
    agent_harness: AgentHarness, agent: Agent, quota: str, refusal: GrantRefusal
) -> None:
    reply = await agent.say(1, demands=[want(quota, waiting=1)], quota=quota)
    assert (reply.outcome, reply.leases) == (ExchangeOutcome.APPLIED, [])
    assert [(each.quota, each.refusal) for each in reply.refused] == [(quota, refusal)]
    assert await agent_harness.one("SELECT count(*) FROM pool") == 0


async def test_the_plan_of_the_tenant_gives_the_limit(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.owner.execute(
        "INSERT INTO subscription (tenant, plan, changed_at) VALUES ('acme', 'pro', now())"
    )
    assert leased(await agent.say(1, demands=[want(MAILS, waiting=60)], quota=MAILS), MAILS).granted == 50


async def test_a_region_far_above_its_low_water_mark_gets_no_more(agent: Agent) -> None:
    await agent.say(1, demands=[want(demand_milli=100_000)])
    again = await agent.say(2, lease(granted=100, consumed=20), demands=[want(demand_milli=100_000)])
    assert leased(again).granted == 100
    low = await agent.say(3, lease(granted=100, consumed=60, units=40), demands=[want(demand_milli=100_000)])
    assert leased(low).granted == 200


async def test_a_changed_limit_is_followed(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=40)])
    await agent_harness.limit([allowance(60)])
    lowered = leased(await agent.say(2, demands=[want()]))
    assert ((await agent_harness.pool())["funded"], lowered.granted, lowered.unallocated) == (60, 40, 20)
    await agent_harness.limit([allowance(10)])
    below = leased(await agent.say(3, demands=[want(waiting=1)]))
    # Units that a region holds cannot be taken; free units leave the pool at once.
    assert ((await agent_harness.pool())["funded"], below.unallocated, below.refusal) == (40, 0, GrantRefusal.EXHAUSTED)
    await agent.say(4, lease(granted=40, consumed=1, returned=25), demands=[want()])
    assert (await agent_harness.pool())["funded"] == 15
    await agent_harness.limit([allowance(100)])
    raised = leased(await agent.say(5, lease(granted=40, consumed=1, returned=25, units=0), demands=[want()]))
    assert ((await agent_harness.pool())["funded"], raised.unallocated) == (100, 85)


async def test_an_exhausted_quota_that_no_region_holds_is_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([allowance(5)])
    await agent.say(1, demands=[want(waiting=5)])
    spent = leased(await agent.say(2, lease(granted=5, consumed=5), demands=[want(waiting=1)]))
    assert (spent.granted, spent.refusal) == (5, GrantRefusal.EXHAUSTED)


async def test_a_total_never_grows_beyond_what_a_store_can_count(agent_harness: AgentHarness, agent: Agent) -> None:
    """Neither by one grant nor by returned units that are granted again; the whole pool may be spent."""
    await agent_harness.limit([allowance(MAX_UNITS)])
    most = leased(await agent.say(1, demands=[want(waiting=MAX_UNITS - 3)]))
    assert most.granted == MAX_UNITS - 3
    back = lease(granted=MAX_UNITS - 3, returned=MAX_UNITS - 10)
    reply = leased(await agent.say(2, back, demands=[want(waiting=20)]))
    assert (reply.granted, reply.refusal) == (MAX_UNITS, None)
    reply = leased(await agent.say(3, back | {"granted": MAX_UNITS}, demands=[want(waiting=20)]))
    assert (reply.granted, reply.refusal, reply.final) == (MAX_UNITS, GrantRefusal.TOTAL_TOO_LARGE, False)
    spent = await agent.say(4, lease(granted=MAX_UNITS, consumed=10, returned=MAX_UNITS - 10))
    assert (spent.outcome, leased(spent).overage) == (ExchangeOutcome.APPLIED, 0)


async def test_overage_is_paid_back_before_anything_is_granted(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([allowance(5)])
    await agent.say(1, lease(consumed=8))
    reply = leased(await agent.say(2, lease(overage=8, consumed=8, units=0), demands=[want(waiting=1)]))
    assert (reply.granted, reply.unallocated, reply.refusal) == (0, 0, GrantRefusal.EXHAUSTED)
    assert (await agent_harness.pool())["funded"] == 5


async def test_regions_that_race_for_the_last_units_get_exactly_these(agent_harness: AgentHarness) -> None:
    await agent_harness.limit([allowance(50)])
    agents = [await agent_harness.agent(name) for name in ("us-east", "eu-west", "ap-south")]

    async def grab(agent: Agent) -> int:
        total = 0
        for seq in range(1, 9):
            total = leased(await agent.say(seq, demands=[want(waiting=7)])).granted
        return total

    totals = await asyncio.gather(*map(grab, agents))
    assert sum(totals) == 50
    pool = await agent_harness.pool()
    assert (pool["unallocated"], pool["outstanding"], pool["overage"]) == (0, 50, 0)


async def test_idle_units_are_recalled_as_the_pool_falls_through_a_quarter(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """A region keeps what it needs while half of the rest lasts for all: 100 of 200 units, at 100/s."""
    idle, busy = await agent_harness.agent("eu-west"), await agent_harness.agent("ap-south")
    await idle.say(1, demands=[want(waiting=300)])
    await busy.say(1, demands=[want(waiting=300, demand_milli=80_000)])
    with agent_harness.hub.subscribe("eu-west") as idle_hears, agent_harness.hub.subscribe("ap-south") as busy_hears:
        await agent.say(1, demands=[want(waiting=140)])
        await agent.say(2, lease(granted=140), demands=[want(waiting=60, demand_milli=20_000)])
        assert await idle_hears.take(10) == [Signal(kind="recall", quota=EXPORTS, keep=0)]
        assert await busy_hears.take(10) == [Signal(kind="recall", quota=EXPORTS, keep=80)]


async def test_a_missed_recall_is_in_the_reply(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.limit([allowance(10)])
    other = await agent_harness.agent("eu-west")
    held = leased(await agent.say(1, demands=[want(waiting=10)]))
    await other.say(1, demands=[want(waiting=4)])
    asked = leased(await agent.say(2, lease(granted=10, consumed=1)))
    assert (held.recall_keep, asked.recall_keep) == (None, 0)
    agent_harness.clock.move(seconds=5)  # no request waits any more
    assert leased(await agent.say(3, lease(granted=10, consumed=1, units=0))).recall_keep is None


async def test_a_new_period_has_its_own_lease_and_old_usage_stays_in_the_old_one(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    agent_harness.clock.time = datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC)
    reply = await agent.say(2, lease(granted=10, consumed=1), demands=[want(waiting=1)])
    last, ahead = sorted(reply.leases, key=lambda each: each.period)
    assert (ahead.starts_in_ms, ahead.granted) == (1000, 1)
    assert (last.expires_in_ms, last.ends_in_ms, last.granted) == (1000, 1000, 11)
    agent_harness.clock.move(seconds=1)
    reply = await agent.say(3, lease(granted=11, consumed=4, units=3), demands=[want(waiting=10)])
    old, new = sorted(reply.leases, key=lambda each: each.period)
    assert (old.period, old.granted, old.expires_in_ms, old.final) == ("2026-11", 11, 0, True)
    assert (new.period, new.granted, new.unallocated, new.final) == ("2026-12", 11, 989, False)
    assert (await agent_harness.pool())["consumed"] == 4
    assert await agent_harness.one("SELECT consumed FROM pool WHERE period = '2026-12'") == 0


async def test_a_replay_extends_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    frozen = lease(granted=10, consumed=1)
    assert leased(await agent.say(2, frozen)).expires_in_ms == 60_000
    agent_harness.clock.move(seconds=50)
    assert leased(await agent.say(2, frozen)).expires_in_ms == 10_000
    assert leased(await agent.say(3, lease(granted=10, consumed=1, units=0))).expires_in_ms == 60_000


async def test_a_draining_region_is_notified_and_gets_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent_harness.drain()
    response = await agent.call(exchange(agent.frozen(2, lease(granted=10, consumed=1)), [want(waiting=5)]))
    assert response.drain
    assert leased(response.replies[0]).granted == 10
    assert [each.refusal for each in response.replies[0].refused] == [GrantRefusal.REGION_NOT_ACTIVE]


async def test_a_change_of_regions_that_was_rolled_back_is_not_remembered(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """Its version number is used by another change then."""
    documents = Documents()
    rolled_back = agent_harness.owner.transaction()
    await rolled_back.start()
    await agent_harness.add_region("eu-west")
    seen = await read_catalogue(agent_harness.owner, documents, [EXPORTS], NOON)
    await rolled_back.rollback()
    await agent_harness.drain()
    now = await read_catalogue(agent_harness.owner, documents, [EXPORTS], NOON)
    assert (seen.version, seen.is_active("eu-west")) == (now.version, True)
    assert (now.is_active("eu-west"), now.must_return("us-east")) == (False, True)
