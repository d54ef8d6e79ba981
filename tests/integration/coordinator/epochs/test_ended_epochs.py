"""An ended epoch is settled by whether its store kept its data, lost it, or was given up by people."""

from secrets import token_hex

import pytest

from coordinator.exchange.expire_leases import expire_leases
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, lease, leased, receipt, want
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio


async def next_incarnation(agent: Agent, *, lost_data: bool | None = None, previous: int | None = None) -> Agent:
    newer = Agent(agent.client, agent.region, f"after {agent.fingerprint}")
    body: dict[str, object] = {"nonce": token_hex(16), "fingerprint": newer.fingerprint}
    body["previous"] = previous or agent.epoch
    answer = await agent.client.post(
        f"/v1/regions/{agent.region}/epochs", json=body if lost_data is None else body | {"lost_data": lost_data}
    )
    newer.epoch, newer.lanes = answer.json()["epoch"], answer.json()["lanes"]
    return newer


async def set_aside(agent_harness: AgentHarness) -> None:
    async with connected(agent_harness.url) as coordinator, coordinator.transaction():
        await expire_leases(coordinator, agent_harness.clock.now())


async def test_the_rest_of_an_epoch_without_data_loss_is_free_at_once(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """Units of open holds are not returned, and stay reserved until their hold has ended there."""
    await agent.say(1, demands=[want(waiting=10)])
    await next_incarnation(agent, lost_data=False)
    reply = await agent.say(2, lease(granted=10, consumed=4, returned=5), demands=[want(waiting=5)])
    assert [each.refusal for each in reply.refused] == [GrantRefusal.EPOCH_FENCED]
    mine, pool = await agent_harness.lease(agent), await agent_harness.pool()
    assert (mine["state"], mine["outstanding"], mine["returned"]) == ("fenced", 1, 5)
    assert (pool["unallocated"], pool["consumed"]) == (995, 4)
    await agent.say(3, lease(granted=10, consumed=5, returned=5, units=1))
    assert (await agent_harness.lease(agent))["outstanding"] == 0


@pytest.mark.parametrize("lost_data", [None, True])
async def test_of_an_epoch_with_data_loss_usage_is_booked_and_returns_are_not(
    agent_harness: AgentHarness, agent: Agent, lost_data: bool | None
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await next_incarnation(agent, lost_data=lost_data)
    await set_aside(agent_harness)
    assert (await agent_harness.pool())["outstanding"] == 10, "its store may be alive, and spend while it has not heard"
    agent_harness.clock.move(hours=1)
    await set_aside(agent_harness)
    assert (await agent_harness.pool())["suspense"] == 10
    reply = await agent.say(2, lease(granted=10, consumed=4, returned=5))
    assert reply.outcome is ExchangeOutcome.APPLIED
    mine, pool = await agent_harness.lease(agent), await agent_harness.pool()
    assert (mine["state"], mine["suspense"], mine["returned"], mine["region_returned"]) == ("lost", 6, 0, 5)
    assert (pool["unallocated"], pool["consumed"], pool["suspense"]) == (990, 4, 6)


async def test_a_store_that_loses_data_may_lose_reports_of_an_epoch_it_once_kept(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """Restored to an older state, the store knows less of that epoch than it had admitted, and
    would return too much.
    """
    await agent.say(1, demands=[want(waiting=10)])
    newer = await next_incarnation(agent, lost_data=False)
    assert (await agent_harness.lease(agent))["state"] == "fenced"
    await next_incarnation(newer, lost_data=True)
    assert (await agent.say(2, lease(granted=10, consumed=4, returned=6))).outcome is ExchangeOutcome.APPLIED
    mine, pool = await agent_harness.lease(agent), await agent_harness.pool()
    assert (mine["state"], mine["consumed"], mine["returned"]) == ("lost", 4, 0)
    assert pool["unallocated"] == 990


async def test_a_fully_reported_epoch_cannot_lose_data_any_more(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    newer = await next_incarnation(agent, lost_data=False)
    await agent.say(2, lease(granted=10, consumed=4, returned=6))
    await next_incarnation(newer, lost_data=True)
    assert (await agent_harness.lease(agent))["state"] == "fenced"


async def test_a_claim_of_no_data_loss_counts_for_its_epoch_only(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    newer = await next_incarnation(agent)
    await newer.say(1, demands=[want(waiting=10)])
    await next_incarnation(newer, lost_data=False, previous=agent.epoch)
    assert ((await agent_harness.lease(agent))["state"], (await agent_harness.lease(newer))["state"]) == (
        "fenced",
        "lost",
    )


async def test_an_epoch_believed_lost_returns_all_once_its_store_is_found_alive(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """The epoch also returns the units whose return was not trusted meanwhile."""
    await agent.say(1, demands=[want(waiting=10)])
    newer = await next_incarnation(agent)
    await agent.say(2, lease(granted=10, consumed=4, returned=2))
    agent_harness.clock.move(hours=1)
    await set_aside(agent_harness)
    assert ((await agent_harness.lease(agent))["returned"], (await agent_harness.pool())["suspense"]) == (0, 6)
    await next_incarnation(newer, lost_data=False, previous=agent.epoch)
    await agent.say(3, lease(granted=10, consumed=4, returned=5, units=0))
    mine, pool = await agent_harness.lease(agent), await agent_harness.pool()
    assert (mine["state"], mine["returned"], mine["suspense"]) == ("fenced", 5, 1), "one unit is held"
    assert (pool["unallocated"], pool["suspense"]) == (995, 1)


async def test_evidence_of_loss_outweighs_the_claim_of_a_store(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=4))
    newer = await next_incarnation(agent)
    await agent.say(3, lease(granted=10, consumed=3, units=0))
    await next_incarnation(newer, lost_data=False, previous=agent.epoch)
    assert (await agent_harness.lease(agent))["state"] == "lost"


@pytest.mark.parametrize(
    ("seq", "consumed", "outcome"), [(2, 6, ExchangeOutcome.CONFLICT), (3, 3, ExchangeOutcome.STORE_REGRESSED)]
)
async def test_evidence_of_loss_ends_the_epoch(
    agent_harness: AgentHarness, agent: Agent, seq: int, consumed: int, outcome: ExchangeOutcome
) -> None:
    """This holds whatever the agent claims of its store when it opens the next epoch."""
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=4))
    assert (await agent.say(seq, lease(granted=10, consumed=consumed, units=0))).outcome is outcome
    epoch = await agent_harness.owner.fetchrow(
        "SELECT state, lost_data FROM region_epoch WHERE epoch = $1", agent.epoch
    )
    assert epoch is not None
    assert tuple(epoch) == ("fenced", True)
    assert (await agent_harness.lease(agent))["state"] == "lost"
    newer = await next_incarnation(agent, lost_data=False)
    assert leased(await newer.say(1, demands=[want(waiting=10)])).granted == 10
    assert (await agent_harness.lease(agent))["state"] == "lost"


async def test_evidence_of_loss_counts_after_the_fence_too(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    await agent.say(2, lease(granted=10, consumed=4))
    await next_incarnation(agent, lost_data=False)
    assert (await agent_harness.lease(agent))["state"] == "fenced"
    await agent.say(3, lease(granted=10, consumed=3, units=0))
    assert (await agent_harness.lease(agent))["state"] == "lost"
    await agent.say(3, lease(granted=10, consumed=4, returned=6, units=0))
    assert (await agent_harness.pool())["unallocated"] == 990


async def retire(
    agent_harness: AgentHarness, agent: Agent, reason: str = "the region burned down"
) -> dict[str, object]:
    client = await agent_harness.client("alloc:write")
    answer = await client.post(f"/v1/epochs/{agent.epoch}:retire", json={"reason": reason})
    assert answer.status_code == 200, answer.text
    body: dict[str, object] = answer.json()
    return body


async def test_evidence_of_a_retired_epoch_is_acknowledged_and_kept_for_people(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    assert (await retire(agent_harness, agent))["reason"] == "the region burned down"
    assert (await retire(agent_harness, agent, "again"))["reason"] == "the region burned down"
    await set_aside(agent_harness)
    before = await agent_harness.pool()
    assert before["suspense"] == 10
    late = lease(granted=10, consumed=4, returned=6)
    first, again = await agent.say(2, late, demands=[want(waiting=5)]), await agent.say(2, late)
    assert (first.outcome, again.outcome) == (ExchangeOutcome.RETIRED, ExchangeOutcome.RETIRED)
    assert receipt(first) == receipt(again)
    assert await agent_harness.pool() == before
    kept = await agent_harness.owner.fetch("SELECT seq, reason, evidence->>'consumed' FROM quarantine")
    assert [tuple(row) for row in kept] == [(2, "epoch_retired", "4")]
    assert (await agent.say(4)).outcome is ExchangeOutcome.GAP
    assert (await agent.say(3)).outcome is ExchangeOutcome.RETIRED
    deeds = await agent_harness.owner.fetch("SELECT action, object FROM audit WHERE action = 'epoch.retired'")
    assert [tuple(row) for row in deeds] == [("epoch.retired", str(agent.epoch))]


async def test_scopes_and_limits_of_retiring_epochs(agent_harness: AgentHarness, agent: Agent) -> None:
    path = f"/v1/epochs/{agent.epoch}:retire"
    reader, allocator = await agent_harness.client("quota:read"), await agent_harness.client("alloc:write")
    assert (await reader.post(path, json={"reason": "x"})).status_code == 403
    assert (await allocator.post(path, json={})).status_code == 422
    assert (await allocator.post(path, json={"reason": " "})).status_code == 422
    assert (await allocator.post("/v1/epochs/999:retire", json={"reason": "x"})).status_code == 404
    assert (await allocator.post("/v1/epochs/one:retire", json={"reason": "x"})).status_code == 422
