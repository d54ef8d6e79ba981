"""Some failures of the database are retried, and others are reported as an outage."""

from urllib.parse import urlsplit

import asyncpg
import pytest

from coordinator.database.connection import Connection
from coordinator.database.engine import ATTEMPTS, open_database
from coordinator.outages import DatabaseUnavailable, TransactionFailed
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio

LOST = (
    ConnectionResetError("reset by peer"),
    asyncpg.InterfaceError("the connection is closed"),
    asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
)


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_a_connection_lost_once_is_retried(database: str, error: Exception) -> None:
    """The driver's exception depends on the step in which the server hangs up."""
    errors = [error]

    async def ask(connection: Connection) -> int:
        if errors:
            raise errors.pop()
        found: int = await connection.fetchval("SELECT 7")
        return found

    async with open_database(database, 1) as engine:
        assert await engine.read(ask) == 7


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_a_connection_lost_each_time_is_an_outage(database: str, error: Exception) -> None:
    async def ask(_: Connection) -> int:
        raise error

    async with open_database(database, 1) as engine:
        with pytest.raises(DatabaseUnavailable):
            await engine.run(ask)


async def test_each_connection_uses_the_url_as_it_is_then(database: str) -> None:
    """A password in a file is changed while a coordinator runs."""
    parts = urlsplit(database)
    outdated = parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":outdated@")).geturl()
    urls = [outdated]
    async with open_database(lambda: urls[-1], 1) as engine:
        with pytest.raises(DatabaseUnavailable):
            await engine.read(lambda connection: connection.fetchval("SELECT 7"))
        urls.append(database)
        assert await engine.read(lambda connection: connection.fetchval("SELECT 7")) == 7


@pytest.mark.parametrize(("lock_timeout_ms", "attempts"), [(50, 1), (None, ATTEMPTS)])
async def test_a_lock_timeout_is_not_retried(database: str, lock_timeout_ms: int | None, attempts: int) -> None:
    """A lock timeout is no outage, because Postgres is there."""
    asked: list[int] = []

    async def wait(connection: Connection) -> None:
        if lock_timeout_ms is None:
            await connection.execute("SET LOCAL lock_timeout = 50")
        asked.append(await connection.fetchval("SELECT current_setting('lock_timeout')::interval = '50 ms'"))
        await connection.execute("SELECT FROM policy_version FOR UPDATE")

    async with open_database(database, 2) as engine, connected(database) as holder, holder.transaction():
        await holder.execute("SELECT FROM policy_version FOR UPDATE")
        with pytest.raises(TransactionFailed):
            await engine.run(wait, lock_timeout_ms=lock_timeout_ms)
    assert asked == [True] * attempts


async def test_a_transaction_that_hangs_frees_its_locks_and_is_run_again(database: str) -> None:
    """Its first attempt hangs until another session has got what it had locked."""
    attempts: list[int] = []

    async with open_database(database, 1) as engine, connected(database) as other:

        async def hang(connection: Connection) -> int:
            attempts.append(len(attempts))
            await connection.execute("SELECT FROM policy_version FOR UPDATE")
            if len(attempts) == 1:
                await other.execute("SELECT FROM policy_version FOR UPDATE")
            found: int = await connection.fetchval("SELECT 7")
            return found

        assert await engine.run(hang, idle_timeout_ms=50) == 7
    assert attempts == [0, 1]


@pytest.mark.parametrize("code", ["57014", "53200"])
async def test_a_failed_statement_is_no_outage(database: str, code: str) -> None:
    """The statement ran too long, or found no memory for another lock."""

    async def fail(connection: Connection) -> None:
        await connection.execute(f"DO $$ BEGIN RAISE EXCEPTION 'planted' USING ERRCODE = '{code}'; END $$")

    async with open_database(database, 1) as engine:
        with pytest.raises(TransactionFailed):
            await engine.run(fail)


async def test_a_commit_is_noted_and_a_failure_or_a_snapshot_is_not(database: str) -> None:
    noted: list[str] = []

    async def divide(connection: Connection) -> None:
        await connection.execute("SELECT 1 / 0")

    async with open_database(database, 1) as engine:
        engine.on_commit = lambda: noted.append("commit")
        await engine.run(lambda c: c.fetchval("SELECT 7"), snapshot=True)
        with pytest.raises(asyncpg.DivisionByZeroError):
            await engine.run(divide)
        assert noted == []
        await engine.run(lambda c: c.fetchval("SELECT 7"))
    assert noted == ["commit"]
