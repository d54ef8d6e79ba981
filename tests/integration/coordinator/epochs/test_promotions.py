"""A promoted replica proves that it has all of an epoch, or the epoch is considered lost."""

from typing import Any

import httpx
import pytest

from protocol.identifiers import lane_of
from protocol.outcomes import ExchangeOutcome
from tests.integration.coordinator.agent_harness import EXPORTS, Agent, AgentHarness, lease, leased, want

pytestmark = pytest.mark.anyio
NONCE, NEXT_NONCE = "0123456789abcdef", "fedcba9876543210"
PRIMARY = "p:history+2.0+r1+r2"
PROOF = {"nonce": NONCE, "history": "history", "offset": 700, "seqs": [1, 1, 1, 1]}


@pytest.fixture
async def agent(agent_harness: AgentHarness) -> Agent:
    await agent_harness.add_region("us-east")
    agent = Agent(await agent_harness.client("region:us-east"), "us-east", fingerprint=PRIMARY)
    assert (await agent.open(NONCE)).status_code == 200
    assert leased(await agent.say(1, demands=[want(waiting=10)])).granted == 10
    return agent


async def promote(agent: Agent, fingerprint: str = "r1:another", **changed: Any) -> httpx.Response:
    previous, agent.fingerprint = agent.epoch, fingerprint
    more = {"previous": previous, "promoted": PROOF} | changed
    return await agent.open(NEXT_NONCE, **more)


async def lost(agent_harness: AgentHarness, epoch: int) -> bool:
    return bool(await agent_harness.one("SELECT lost_data FROM region_epoch WHERE epoch = $1", epoch))


async def kept(agent_harness: AgentHarness) -> int:
    return int(await agent_harness.one("SELECT count(*) FROM audit WHERE action = 'epoch.kept'"))


@pytest.mark.parametrize("fingerprint", ["r1:another", "r2:another", "r1:another+1.0+r3"])
async def test_a_replica_that_confirmed_every_reply_has_all_of_the_epoch(
    agent_harness: AgentHarness, agent: Agent, fingerprint: str
) -> None:
    epoch = agent.epoch
    for _ in range(2):
        answer = await promote(agent, fingerprint)
        assert (answer.status_code, answer.json()["is_whole"]) == (200, True)
        agent.epoch = epoch
    assert not await lost(agent_harness, epoch)
    rows = await agent_harness.owner.fetch("SELECT object, details FROM audit WHERE action = 'epoch.kept'")
    assert [row["object"] for row in rows] == [str(epoch)], "asked twice, done once"
    assert '"offset": 700' in rows[0]["details"]


@pytest.mark.parametrize(
    "changed",
    [
        {"promoted": None},
        {"promoted": PROOF | {"nonce": "f" * 16}},
        {"promoted": PROOF | {"history": "another history"}},
        {"promoted": PROOF | {"seqs": [0, 0, 0, 0]}},
        {"promoted": PROOF | {"seqs": []}},
        {"fingerprint": "r3:another"},
        {"fingerprint": "2.0:another"},
        {"promoted": None, "lost_data": False},
    ],
    ids=str,
)
async def test_an_epoch_without_a_proof_is_lost(
    agent_harness: AgentHarness, agent: Agent, changed: dict[str, Any]
) -> None:
    epoch = agent.epoch
    for _ in range(2):
        answer = await promote(agent, **changed)
        assert (answer.status_code, answer.json().get("is_whole", False)) == (200, False)
        agent.epoch = epoch
    assert await lost(agent_harness, epoch)
    assert await kept(agent_harness) == 0


async def test_a_replica_proves_nothing_of_an_epoch_that_another_replaced(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """Its holds may have been committed in the epoch that came after it, whose replies this replica did not confirm."""
    first = agent.epoch
    agent.fingerprint = "p:history+2.0+r2"
    assert (await agent.open("1" * 16, previous=first, lost_data=False)).json()["is_whole"]
    second, agent.epoch = agent.epoch, first
    await promote(agent)
    assert await lost(agent_harness, second)
    assert await kept(agent_harness) == 0


async def test_a_former_primary_has_not_kept_what_a_replica_went_on_with(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """It knows nothing of holds that were committed in the promoted replica, and would return their units."""
    first = agent.epoch
    assert (await promote(agent)).json()["is_whole"]
    second, agent.fingerprint = agent.epoch, "p:history"
    answer = await agent.open("2" * 16, previous=first, lost_data=False)
    assert not answer.json().get("is_whole", False)
    assert await lost(agent_harness, first)
    assert await lost(agent_harness, second)


async def test_a_former_primary_has_kept_what_no_replica_went_on_with(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """The promoted replica proved nothing, so it returned nothing."""
    first = agent.epoch
    await promote(agent, promoted=None)
    agent.fingerprint = "p:history"
    await agent.open("2" * 16, previous=first, lost_data=False)
    assert not await lost(agent_harness, first)


async def test_an_epoch_whose_replies_no_replica_confirmed_is_lost(agent_harness: AgentHarness) -> None:
    await agent_harness.add_region("us-east")
    agent = Agent(await agent_harness.client("region:us-east"), "us-east", fingerprint="p:history")
    assert (await agent.open(NONCE)).status_code == 200
    epoch = agent.epoch
    await promote(agent)
    assert await lost(agent_harness, epoch)


OTHER = next(key for n in range(9) if lane_of(key := f"exports:tenant=t{n}", 4) != lane_of(EXPORTS, 4))


async def test_a_replay_in_an_ended_epoch_names_what_the_first_reply_granted(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    """The replica has the batch and not its reply: nothing in the batch says which lease was granted."""
    await agent.say(1, demands=[want(OTHER, waiting=3)], quota=OTHER)
    assert (await agent.say(1)).leases == [], "requests are repeated in a current epoch"
    epoch = agent.epoch
    assert (await promote(agent)).json()["is_whole"]
    agent.epoch = epoch
    for _ in range(2):
        replayed = await agent.say(1)
        assert (replayed.outcome, [each.quota for each in replayed.leases]) == (ExchangeOutcome.REPLAYED, [EXPORTS])
        assert (leased(replayed).granted, leased(replayed).consumed) == (10, 0)
    for _ in range(2):
        await agent.say(2, lease(granted=10, returned=10))
    row, pool = await agent_harness.lease(agent), await agent_harness.pool()
    assert (row["returned"], row["outstanding"], row["suspense"]) == (10, 0, 0)
    assert (pool["unallocated"], pool["outstanding"]) == (1000, 0)


async def test_what_an_epoch_that_lost_data_was_granted_is_neither_named_again_nor_free(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    epoch = agent.epoch
    await promote(agent, promoted=None)
    agent.epoch = epoch
    assert (await agent.say(1)).leases == []
    await agent.say(2, lease(granted=10, returned=10))
    row = await agent_harness.lease(agent)
    assert (row["returned"], row["outstanding"]) == (0, 10)
