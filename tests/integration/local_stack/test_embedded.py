"""The embedded servers of the tests and of `leasehold up` start, need passwords, and are removed."""

import os
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import identity, stop, wait_until
from tests.conftest import MEMORY, NAME_IN_MEMORY, START_S, Server, free_port, in_memory


@pytest.mark.anyio
async def test_database_is_migrated(database: str) -> None:
    connection = await asyncpg.connect(database)
    try:
        assert await connection.fetchval("SELECT version FROM policy_version") is not None
    finally:
        await connection.close()


@pytest.mark.anyio
async def test_postgres_requires_the_password(database: str, postgres_server: Server) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(database.replace(postgres_server.password, "guess"))


def test_store_requires_the_password(store_server: Server) -> None:
    assert not embedded.store_is_ready(store_server.port, "guess")
    assert embedded.store_is_ready(store_server.port, store_server.password)


@pytest.mark.parametrize(("setting", "value"), [("maxmemory-policy", "noeviction"), ("appendonly", "yes")])
def test_store_persists_and_never_evicts(store: str, setting: str, value: str) -> None:
    assert value in _ask(store, f"CONFIG GET {setting}")


def _ask(store: str, command: str) -> str:
    url = urlsplit(store)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"AUTH {url.password}\r\n{command}\r\nQUIT\r\n".encode())
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


def test_no_secret_in_the_process_list(postgres_server: Server, store_server: Server) -> None:
    command_lines = b"".join(_command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
    assert b"postgres" in command_lines
    assert postgres_server.password.encode() not in command_lines
    assert store_server.password.encode() not in command_lines


def _command_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
def test_postgres_runs_where_namespaces_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres runs as `nobody`, in a directory that only root can reach."""
    monkeypatch.setattr(embedded, "IN_USER_NAMESPACE", ["false"])
    embedded._unprivileged.cache_clear()
    data, log = tmp_path / "data", tmp_path / "log"
    tmp_path.chmod(0o700)
    try:
        embedded.initialise_postgres(data, "password")
        process = embedded.start_postgres(data, free_port(), log=log, settings=embedded.WITHOUT_DURABILITY)
    finally:
        embedded._unprivileged.cache_clear()
    try:
        assert wait_until(lambda: embedded.postgres_is_ready(data), START_S), log.read_text()
        assert Path(f"/proc/{process.pid}").stat().st_uid == embedded.NOBODY
    finally:
        assert stop(process, by=signal.SIGINT)


def test_an_unused_pid_has_no_identity() -> None:
    assert identity(2**22 + 1) is None


@pytest.mark.skipif(not MEMORY.is_dir(), reason="there is no place in memory here")
def test_memory_of_a_killed_run_is_removed_and_memory_in_use_stays() -> None:
    left = MEMORY / f"{NAME_IN_MEMORY}of-a-run-that-was-killed"
    (left / "postgres").mkdir(parents=True)
    with in_memory() as mine, in_memory() as anothers:
        assert (left.exists(), mine.exists(), anothers.exists()) == (False, True, True)
    assert not mine.exists()
