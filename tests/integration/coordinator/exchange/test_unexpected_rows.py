"""Every write repeats the state that was decided on.

A row in another state is a bug, and rolls the transaction back.
"""

import pytest

from coordinator.database.expect import UnexpectedRows
from coordinator.exchange.rules.balances import Key, Lease, Pool
from coordinator.exchange.rules.decision import BookedReport
from coordinator.exchange.rules.posting import Report
from coordinator.exchange.statements.balances import write_balances, write_booked
from protocol.identifiers import lane_of
from protocol.lease import LeaseState
from tests.integration.coordinator.agent_harness import EXPORTS, PERIOD, Agent, AgentHarness, want
from tests.integration.coordinator.fixtures import NOON

pytestmark = pytest.mark.anyio
KEY = Key(EXPORTS, PERIOD)


async def test_a_missing_pool_fails_the_write(agent_harness: AgentHarness, agent: Agent) -> None:
    with pytest.raises(UnexpectedRows):
        await write_balances(agent_harness.owner, [Pool(KEY)], [], {})


@pytest.mark.parametrize("was", list(LeaseState))
async def test_a_lease_in_another_state_fails_the_write(
    agent_harness: AgentHarness, agent: Agent, was: LeaseState
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    lease = Lease(KEY, agent.epoch, agent.region, NOON, NOON, granted=10, outstanding=10)
    write = write_balances(agent_harness.owner, [], [lease], {(agent.epoch, KEY): was})
    if was is LeaseState.ACTIVE:
        await write
    else:
        with pytest.raises(UnexpectedRows):
            await write


@pytest.mark.parametrize("seq", [1, 2, 3])
async def test_a_lane_at_another_number_fails_the_write(agent_harness: AgentHarness, agent: Agent, seq: int) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    report = Report(agent.region, agent.epoch, lane_of(EXPORTS, agent.lanes), seq)
    booked = [BookedReport(report, b"hash", b"head", [])]
    write = write_booked(agent_harness.owner, booked, [], [], {}, [], NOON)
    if seq == 2:
        assert (await write)[agent.epoch, report.lane].head == b"head".hex()
    else:
        with pytest.raises(UnexpectedRows):
            await write
