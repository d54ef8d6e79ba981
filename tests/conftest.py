"""Real servers for the tests: one Postgres and one store for each worker, and nothing left over between tests.

A test that asks for `database` gets one of its own, copied from a migrated template; one that asks for `store` gets the
worker's store, emptied. Both are URLs; `database` is the owner's, and `restricted` makes it what a coordinator is told.
"""

import asyncio
import itertools
import secrets
import signal
import socket
from collections.abc import Iterator
from typing import NamedTuple

import asyncpg
import pytest
from hypothesis import settings

from leasehold import embedded
from leasehold.processes import stop, wait_until
from migrations.run import upgrade

# A machine that is busy is no fault of the code: no test fails for the time that it took.
settings.register_profile("leasehold", deadline=None)
settings.load_profile("leasehold")

TEMPLATE = "template_of_tests"
START_S = 30


class Server(NamedTuple):
    """A server of this worker; a test that wants another one of its kind starts it with `leasehold.embedded`."""

    port: int
    password: str


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((embedded.LOOPBACK, 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("postgres")
    data, log = directory / "data", directory / "log"
    server = Server(free_port(), secrets.token_urlsafe())
    embedded.initialise_postgres(data, server.password)
    process = embedded.start_postgres(data, server.port, log=log, settings=embedded.FORGETFUL)
    try:
        assert wait_until(lambda: embedded.postgres_is_ready(data), START_S), log.read_text()
        _make_template(server)
        yield server
    finally:
        stop(process, by=signal.SIGINT)


def _make_template(server: Server) -> None:
    _execute(server, f'CREATE DATABASE "{TEMPLATE}"')
    url = embedded.postgres_url(server.port, server.password, TEMPLATE)
    assert upgrade(url, restricted(url))


def restricted(owners_url: str) -> str:
    """The same database as a coordinator comes to it: with the restricted role, and in tests with the same password."""
    return owners_url.replace(f"://{embedded.OWNER}:", "://coordinator:", 1)


def _execute(server: Server, sql: str) -> None:
    async def execute() -> None:
        connection = await asyncpg.connect(embedded.postgres_url(server.port, server.password))
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    asyncio.run(execute())


_numbers = itertools.count(1)


@pytest.fixture
def database(postgres_server: Server) -> Iterator[str]:
    """The owner's URL of a database that holds the schema and nothing else."""
    name = f"test_{next(_numbers)}"
    _execute(postgres_server, f'CREATE DATABASE "{name}" TEMPLATE "{TEMPLATE}"')
    yield embedded.postgres_url(postgres_server.port, postgres_server.password, name)
    _execute(postgres_server, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("store")
    server = Server(free_port(), secrets.token_urlsafe())
    log = directory / "log"
    process = embedded.start_store(directory / "data", server.port, server.password, log=log)
    try:
        assert wait_until(lambda: embedded.store_is_ready(server.port, server.password), START_S), log.read_text()
        yield server
    finally:
        stop(process)


@pytest.fixture
def store(store_server: Server) -> str:
    """The URL of a store that is empty and knows no script."""
    for command in ("FLUSHALL", "SCRIPT FLUSH", "FUNCTION FLUSH"):
        assert embedded.ask_store(store_server.port, store_server.password, command).startswith("+OK")
    return embedded.store_url(store_server.port, store_server.password)
