"""Several calls share a transaction, and returned units are pushed to regions that wait for them."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from coordinator.exchange.parsing import parse_exchanges
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.transaction import Applied, apply_exchanges
from coordinator.limits.in_force import Documents
from protocol.identifiers import lane_of
from protocol.messages import Exchange, ExchangeRequest, LeaseDemand, LiveState
from protocol.outcomes import ExchangeOutcome
from tests.integration.coordinator.agent_harness import EXPORTS, Agent, AgentHarness, exchange, lease, leased, want
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio


async def scarce(agent_harness: AgentHarness, limit: int) -> None:
    exports = {"name": "exports", "kind": "allowance", "limit": limit, "period": "month", "horizon": "10s"}
    await agent_harness.limit([exports])


async def several(agent_harness: AgentHarness, count: int) -> list[Agent]:
    return [await agent_harness.agent(f"region-{number}") for number in range(count)]


async def applied_together(agent_harness: AgentHarness, agents: Sequence[Agent], demands: LeaseDemand) -> list[Applied]:
    """Apply calls in one transaction, as the coordinator's batcher does."""
    calls = [
        parse_exchanges(
            agent.region,
            msgspec.json.encode(
                ExchangeRequest(
                    fingerprint=agent.fingerprint,
                    exchanges=[Exchange(frozen=agent.frozen(1), live=LiveState(demands=[demands]))],
                )
            ),
        )
        for agent in agents
    ]
    async with connected(agent_harness.url) as coordinator, coordinator.transaction():
        return await apply_exchanges(coordinator, Documents(), calls, LeaseTerms(60_000), agent_harness.clock.now())


async def test_regions_at_once_share_transactions_and_each_gets_its_own_reply(agent_harness: AgentHarness) -> None:
    await scarce(agent_harness, 160)
    agents = await several(agent_harness, 12)
    for seq in range(1, 4):
        replies = await asyncio.gather(*(agent.say(seq, demands=[want(waiting=4)]) for agent in agents))
        assert [leased(reply).granted for reply in replies] == [4 * seq] * 12
    transactions = await agent_harness.one("SELECT count(DISTINCT xmin::text) FROM report")
    assert await agent_harness.one("SELECT count(*) FROM report") == 36
    assert transactions < 36
    assert (await agent_harness.pool())["outstanding"] == 144


async def test_a_lease_in_a_wrong_lane_refuses_only_its_exchange(agent_harness: AgentHarness) -> None:
    agents = await several(agent_harness, 6)
    bad = {"lane": (lane_of(EXPORTS, 4) + 1) % 4}
    calls = [
        agent.call(exchange(agent.frozen(1, lease(), other=bad if number == 3 else {}), [want(waiting=2)]))
        for number, agent in enumerate(agents)
    ]
    outcomes = [answer.replies[0].outcome.value for answer in await asyncio.gather(*calls)]
    assert outcomes == ["applied", "applied", "applied", "refused", "applied", "applied"]
    first, others = await agent_harness.owner.fetch(
        "SELECT count(*) AS reports FROM report GROUP BY xmin::text ORDER BY min(position)"
    )
    assert (first["reports"], others["reports"]) == (1, 4), "the gather failed, and its members ran singly"


async def test_returned_units_are_pushed_to_waiting_regions_in_the_same_transaction(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await scarce(agent_harness, 10)
    other = await agent_harness.agent("eu-west")
    await agent.say(1, demands=[want(waiting=10)])
    assert leased(await other.say(1, demands=[want(waiting=4)])).granted == 0
    await agent.say(2, lease(granted=10, consumed=3, returned=6))
    theirs, pool = await agent_harness.lease(other), await agent_harness.pool()
    assert (theirs["granted"], theirs["waiting"], pool["unallocated"]) == (4, 0, 2)
    pushed = await agent_harness.owner.fetchrow(
        "SELECT epoch, region, seq, units FROM transfer WHERE movement_id IS NOT NULL"
    )
    assert pushed is not None
    assert tuple(pushed) == (other.epoch, "eu-west", None, 4)
    # It fetches its units, and does not get them twice.
    fetched = leased(await other.say(2, lease(granted=0, units=0), demands=[want(waiting=4)]))
    assert (fetched.granted, fetched.refusal) == (4, None)


async def test_units_above_a_lowered_limit_are_not_pushed(agent_harness: AgentHarness, agent: Agent) -> None:
    """A region that returns units requests none, but the limit is checked all the same."""
    await scarce(agent_harness, 10)
    other = await agent_harness.agent("eu-west")
    await agent.say(1, demands=[want(waiting=10)])
    await scarce(agent_harness, 6)
    assert leased(await other.say(1, demands=[want(waiting=4)])).granted == 0
    await agent.say(2, lease(granted=10, consumed=3, returned=6))
    assert (await agent_harness.lease(other))["granted"] == 2
    assert leased(await other.say(2, lease(granted=2, units=0), demands=[want(waiting=2)])).granted == 2
    assert (await agent_harness.pool())["funded"] == 6


async def test_nothing_is_pushed_to_a_region_that_no_longer_waits(agent_harness: AgentHarness, agent: Agent) -> None:
    await scarce(agent_harness, 10)
    other, gone = await agent_harness.agent("eu-west"), await agent_harness.agent("ap-south")
    await agent.say(1, demands=[want(waiting=10)])
    await other.say(1, demands=[want(waiting=4)])
    await gone.say(1, demands=[want(waiting=4)])
    await agent_harness.owner.execute("UPDATE region_epoch SET state = 'fenced' WHERE epoch = $1", gone.epoch)
    agent_harness.clock.move(seconds=5)
    await agent.say(2, lease(granted=10, returned=5))
    assert await agent_harness.one("SELECT count(*) FROM transfer WHERE movement_id IS NOT NULL") == 0
    assert (await agent_harness.pool())["unallocated"] == 5


async def test_nothing_is_pushed_to_a_lane_that_stopped_because_the_ledger_lost_data(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """The region waited a moment ago, and then showed that it knows more than the ledger."""
    await scarce(agent_harness, 10)
    other = await agent_harness.agent("eu-west")
    await agent.say(1, demands=[want(waiting=10)])
    await other.say(1, demands=[want(waiting=4)])
    assert (await other.say(5)).outcome is ExchangeOutcome.GAP
    await agent.say(2, lease(granted=10, returned=5))
    assert (await agent_harness.lease(other))["granted"] == 0
    assert (await agent_harness.pool())["unallocated"] == 5


async def test_an_epoch_that_is_being_fenced_is_not_pushed_to(agent_harness: AgentHarness, agent: Agent) -> None:
    """No transaction waits for it, and the units stay free for the next request."""
    await scarce(agent_harness, 10)
    other = await agent_harness.agent("eu-west")
    await agent.say(1, demands=[want(waiting=10)])
    await other.say(1, demands=[want(waiting=4)])
    async with connected(agent_harness.url) as opening, opening.transaction():
        await opening.execute("UPDATE region_epoch SET state = 'fenced' WHERE epoch = $1", other.epoch)
        reply = await agent.say(2, lease(granted=10, returned=5))
        assert reply.outcome is ExchangeOutcome.APPLIED
    assert (await agent_harness.lease(other))["granted"] == 0
    assert (await agent_harness.pool())["unallocated"] == 5


async def test_a_batch_is_one_transaction(agent_harness: AgentHarness) -> None:
    """A failure rolls back all of its calls."""
    agents = await several(agent_harness, 3)
    applied = await applied_together(agent_harness, agents, LeaseDemand(quota=EXPORTS, waiting=3))
    assert [leased(each.response.replies[0]).granted for each in applied] == [3, 3, 3]
    assert await agent_harness.one("SELECT count(DISTINCT xmin::text) FROM report") == 1
    assert await agent_harness.one("SELECT count(*) FROM transfer WHERE cause = 'funded'") == 1


async def test_regions_of_a_batch_are_granted_in_turn(agent_harness: AgentHarness) -> None:
    """The first gets all of its target by demand, the second a quarter of what is left, the third a sixth."""
    await scarce(agent_harness, 100)
    agents = await several(agent_harness, 3)
    applied = await applied_together(agent_harness, agents, LeaseDemand(quota=EXPORTS, demand_milli=40_000))
    assert [leased(each.response.replies[0]).granted for each in applied] == [40, 15, 7]
