"""Real servers for the tests: one Postgres and one store for each worker, and nothing left over between tests.

A test that requests `database` gets one of its own, copied from a migrated template; one that requests `store` gets the
worker's store, emptied. Both are URLs; `database` is the owner's, and `restricted` makes it the coordinator's.
"""

import asyncio
import fcntl
import functools
import itertools
import os
import secrets
import shutil
import signal
import socket
import ssl
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from httpx._transports import default as httpx_transports

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop, wait_until
from migrations.run import upgrade
from tests import budget

TEMPLATE = "template_of_tests"
START_S = 30

# Nothing of a test's servers outlives the run, and a database for each test is thousands of files: made in memory it
# costs an eighth of the time of processors that it costs on a disk, and a seventh of the wait.
MEMORY = Path("/dev/shm")
NAME_IN_MEMORY = "leasehold-tests-"
ROOM = 1 << 30  # measured: 77 MiB for a worker
# The log is not kept long. A test opens some seven connections, and to hash a password 4,096 times costs each of them a
# millisecond of processor time; these passwords are random and die with their server.
OF_TESTS = embedded.WITHOUT_DURABILITY | {"max_wal_size": "64MB", "min_wal_size": "32MB", "scram_iterations": "1"}


@dataclass(frozen=True)
class Server:
    """A server of this worker. A test that needs another one of its kind starts it with `embedded`."""

    port: int
    password: str


@dataclass(frozen=True)
class PostgresServer(Server):
    """The worker's Postgres, and one connection that creates and drops its databases."""

    runner: asyncio.Runner
    owner: "asyncpg.Connection[asyncpg.Record]"

    def execute(self, sql: str) -> None:
        self.runner.run(self.owner.execute(sql))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(budget)


def pytest_xdist_auto_num_workers() -> int:
    """Give `-n auto` more workers than there are processors, because tests of processes mostly wait.

    The costliest tests do not, so a full run has half as many again, and a short one twice as many.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors + processors // 2 if budget.is_full() else 2 * processors


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


# Below the ports that the system gives to connections by itself, and for each worker others: a server that starts later
# finds its port free. A run begins anywhere among them, so that it rarely meets another run on this machine.
FIRST_PORT, PORTS_OF_A_WORKER, WORKERS_WITH_PORTS = 12_000, 4_000, 5
_offsets = itertools.count(secrets.randbelow(PORTS_OF_A_WORKER))


def free_port() -> int:
    """Return a port that nothing listens on, and that is returned once in thousands of calls."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS_WITH_PORTS
    while True:
        port = FIRST_PORT + worker * PORTS_OF_A_WORKER + next(_offsets) % PORTS_OF_A_WORKER
        with socket.socket() as listener, suppress(OSError):
            listener.bind((embedded.LOOPBACK, port))
            return port


@pytest.fixture(scope="session")
def of_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the directory of this worker's servers, in memory if there is room for it."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        yield tmp_path_factory.mktemp("servers")
        return
    with in_memory() as directory:
        yield directory


@contextmanager
def in_memory() -> Iterator[Path]:
    """Yield a directory that is locked while its run lives; the next run removes what a killed run left behind."""
    for left in MEMORY.glob(f"{NAME_IN_MEMORY}*"):
        with suppress(OSError), _locked(left):  # otherwise it is in use, or another user's
            shutil.rmtree(left)
    nameless = Path(tempfile.mkdtemp(dir=MEMORY))
    with _locked(nameless):
        directory = nameless.rename(MEMORY / f"{NAME_IN_MEMORY}{nameless.name}")
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@pytest.fixture(scope="session")
def postgres_server(of_servers: Path) -> Iterator[PostgresServer]:
    directory = of_servers / "postgres"
    directory.mkdir()
    data, log = directory / "data", directory / "log"
    port, password = free_port(), secrets.token_urlsafe()
    embedded.initialise_postgres(data, password)
    process = embedded.start_postgres(data, port, log=log, settings=OF_TESTS)
    try:
        assert wait_until(lambda: embedded.postgres_is_ready(data), START_S), log.read_text()
        with asyncio.Runner() as runner:
            owner = runner.run(asyncpg.connect(embedded.postgres_url(port, password)))
            server = PostgresServer(port, password, runner, owner)
            server.execute(f"ALTER ROLE {embedded.OWNER} PASSWORD '{password}'")  # hashed as OF_TESTS says
            _make_template(server)
            yield server
            runner.run(owner.close())
    finally:
        stop(process, by=signal.SIGINT)


def _make_template(server: PostgresServer) -> None:
    server.execute(f'CREATE DATABASE "{TEMPLATE}"')
    url = embedded.postgres_url(server.port, server.password, TEMPLATE)
    assert upgrade(url, restricted(url))


@pytest.fixture(scope="session", autouse=True)
def introspection_cache() -> Iterator[None]:
    """Let asyncpg introspect Postgres's own types once in each process, instead of once in each of its connections.

    It asks for each array type by a query of three milliseconds: a quarter of what tests had Postgres do. Below this
    number are the types that initdb makes, in every database alike.
    """
    first_of_a_database = 16_384
    name = "_introspect_types"
    introspect = getattr(asyncpg.Connection, name)
    known: dict[frozenset[int], Any] = {}

    async def introspect_once(connection: Any, oids: Collection[int], patience_s: float | None) -> Any:
        if any(oid >= first_of_a_database for oid in oids):
            return await introspect(connection, oids, patience_s)
        key = frozenset(oids)
        if key not in known:
            known[key] = await introspect(connection, oids, patience_s)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncpg.Connection, name, introspect_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def tls_context() -> Iterator[None]:
    """Let httpx read the certificates of public authorities once in each process, instead of for each of its clients.

    That takes some 20 ms of processor time, and what the tests connect to has no certificate of theirs.
    """
    name = "create_ssl_context"
    create: Callable[..., ssl.SSLContext] = getattr(httpx_transports, name)
    usual = functools.cache(create)

    def create_once(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        return usual(trust_env=trust_env) if verify is True and cert is None else create(verify, cert, trust_env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx_transports, name, create_once)
        yield


def restricted(owners_url: str) -> str:
    """Return the URL of the same database for a coordinator: with the restricted role and, in
    tests, the same password.
    """
    return owners_url.replace(f"://{embedded.OWNER}:", "://coordinator:", 1)


_numbers = itertools.count(1)


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[str]:
    """Yield the owner's URL of a database that holds the schema and nothing else."""
    with copied(postgres_server) as url:
        yield url


@pytest.fixture
def empty_database(postgres_server: PostgresServer) -> Iterator[str]:
    """Yield the owner's URL of a database without any table."""
    with copied(postgres_server, "template0") as url:
        yield url


@contextmanager
def copied(server: PostgresServer, template: str = TEMPLATE) -> Iterator[str]:
    """Copy a database that has no connections, yield the owner's URL of the copy, and drop it."""
    name = f"test_{next(_numbers)}"
    server.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY FILE_COPY')
    yield embedded.postgres_url(server.port, server.password, name)
    server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(scope="session")
def store_server(of_servers: Path) -> Iterator[Server]:
    directory = of_servers / "store"
    directory.mkdir()
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
    """Yield the URL of a store that is empty and has no scripts loaded."""
    for command in ("FLUSHALL", "SCRIPT FLUSH", "FUNCTION FLUSH"):
        assert embedded.send_to_store(store_server.port, store_server.password, command).startswith("+OK")
    return embedded.store_url(store_server.port, store_server.password)
