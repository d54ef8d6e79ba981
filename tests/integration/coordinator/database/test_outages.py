"""An outage of Postgres is answered by 503 with Retry-After, and afterwards everything works as before."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx
import pytest
from pydantic import SecretStr

from coordinator.database import engine
from coordinator.database.connection import Connection
from coordinator.database.engine import open_database
from coordinator.main import create_app
from coordinator.outages import DatabaseUnavailable
from coordinator.settings import CoordinatorSettings
from protocol.outcomes import ExchangeOutcome
from tests.conftest import free_port, restricted
from tests.integration.coordinator.agent_harness import Agent, AgentHarness, agent_harness_on, exchange, lease, want
from tests.integration.coordinator.fixtures import connected, frozen
from tests.waiting import BOUND_S

pytestmark = pytest.mark.anyio


WHO_WAITS = """
SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' LIMIT 1
"""


@asynccontextmanager
async def another_database(url: str) -> AsyncIterator[Connection]:
    """Connect to the same server without keeping the database in use."""
    async with connected(urlunsplit(urlsplit(url)._replace(path="/postgres"))) as connection:
        yield connection


async def rename(server: Connection, name: str, other: str) -> None:
    """Block connections, since a coordinator's background jobs may reconnect in between."""
    async with asyncio.timeout(60):
        while await server.fetchval("SELECT count(*) FROM pg_database WHERE datname = $1", name):
            await server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
            with suppress(asyncpg.ObjectInUseError):
                await server.execute(f'ALTER DATABASE "{name}" RENAME TO "{other}"')


async def test_a_connection_that_dies_midway_is_not_noticed_by_callers(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    async with connected(agent_harness.url) as holder, holder.transaction():
        await holder.execute("SELECT FROM lane FOR UPDATE")
        said = asyncio.create_task(agent.say(2, lease(granted=10, consumed=7)))
        while not (waiting := await agent_harness.owner.fetchval(WHO_WAITS)):
            assert not said.done()
        await agent_harness.owner.execute("SELECT pg_terminate_backend($1)", waiting)
        while await agent_harness.owner.fetchval(WHO_WAITS) == waiting:
            pass
    assert (await said).outcome is ExchangeOutcome.APPLIED
    assert (await agent_harness.pool())["consumed"] == 7


async def test_a_postgres_that_hangs_is_503_in_bounded_time(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a rollback nor giving a connection back ends by itself then. There are more requests than connections."""
    for name in ("COMMAND_TIMEOUT_S", "ACQUIRE_TIMEOUT_S", "CONNECT_TIMEOUT_S", "END_WITHIN_S"):
        monkeypatch.setattr(engine, name, 1)
    async with agent_harness_on(database) as harness:
        agent = await harness.agent()
        async with frozen(harness.owner), asyncio.timeout(BOUND_S):
            answers = await asyncio.gather(
                agent.post(exchange(agent.frozen(1), [want(waiting=1)])),
                *(agent.client.get("/v1/policies") for _ in range(12)),
            )
        assert {answer.json()["type"] for answer in answers} == {"/problems/database-unavailable"}
        reply = await agent.say(1, demands=[want(waiting=10)])
        assert reply.outcome is ExchangeOutcome.APPLIED


async def test_a_connection_whose_server_has_become_read_only_is_not_used_again(database: str) -> None:
    async with open_database(restricted(database), 1) as opened:
        await opened.read(lambda connection: connection.execute("SET default_transaction_read_only = on"))
        with pytest.raises(DatabaseUnavailable):
            await opened.run(change_something)
        await opened.run(change_something)


async def change_something(connection: Connection) -> None:
    await connection.execute("UPDATE policy_version SET version = version + 1")


class Refused(Exception):
    """The error of an operation whose server has stopped answering."""


async def test_an_operation_that_refuses_does_not_wait_for_a_rollback_that_hangs(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "COMMAND_TIMEOUT_S", 10 * BOUND_S)
    async with open_database(restricted(database), 1) as opened, connected(database) as owner:
        async with AsyncExitStack() as stack, asyncio.timeout(BOUND_S):

            async def refuse(connection: Connection) -> None:
                await connection.execute("SELECT 1")
                await stack.enter_async_context(frozen(owner))
                raise Refused

            with pytest.raises(Refused):
                await opened.run(refuse)
        assert await opened.read(lambda connection: connection.fetchval("SELECT 1")) == 1


async def test_an_outage_is_503_until_postgres_is_back(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    name = urlsplit(agent_harness.url).path[1:]
    async with another_database(agent_harness.url) as server:
        await rename(server, name, f"{name}_away")
        answer = await agent.post(exchange(agent.frozen(2, lease(granted=10, consumed=7))))
        ready = await agent.client.get("/readyz")
        await rename(server, f"{name}_away", name)
    assert answer.json()["type"] == "/problems/database-unavailable"
    assert ready.json()["status"] == "not_ready"
    assert [reason["code"] for reason in ready.json()["reasons"]] == ["database_unavailable"]
    for refused in (answer, ready):
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert "password" not in refused.text
    reply = await agent.say(2, lease(granted=10, consumed=7))
    assert reply.outcome is ExchangeOutcome.APPLIED
    async with connected(agent_harness.url) as agent_harness.owner:
        assert (await agent_harness.pool())["consumed"] == 7


async def test_a_coordinator_starts_without_postgres_and_says_that_it_is_not_ready() -> None:
    url = f"postgresql://nobody:hunter2@127.0.0.1:{free_port()}/nowhere"
    app = create_app(CoordinatorSettings(database_url=SecretStr(url)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://c") as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
        answer = await client.post("/v1/regions/x/exchanges", headers={"Authorization": "Bearer lh_x"})
        assert answer.status_code == 503
        assert "hunter2" not in answer.text
