"""A failing exchange is refused alone: the others of its batch and of its call are booked."""

import asyncio
from collections.abc import Sequence

import pytest

from protocol.identifiers import lane_of
from protocol.messages import ExchangeReply
from protocol.outcomes import ExchangeOutcome
from tests.integration.coordinator.agent_harness import EXPORTS, Agent, AgentHarness, exchange, lease, want
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.interleaving import until_it_waits

pytestmark = pytest.mark.anyio
BAD = "exports:tenant=bad"
FAILS = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'planted' USING ERRCODE = '{code}'; END $$;
CREATE TRIGGER fails BEFORE UPDATE ON pool FOR EACH ROW WHEN (NEW.quota = '{quota}') EXECUTE FUNCTION fail();
"""


def quotas_of_other_lanes(agent: Agent, count: int) -> list[str]:
    """Return one quota of each of so many lanes that BAD is not in."""
    found: dict[int, str] = {}
    for number in range(1000):
        quota = f"exports:tenant=t{number}"
        found.setdefault(lane_of(quota, agent.lanes), quota)
    return [quota for lane, quota in sorted(found.items()) if lane != lane_of(BAD, agent.lanes)][:count]


def fault_rules(replies: Sequence[ExchangeReply]) -> list[str | None]:
    return [reply.fault.rule if reply.fault else None for reply in replies]


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("22003", "internal"),  # a number out of range
        ("53200", "contention"),  # out of shared memory
        ("57014", "contention"),  # a statement that ran too long
        ("55P03", "contention"),  # a lock that was not free in time
    ],
)
async def test_one_failing_exchange_leaves_the_others_of_its_call(
    agent_harness: AgentHarness, agent: Agent, code: str, rule: str
) -> None:
    await agent_harness.owner.execute(FAILS.format(code=code, quota=BAD))
    first, second = quotas_of_other_lanes(agent, 2)
    quotas = (first, BAD, second)
    exchanges = [exchange(agent.frozen(1, quota=quota), [want(quota, waiting=2)]) for quota in quotas]
    replies = (await agent.call(*exchanges)).replies
    assert [reply.outcome.value for reply in replies] == ["applied", "refused", "applied"]
    assert fault_rules(replies) == [None, rule, None]
    assert [reply.leases[0].granted for reply in (replies[0], replies[2])] == [2, 2]
    counted = f'exchange_items_refused_total{{kind="exchange",reason="{rule}",region="us-east"}} 1.0'
    assert counted in (await agent.client.get("/metrics")).text
    await agent_harness.owner.execute("DROP TRIGGER fails ON pool")
    assert (await agent.say(1, demands=[want(BAD, waiting=2)], quota=BAD)).outcome is ExchangeOutcome.APPLIED


async def test_one_region_whose_exchange_fails_leaves_the_other_regions(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent_harness.owner.execute(FAILS.format(code="22003", quota=BAD))
    others = [await agent_harness.agent(f"region-{number}") for number in range(5)]
    for seq in range(1, 4):
        failing = agent.say(1, demands=[want(BAD, waiting=2)], quota=BAD)
        good = [other.say(seq, demands=[want(waiting=1)]) for other in others]
        refused, *booked = await asyncio.gather(failing, *good)
        assert refused.outcome is ExchangeOutcome.REFUSED
        assert {reply.outcome for reply in booked} == {ExchangeOutcome.APPLIED}
    assert (await agent_harness.pool())["outstanding"] == 15


@pytest.mark.extended
async def test_a_long_locked_row_delays_only_what_needs_it(agent_harness: AgentHarness, agent: Agent) -> None:
    """A period takes long to close while one region reports late for it, among many that do not."""
    others = [await agent_harness.agent(f"region-{number}") for number in range(4)]
    before = lease(consumed=3) | {"period": "2026-10"}
    assert (await agent.say(1, before)).outcome is ExchangeOutcome.APPLIED
    late = exchange(agent.frozen(2, before | {"consumed": 5, "lines": lease(consumed=2)["lines"]}))
    (second,) = quotas_of_other_lanes(agent, 1)
    async with connected(agent_harness.url) as holder, holder.transaction():
        await holder.execute("SELECT FROM period WHERE id = '2026-10' FOR UPDATE")
        other_lane = exchange(agent.frozen(1, quota=second), [want(second, waiting=2)])
        stuck = asyncio.create_task(agent.call(late, other_lane))
        await until_it_waits(agent_harness.owner, stuck)
        for seq in range(1, 4):
            replies = await asyncio.gather(*(other.say(seq, demands=[want(waiting=1)]) for other in others))
            assert {reply.outcome for reply in replies} == {ExchangeOutcome.APPLIED}
        refused, booked = (await stuck).replies
        assert fault_rules([refused, booked]) == ["contention", None]
        assert booked.leases[0].granted == 2
    (reply,) = (await agent.call(late)).replies
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert await agent_harness.one("SELECT consumed FROM pool WHERE quota = $1 AND period = '2026-10'", EXPORTS) == 5
