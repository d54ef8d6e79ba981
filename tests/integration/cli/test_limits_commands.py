"""`apply`, `quota`, `subscription`, `override` and `block` work against a real coordinator."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from coordinator.access.issue_token import issue_token
from leasehold.cli.app import app
from tests.integration.regional_agent.world import another_coordinator

pytestmark = pytest.mark.anyio

DOCUMENT = """\
plans: {free: {}, pro: {}}
default_plan: free
quotas:
  - name: exports
    kind: allowance
    limit: {free: 10, pro: 100}
    period: month
  - name: api
    kind: rate
    limit: "10/second"
policies:
  - {name: export, by: [tenant], quota: exports, match: {route: /v1/exports}}
  - {name: api, by: [], quota: api}
"""


class Shell:
    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    async def run(self, *words: str, stdin: str = "") -> Result:
        """Run a command in a thread, because the coordinator runs in this loop."""
        runner = CliRunner()
        return await asyncio.to_thread(runner.invoke, app, words, input=stdin, env=self._environment)

    async def output(self, *words: str, stdin: str = "") -> str:
        done = await self.run(*words, stdin=stdin)
        assert done.exit_code == 0, done.output
        return done.stdout

    async def json(self, *words: str, stdin: str = "") -> Any:
        return json.loads(await self.output(*words, "--json", stdin=stdin))

    async def error(self, *words: str, stdin: str = "") -> str:
        done = await self.run(*words, stdin=stdin)
        assert (done.exit_code, "Traceback" in done.output) == (1, False), done.output
        return done.stderr


@pytest.fixture
async def environment(database: str) -> AsyncIterator[dict[str, str]]:
    connection = await asyncpg.connect(database)
    try:
        issued = await issue_token(connection, ["quota:read", "quota:write"], "test", datetime.now(UTC))
    finally:
        await connection.close()
    with capture_logs():  # command and coordinator share this process's output
        async with another_coordinator(database) as url:
            yield {"LEASEHOLD_URL": url, "LEASEHOLD_TOKEN": issued.token, "COLUMNS": "200"}


@pytest.fixture
def shell(environment: dict[str, str]) -> Shell:
    return Shell(environment)


@pytest.fixture
async def applied(shell: Shell) -> None:
    await shell.output("apply", "-y", "-f", "-", stdin=DOCUMENT)


async def test_apply_prints_the_changes_asks_for_consent_and_applies(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(DOCUMENT)
    assert "nothing was changed" in await shell.error("apply", "-f", str(file), stdin="n\n")
    assert await shell.json("quota", "list") == []
    assert "version 1 is in force" in await shell.output("apply", "-f", str(file), stdin="y\n")
    file.write_text(DOCUMENT.replace("pro: 100}", "pro: 200}").replace("  - {name: api, by: [], quota: api}\n", ""))
    seen = await shell.output("apply", "-f", str(file), "--dry-run")
    assert seen.splitlines() == ["~ quotas.exports.limit.pro: 100 → 200", "- policies.api"]
    changed = await shell.json("apply", "-f", str(file), "-y")
    assert (changed["version"], changed["dry_run"], len(changed["changes"])) == (2, False, 2)
    assert "nothing changes" in await shell.output("apply", "-f", str(file))


async def test_a_document_that_was_applied_meanwhile_is_not_overwritten(
    shell: Shell, environment: dict[str, str], tmp_path: Path
) -> None:
    """The other document is applied between the question and the answer."""
    file = tmp_path / "limits.yaml"
    file.write_text(DOCUMENT)
    command = [sys.executable, "-m", "leasehold.cli", "apply", "-f", str(file)]
    asked = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=os.environ | environment
    )
    assert asked.stdout is not None
    async with asyncio.timeout(60):
        await asked.stdout.readuntil(b"Apply?")
        await shell.output("apply", "-y", "-f", "-", stdin=DOCUMENT.replace("pro: 100}", "pro: 300}"))
        _, told = await asked.communicate(b"y\n")
    assert (asked.returncode, b"Version 1 is in force. Read it before" in told) == (1, True), told
    assert (await shell.json("quota", "list"))[0]["limit"]["pro"] == 300


@pytest.mark.usefixtures("applied")
async def test_an_exported_document_can_be_applied(shell: Shell) -> None:
    exported = await shell.output("quota", "export")
    assert exported.startswith("# version 1\n")
    again = await shell.json("apply", "-y", "-f", "-", stdin=exported)
    assert (again["version"], again["changes"]) == (1, [])
    as_json = json.dumps(again["document"])
    assert (await shell.json("apply", "-y", "-f", "-", stdin=as_json))["changes"] == []


async def test_each_fault_is_printed_with_its_place_and_nothing_changes(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(DOCUMENT.replace("10/second", "10/parsec").replace("quota: exports", "quota: imports"))
    told = await shell.error("apply", "-f", str(file), "-y")
    assert f"{file}: quotas[1].limit: '10/parsec' is not a rate" in told
    assert "(line 10, column 12) [rate]" in told
    assert "policies[0].quota: there is no quota 'imports' (line 12, column 41) [known]" in told
    assert await shell.json("quota", "list") == []
    assert "No such file" in await shell.error("apply", "-f", str(tmp_path / "nothing.yaml"), "-y")
    assert "use --yes" in await shell.error("apply", "-f", "-", stdin=DOCUMENT)


@pytest.mark.usefixtures("applied")
async def test_quotas_are_shown_with_their_policies(shell: Shell) -> None:
    listed = await shell.output("quota", "list")
    assert "free: 10" in listed
    assert "10/second" in listed
    shown = await shell.output("quota", "show", "exports")
    assert "month" in shown
    assert "/v1/exports" in shown
    assert [each["name"] for each in (await shell.json("quota", "show", "exports"))["policies"]] == ["export"]
    assert "there is no quota 'nothing'" in await shell.error("quota", "show", "nothing")


@pytest.mark.usefixtures("applied")
async def test_subscriptions_are_set_shown_and_removed(shell: Shell) -> None:
    assert "a/b is on pro" in await shell.output("subscription", "set", "a/b", "pro")
    assert await shell.output("subscription", "show", "a/b") == "pro\n"
    assert "a/b" in await shell.output("subscription", "list")
    assert "plan: the limits document has no such plan" in await shell.error("subscription", "set", "a/b", "gold")
    await shell.output("subscription", "remove", "a/b")
    assert await shell.json("subscription", "list") == []
    await shell.error("subscription", "remove", "a/b")


@pytest.mark.usefixtures("applied")
async def test_overrides_are_created_once_per_key_listed_and_deleted(shell: Shell) -> None:
    words = ("override", "create", "exports", "500", "--for", "tenant=acme", "--reason", "[a] launch")
    first, again = [await shell.json(*words, "--idempotency-key", "k") for _ in range(2)]
    assert first == again
    await shell.output(
        "override", "create", "api", "5/second, burst 9", "--reason", "x", "--until", "2100-01-01T00:00:00Z"
    )
    listed = await shell.json("override", "list")
    assert [(each["quota"], each["subject"], each["limit"]) for each in listed] == [
        ("api", {}, "5/second, burst 9"),
        ("exports", {"tenant": "acme"}, 500),
    ]
    table = await shell.output("override", "list", "--quota", "exports")
    assert "[a] launch" in table
    await shell.output("override", "delete", first["id"])
    assert await shell.json("override", "list", "--quota", "exports") == []
    assert "FIELD=VALUE" in await shell.error("override", "create", "exports", "5", "--for", "acme", "--reason", "x")
    assert "There is no such override" in await shell.error("override", "delete", "x")


async def test_blocks_are_added_listed_and_removed(shell: Shell) -> None:
    assert "ip=203.0.113.0/24 is blocked" in await shell.output("block", "add", "ip=203.0.113.0/24", "--reason", "x")
    assert "203.0.113.0/24" in await shell.output("block", "list")
    await shell.output("block", "remove", "ip=203.0.113.0/24")
    assert await shell.json("block", "list") == []
    assert "There is no such block" in await shell.error("block", "remove", "ip=203.0.113.0/24")
    assert "FIELD=VALUE" in await shell.error("block", "add", "acme", "--reason", "x")


async def test_without_a_token_the_scope_is_named(environment: dict[str, str]) -> None:
    shell = Shell(environment | {"LEASEHOLD_TOKEN": ""})
    assert "quota:read" in await shell.error("block", "list")
    assert "does not answer" in await Shell(environment).error("block", "list", "--url", "http://127.0.0.1:1")
