"""Auditors and finance read proofs over HTTP, and `leasehold verify` checks them."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID

import httpx
import pytest
from typer.testing import CliRunner

from coordinator.database.engine import open_database
from coordinator.proof.seal import seal
from coordinator.proof.verifications import run_verifications
from leasehold.cli.app import app
from leasehold.local_stack.plan import URL_VARIABLE
from tests.conftest import PostgresServer, copied
from tests.integration.coordinator.admin_harness import AdminHarness, Region, problem
from tests.integration.coordinator.fixtures import NOON, StandingClock, connected
from tests.integration.coordinator.proof.conftest import POOLS, harness_on, use_something

pytestmark = pytest.mark.anyio


@pytest.fixture
def written(postgres_server: PostgresServer, books: str) -> Iterator[str]:
    with copied(postgres_server, urlsplit(books).path.strip("/")) as url:
        yield url


@pytest.fixture
async def admin_harness(written: str) -> AsyncIterator[AdminHarness]:
    async with harness_on(written) as admin_harness:
        admin_harness.clock.time = NOON.replace(hour=13)
        yield admin_harness


async def test_an_answer_as_of_a_seal_is_the_same_bytes_for_ever(admin_harness: AdminHarness) -> None:
    finance, admin = await admin_harness.caller("usage:read"), await admin_harness.caller("admin")
    sealed = (await admin.get("/v1/seals")).json()["data"][1]
    position, moment = sealed["position"], quote(sealed["sealed_at"])
    for shape in ("", "&granularity=PT1M", "&granularity=PT1H", "&granularity=P1D", "&granularity=P1D&page_size=1"):
        question = f"/v1/usage?group_by=tenant,region{shape}&as_of="
        before = await finance.get(f"{question}{position}")
        assert (before.status_code, before.json()["as_of"]) == (200, position)
        by_time = await finance.get(f"{question}{moment}")
        await book_more(admin_harness)
        after = await finance.get(f"{question}{position}")
        assert after.content == before.content
        assert by_time.json()["data"] == before.json()["data"]
        assert (await finance.get(f"{question}{moment}")).content == by_time.content
        known = {"If-None-Match": before.headers["ETag"]}
        assert (await finance.get(f"{question}{position}", headers=known)).status_code == 304
        now = (await finance.get(question.removesuffix("&as_of="))).json()
        assert now["as_of"] > position


async def book_more(admin_harness: AdminHarness) -> None:
    """Book usage of the same minutes, by reports and by the coordinator itself."""
    row = await admin_harness.owner.fetchrow(
        "SELECT * FROM region_epoch WHERE state = 'current' AND region = 'eu-west'"
    )
    assert row is not None
    lanes = await admin_harness.owner.fetch("SELECT lane, last_seq FROM lane WHERE epoch = $1", row["epoch"])
    region = Region(await admin_harness.caller("region:eu-west"), "eu-west", row["epoch"], row["lanes"])
    region.seqs = {lane["lane"]: lane["last_seq"] for lane in lanes}
    for lease in await admin_harness.owner.fetch("SELECT * FROM lease WHERE epoch = $1", row["epoch"]):
        totals = {name: lease[name] for name in ("quota", "period", "granted", "overage")}
        reported = {"consumed": lease["region_consumed"], "returned": lease["region_returned"]}
        region.leases[lease["quota"], lease["period"]] = totals | reported
    await use_something(random.Random(1), admin_harness.clock, region)
    await region.exchange(POOLS[0][0], demands=[{"quota": POOLS[0][0], "waiting": 5}])
    await admin_harness.owner.execute(
        """INSERT INTO transfer (quota, period, charge_period, region, src, dst, units, cause, movement_id, window_at,
            dimensions, recorded_at)
        SELECT quota, period, period, 'eu-west', 'overage', 'consumed', 5, 'usage', gen_random_uuid(), $1,
            '{"tenant": "acme"}', $1 FROM pool ORDER BY quota LIMIT 1""",
        NOON,
    )
    async with admin_harness.owner.transaction():
        await seal(admin_harness.owner, admin_harness.clock.now())


async def test_a_position_that_is_not_sealed_is_refused(admin_harness: AdminHarness) -> None:
    finance, admin = await admin_harness.caller("usage:read"), await admin_harness.caller("admin")
    newest = (await admin.get("/v1/seals")).json()["data"][0]
    for as_of in (newest["position"] + 1, "2026-11-19", "2026-11-01"):
        assert problem(await finance.get(f"/v1/usage?as_of={as_of}")) == (422, [("as_of", "sealed")])


async def test_seals_are_listed_newest_first_page_by_page(admin_harness: AdminHarness) -> None:
    auditor = await admin_harness.caller("audit:read")
    whole = (await auditor.get("/v1/seals")).json()
    assert [each["number"] for each in whole["data"]] == [6, 5, 4, 3, 2, 1]
    assert [one["previous"] for one in whole["data"][:-1]] == [two["hash"] for two in whole["data"][1:]]
    assert whole["page"] == {"next": None}
    pages, after = [], ""
    while after is not None:
        answer = (await auditor.get(f"/v1/seals?page_size=4{after and f'&page_after={after}'}")).json()
        pages.append([each["number"] for each in answer["data"]])
        after = answer["page"]["next"]
    assert pages == [[6, 5, 4, 3], [2, 1]]


async def test_a_verification_is_requested_made_and_kept(admin_harness: AdminHarness, written: str) -> None:
    auditor = await admin_harness.caller("audit:read")
    asked = await auditor.post("/v1/verifications")
    assert (asked.status_code, asked.json()["result"]) == (202, None)
    async with open_database(written, 3) as database:
        await run_verifications(database, StandingClock())
    found = (await auditor.get(asked.headers["Location"])).json()
    assert (found["result"]["intact"], found["result"]["seals"], found["result"]["fault"]) == (True, 6, None)
    for unknown in (UUID(int=1), "x", "%00"):
        assert problem(await auditor.get(f"/v1/verifications/{unknown}")) == (404, [])


async def test_a_coordinator_runs_waiting_verifications_by_itself(
    admin_harness: AdminHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that orders one lets the jobs be looked at soon."""
    monkeypatch.setattr("coordinator.jobs.IDLE_S", 3_600.0)
    auditor = await admin_harness.caller("audit:read")
    location = (await auditor.post("/v1/verifications")).headers["Location"]
    async with asyncio.timeout(30):
        while (await auditor.get(location)).json()["result"] is None:  # noqa: ASYNC110 - it is done elsewhere
            await asyncio.sleep(0.02)


async def kept_at(admin_harness: AdminHarness, number: int) -> dict[str, Any]:
    row = await admin_harness.owner.fetchrow(
        "SELECT number, encode(hash, 'hex') AS hash FROM seal WHERE number = $1", number
    )
    assert row is not None
    return dict(row)


async def test_a_kept_seal_is_compared(admin_harness: AdminHarness, written: str) -> None:
    """The last reports are cut off: the rest is consistent, and only a kept seal shows the loss."""
    auditor = await admin_harness.caller("audit:read")
    early, late = await kept_at(admin_harness, 3), await kept_at(admin_harness, 6)
    async with connected(written) as owner:
        await owner.execute("SET session_replication_role = replica; DELETE FROM seal WHERE number > 4")
    for kept, kind, number in (
        ([], None, None),
        ([early], None, None),
        ([early, late], "kept_seal_missing", 6),
        ([late, early | {"hash": "0" * 64}], "kept_seal_differs", 3),
    ):
        asked = await auditor.post("/v1/verifications", json={"kept_seals": kept})
        assert (asked.status_code, asked.json()["kept_seals"]) == (202, kept)
        async with open_database(written, 3) as database:
            await run_verifications(database, StandingClock())
        fault = (await auditor.get(asked.headers["Location"])).json()["result"]["fault"]
        assert (fault and fault["kind"], fault and fault["seal"]) == (kind, number)


@pytest.mark.parametrize(
    ("kept", "fault"),
    [
        ([{"number": 0, "hash": "0" * 64}], ("kept_seals[0].number", "minimum")),
        ([{"number": 1, "hash": "0" * 63}], ("kept_seals[0].hash", "pattern")),
        ([{"number": 1}], ("kept_seals[0].hash", "required")),
        ([{"number": "1", "hash": "0" * 64}], ("kept_seals[0].number", "type")),
        ("1:00", ("kept_seals", "type")),
    ],
)
async def test_an_invalid_kept_seal_is_named(admin_harness: AdminHarness, kept: object, fault: tuple[str, str]) -> None:
    auditor = await admin_harness.caller("audit:read")
    assert problem(await auditor.post("/v1/verifications", json={"kept_seals": kept})) == (422, [fault])


# --- the command ------------------------------------------------------------------------------------------------------


def said_by(*arguments: str, **environment: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", *arguments], env=environment)
    return done.exit_code, done.output


async def test_the_command_reads_the_database_itself(written: str) -> None:
    in_thread = asyncio.to_thread
    status, said = await in_thread(said_by, "--database", "--json", **{URL_VARIABLE: written})
    assert (status, json.loads(said)["intact"]) == (0, True)
    status, said = await in_thread(said_by, "--database", **{URL_VARIABLE: written})
    assert (status, "intact: every row" in said) == (0, True)
    async with connected(written) as owner:
        await owner.execute("SET session_replication_role = replica")
        row = await owner.fetchrow("SELECT * FROM transfer WHERE cause = 'usage' ORDER BY id DESC LIMIT 1")
        assert row is not None
        await owner.execute("UPDATE transfer SET units = units + 1 WHERE id = $1", row["id"])
    status, said = await in_thread(said_by, "--database", **{URL_VARIABLE: written})
    place = f"first at epoch {row['epoch']}, lane {row['lane']}, seq {row['seq']}: report_changed"
    assert (status, "NOT INTACT" in said, place in said) == (1, True, True), said
    status, said = await in_thread(said_by, "--database", "--json", **{URL_VARIABLE: written})
    fault = json.loads(said)["fault"]
    assert (status, fault["kind"], fault["seq"]) == (1, "report_changed", row["seq"])


async def test_the_command_compares_seals_that_were_kept(written: str) -> None:
    async with connected(written) as owner:
        kept = await owner.fetchval("SELECT encode(hash, 'hex') FROM seal WHERE number = 6")
        await owner.execute("SET session_replication_role = replica; DELETE FROM seal WHERE number = 6")
    read = {URL_VARIABLE: written}
    status, said = await asyncio.to_thread(said_by, "--database", "--kept", f"6:{kept}", **read)
    assert (status, "seal 6: kept_seal_missing: the newest seal that is there is 5" in said) == (1, True), said
    for wrong in ("6", kept, f"x:{kept}", f"6:{kept[1:]}", f"0:{kept}", f"-1:{kept}"):
        status, said = await asyncio.to_thread(said_by, "--database", "--kept", wrong, **read)
        assert (status, "is not NUMBER:HASH" in said) == (1, True), said


async def test_a_ledger_without_seals_says_so(database: str) -> None:
    """The output does not contain `None`."""
    status, said = await asyncio.to_thread(said_by, "--database", **{URL_VARIABLE: database})
    assert (status, "None" in said) == (0, False), said


async def test_the_command_names_missing_settings(tmp_path: Path) -> None:
    for arguments, environment, sentence in (
        ((), {"LEASEHOLD_TOKEN": ""}, "LEASEHOLD_TOKEN is not set"),
        (("--url", "http://127.0.0.1:1"), {"LEASEHOLD_TOKEN": "x"}, "does not answer"),
        (("--database",), {URL_VARIABLE: ""}, f"{URL_VARIABLE} is not set"),
        (("--database",), {URL_VARIABLE: "postgresql://nobody@127.0.0.1:1/x"}, "could not be read"),
    ):
        status, said = await asyncio.to_thread(said_by, *arguments, **environment)
        assert (status, sentence in said) == (1, True), said


async def test_the_command_verifies_through_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    intact = {"intact": True, "fault": None, "lanes": 1, "reports": 2, "transfers": 3, "movements": 0, "seals": 1}
    result = intact | {"sealed_position": 2, "newest_seal": "ab"}
    answers = iter([{"id": "1", "result": None}, {"id": "1", "result": None}, {"id": "1", "result": result}])

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return httpx.Response(202 if request.method == "POST" else 200, json=next(answers))

    transport = httpx.MockTransport(answer)
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(transport=transport, **options))
    status, said = await asyncio.to_thread(said_by, "--json", LEASEHOLD_TOKEN="secret")
    assert (status, json.loads(said)) == (0, result)
