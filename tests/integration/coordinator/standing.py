"""What every test of a coordinator stands on: a time that moves only when it is moved, and the database behind it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import asyncpg

from coordinator.database.connection import Connection

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)


class StandingClock:
    def __init__(self) -> None:
        self.time = NOON

    def now(self) -> datetime:
        return self.time

    def monotonic_ms(self) -> int:
        return int(self.time.timestamp() * 1000)

    def move(self, **by: float) -> None:
        self.time += timedelta(**by)


# Whoever waits for a lock for longer than that waits for ever: the test fails, and does not hang.
PATIENCE = {"lock_timeout": "20s"}


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    connection: Connection = await asyncpg.connect(url, server_settings=PATIENCE)
    try:
        yield connection
    finally:
        await connection.close()
