"""The commands `migrate`, `token` and `help` work, and services start."""

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
from migrations.revisions import known_revisions
from tests.budget import cases
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


def test_a_token_is_created_listed_and_revoked(database: str) -> None:
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


def test_create_prints_the_token_alone(database: str) -> None:
    assert on(database, "token", "create", "--scope", "quota:read", "--scope", "quota:write").strip().startswith("lh_")


def test_the_database_of_a_running_stack_is_found(database: str, tmp_path: Path) -> None:
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
def test_errors_are_one_sentence(database: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(leasehold(*arguments, LEASEHOLD_MIGRATE_DATABASE_URL=database))


@pytest.mark.extended
def test_the_owners_url_may_be_in_a_file(database: str, tmp_path: Path) -> None:
    file = tmp_path / "owner-url"
    file.write_text(database + "\n")
    in_a_file = {"LEASEHOLD_MIGRATE_DATABASE_URL_FILE": str(file)}
    assert leasehold("token", "list", "--json", **in_a_file).stdout == "[]\n"
    done = leasehold("migrate", **in_a_file)
    assert (done.exit_code, done.stdout) == (0, f"the schema has revision {known_revisions()[-1]}\n")
    both = refused(leasehold("token", "list", **in_a_file, LEASEHOLD_MIGRATE_DATABASE_URL=database))
    assert "LEASEHOLD_MIGRATE_DATABASE_URL and LEASEHOLD_MIGRATE_DATABASE_URL_FILE are both set" in both
    file.unlink()
    assert "LEASEHOLD_MIGRATE_DATABASE_URL_FILE names" in refused(leasehold("migrate", **in_a_file))


def test_without_a_database_the_variable_is_named(tmp_path: Path) -> None:
    done = leasehold("token", "list", XDG_STATE_HOME=str(tmp_path))
    assert "LEASEHOLD_MIGRATE_DATABASE_URL is not set" in refused(done)
    assert "LEASEHOLD_MIGRATE_DATABASE_URL is not set" in refused(leasehold("migrate"))
    standby = "postgresql://owner:secret@127.0.0.1:1/leasehold?target_session_attrs=standby"
    said = refused(leasehold("migrate", LEASEHOLD_MIGRATE_DATABASE_URL=standby))
    assert "LEASEHOLD_MIGRATE_DATABASE_URL: target_session_attrs must be read-write or primary, not standby" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("command", "variable"), [("coordinator", "LEASEHOLD_COORDINATOR_PORT"), ("agent", "LEASEHOLD_AGENT_REGION")]
)
def test_a_service_with_wrong_settings_names_them(command: str, variable: str) -> None:
    assert variable in refused(leasehold(command, **{variable: "No such thing!"}))


def test_zero_workers_are_refused() -> None:
    done = leasehold("agent", "--workers", "0")
    assert done.exit_code == 2
    assert "Invalid value for '--workers'" in done.stderr
    assert "LEASEHOLD_AGENT_WORKERS cannot be '65'" in refused(leasehold("agent", "--workers", "65"))


@pytest.mark.extended
@pytest.mark.parametrize("command", [["coordinator"], ["agent"], ["agent", "--workers", "3"]])
def test_a_used_port_is_named(database: str, store_server: Server, command: list[str]) -> None:
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


def test_migrating_again_succeeds(database: str) -> None:
    """The command runs as a process of its own, by the name under which it is installed."""
    command = [str(Path(sys.executable).with_name("leasehold")), "migrate"]
    for _ in range(2):
        subprocess.run(command, env=os.environ | {"LEASEHOLD_MIGRATE_DATABASE_URL": database}, timeout=60, check=True)


def test_migrating_creates_the_coordinators_user(database: str) -> None:
    """The coordinator's role gets the password of the URL, and is never the owner."""
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


def test_an_owner_without_createrole_gets_instructions(database: str) -> None:
    """Everything else is migrated, and migrating again finds the role that was created since."""
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
    """Return the value of one query, or None for several statements."""
    connection = await asyncpg.connect(url)
    try:
        return await (
            connection.execute(sql) if ";" in sql or sql.startswith(("ALTER", "DROP")) else connection.fetchval(sql)
        )
    finally:
        await connection.close()


def test_no_secret_in_errors(postgres_server: Server) -> None:
    nobody = f"postgresql://leasehold:pa55word@127.0.0.1:{free_port()}/leasehold"
    wrong = f"postgresql://leasehold:pa55word@127.0.0.1:{postgres_server.port}/postgres"
    for url in (nobody, wrong):
        assert "pa55word" not in refused(leasehold("migrate", LEASEHOLD_MIGRATE_DATABASE_URL=url))
        assert "pa55word" not in refused(leasehold("token", "list", LEASEHOLD_MIGRATE_DATABASE_URL=url))


def test_an_old_database_must_be_migrated(postgres_server: Server) -> None:
    url = f"postgresql://leasehold:{postgres_server.password}@127.0.0.1:{postgres_server.port}/postgres"
    assert "leasehold migrate" in refused(leasehold("token", "list", LEASEHOLD_MIGRATE_DATABASE_URL=url))


@pytest.mark.parametrize(
    "command", cases(["", "token create", "up", "coordinator", "agent", "migrate", "token"], short=2)
)
def test_help_lists_the_commands(command: str) -> None:
    done = leasehold(*command.split(), "--help", COLUMNS="200")
    assert done.exit_code == 0
    assert "Usage" in done.stdout


def test_the_launchers_scopes_equal_the_coordinators() -> None:
    """The launcher has a copy of the scopes, because it does not import the coordinator."""
    assert [scope for scope in LAUNCHERS_SCOPES if not scope.startswith(REGION_PREFIX)] == list(SCOPES)
    assert all(is_scope(scope) for scope in LAUNCHERS_SCOPES)
