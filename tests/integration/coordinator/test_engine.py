"""What is tried again by itself, and what is told as an outage."""

import asyncpg
import pytest

from coordinator.database.connection import Connection
from coordinator.database.engine import open_database
from coordinator.outages import DatabaseUnavailable

pytestmark = pytest.mark.anyio

LOST = (
    ConnectionResetError("reset by peer"),
    asyncpg.InterfaceError("the connection is closed"),
    asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
)


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_a_connection_that_is_lost_once_is_not_noticed(database: str, error: Exception) -> None:
    """Whatever the driver calls it: it depends on which of its steps the server hangs up in."""
    errors = [error]

    async def ask(connection: Connection) -> int:
        if errors:
            raise errors.pop()
        found: int = await connection.fetchval("SELECT 7")
        return found

    async with open_database(database, 1) as engine:
        assert await engine.read(ask) == 7


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_one_that_is_lost_each_time_is_an_outage(database: str, error: Exception) -> None:
    async def ask(_: Connection) -> int:
        raise error

    async with open_database(database, 1) as engine:
        with pytest.raises(DatabaseUnavailable):
            await engine.run(ask)
