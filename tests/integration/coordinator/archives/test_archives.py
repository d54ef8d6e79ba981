"""A closed period is archived: its lines leave the database, and every answer stays what it was."""

from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from coordinator.archives.check import check_archive
from coordinator.proof.verify import verify
from protocol.identifiers import lane_of
from tests.conftest import restricted
from tests.integration.coordinator.admin_harness import FINGERPRINT, Region, open_region, problem
from tests.integration.coordinator.archives.conftest import SECOND_DAY, Archivist, archivist_on, close
from tests.integration.coordinator.fixtures import connected
from tests.integration.coordinator.proof.history import ACME, DAY, DECEMBER, MAILS, MORNING, NOVEMBER
from tests.integration.coordinator.proof.test_coverage import expect_proven

pytestmark = pytest.mark.anyio
TENANTS = ("acme", "globex", "initech")


async def answers(archivist: Archivist, *periods: str) -> dict[str, Any]:
    """Return every answer that finance and auditors get of closed periods."""
    admin = await archivist.harness.caller("admin")
    found: dict[str, Any] = {}

    async def get(path: str) -> Any:
        found[path] = answer = (await admin.get(path)).json()
        answer.pop("request_id", None)  # of a refusal
        return answer

    for period in periods:
        await get(f"/v1/periods/{period}/reconciliation")
        await get(f"/v1/periods/{period}/trial-balance")
        await get(f"/v1/usage?from=2026-11-01&to=2026-12-01&period={period}&group_by=tenant,region")
        for tenant in TENANTS:
            statement = await get(f"/v1/periods/{period}/statement?tenant={tenant}")
            for line in statement.get("lines", ()):
                reports = await get(line["reports"])
                after = reports["page"]["next"] or (await get(f"{line['reports']}?page_size=1"))["page"]["next"]
                if after:
                    await get(f"{line['reports']}?page_size=1&page_after={after}")
                await get(f"{line['reports'].replace('/reports', '/proof')}")
    return found


async def is_intact(archivist: Archivist) -> Any:
    owner = archivist.owner
    async with owner.transaction(isolation="repeatable_read", readonly=True):
        found = await verify(owner, archivist.clock.now())
    assert found.fault is None, found.fault
    return found


async def test_every_answer_is_the_same_before_and_after(archivist: Archivist) -> None:
    before = await answers(archivist, NOVEMBER, DAY)
    assert any("proof" in path for path in before)
    booked = await archivist.owner.fetchval("SELECT count(*) FROM transfer WHERE period = $1", NOVEMBER)
    day, month = await archivist.archive(DAY, NOVEMBER)
    assert (day["state"], month["state"]) == ("archived", "archived"), (day, month)
    left = await archivist.owner.fetch("SELECT seq FROM transfer WHERE period = ANY ($1)", [DAY, NOVEMBER])
    assert {row["seq"] for row in left} == {None}
    moved = await archivist.owner.fetchval("SELECT count(*) FROM transfer WHERE period = $1", NOVEMBER)
    assert month["transfers"] == booked - moved > 0
    assert await answers(archivist, NOVEMBER, DAY) == before
    await is_intact(archivist)
    await archivist.seal()
    await archivist.seal()
    found = await is_intact(archivist)
    assert len(found.not_compared) == 2


async def test_a_report_of_two_periods_is_whole_in_the_archive_of_each(archivist: Archivist) -> None:
    """The first archive copies lines of the open month, and the second reads those of the day from the first."""
    (day,) = await archivist.archive(SECOND_DAY)
    assert day["state"] == "archived", day
    await is_intact(archivist)
    archivist.clock.time = archivist.clock.time.replace(year=2027, month=1, day=2)
    await close(archivist.harness, DECEMBER)
    await archivist.seal()
    before = await answers(archivist, DECEMBER)
    (month,) = await archivist.archive(DECEMBER)
    assert month["state"] == "archived", month
    for period in (SECOND_DAY, DECEMBER):
        found = await check_archive(archivist.store, f"{period}/1")
        assert found.fault is None, found.fault
    assert await answers(archivist, DECEMBER) == before
    await is_intact(archivist)


async def test_an_archive_is_made_once(archivist: Archivist) -> None:
    (first,) = await archivist.archive(NOVEMBER)
    again = await archivist.request(NOVEMBER)
    assert (again.status_code, again.json()) == (202, first)
    assert again.json()["state"] == "archived"
    finance = await archivist.harness.caller("usage:read")
    assert (await finance.get("/v1/archives")).json()["data"] == [first]
    (entry,) = await archivist.owner.fetch("SELECT * FROM audit WHERE action = 'period.archived'")
    assert (entry["object"], entry["actor"]) == (NOVEMBER, str(first["requested_by"]))
    assert first["manifest_sha256"] in entry["details"]


async def test_a_preview_changes_nothing(archivist: Archivist) -> None:
    answer = (await archivist.request(NOVEMBER, dry_run=True)).json()
    assert (answer["rows"], answer["missing"]) == (
        await archivist.owner.fetchval("SELECT count(*) FROM transfer WHERE period = $1", NOVEMBER),
        [],
    )
    assert answer["bytes"] > 0
    assert await archivist.owner.fetchval("SELECT count(*) FROM archive") == 0


UNRESOLVED = {
    "not_closed": "SELECT 1",
    "not_sealed": "DELETE FROM seal",
    "suspense": """UPDATE correction SET suspense_carried = 1, written_off = written_off - 1
        WHERE charge_period = '2026-11' AND written_off > 0""",
    "proposal": """INSERT INTO resolution (id, epoch, quota, period, kind, suspense, charged, reason, proposed_by,
        proposed_at) SELECT gen_random_uuid(), epoch, quota, period, 'write_off', 0, 0, 'a thought', gen_random_uuid(),
        now() FROM lease WHERE period = '2026-11' LIMIT 1""",
    "quarantine": """INSERT INTO quarantine (epoch, lane, seq, quota, period, reason, evidence, recorded_at)
        SELECT epoch, 0, 99999, 'exports:tenant=hooli', '2026-11', 'unknown_quota', '{}', now() FROM lease LIMIT 1""",
    "export": """INSERT INTO export (id, period, format, seal, is_final, requested_by, requested_at)
        VALUES (gen_random_uuid(), '2026-11', 'csv', 1, true, gen_random_uuid(), now())""",
}


@pytest.mark.parametrize("what", UNRESOLVED)
async def test_a_period_with_something_unresolved_is_refused(archivist: Archivist, what: str) -> None:
    await archivist.owner.execute(
        f"SET session_replication_role = replica; {UNRESOLVED[what]}; RESET session_replication_role"
    )
    answer = await archivist.request(DECEMBER if what == "not_closed" else NOVEMBER)
    assert problem(answer) == (409, [])
    (missing,) = answer.json()["missing"]
    assert missing["what"] == what
    assert answer.json()["detail"] == missing["reason"]
    assert await archivist.owner.fetchval("SELECT count(*) FROM archive") == 0
    assert problem(await archivist.request("2020-01")) == (404, [])


@pytest.mark.parametrize("what", ["suspense", "proposal", "quarantine"])
async def test_what_came_up_after_the_request_stops_the_archive(archivist: Archivist, what: str) -> None:
    """Minutes may lie between a request and the job, and nothing that is unresolved may leave the database."""
    assert (await archivist.request(NOVEMBER)).status_code == 202
    booked = await archivist.owner.fetch("SELECT * FROM transfer WHERE period = $1", NOVEMBER)
    await archivist.owner.execute(
        f"SET session_replication_role = replica; {UNRESOLVED[what]}; RESET session_replication_role"
    )
    await archivist.run()
    found = await archivist.progress(NOVEMBER)
    (missing,) = (await archivist.request(NOVEMBER)).json()["missing"]
    assert (found["state"], found["failure"]) == ("failed", missing["reason"])
    assert await archivist.owner.fetch("SELECT * FROM transfer WHERE period = $1", NOVEMBER) == booked


async def test_a_period_that_does_not_verify_keeps_its_lines(archivist: Archivist) -> None:
    """A transfer was edited in the database: the files that are made of it do not hash to the chain."""
    owner = archivist.owner
    await owner.execute("SET session_replication_role = replica")
    await owner.execute(
        """UPDATE transfer SET window_at = window_at + interval '1 second' WHERE period = $1 AND id = (
            SELECT max(id) FROM transfer WHERE period = $1 AND dst = 'consumed' AND seq IS NOT NULL)""",
        NOVEMBER,
    )
    await owner.execute("RESET session_replication_role")
    booked = await owner.fetch("SELECT * FROM transfer WHERE period = $1", NOVEMBER)
    (found,) = await archivist.archive(NOVEMBER)
    assert found["state"] == "failed"
    assert "does not hash to its head" in found["failure"]
    assert await owner.fetch("SELECT * FROM transfer WHERE period = $1", NOVEMBER) == booked


async def test_a_coordinator_without_a_place_says_so(closed_database: str) -> None:
    async with archivist_on(closed_database, "") as archivist:
        answer = await archivist.request(NOVEMBER)
        assert problem(answer) == (409, [])
        assert "LEASEHOLD_COORDINATOR_ARCHIVE" in answer.json()["detail"]


async def test_what_needs_lines_says_where_they_are(archivist: Archivist, closed_database: str, tmp_path: Path) -> None:
    admin = await archivist.harness.caller("admin")
    export = await admin.post("/v1/exports", json={"period": DAY})
    assert export.status_code == 202
    async with archivist_on(closed_database, str(tmp_path / "archives")):
        while (made := (await admin.get(export.headers["Location"])).json())["finished_at"] is None:
            pass
    month, _ = await archivist.archive(NOVEMBER, DAY)
    elsewhere = month["location"]
    for path in (
        f"/v1/periods/{NOVEMBER}/statement?tenant=acme&as_of=1",
        f"/v1/usage?from=2026-11-18T09:00:30Z&to=2026-11-18T10:00:00Z&period={NOVEMBER}",
        f"/v1/usage?from=2026-11-01&to=2026-12-01&period={NOVEMBER}&as_of=1",
    ):
        answer = await admin.get(path)
        assert problem(answer) == (410, []), path
        assert (answer.json()["period"], answer.json()["location"]) == (NOVEMBER, elsewhere)
    assert problem(await admin.post("/v1/exports", json={"period": NOVEMBER})) == (410, [])
    assert problem(await admin.get(f"/v1/exports/{made['id']}/data")) == (410, [])
    sealed = await archivist.owner.fetchval("SELECT max(position) FROM seal")
    now = (await admin.get(f"/v1/usage?from=2026-11-01&to=2026-12-01&period={NOVEMBER}")).json()
    then = (await admin.get(f"/v1/usage?from=2026-11-01&to=2026-12-01&period={NOVEMBER}&as_of={sealed}")).json()
    assert (then["data"], then["coverage"]) == (now["data"], now["coverage"])
    async with archivist_on(closed_database, "") as without:
        line = (await admin.get(f"/v1/periods/{NOVEMBER}/statement?tenant=acme")).json()["lines"][0]
        caller = await without.harness.caller("admin")
        for path in (line["reports"], line["reports"].replace("/reports", "/proof")):
            answer = await caller.get(path)
            assert problem(answer) == (410, [])
            assert elsewhere in answer.json()["detail"]


async def test_the_restricted_role_removes_nothing_by_itself(archivist: Archivist, closed_database: str) -> None:
    recorded = """json_populate_record(NULL::archive, json_build_object('period', $1::text, 'location', 'x', 'folder',
        'x', 'manifest_sha256', 'x', 'transfers', $2::bigint, 'first_position', 1, 'last_position', 1, 'last_transfer',
        1, 'usage_sha256', 'x', 'archived_at', now(), 'attempt', 0))"""
    booked = await archivist.owner.fetch("SELECT * FROM transfer ORDER BY id")
    async with connected(restricted(closed_database)) as coordinator:
        for sql in (
            f"DELETE FROM transfer WHERE period = '{NOVEMBER}'",
            f'TRUNCATE "transfer_{NOVEMBER}"',
            f'DROP TABLE "transfer_{NOVEMBER}"',
            f'ALTER TABLE transfer DETACH PARTITION "transfer_{NOVEMBER}"',
            "INSERT INTO archived_sum SELECT period, period, quota, 1, 1, 'a', 'b', 'c', 1, 1 FROM pool",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await coordinator.execute(sql)
        for period, transfers, reason in (
            (DECEMBER, 1, "is not closed"),
            (NOVEMBER, 1, "another number of transfers"),
            (SECOND_DAY, len([row for row in booked if row["period"] == SECOND_DAY and row["seq"]]), "has ended"),
        ):
            with pytest.raises(asyncpg.RaiseError, match=reason):
                await coordinator.execute(f"SELECT archive_transfers({recorded})", period, transfers)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await coordinator.execute("UPDATE archive SET archived_at = now()")
    assert await archivist.owner.fetch("SELECT * FROM transfer ORDER BY id") == booked


async def test_a_recorded_archive_stays_as_it_was_recorded(archivist: Archivist) -> None:
    await archivist.archive(NOVEMBER)
    for sql in (
        "UPDATE archive SET location = 'elsewhere'",
        "DELETE FROM archive",
        "TRUNCATE archive",
        "UPDATE archived_sum SET units = 1",
        "DELETE FROM archived_sum",
        "TRUNCATE archived_sum",
        f"""INSERT INTO transfer (period, charge_period, quota, src, dst, units, cause, movement_id, recorded_at)
            VALUES ('{NOVEMBER}', '{NOVEMBER}', '{ACME}', 'suspense', 'consumed', 1, 'x', gen_random_uuid(), now())""",
        f"UPDATE transfer SET units = 9 WHERE period = '{NOVEMBER}'",
        f'TRUNCATE "transfer_{NOVEMBER}"',
    ):
        with pytest.raises(asyncpg.RaiseError):
            await archivist.owner.execute(sql)


@pytest.mark.extended
async def test_late_usage_of_an_archived_period_is_a_correction(archivist: Archivist) -> None:
    """The keys of reports stay, so an old number is recognised, and a new one is booked where it belongs."""
    owner = archivist.owner
    await archivist.archive(NOVEMBER, DAY)
    lease = await owner.fetchrow(
        """SELECT lease.*, name FROM lease JOIN region_epoch USING (epoch) JOIN region ON region.name = lease.region
        WHERE period = $1 AND quota = $2 AND region_epoch.state = 'current' ORDER BY epoch LIMIT 1""",
        NOVEMBER,
        ACME,
    )
    assert lease is not None
    region = Region(await archivist.harness.caller(f"region:{lease['region']}"), lease["region"], lease["epoch"], 4)
    lane = lane_of(ACME, 4)
    last = await owner.fetchval("SELECT last_seq FROM lane WHERE epoch = $1 AND lane = $2", lease["epoch"], lane)
    total = await owner.fetchval(
        """SELECT region_consumed FROM correction WHERE (epoch, quota, charge_period) = ($1, $2, $3)
        ORDER BY period DESC LIMIT 1""",
        lease["epoch"],
        ACME,
        NOVEMBER,
    )
    totals = {name: lease[name] for name in ("quota", "period", "granted", "overage", "returned")}
    line = {"minute": int(MORNING.timestamp()) // 60, "dimensions": {"tenant": "acme"}, "units": 3}
    late = totals | {"consumed": (total or lease["consumed"]) + 3, "lines": [line]}
    assert await outcome(region, lane, 1, late) == "stale"
    assert await outcome(region, lane, last + 1, late) == "applied"
    assert await outcome(region, lane, last + 1, late) == "replayed"
    booked = await owner.fetch(
        "SELECT * FROM transfer WHERE (epoch, lane, seq) = ($1, $2, $3)", lease["epoch"], lane, last + 1
    )
    assert {(row["period"], row["charge_period"]) for row in booked} == {(DECEMBER, NOVEMBER)}
    assert sum(row["units"] for row in booked if row["dst"] == "consumed") == 3
    await is_intact(archivist)


async def outcome(region: Region, lane: int, seq: int, lease: dict[str, Any]) -> str:
    batch = {"epoch": region.epoch, "lane": lane, "seq": seq, "leases": [lease]}
    exchange = {"frozen": msgspec.json.encode(batch).decode(), "live": {"demands": []}}
    body = {"fingerprint": FINGERPRINT, "exchanges": [exchange]}
    answer = await region.client.post(f"/v1/regions/{region.name}/exchanges", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["replies"][0]["outcome"])


async def test_a_seal_does_not_go_back_when_the_last_transfers_left_with_an_archive(archivist: Archivist) -> None:
    """Usage of a day is the last that was booked, and leaves with its archive. Later seals begin where it ended."""
    harness, owner, day = archivist.harness, archivist.owner, "2026-12-05"
    region = await open_region(harness, await harness.caller("admin"), "eu-north")
    await use_all(region, MAILS, day, archivist.clock.time)
    archivist.clock.move(days=1)
    await close(harness, day)
    await archivist.seal()
    last = await owner.fetchrow("SELECT id, seq FROM transfer ORDER BY id DESC LIMIT 1")
    assert last is not None
    assert last["seq"] is not None, "the last transfer is of a report"
    await archivist.archive(day)
    assert await owner.fetchval("SELECT max(id) FROM transfer") < last["id"], "it has left"
    await archivist.seal()
    await use_all(region, MAILS, "2026-12-06", archivist.clock.time)
    await archivist.seal()
    ends = [row["transfer"] for row in await owner.fetch("SELECT transfer FROM seal ORDER BY number")]
    assert ends == sorted(ends)
    assert ends[-1] > ends[-2] == ends[-3] == last["id"]
    await is_intact(archivist)


async def use_all(region: Region, quota: str, period: str, at: datetime) -> None:
    """Lease units, use some and return the rest in one report, so that nothing is left to expire."""
    await region.exchange(quota, demands=[{"quota": quota, "waiting": 5}])
    lease = region.leases[quota, period]
    lease |= {"consumed": 5, "returned": lease["granted"] - 5}
    line = {"minute": int(at.timestamp()) // 60, "dimensions": {"tenant": "acme"}, "units": 5}
    await region.exchange(quota, frozen=[lease | {"lines": [line]}])


FORGED = {
    "sums": "UPDATE archived_sum SET units = units + 1 WHERE dst = 'consumed'",
    "sums_deleted": "DELETE FROM archived_sum WHERE ctid = (SELECT min(ctid) FROM archived_sum)",
    "usage": f"UPDATE usage_hour SET units = units + 1 WHERE period = '{NOVEMBER}'",
    "labelled_usage": f"UPDATE labelled_usage SET labels = 'model=small' WHERE period = '{NOVEMBER}'",
    "location": "UPDATE archive SET location = 'elsewhere'",
    "manifest": "UPDATE archive SET manifest_sha256 = 'x'",
    "record_deleted": "DELETE FROM archive",
    "movement_deleted": f"DELETE FROM transfer WHERE period = '{NOVEMBER}' AND cause = 'expired'",
    "other_line_deleted": f"DELETE FROM transfer WHERE period = '{DECEMBER}' AND dst = 'consumed'",
}


@pytest.mark.parametrize("forgery", FORGED)
async def test_what_stays_in_the_database_is_still_proven(archivist: Archivist, forgery: str) -> None:
    await archivist.archive(NOVEMBER, SECOND_DAY)
    await archivist.seal()
    await is_intact(archivist)
    await archivist.owner.execute("SET session_replication_role = replica")
    assert await archivist.owner.execute(FORGED[forgery]) not in ("UPDATE 0", "DELETE 0")
    await archivist.owner.execute("RESET session_replication_role")
    async with archivist.owner.transaction(isolation="repeatable_read", readonly=True):
        found = await verify(archivist.owner, archivist.clock.now())
    assert found.fault is not None


@pytest.mark.extended
async def test_every_column_of_a_record_is_proven(archivist: Archivist, closed_database: str) -> None:
    await archivist.archive(NOVEMBER)
    await archivist.seal()
    for table in ("archive", "archived_sum"):
        await expect_proven(closed_database, table)
