"""The commands that end: `migrate` and `token`, as somebody types them."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from typer.testing import CliRunner, Result

from coordinator.access.rules.scopes import REGION_PREFIX, SCOPES, is_scope
from leasehold.cli.app import app
from leasehold.local_stack.data_directory import SCOPES as LAUNCHERS_SCOPES
from leasehold.local_stack.data_directory import write_private
from tests.conftest import Server, free_port

UNKNOWN_ID = "6f1f6b8e-8a3f-4d53-9a53-6d1b8f1b7a11"


def leasehold(*arguments: str, **environ: str) -> Result:
    inherited = dict.fromkeys(name for name in os.environ if name.startswith("LEASEHOLD_"))
    return CliRunner().invoke(app, arguments, env={**inherited, **environ})


def on(database: str, *arguments: str) -> str:
    done = leasehold(*arguments, LEASEHOLD_MIGRATE_DATABASE_URL=database)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def refused(done: Result) -> str:
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("leasehold: ")
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_token_from_its_creation_to_its_end(database: str) -> None:
    created = json.loads(on(database, "token", "create", "--scope", "usage:read", "--note", "for finance", "--json"))
    assert created["token"].startswith("lh_")
    [listed] = json.loads(on(database, "token", "list", "--json"))
    assert (listed["id"], listed["scopes"], listed["note"]) == (created["id"], ["usage:read"], "for finance")
    assert listed["revoked_at"] is None
    on(database, "token", "revoke", created["id"])
    [revoked] = json.loads(on(database, "token", "list", "--json"))
    assert revoked["revoked_at"]
    table = on(database, "token", "list")
    assert created["id"] in table
    assert created["token"] not in table


def test_a_token_for_people_is_the_token_and_nothing_else(database: str) -> None:
    assert on(database, "token", "create", "--scope", "quota:read", "--scope", "quota:write").strip().startswith("lh_")


def test_a_running_stack_needs_no_variable(database: str, tmp_path: Path) -> None:
    write_private(tmp_path / "stack.json", {"postgres": database})
    done = leasehold("token", "list", "--json", "--data", str(tmp_path))
    assert (done.exit_code, done.stdout) == (0, "[]\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("token", "create", "--scope", "everything"), "'everything' is not a scope"),
        (("token", "revoke", UNKNOWN_ID), f"there is no token with the id {UNKNOWN_ID}"),
    ],
)
def test_what_cannot_be_done_is_said(database: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(leasehold(*arguments, LEASEHOLD_MIGRATE_DATABASE_URL=database))


def test_without_a_database_the_variable_is_named(tmp_path: Path) -> None:
    done = leasehold("token", "list", XDG_STATE_HOME=str(tmp_path))
    assert "LEASEHOLD_MIGRATE_DATABASE_URL is not set" in refused(done)
    assert "LEASEHOLD_MIGRATE_DATABASE_URL is not set" in refused(leasehold("migrate"))


@pytest.mark.parametrize(
    ("command", "variable"), [("coordinator", "LEASEHOLD_COORDINATOR_PORT"), ("agent", "LEASEHOLD_AGENT_REGION")]
)
def test_a_service_with_wrong_settings_names_them(command: str, variable: str) -> None:
    assert variable in refused(leasehold(command, **{variable: "No such thing!"}))


def test_a_number_of_workers_that_cannot_be_is_refused() -> None:
    done = leasehold("agent", "--workers", "0")
    assert done.exit_code == 2
    assert "Invalid value for '--workers'" in done.stderr
    assert "LEASEHOLD_AGENT_WORKERS cannot be '65'" in refused(leasehold("agent", "--workers", "65"))


@pytest.mark.parametrize("command", [["coordinator"], ["agent"], ["agent", "--workers", "3"]])
def test_a_service_whose_port_is_taken_says_so(database: str, store_server: Server, command: list[str]) -> None:
    port = str(store_server.port)
    settings = {
        "LEASEHOLD_COORDINATOR_DATABASE_URL": database,
        "LEASEHOLD_COORDINATOR_PORT": port,
        "LEASEHOLD_AGENT_REGION": "us-east",
        "LEASEHOLD_AGENT_COORDINATOR_URL": "http://127.0.0.1:1",
        "LEASEHOLD_AGENT_COORDINATOR_TOKEN": "lh_none",
        "LEASEHOLD_AGENT_STORE_URL": "redis://127.0.0.1:1/0",
        "LEASEHOLD_AGENT_PORT": port,
    }
    command = [sys.executable, "-m", "leasehold.cli", *command]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"leasehold: Port {port} of 127.0.0.1 is in use")


def test_migrating_twice_is_migrating_once(database: str) -> None:
    """As its own process, and as it is installed: by the name that people type."""
    command = [str(Path(sys.executable).with_name("leasehold")), "migrate"]
    for _ in range(2):
        subprocess.run(command, env=os.environ | {"LEASEHOLD_MIGRATE_DATABASE_URL": database}, timeout=60, check=True)


def test_migrating_makes_the_user_that_coordinators_come_as(database: str) -> None:
    """With a new password each time it is told one, and never the owner."""
    coordinators = database.replace("://leasehold:", "://another:")
    told = {"LEASEHOLD_MIGRATE_DATABASE_URL": database}
    try:
        for password in ("first'one", "second%40"):
            url = f"postgresql://another:{password}@{coordinators.partition('@')[2]}"
            done = leasehold("migrate", **told, LEASEHOLD_MIGRATE_COORDINATOR_URL=url)
            assert (done.exit_code, done.stderr) == (0, "")
            assert asyncio.run(asked(url, "SELECT pg_has_role('leasehold_coordinator', 'MEMBER')"))
        said = refused(leasehold("migrate", **told, LEASEHOLD_MIGRATE_COORDINATOR_URL=database))
        assert "must not be the owner's" in said
    finally:
        asyncio.run(asked(database, "DROP ROLE IF EXISTS another"))


def test_an_owner_who_may_not_create_roles_is_told_who_may(database: str) -> None:
    """Everything else is migrated, and migrating again finds the role that somebody made since."""
    name = asyncio.run(asked(database, "SELECT current_database()"))
    asyncio.run(
        asked(
            database,
            f"""CREATE ROLE plain LOGIN PASSWORD 'p'; GRANT CREATE, CONNECT ON DATABASE "{name}" TO plain;
                DROP SCHEMA public CASCADE; CREATE SCHEMA public AUTHORIZATION plain;
                ALTER ROLE leasehold_coordinator RENAME TO set_aside""",
        )
    )
    owner = f"postgresql://plain:p@{database.partition('@')[2]}"
    try:
        done = leasehold("migrate", LEASEHOLD_MIGRATE_DATABASE_URL=owner)
        assert done.exit_code == 0, done.stderr
        assert "CREATE ROLE leasehold_coordinator NOLOGIN" in done.stderr
        wanted = leasehold(
            "migrate",
            LEASEHOLD_MIGRATE_DATABASE_URL=owner,
            LEASEHOLD_MIGRATE_COORDINATOR_URL=owner.replace("plain", "other"),
        )
        assert "may not create roles" in refused(wanted)
    finally:
        asyncio.run(asked(database, "ALTER ROLE set_aside RENAME TO leasehold_coordinator"))
    try:
        assert leasehold("migrate", LEASEHOLD_MIGRATE_DATABASE_URL=owner).stderr == ""
        assert asyncio.run(asked(database, "SELECT has_table_privilege('leasehold_coordinator', 'transfer', 'INSERT')"))
    finally:
        asyncio.run(asked(database, "DROP OWNED BY plain CASCADE; DROP ROLE plain"))


async def asked(url: str, sql: str) -> object:
    """What one query answers; of several statements, nothing."""
    connection = await asyncpg.connect(url)
    try:
        return await (
            connection.execute(sql) if ";" in sql or sql.startswith(("ALTER", "DROP")) else connection.fetchval(sql)
        )
    finally:
        await connection.close()


def test_no_answer_no_secret(postgres_server: Server) -> None:
    nobody = f"postgresql://leasehold:pa55word@127.0.0.1:{free_port()}/leasehold"
    wrong = f"postgresql://leasehold:pa55word@127.0.0.1:{postgres_server.port}/postgres"
    for url in (nobody, wrong):
        assert "pa55word" not in refused(leasehold("migrate", LEASEHOLD_MIGRATE_DATABASE_URL=url))
        assert "pa55word" not in refused(leasehold("token", "list", LEASEHOLD_MIGRATE_DATABASE_URL=url))


def test_an_old_database_is_told_to_migrate(postgres_server: Server) -> None:
    url = f"postgresql://leasehold:{postgres_server.password}@127.0.0.1:{postgres_server.port}/postgres"
    assert "leasehold migrate" in refused(leasehold("token", "list", LEASEHOLD_MIGRATE_DATABASE_URL=url))


@pytest.mark.parametrize("command", ["", "up", "coordinator", "agent", "migrate", "token", "token create"])
def test_help(command: str) -> None:
    done = leasehold(*command.split(), "--help", COLUMNS="200")
    assert done.exit_code == 0
    assert "Usage" in done.stdout


def test_the_launchers_scopes_are_the_coordinators() -> None:
    """Two copies of one fact, for the launcher does not import the coordinator."""
    assert [scope for scope in LAUNCHERS_SCOPES if not scope.startswith(REGION_PREFIX)] == list(SCOPES)
    assert all(is_scope(scope) for scope in LAUNCHERS_SCOPES)
