"""Fixtures of a connected region's store with an adopted epoch, as scripts find it in production."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from regional_agent.store.connection import StoreConnection
from regional_agent.store.opening import Server
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import StoreIncarnation

NONCE = "0123456789abcdef"


@pytest.fixture
async def connection(store: str) -> AsyncIterator[StoreConnection]:
    connected = asyncio.Event()
    connection = StoreConnection(Server.at(store), timeout_ms=5_000, on_connected=connected.set)
    connection.keep()
    await asyncio.wait_for(connected.wait(), 60)
    yield connection
    await connection.close()


@pytest.fixture
def scripts(connection: StoreConnection) -> Scripts:
    return Scripts(connection)


@pytest.fixture
async def incarnation(connection: StoreConnection, scripts: Scripts) -> StoreIncarnation:
    fingerprint = await connection.read_fingerprint()
    await scripts.begin_incarnation(fingerprint, NONCE)
    assert await scripts.adopt_epoch(fingerprint, NONCE, 7, 4)
    return StoreIncarnation(fingerprint, 7, 4)
