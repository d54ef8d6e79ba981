"""The transaction of an exchange confirms the token, so no look-up goes ahead of it, and a revoked token is refused."""

import asyncio
from collections.abc import Collection, Mapping

import httpx
import pytest
from pydantic import SecretStr

from coordinator.access.authenticate import Caller, Credential
from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from tests.conftest import restricted
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, exchange, lease, want
from tests.integration.coordinator.fixtures import StandingClock

pytestmark = pytest.mark.anyio


END_LISTENERS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE application_name = 'leasehold-coordinator-signals' AND datname = current_database()
"""


async def post(client: httpx.AsyncClient, agent: Agent, seq: int) -> int:
    body = {"fingerprint": agent.fingerprint, "exchanges": [exchange(agent.frozen(seq), [want(waiting=1)])]}
    return (await client.post(f"/v1/regions/{agent.region}/exchanges", json=body)).status_code


async def booked(agent_harness: AgentHarness) -> int:
    number: int = await agent_harness.one("SELECT count(*) FROM report")
    return number


async def revoke(agent_harness: AgentHarness, region: str) -> None:
    scope = f"region:{region}"
    await agent_harness.owner.execute("UPDATE token SET revoked_at = now() WHERE $1 = ANY (scopes)", scope)


def look_ups(agent_harness: AgentHarness, monkeypatch: pytest.MonkeyPatch) -> list[Collection[Credential]]:
    """Return a list to which each look-up of tokens is added from now on."""
    callers, noted = agent_harness.app.state.coordinator.callers, list[Collection[Credential]]()
    look_up = callers._look_up

    async def note(credentials: Collection[Credential]) -> Mapping[Credential, Caller]:
        noted.append(credentials)
        found: Mapping[Credential, Caller] = await look_up(credentials)
        return found

    monkeypatch.setattr(callers, "_look_up", note)
    return noted


async def test_an_exchange_looks_up_no_token_that_was_found_before(
    agent_harness: AgentHarness, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = look_ups(agent_harness, monkeypatch)
    assert [await post(agent.client, agent, seq) for seq in (1, 2, 3)] == [200] * 3
    assert noted == []


async def test_a_token_of_another_region_is_looked_up_and_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    other = await agent_harness.agent("eu-west")
    assert await post(other.client, agent, 1) == 403
    assert await booked(agent_harness) == 0


async def test_every_coordinator_refuses_a_revoked_token_at_once(agent_harness: AgentHarness, agent: Agent) -> None:
    """Both found the token before, and neither is told of the revocation: the other listens to nothing any more."""
    settings = CoordinatorSettings(database_url=SecretStr(restricted(agent_harness.url)), clock_limit_ms=0)
    app = create_app(settings, StandingClock(), SignalHub())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://other", headers=agent.client.headers) as other,
    ):
        assert [await post(client, agent, seq) for seq, client in enumerate((agent.client, other), 1)] == [200, 200]
        assert await agent_harness.one(END_LISTENERS) == 2
        await revoke(agent_harness, agent.region)
        assert [await post(client, agent, 3) for client in (agent.client, other)] == [401, 401]
    assert await booked(agent_harness) == 2


async def test_a_revoked_token_does_not_concern_others_in_its_transaction(agent_harness: AgentHarness) -> None:
    agents = [await agent_harness.agent(f"region-{number}") for number in range(6)]
    assert [await post(each.client, each, 1) for each in agents] == [200] * 6
    await revoke(agent_harness, agents[3].region)
    statuses = await asyncio.gather(*(post(each.client, each, 2) for each in agents))
    assert statuses == [200, 200, 200, 401, 200, 200]
    transactions = await agent_harness.one("SELECT count(DISTINCT xmin::text) FROM report WHERE seq = 2")
    assert transactions < 5
    assert await booked(agent_harness) == 6 + 5


async def test_nothing_of_a_revoked_call_is_judged(agent_harness: AgentHarness, agent: Agent) -> None:
    """Its evidence is not even kept, which a region whose token is valid could make many rows of."""
    assert await post(agent.client, agent, 1) == 200
    await revoke(agent_harness, agent.region)
    answer = await agent.post(exchange(agent.frozen(9, lease(consumed=1))), exchange("no JSON"))
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert await agent_harness.one("SELECT count(*) FROM quarantine") == 0
    answer = await agent.post()  # it is forgotten: looked up ahead of the body
    assert answer.status_code == 401
