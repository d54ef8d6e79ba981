"""`leasehold up` runs as a process with real servers and services, and reports its errors."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path

import asyncpg
import pytest

from leasehold.local_stack.calls import call
from leasehold.local_stack.data_directory import SCOPES
from leasehold.local_stack.embedded import postgres_url
from leasehold.local_stack.launcher import refuse_used_ports
from leasehold.local_stack.plan import REGIONS, StackPlan
from leasehold.local_stack.processes import wait_until
from tests.conftest import Server, free_port
from tests.end_to_end.launching import PATIENCE_S, STOP_S, UP, Launcher, free_base_port, running


def fails(*options: str) -> str:
    """Return the error of a start that must fail: one sentence on stderr, nothing on stdout, exit status 1."""
    done = subprocess.run([*UP, *options], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("leasehold: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.extended
def test_a_second_run_keeps_the_data_of_the_first(tmp_path: Path) -> None:
    data = tmp_path / "données, 1 of 2"
    with running(data, "--json") as first:
        _stack_is_as_promised(first)
        _nobody_else_may_use(first)
        assert [first.check(region, 7).status for region in REGIONS] == [200, 200, 200]
        assert first.check("us-east", 1001).status == 429
        _no_secret_in_the_process_list(first)
        first.process.send_signal(signal.SIGINT)
        assert first.ended(STOP_S) == 0
        assert json.loads(first.output()) == first.stack
        assert not (data / "stack.json").exists()
        assert first.said() == ""

    with running(data) as second:
        assert second.stack["tokens"] == first.stack["tokens"]
        assert second.consumed() == 21
        _nothing_is_outstanding(second)
        second.process.send_signal(signal.SIGTERM)
        assert second.ended(STOP_S) == 0
        _commands_do_what_they_say(second.output())


def _stack_is_as_promised(launcher: Launcher) -> None:
    stack = launcher.stack
    assert mode(launcher.data / "stack.json") == 0o600
    assert set(stack) == {"coordinator", "agents", "grpc", "tokens", "postgres", "stores", "pids"}
    assert set(stack["agents"]) == set(stack["stores"]) == set(stack["grpc"]) == set(REGIONS)
    assert set(stack["tokens"]) == set(SCOPES)
    assert len(set(stack["pids"].values())) == 1 + 1 + 1 + 2 * len(REGIONS)
    assert len(launcher.everybody) == len(stack["pids"])
    for url in (stack["coordinator"], *stack["agents"].values()):
        assert call("GET", f"{url}/readyz").status == 200
    assert asyncio.run(_who_the_coordinator_is(stack["postgres"])) == {"coordinator"}


async def _who_the_coordinator_is(owners_url: str) -> set[str]:
    connection = await asyncpg.connect(owners_url)
    try:
        rows = await connection.fetch("SELECT usename FROM pg_stat_activity WHERE application_name ^@ 'leasehold-'")
    finally:
        await connection.close()
    return {row["usename"] for row in rows}


def _nobody_else_may_use(launcher: Launcher) -> None:
    assert "another `leasehold up` (pid " in fails("--data", str(launcher.data))
    port = launcher.stack["coordinator"].rpartition(":")[2]
    said = fails("--data", str(launcher.data.with_name("elsewhere")), "--port", port)
    assert f"port {port}, meant for the coordinator" in said


def _no_secret_in_the_process_list(launcher: Launcher) -> None:
    arguments = b"\0".join(Path(f"/proc/{who.pid}/cmdline").read_bytes() for who in launcher.everybody)
    assert arguments.count(b"postgres") > 0
    secrets = json.loads((launcher.data / "secrets.json").read_text())
    passwords = (secrets["postgres"], secrets["coordinator"], *secrets["stores"].values())
    for secret in (*passwords, *secrets["tokens"].values()):
        assert secret.encode() not in arguments


def _nothing_is_outstanding(launcher: Launcher) -> None:
    """Check the epochs of the first run; the second leases nothing before the first request."""
    [period] = launcher.read("/v1/periods")["data"]
    reconciliation = launcher.read(f"/v1/periods/{period['id']}/reconciliation")
    assert reconciliation["drift"] == 0
    for quota in reconciliation["quotas"]:
        assert (quota["consumed"], quota["outstanding"], quota["suspense"]) == (21, 0, 0)


def _commands_do_what_they_say(screen: str) -> None:
    lines = [line.strip() for line in screen.splitlines()]
    assert sum(line.startswith("curl ") for line in lines) == 3
    assert all(any(line.startswith(scope) for line in lines) for scope in SCOPES)


@pytest.mark.extended
def test_the_next_launcher_cleans_up_after_a_killed_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, "--json", "--wan") as first:
        assert first.check("ap-south", 5).status == 200
        assert wait_until(lambda: first.consumed() == 5, PATIENCE_S)
        first.process.kill()
        first.process.wait()

    with running(data, "--json", "--wan") as second:
        assert not first.left()
        assert second.consumed() == 5
        os.kill(second.stack["pids"]["agent-eu-west"], signal.SIGKILL)
        assert second.ended() == 1
        assert "agent-eu-west was killed by SIGKILL" in second.said()


@pytest.mark.extended
@pytest.mark.skipif(not Path("/usr/bin/curl").exists(), reason="there is no curl")
def test_the_commands_on_the_screen_work_with_existing_servers(
    tmp_path: Path, postgres_server: Server, store: str
) -> None:
    postgres = postgres_url(postgres_server.port, postgres_server.password, "made_by_up")
    with running(tmp_path / "data", "--postgres", postgres, "--store", f"us-east={store}") as launcher:
        assert launcher.stack["postgres"] == postgres
        assert launcher.stack["stores"]["us-east"] == store
        assert not {"postgres", "store-us-east"} & set(launcher.stack["pids"])
        assert launcher.process.stdout
        commands: list[str] = []
        while len(commands) < 3:
            line = launcher.process.stdout.readline().decode().strip()
            commands += [line] if line.startswith("curl ") else []
        admission, denial, usage = commands
        assert " 200 OK" in _shell(admission)
        assert " 429 Too Many Requests" in _shell(denial)
        assert wait_until(lambda: '"units":1' in _shell(usage), PATIENCE_S)
        # Two signals at once still end everything.
        launcher.process.send_signal(signal.SIGINT)
        launcher.process.send_signal(signal.SIGINT)
        launcher.ended(STOP_S)


def _shell(command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


@pytest.mark.extended
@pytest.mark.parametrize("newest", ["store-us-east", "agent-ap-south", "postgres"])
def test_an_interrupt_before_it_is_ready_leaves_no_process(newest: str, tmp_path: Path) -> None:
    """Interrupt it at any moment: no process is left."""
    base = free_base_port()
    record = tmp_path / "data" / "running.json"
    with subprocess.Popen([*UP, "--data", str(record.parent), "--port", str(base)], start_new_session=True) as process:
        assert wait_until(lambda: record.exists() and newest in record.read_text(), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0
    assert not record.exists()
    refuse_used_ports(StackPlan(Path(), base).ports())


def test_data_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("leasehold local stack, format 99\n")
    assert "holds the data of another version of Leasehold" in fails("--data", str(tmp_path))


@pytest.mark.extended
def test_data_of_another_postgres_is_refused(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("leasehold local stack, format 2\n")
    (tmp_path / "secrets.json").write_text(
        json.dumps(
            {
                "postgres": "p",
                "coordinator": "c",
                "stores": dict.fromkeys(REGIONS, "s"),
                "tokens": {"region:" + region: "t" for region in REGIONS},
            }
        )
    )
    (tmp_path / "postgres").mkdir(mode=0o700)
    (tmp_path / "postgres" / "PG_VERSION").write_text("9\n")
    (tmp_path / "postgres" / "postgresql.conf").write_text("")
    assert "database files are incompatible with server" in fails(
        "--data", str(tmp_path), "--port", str(free_base_port())
    )


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    # Root may write anywhere but where there is no directory at all.
    data = tmp_path / "file" / "data" if os.geteuid() == 0 else locked / "data"
    (tmp_path / "file").write_text("")
    assert f"cannot use {data} (" in fails("--data", str(data))


@pytest.mark.extended
def test_an_existing_postgres_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    nobody = postgres_url(free_port(), "pa55word")
    said = fails("--data", str(tmp_path / "data"), "--port", str(free_base_port()), "--postgres", nobody)
    assert "the database could not be prepared: " in said
    assert "pa55word" not in said


@pytest.mark.extended
def test_a_used_port_is_reported(tmp_path: Path) -> None:
    base = free_base_port()
    with socket.create_server(("127.0.0.1", StackPlan(Path(), base).agent_port("eu-west"))):
        said = fails("--data", str(tmp_path / "data"), "--port", str(base))
    assert "meant for the agent of eu-west" in said


@pytest.mark.parametrize(
    "options",
    [
        ("--postgres", "nonsense"),
        *(
            pytest.param(options, marks=pytest.mark.extended)
            for options in (
                ("--store", "us-east"),
                ("--store", "mars=redis://127.0.0.1/0"),
                ("--store", "us-east=http://127.0.0.1/0"),
            )
        ),
    ],
)
def test_invalid_addresses_are_refused(options: tuple[str, str], tmp_path: Path) -> None:
    assert options[0] in fails("--data", str(tmp_path / "data"), *options)
    assert not (tmp_path / "data").exists()
