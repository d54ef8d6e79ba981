"""Fixtures of every test of a coordinator: a clock that only the test moves, and the database."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
from fastapi import FastAPI

from coordinator.database.connection import Connection, read_sums_as_integers
from web.serving import serve

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


# A longer wait for a lock is taken for a deadlock: the test fails, and does not hang.
PATIENCE = {"lock_timeout": "20s"}


# For a transaction that locks whole tables. If it deadlocks with a coordinator's job, the job fails and is repeated.
WIN_DEADLOCKS = f"SET LOCAL deadlock_timeout = '{PATIENCE['lock_timeout']}'"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    connection: Connection = await asyncpg.connect(url, server_settings=PATIENCE)
    await read_sums_as_integers(connection)
    try:
        yield connection
    finally:
        await connection.close()


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@asynccontextmanager
async def frozen(owner: Connection) -> AsyncIterator[None]:
    """Stop the server's first process, which accepts connections, and all that serve this database."""
    rows = await owner.fetch(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
    )
    backends = [row["pid"] for row in rows]
    processes = [parent_of(backends[0]), *backends]
    try:
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


async def put_off(owner: Connection, *jobs: str) -> None:
    """Stop a background job of all coordinators, so that only the test runs it."""
    await owner.executemany(
        "INSERT INTO job VALUES ($1, '2100-01-01') ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at",
        [(job,) for job in jobs],
    )


@asynccontextmanager
async def served(app: FastAPI, before_shutdown: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[str]:
    """Yield the address of the app on a real port."""
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve(app, host="127.0.0.1", port=0, before_shutdown=before_shutdown, on_listening=listening.set_result)
    )
    try:
        yield await asyncio.wait_for(listening, 60)
    finally:
        server.cancel()
        await asyncio.wait([server], timeout=20)
