"""`leasehold doctor` examines a real coordinator, a real agent, a database and a store, and one that hangs."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.access.issue_token import issue_token
from leasehold.doctor.examine import Doctor, Installation
from leasehold.doctor.probes import probe_tls
from leasehold.doctor.rules import TLS_CHECK
from protocol.clock import SystemClock
from protocol.diagnosis.checks import failure
from regional_agent.main import create_app as create_agent
from tests.certificates import DAY, Authority
from tests.conftest import free_port
from tests.integration.cli.test_limits_commands import Shell
from tests.integration.coordinator.fixtures import connected, served
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def shell(world: World) -> AsyncIterator[Shell]:
    with capture_logs():
        yield Shell({"LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": world.tokens["admin"], "COLUMNS": "400"})


async def examined(shell: Shell, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    done = await shell.run("doctor", "--json", *words)
    assert "Traceback" not in done.output
    found = json.loads(done.stdout)["checks"]
    return {(each["check"], each["subject"]): each for each in found}


async def test_a_whole_installation_is_examined(shell: Shell, world: World) -> None:
    app = create_agent(world.settings("us-east", name="east"))
    async with served(app) as agent_url:
        await until(lambda: app.state.region.has_epochs and app.state.region.admission.policies is not None)
        await app.state.region.diagnosis.look()
        words = ("--agent", agent_url, "--database-url", world.database, "--store-url", world.store)
        found = await examined(shell, *words)
        table = await shell.run("doctor", *words, "--problems")
    coordinator = f"coordinator {world.url}"
    expected = {
        ("reachable", coordinator): "ok",
        ("tls", coordinator): "ok",
        ("token", coordinator): "ok",
        ("reachable", f"agent {agent_url}"): "ok",
        ("releases", "installation"): "ok",
        ("own_clock", "this machine"): "ok",
        ("database_role", "database"): "ok",
        ("database_durability", "database"): "failed",  # test servers do not wait for disks
        ("database_clock", "this machine"): "ok",
        ("agent_state_dir", "agent east"): "warning",
        ("coordinator_installation_name", coordinator): "warning",
    }
    assert {name: found[name]["state"] for name in expected} == expected
    assert any(check == "store_eviction" for check, _ in found)
    assert table.exit_code == 1  # a check has failed
    assert "fsync" in table.output
    assert " ok " not in table.output.rpartition("\n")[0].replace("ok again", "")


@asynccontextmanager
async def hanging() -> AsyncIterator[tuple[int, list[asyncio.StreamWriter]]]:
    """Yield the port of a server that accepts connections and never answers, and these connections."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], writers
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def test_a_service_that_hangs_stops_no_other_check(world: World) -> None:
    """The service hangs until the coordinator has been examined, and is gone then."""
    async with hanging() as (port, writers):
        silent = f"http://127.0.0.1:{port}"

        def on_progress(text: str) -> None:
            if text == f"examined {world.url}":
                for writer in writers:
                    writer.close()

        told = Installation([world.url], [silent], token=world.tokens["admin"], timeout_s=60)
        with capture_logs():
            found = await Doctor(told, on_progress).examine()
    states = {(each.check, each.subject): each.state.value for each in found}
    assert states["reachable", f"agent {silent}"] == "failed"
    assert states["reachable", f"coordinator {world.url}"] == "ok"
    assert states["jobs", "ledger"] == "ok"


async def test_each_part_has_a_time_out_of_its_own(shell: Shell) -> None:
    async with hanging() as (port, _):
        silent = f"127.0.0.1:{port}"
        words = ("--agent", f"http://{silent}", "--url", f"http://{silent}", "--store-url", f"redis://{silent}/0")
        found = await examined(shell, *words, "--database-url", f"postgresql://a:b@{silent}/c", "--timeout", "0.1")
    assert found["reachable", f"agent http://{silent}"]["state"] == "failed"
    assert found["reachable", f"coordinator http://{silent}"]["state"] == "failed"
    assert found["token", f"agent http://{silent}"]["state"] == "unknown"
    assert found["store_eviction", "store"]["state"] == "unknown"
    assert found["database_role", "database"]["state"] == "unknown"


async def test_without_any_answer_it_says_what_it_could_not_check(shell: Shell) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = await shell.run("doctor", "--url", nowhere, "--json")
    found = {(each["check"], each["subject"]): each for each in json.loads(done.stdout)["checks"]}
    assert done.exit_code == 1
    assert found["reachable", f"coordinator {nowhere}"]["state"] == "failed"
    assert found["reachable", "agents"]["state"] == "unknown"
    assert found["tls", "webhooks"]["state"] == "unknown"


async def test_a_token_without_the_scope_is_refused_and_the_rest_examined(world: World) -> None:
    async with connected(world.database) as owner:
        issued = await issue_token(owner, ["quota:read"], "a test", SystemClock().now())
    with capture_logs():
        found = await examined(Shell({"LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": issued.token}))
        none = await examined(Shell({"LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": ""}))
    name = ("token", f"coordinator {world.url}")
    assert found[name]["state"] == "failed"
    assert "audit:read" in found[name]["found"]
    assert none[name]["state"] == "unknown"
    assert found["reachable", f"coordinator {world.url}"]["state"] == "ok"


async def test_warnings_fail_only_with_strict(shell: Shell) -> None:
    only = ("doctor", "--check", "coordinator_installation_name")
    assert (await shell.run(*only)).exit_code == 0
    assert (await shell.run(*only, "--strict")).exit_code == 1
    assert "there is no check 'nonsense'" in await shell.error("doctor", "--check", "nonsense")


async def test_the_list_of_checks_needs_no_connection(shell: Shell) -> None:
    listed = json.loads(await shell.output("doctor", "--list", "--json"))
    assert {"database_replication", "store_eviction"} <= {each["check"] for each in listed}
    assert "database_replication" in await shell.output("doctor", "--list")


@asynccontextmanager
async def with_certificate(authority: Authority, host: str) -> AsyncIterator[int]:
    """Yield the port of a server that shakes hands with a certificate for this host, and says goodbye."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(host, (host,), ends_in=DAY))
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_certificate_is_verified_by_this_machine_and_by_the_authority_that_is_passed(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    trusting = ssl.create_default_context(cafile=str(authority.file))
    async with with_certificate(authority, "127.0.0.1") as port, with_certificate(authority, "b.test") as other:
        strange = await probe_tls(f"https://127.0.0.1:{port}", ssl.create_default_context(), 60)
        known = await probe_tls(f"https://127.0.0.1:{port}", trusting, 60)
        of_another = await probe_tls(f"https://127.0.0.1:{other}", trusting, 60)
    assert strange.fault is not None
    assert "not accepted" in strange.fault
    assert (known.fault, TLS_CHECK.judge(known)) == (None, failure("the certificate is verified and expires in 0 days"))
    assert of_another.fault is not None
    assert "mismatch" in of_another.fault
