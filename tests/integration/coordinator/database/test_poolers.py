"""A real PgBouncer: it is refused by name, unless it keeps sessions with their settings."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from coordinator.database.engine import SESSION
from coordinator.database.session import SessionNotKept
from coordinator.diagnosis.examine import read_and_examine_database
from leasehold.local_stack import embedded
from leasehold.local_stack.processes import spawn, stop, wait_until
from protocol.clock import SystemClock
from tests.conftest import PostgresServer, free_port, restricted
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.health.test_health import coordinator
from tests.parts import part
from tests.waiting import BOUND_S, until

pytestmark = pytest.mark.anyio

CONFIG = """\
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = plain
auth_file = {users}
pool_mode = {mode}
default_pool_size = 20
ignore_startup_parameters = {ignored}
"""
ALL = ",".join(SESSION)


@contextmanager
def pgbouncer(server: PostgresServer, url: str, directory: Path, mode: str, ignored: str = ALL) -> Iterator[str]:
    """Start PgBouncer in front of a server, and yield the URL through it."""
    program = part("pgbouncer") / "bin" / "pgbouncer"
    parts, port = urlsplit(url), free_port()
    users, config = directory / "users.txt", directory / "pgbouncer.ini"
    users.write_text(f'"{parts.username}" "{parts.password}"\n')
    config.write_text(CONFIG.format(server=server.port, port=port, users=users, mode=mode, ignored=ignored))
    directory.chmod(0o777)
    log = directory / "pgbouncer.log"
    process = spawn([*embedded._unprivileged(), program, config], log=log)
    try:
        assert wait_until(lambda: is_listening(port), BOUND_S), log.read_text()
        yield urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}"))
    finally:
        stop(process)


def is_listening(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


async def reason_not_ready(url: str) -> str:
    """Return why a coordinator that was given this URL does not become ready."""
    async with coordinator(url) as (_, client):
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert (await client.get("/v1/limits", headers={"Authorization": "Bearer x"})).status_code == 503
        [reason] = [each for each in answer.json()["reasons"] if each["code"] == "database_pooled"]
        return str(reason["text"])


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ignored", "fault"),
    [
        (ALL, "a pooler does not pass the setting lock_timeout on"),
        ("", "a pooler refuses the settings of a session (unsupported startup parameter: "),
    ],
    ids=["ignored", "refused"],
)
async def test_a_coordinator_behind_transaction_pooling_says_so_and_serves_nothing(
    postgres_server: PostgresServer, database: str, of_servers: Path, ignored: str, fault: str
) -> None:
    with pgbouncer(postgres_server, restricted(database), of_servers, "transaction", ignored) as url:
        reason = await reason_not_ready(url)
    assert reason.startswith(fault)
    assert "PgBouncer" in reason


@pytest.mark.extended
async def test_shared_servers_are_found_where_the_settings_are_those_of_the_role(
    postgres_server: PostgresServer, database: str, of_servers: Path
) -> None:
    async with connected(database) as owner:
        name = urlsplit(database).path[1:]
        for setting, value in SESSION.items():
            await owner.execute(f"ALTER ROLE coordinator IN DATABASE {name} SET {setting} = '{value}'")
    with pgbouncer(postgres_server, restricted(database), of_servers, "transaction") as url:
        assert (await reason_not_ready(url)).startswith("connections share the servers of a pooler, ")
    with pgbouncer(postgres_server, restricted(database), of_servers, "session") as url:
        async with coordinator(url) as (app, _):
            await until(lambda: app.state.coordinator.health.report().status == "ready")


@pytest.mark.extended
async def test_the_doctor_names_the_pooler(postgres_server: PostgresServer, database: str, of_servers: Path) -> None:
    """Its connection has no settings that could be lost."""
    with (
        pgbouncer(postgres_server, restricted(database), of_servers, "transaction") as url,
        pytest.raises(SessionNotKept, match="PgBouncer in transaction mode"),
    ):
        await read_and_examine_database(url, SystemClock(), timeout_s=10)
