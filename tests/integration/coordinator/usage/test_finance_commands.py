"""`leasehold usage`, `statement` and `export` work for finance, and so does the guide to closing a month."""

import asyncio
import hashlib
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from coordinator.access.issue_token import issue_token
from leasehold.cli.app import app
from tests.integration.coordinator.admin_harness import AdminHarness, Region, sealed
from tests.integration.coordinator.fixtures import served
from tests.integration.coordinator.proof.test_line_proof import script
from tests.integration.coordinator.spreadsheets import csv_rows
from tests.integration.coordinator.usage.test_statements import DAY, MAILS, at, region

__all__ = ["region"]
pytestmark = pytest.mark.anyio
Typed = Callable[..., Coroutine[Any, Any, Result]]
GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "closing.md"


@pytest.fixture
async def address(admin_harness: AdminHarness, region: Region) -> AsyncIterator[str]:
    coordinator = admin_harness.transport.app
    assert region
    assert isinstance(coordinator, FastAPI)
    with capture_logs():  # command and coordinator share this process's output
        async with served(coordinator) as url:
            yield url


async def commands(admin_harness: AdminHarness, address: str, *scopes: str, **environ: str | None) -> Typed:
    """Return a function that runs commands with a token of these scopes."""
    token = (await issue_token(admin_harness.owner, scopes, "Ada, finance", admin_harness.clock.now())).token
    environment = {"LEASEHOLD_URL": address, "LEASEHOLD_TOKEN": token, "COLUMNS": "300", **environ}

    async def type_(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, words, env=environment)

    return type_


@pytest.fixture
async def typed(admin_harness: AdminHarness, address: str) -> Typed:
    return await commands(admin_harness, address, "admin")


async def said(typed: Typed, *words: str) -> str:
    done = await typed(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


async def test_usage_is_a_table_json_or_csv(typed: Typed) -> None:
    asked = ("usage", "--from", DAY, "--to", "2026-11-19", "-g", "tenant,quota", "--only", "quota=mails")
    table = await typed(*asked)
    assert table.stdout.splitlines()[-1].split()[2:] == ["acme", "mails", "10"]
    assert "regions hold 7 units more: leased, and not reported as used so far" in table.stderr
    found = json.loads(await said(typed, *asked, "--granularity", "PT1H", "--zeros", "--json"))
    assert [row["units"] for row in found["data"]] == [0] * 9 + [4, 6] + [0] * 13
    _, row = csv_rows((await said(typed, *asked, "--csv")).encode())
    assert row == ["2026-11-18T00:00:00Z", "2026-11-19T00:00:00Z", "acme", "mails", "10"]
    assert "the ledger has no such tenant" in (await typed("usage", "--only", "tenant=nobody")).stderr
    for wrong, sentence in (
        (("--only", "acme"), "write it as --only FIELD=VALUE, such as tenant=acme"),
        (("--from", "soon"), "from: "),
    ):
        refused = await typed("usage", *wrong)
        assert (refused.exit_code, sentence in refused.stderr) == (1, True)


async def test_a_statement_is_shown_and_followed_to_its_reports(typed: Typed, tmp_path: Path) -> None:
    asked = ("statement", "show", DAY, "--tenant", "acme")
    table = (await said(typed, *asked)).splitlines()
    assert table[1].split() == ["1", "usage", "mails", DAY, "eu-west", "10"]
    assert table[-1].startswith("billed: 10 units; as of position ")
    found = json.loads(await said(typed, *asked, "--json"))
    sources = json.loads(await said(typed, *asked, "--line", "1", "--json"))
    assert sum(each["units"] for each in sources) == found["billed"]
    assert sources[0]["body_hash"] in await said(typed, *asked, "--line", "1")
    assert (await said(typed, *asked, "--csv")).startswith(
        "\ufefftenant,name,external ids,period,as of,is final,line,kind,quota"
    )
    assert (await said(typed, *asked, "--html")).startswith("<!doctype html>")
    assert (await typed("statement", "show", DAY, "--tenant", "nobody")).exit_code == 1
    assert "billed: 15 units in 2 periods; as of position " in await said(
        typed, "statement", "month", "acme", "2026-11"
    )
    await downloaded(typed, tmp_path, asked, {"html": b"<!doctype html>", "xlsx": b"PK", "json": b"{"})


@pytest.mark.extended
@pytest.mark.usefixtures("pango")
async def test_a_statement_is_a_pdf_if_the_file_is_one(typed: Typed, tmp_path: Path) -> None:
    await downloaded(typed, tmp_path, ("statement", "show", DAY, "--tenant", "acme"), {"pdf": b"%PDF-"})


async def downloaded(typed: Typed, tmp_path: Path, asked: Sequence[str], begins_of: Mapping[str, bytes]) -> None:
    for suffix, begins in begins_of.items():
        file = tmp_path / f"statement.{suffix}"
        await said(typed, *asked, "-o", str(file))
        await said(typed, "statement", "month", "acme", "2026-11", "-o", str(file))
        assert file.read_bytes().startswith(begins)


async def test_an_export_is_the_file_of_its_manifest(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "usage.csv"
    manifest = json.loads(await said(typed, "export", DAY, "-o", str(file), "--json"))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == manifest["sha256"]
    assert not file.with_name("usage.csv.part").exists()
    assert f"2 lines, sha256 {manifest['sha256']}" in await said(typed, "export", DAY, "-o", str(file))
    columns = tmp_path / "usage.parquet"
    assert f"{columns}: 2 lines" in await said(typed, "export", DAY, "-o", str(columns), "--format", "parquet")
    assert columns.read_bytes()[-4:] == b"PAR1"
    refused = await typed("export", DAY, "-o", str(tmp_path / "usage.xls"), "--format", "xls")
    assert (refused.exit_code, "should be 'csv', 'ndjson' or 'parquet'" in refused.stderr) == (1, True)
    assert not (tmp_path / "usage.xls").exists()


def steps() -> list[list[str]]:
    (block,) = re.findall(r"^```console\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    commands = [re.split(r"\s{2,}", line)[0] for line in block.splitlines()]
    return [shlex.split(command.removeprefix("$ leasehold ").replace("2026-10", DAY)) for command in commands]


@pytest.mark.extended
async def test_the_guide_closes_a_period(
    admin_harness: AdminHarness, region: Region, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of the guide works, in the guide's order, with the scopes of the guide and no others."""
    scopes = re.findall(r"--scope (\S+)", GUIDE.read_text(encoding="utf-8"))
    assert len(scopes) == 3
    typed = await commands(admin_harness, address, *scopes)
    monkeypatch.chdir(tmp_path)
    await region.exchange(MAILS, frozen=[region.leases[MAILS, DAY] | {"returned": 7}])
    await sealed(admin_harness)
    admin_harness.clock.time = at("19T12:00")
    moving = asyncio.create_task(_let_time_pass(admin_harness))
    try:
        said_of = {" ".join(step[:2]): await said(typed, *step) for step in steps()}
    finally:
        moving.cancel()
    assert len(steps()) == 11
    assert f"{DAY} is closed" in said_of["period close"]
    assert "intact" in said_of["verify"]
    assert (tmp_path / f"usage-{DAY}.csv").read_text().count("\n") == 3
    assert said_of["period close"].count("waits for") <= 2 * said_of["period close"].count("grace"), "told each time"
    for missing in scopes:
        fewer = await commands(admin_harness, address, *(scope for scope in scopes if scope != missing))
        refused = [done.stderr for step in steps() if (done := await fewer(*step)).exit_code]
        assert refused
        assert all(text == f"leasehold: The token lacks the scope `{missing}`.\n" for text in refused), refused


async def _let_time_pass(admin_harness: AdminHarness) -> None:
    """Let the grace of a close end."""
    while True:
        await asyncio.sleep(0.5)
        admin_harness.clock.move(minutes=1)


async def test_a_proof_is_saved_and_checked(typed: Typed, tmp_path: Path) -> None:
    printed = await said(typed, "statement", "proof", DAY, "-t", "acme", "--line", "1", "-o", str(tmp_path))
    seals = {seal["number"]: seal["hash"] for seal in json.loads(await said(typed, "ledger", "seals", "--json"))}
    check = tmp_path / "check.py"
    check.write_text(script())
    words = re.sub(r"HASH-OF-SEAL-(\d+)", lambda found: seals[int(found[1])], printed).split()
    proven = await asyncio.create_subprocess_exec(sys.executable, check, *words[2:], stdout=asyncio.subprocess.PIPE)
    assert (await proven.communicate())[0].startswith(b"PROVEN: 10 units of mails by acme")
    refused = await typed("statement", "proof", DAY, "-t", "acme", "--line", "1", "--seal", "9999", "-o", str(tmp_path))
    assert (refused.exit_code, "There is no seal 9999" in refused.stderr) == (1, True)


async def test_the_audit_names_people(typed: Typed) -> None:
    await said(typed, "webhook", "add", "http://127.0.0.1:9/", "period.closed")
    table = (await said(typed, "ledger", "audit", "--action", "webhook.added", "--last", "1")).splitlines()
    assert "Ada, finance" in table[1]
    assert "Ada, finance" in (await said(typed, "webhook", "list")).splitlines()[1]
    assert len(json.loads(await said(typed, "ledger", "audit", "--last", "2", "--json"))) == 2
    refused = await typed("ledger", "audit", "--action", "webhook.aded")
    assert (refused.exit_code, "token.issued" in refused.stderr) == (1, True)
    assert len(refused.stderr.splitlines()) == 1, "each fault is printed once"


async def test_tables_are_not_folded_in_a_pipe(admin_harness: AdminHarness, address: str) -> None:
    """COLUMNS, which the other tests set, is the only thing that folds them there."""
    typed = await commands(admin_harness, address, "admin", COLUMNS=None)
    target = f"http://127.0.0.1:9/{'a' * 200}"
    await said(typed, "webhook", "add", target, "period.closed", "usage.sealed", "suspense.new")
    (made,) = json.loads(await said(typed, "webhook", "list", "--json"))
    heading, row = (await said(typed, "webhook", "list")).splitlines()
    assert heading.split()[:2] == ["id", "url"]
    assert row.split()[:2] == [made["id"], target]
    await said(typed, "webhook", "deliveries", made["id"])
