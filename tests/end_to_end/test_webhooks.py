"""A webhook event whose coordinator was killed during delivery is delivered again under the same id by another."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpx
import pytest

from coordinator.access.issue_token import issue_token
from coordinator.database.connection import Connection
from coordinator.webhooks.outbox import enqueue
from coordinator.webhooks.rules import EventKind, event
from tests.conftest import free_port, restricted
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.webhooks.test_webhooks import Receiver, receiver

__all__ = ["receiver"]
pytestmark = pytest.mark.anyio

PATIENCE_S = 90


@pytest.fixture
async def owner(database: str) -> AsyncIterator[Connection]:
    async with connected(database) as connection:
        yield connection


@asynccontextmanager
async def coordinator(database: str, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a process once it answers, and kill it at the end if it still runs."""
    told = {"LEASEHOLD_COORDINATOR_DATABASE_URL": restricted(database), "LEASEHOLD_COORDINATOR_PORT": str(port)}
    command = [sys.executable, "-m", "leasehold.cli", "coordinator"]
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | told, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            await until(lambda: is_ready(client))
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def until(is_so: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_so():  # noqa: ASYNC110 - another process would have to set the event
            await asyncio.sleep(0.05)


async def happened(owner: Connection, number: int) -> None:
    async with owner.transaction():
        await enqueue(owner, [event(EventKind.DRIFT_FOUND, {"epoch": number}, number)], datetime.now(UTC))


@pytest.mark.extended
async def test_an_event_of_a_killed_coordinator_is_delivered_again_and_a_dead_one_replayed(
    database: str, owner: Connection, receiver: Receiver
) -> None:
    _, token = await issue_token(owner, ["admin"], "a test", datetime.now(UTC))
    port, headers = free_port(), {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers) as admin:
        async with coordinator(database, port) as killed:
            wish = {"url": receiver.url, "events": ["drift.found"]}
            hook = f"/v1/webhooks/{(await admin.post('/v1/webhooks', json=wish)).json()['id']}"
            receiver.hangs = True
            await happened(owner, 1)
            await asyncio.wait_for(receiver.arrived.wait(), PATIENCE_S)
            killed.kill()
            assert await killed.wait() == -signal.SIGKILL
        state = "SELECT attempts, delivered_at, dead_at, status FROM delivery"
        assert tuple(await owner.fetchrow(state) or ()) == (1, None, None, None)  # sent, but not recorded as sent

        receiver.hangs = False
        await owner.execute(
            "UPDATE delivery SET next_attempt_at = now()"
        )  # the minute has passed in which the dead coordinator held it
        async with coordinator(database, port):
            await until(lambda: owner.fetchval("SELECT bool_and(delivered_at IS NOT NULL) FROM delivery"))
            assert len(receiver.ids) == 2
            assert receiver.bodies[0] == receiver.bodies[1]
            assert receiver.ids == [receiver.bodies[0]["id"]] * 2

            receiver.status = 410
            await happened(owner, 2)
            await until(lambda: owner.fetchval("SELECT bool_or(dead_at IS NOT NULL) FROM delivery"))
            (letter,) = (await admin.get(f"{hook}/deliveries?dead=true")).json()["data"]
            assert (letter["event"], letter["status"]) == (receiver.ids[2], 410)
            receiver.status = 200
            replayed = await admin.post(f"{hook}:replay", json={"events": [letter["event"]]})
            assert replayed.json() == {"deliveries": 1}
            await until(lambda: owner.fetchval("SELECT bool_and(delivered_at IS NOT NULL) FROM delivery"))
            assert receiver.ids[2:] == [letter["event"]] * 2
