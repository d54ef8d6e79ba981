"""An epoch continues in another incarnation of its store, except where data loss is possible."""

from typing import Any

import httpx
import pytest

from protocol.outcomes import ExchangeOutcome
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, lease, leased, want

pytestmark = pytest.mark.anyio
NONCE = "0123456789abcdef"


@pytest.fixture
async def agent(agent_harness: AgentHarness) -> Agent:
    await agent_harness.add_region("us-east")
    agent = Agent(await agent_harness.client("region:us-east"), "us-east")
    assert (await agent.open(NONCE)).status_code == 200
    assert leased(await agent.say(1, demands=[want(waiting=10)])).granted == 10
    return agent


async def rebind(agent: Agent, **changed: Any) -> httpx.Response:
    body = {"nonce": NONCE, "previous": "one life", "fingerprint": "the next", "seqs": [1, 1, 1, 1]}
    return await agent.client.post(f"/v1/regions/us-east/epochs/{agent.epoch}:rebind", json=body | changed)


async def test_exchanges_continue_where_they_stopped(agent_harness: AgentHarness, agent: Agent) -> None:
    for _ in range(2):
        answer = await rebind(agent)
        assert (answer.status_code, answer.json()["epoch"]) == (200, agent.epoch)
    assert (await agent.say(2, lease(granted=10, consumed=4))).outcome is ExchangeOutcome.WRONG_FINGERPRINT
    agent.fingerprint = "the next"
    reply = await agent.say(2, lease(granted=10, consumed=4), demands=[want(waiting=7)])
    assert (reply.outcome, leased(reply).granted) == (ExchangeOutcome.APPLIED, 17)
    deeds = await agent_harness.owner.fetch(
        "SELECT object, details->>'fingerprint' FROM audit WHERE action = 'epoch.rebound'"
    )
    assert [tuple(deed) for deed in deeds] == [(str(agent.epoch), "the next")], "asked twice, done once"


@pytest.mark.parametrize(
    ("refusal", "changed"),
    [
        ("not_issued", {"nonce": "f" * 16}),
        ("another_incarnation", {"previous": "an incarnation that nobody knows"}),
        ("store_behind", {"seqs": [0, 0, 0, 0]}),
        ("store_behind", {"seqs": []}),
    ],
)
async def test_an_epoch_in_doubt_does_not_continue(
    agent_harness: AgentHarness, agent: Agent, refusal: str, changed: dict[str, Any]
) -> None:
    answer = await rebind(agent, **changed)
    assert (answer.status_code, answer.json()["refusal"]) == (409, refusal)
    assert await agent_harness.one("SELECT fingerprint FROM region_epoch WHERE epoch = $1", agent.epoch) == "one life"
    assert not await agent_harness.one("SELECT count(*) FROM audit WHERE action = 'epoch.rebound'")


async def test_an_ended_epoch_does_not_continue(agent_harness: AgentHarness, agent: Agent) -> None:
    other = Agent(agent.client, "us-east", "another store")
    await other.open()
    assert (await rebind(agent)).json()["refusal"] == "epoch_over"
    behind = await rebind(agent, seqs=[0, 0, 0, 0])
    assert behind.json()["refusal"] == "store_behind", "what speaks against its data is said first"


async def test_a_region_that_is_down_and_an_unknown_store_are_refused(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent_harness.add_region("eu-west")
    stranger = await agent_harness.client("region:eu-west")
    path = f"/v1/regions/eu-west/epochs/{agent.epoch}:rebind"
    body = {"nonce": NONCE, "previous": "one life", "fingerprint": "mine", "seqs": [9, 9, 9, 9]}
    assert (await stranger.post(path, json=body)).json()["refusal"] == "not_issued"
    assert (await stranger.post(path.replace("eu-west", "us-east"), json=body)).status_code == 403
    await agent_harness.owner.execute("UPDATE region SET status = 'down' WHERE name = 'us-east'")
    assert (await rebind(agent)).json()["refusal"] == "region_down"
    wrong = await agent.client.post("/v1/regions/us-east/epochs/one:rebind", json=body)
    assert wrong.status_code == 422
