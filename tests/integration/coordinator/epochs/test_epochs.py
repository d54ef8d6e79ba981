"""A new incarnation of a store gets a new epoch, the old one is fenced, and opening is idempotent."""

import asyncio

import pytest

from coordinator.epochs.rules.split_brain import MOST_OPENINGS, WINDOW
from coordinator.proof.rules import genesis_head
from protocol.outcomes import ExchangeOutcome
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, lease, leased, want
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio

NONCE = "0123456789abcdef"


async def test_the_same_nonce_and_fingerprint_give_the_same_epoch(agent_harness: AgentHarness, agent: Agent) -> None:
    answers = await asyncio.gather(*(agent.open(NONCE) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["epoch"] for answer in answers}) == 1
    assert await agent_harness.one("SELECT count(*) FROM region_epoch") == 2


async def test_a_nonce_of_another_incarnation_is_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.open(NONCE)
    agent.fingerprint = "another incarnation"
    answer = await agent.open(NONCE)
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/nonce-of-another-incarnation")
    other = await agent_harness.agent("eu-west")
    other.fingerprint = "one life"
    assert (await other.open(NONCE)).status_code == 409
    assert await agent_harness.one("SELECT count(*) FROM region_epoch WHERE state = 'current'") == 2


async def test_two_regions_that_open_with_one_nonce_at_once(agent_harness: AgentHarness, agent: Agent) -> None:
    """The second call finds the first one's row only when it inserts its own, and then reads again."""
    await agent_harness.add_region("eu-west")
    sql = (
        "INSERT INTO region_epoch (region, nonce, fingerprint, lanes, opened_at) VALUES ('eu-west', $1, 'f', 4, now())"
    )
    async with connected(agent_harness.url) as first:
        transaction = first.transaction()
        await transaction.start()
        await first.execute(sql, NONCE)
        second = asyncio.create_task(agent.open(NONCE))
        while not await agent_harness.one(_SOMEBODY_WAITS):
            assert not second.done()
        await transaction.commit()
        assert (await second).status_code == 409
    assert await agent_harness.one("SELECT count(*) FROM region_epoch WHERE state = 'current'") == 2


_SOMEBODY_WAITS = """
SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


async def test_a_new_epoch_fences_the_one_before(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    old = agent.epoch
    agent.fingerprint = "another incarnation"
    await agent.open()
    states = await agent_harness.owner.fetch("SELECT epoch, state FROM region_epoch ORDER BY epoch")
    assert [tuple(row) for row in states] == [(old, "fenced"), (agent.epoch, "current")]
    assert await agent_harness.one("SELECT state FROM lease WHERE epoch = $1", old) == "lost"
    lanes = await agent_harness.owner.fetch("SELECT lane, head FROM lane WHERE epoch = $1 ORDER BY lane", agent.epoch)
    assert [tuple(row) for row in lanes] == [(lane, genesis_head(agent.epoch, lane)) for lane in range(4)]


async def test_nothing_is_granted_to_an_ended_epoch(agent_harness: AgentHarness, agent: Agent) -> None:
    """An exchange and the opening of the next epoch run at once, in either order: a lease equals what its region was
    granted.
    """
    for incarnation in range(10):
        await agent.say(1, demands=[want(waiting=1)])
        newer = Agent(agent.client, agent.region, f"life {incarnation}")
        reply, opened = await asyncio.gather(agent.say(2, demands=[want(waiting=1)]), newer.open())
        assert opened.status_code == 200
        fenced = await agent_harness.lease(agent)
        assert (fenced["state"], fenced["granted"]) == ("lost", leased(reply).granted if reply.leases else 1)
        assert (await agent.say(3, demands=[want(waiting=1)])).leases == []
        agent = newer


async def test_requests_for_an_epoch_that_are_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.owner.execute("UPDATE region SET status = 'down'")
    answer = await agent.open()
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/region-down")
    nowhere = Agent(await agent_harness.client("region:nowhere"), "nowhere")
    assert (await nowhere.open()).status_code == 404


async def alternates(agent: Agent, rival: Agent, times: int) -> None:
    for _ in range(times):
        for each in (agent, rival):
            assert (await each.open()).status_code == 200


async def test_two_stores_of_one_region_are_refused_until_they_have_been_silent(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    rival = Agent(agent.client, agent.region, "another incarnation")
    await rival.open()
    await alternates(agent, rival, MOST_OPENINGS - 1)
    refused = await agent.open()
    assert (refused.status_code, refused.json()["refusal"]) == (409, "two_stores")
    assert refused.json()["type"] == "/problems/two-stores"
    assert refused.headers["Retry-After"] == "15"
    reader = await agent_harness.client("quota:read")
    region = (await reader.get("/v1/regions/us-east")).json()
    assert (region["split_brain"], region["epoch"]) == (True, rival.epoch), "whose turn it was keeps it"
    metrics = await agent_harness.metrics()
    assert 'leasehold_coordinator_region_split_brain{region="us-east"} 1.0' in metrics
    agent_harness.clock.time += WINDOW
    assert (await reader.get("/v1/regions/us-east")).json()["split_brain"] is False
    assert (await agent.open()).status_code == 200


async def test_evidence_of_a_contested_region_is_booked_and_its_epoch_is_granted_to(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    told = Agent(agent.client, agent.region, epoch=agent.epoch)
    rival = Agent(agent.client, agent.region, "another incarnation")
    await rival.open()
    await alternates(agent, rival, MOST_OPENINGS - 1)
    assert (await agent.open()).status_code == 409
    assert (await told.say(2, lease(granted=10, consumed=4))).outcome is ExchangeOutcome.APPLIED
    assert (await agent_harness.pool())["consumed"] == 4
    assert leased(await rival.say(1, demands=[want(waiting=10)])).granted > 0


async def test_an_open_epoch_is_returned_again_even_if_the_region_is_contested(agent: Agent) -> None:
    rival = Agent(agent.client, agent.region, "another incarnation")
    await agent.open(NONCE)
    known = agent.epoch
    await rival.open()
    await alternates(agent, rival, MOST_OPENINGS - 1)
    assert (await agent.open()).status_code == 409
    assert (await agent.open(NONCE)).json()["epoch"] == known


async def test_repeated_failover_is_no_contest(agent_harness: AgentHarness, agent: Agent) -> None:
    """The store fails over to another incarnation each time, sometimes back, or restarts as one incarnation."""
    for incarnation in range(MOST_OPENINGS * 3):
        other = Agent(agent.client, agent.region, f"life {incarnation % (2 * MOST_OPENINGS)}")
        for each in (other, agent):
            assert (await each.open()).status_code == 200
    eu = await agent_harness.agent("eu-west")
    await alternates(agent, eu, MOST_OPENINGS)
    stores = Agent(agent.client, agent.region, "an incarnation of another moment"), agent
    for _ in range(MOST_OPENINGS):
        agent_harness.clock.time += WINDOW / 2
        for each in stores:
            assert (await each.open()).status_code == 200


@pytest.mark.parametrize("nonce", ["", "short", "G" * 32, "0" * 65])
async def test_a_nonce_has_a_form(agent: Agent, nonce: str) -> None:
    answer = await agent.client.post("/v1/regions/us-east/epochs", json={"nonce": nonce, "fingerprint": "f"})
    assert answer.status_code == 422
    assert answer.json()["invalid_parameters"][0]["field"] == "nonce"


async def test_each_cell_of_a_cluster_has_an_epoch_of_its_own(agent_harness: AgentHarness, agent: Agent) -> None:
    """A new epoch ends the one before in its cell only. A store with another number of cells is another store."""
    turns = [
        (("a", 0, 3), "a"),
        (("a", 1, 3), "aa"),
        (("b", 2, 3), "aab"),
        (("c", 1, 3), "abc"),
        (("d", 0, 2), "d"),
        (("e", 0, 1), "e"),
    ]
    for (agent.fingerprint, cell, cells), left in turns:
        answer = await agent.open(cell=cell, cells=cells)
        assert (answer.status_code, agent.lanes) == (200, 4 if cells == 1 else 1)
        current = await agent_harness.owner.fetch(
            "SELECT fingerprint FROM region_epoch WHERE state = 'current' ORDER BY epoch"
        )
        assert "".join(row["fingerprint"] for row in current) == left
        region = (await (await agent_harness.client("admin")).get("/v1/regions/us-east")).json()
        assert (region["epoch"], region["split_brain"]) == (agent.epoch, False)


async def test_a_cell_that_is_not_among_those_it_names_is_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    answer = await agent.open(cell=3, cells=3)
    assert answer.status_code == 422, answer.text
    assert [fault["field"] for fault in answer.json()["invalid_parameters"]] == ["cell"]
    assert await agent_harness.one("SELECT count(*) FROM region_epoch") == 1


async def test_the_cells_that_one_store_opens_are_no_contest(agent_harness: AgentHarness, agent: Agent) -> None:
    """A Cluster opens as many epochs at once as it has cells, of few incarnations."""
    for cell in range(3 * MOST_OPENINGS):
        agent.fingerprint = f"shard {cell % 3}"
        assert (await agent.open(cell=cell, cells=3 * MOST_OPENINGS)).status_code == 200
    region = (await (await agent_harness.client("admin")).get("/v1/regions/us-east")).json()
    assert region["split_brain"] is False
    for turn in range(2 * MOST_OPENINGS):
        agent.fingerprint = f"rival {turn % 2}"
        assert (await agent.open(cell=1, cells=3 * MOST_OPENINGS)).status_code == 200
    answer = await agent.open(cell=1, cells=3 * MOST_OPENINGS)
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/two-stores")
    assert (await agent.open(cell=2, cells=3 * MOST_OPENINGS)).status_code == 200, "of this cell they are no rivals"
    region = (await (await agent_harness.client("admin")).get("/v1/regions/us-east")).json()
    assert region["split_brain"] is True
