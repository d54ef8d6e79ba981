"""Any secret change that the owner of the database makes is found, at its first place."""

import json
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from coordinator.database.connection import Connection
from coordinator.proof.rules import FaultKind, LedgerFault, seal_hash
from coordinator.proof.seal import seal_of
from coordinator.proof.verify import Verification, verify
from tests.integration.coordinator.fixtures import NOON, connected
from tests.integration.coordinator.proof.conftest import DAY, MONTH, SEALS, forging

pytestmark = pytest.mark.anyio

# A transfer in the middle of the ledger: a line of usage whose report has others before and after it in its lane.
MIDDLE = """
SELECT transfer.* FROM transfer JOIN lane USING (epoch, lane)
WHERE cause = 'usage' AND seq > 3 AND seq < last_seq - 3 AND line > 0 AND period = '2026-11'
ORDER BY id OFFSET 20 LIMIT 1
"""
MOVEMENT = "SELECT * FROM transfer WHERE seq IS NULL ORDER BY id OFFSET 2 LIMIT 1"
ENTRY = "SELECT * FROM audit WHERE actor = 'token:1' ORDER BY id OFFSET 2 LIMIT 1"


async def found_after(books: str, forge: "Forge") -> LedgerFault:
    async with forging(books) as forger:
        await forge(forger)
        found = await verify(forger, NOON)
        assert not found.intact
        assert found.fault is not None
        return found.fault


async def test_untouched_books_are_intact(books: str) -> None:
    async with connected(books) as owner, owner.transaction():
        found = await verify(owner, NOON)
        counted = await owner.fetchrow(
            """SELECT (SELECT count(*) FROM lane) AS lanes, (SELECT count(*) FROM report) AS reports,
            (SELECT count(*) FROM transfer WHERE seq IS NOT NULL) AS transfers,
            (SELECT count(*) FROM transfer WHERE seq IS NULL) AS movements,
            (SELECT position FROM seal ORDER BY number DESC LIMIT 1) AS position,
            (SELECT hash FROM seal ORDER BY number DESC LIMIT 1) AS hash, (SELECT count(*) FROM seal) AS seals"""
        )
    assert counted is not None
    assert found == Verification(
        intact=True,
        fault=None,
        lanes=counted["lanes"],
        reports=counted["reports"],
        transfers=counted["transfers"],
        movements=counted["movements"],
        seals=counted["seals"],
        sealed_position=counted["position"],
        newest_seal=counted["hash"].hex(),
    )
    assert (counted["lanes"], counted["seals"], counted["movements"]) == (16, SEALS, SEALS)
    assert counted["reports"] > 200
    assert counted["transfers"] > counted["reports"]


# --- every column -----------------------------------------------------------------------------------------------------


async def columns(connection: Connection, table: str) -> list[str]:
    rows = await connection.fetch(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = 'public' AND table_name = $1", table
    )
    assert rows
    return [row["column_name"] for row in rows]


def other(column: str, value: Any) -> Any:
    """Return something else that the column can hold."""
    if column in OTHERS:
        return OTHERS[column] if value != OTHERS[column] else OTHERS[column + " "]
    if value is None:
        return NOTHINGS[column]
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    if isinstance(value, UUID):
        return UUID(int=value.int + 1_000_000)
    return value + {int: 1, str: "x", datetime: timedelta(microseconds=1)}[type(value)]


OTHERS: dict[str, Any] = {
    "period": DAY,
    "period ": MONTH,
    "src": "suspense",
    "dst": "written_off",
    "quota": "exports:tenant=umbrella",
    "quota ": "exports:tenant=acme",
    "dimensions": '{"tenant": "acme", "policy": "other"}',
    "details": '{"version": 2}',
    "balances": "{}",
}
NOTHINGS: dict[str, Any] = {
    "reverses": 1,
    "movement_id": "00000000-0000-0000-0000-000000000077",
    "window_at": NOON,
    "lane": 1,
    "seq": 10_000,
    "line": 1,
}


Forge = Callable[[Connection], Awaitable[object]]


def sql(script: str) -> Forge:
    return lambda forger: forger.execute(script)


def edit(table: str, row: Any, column: str) -> Forge:
    key = {"transfer": ["period", "id"], "report": ["epoch", "lane", "seq"], "lane": ["epoch", "lane"]}
    names = key.get(table) or ["number" if table == "seal" else "id"]
    where = " AND ".join(f"{name} = ${place}" for place, name in enumerate(names, 2))

    async def forge(forger: Connection) -> None:
        key = [row[name] for name in names]
        done = await forger.execute(f"UPDATE {table} SET {column} = $1 WHERE {where}", other(column, row[column]), *key)
        assert done == "UPDATE 1"

    return forge


# Names of rows, on which no bill, balance or position depends.
NAMES_ONLY = {"id"}


async def test_every_column_of_a_reports_transfer_is_proven(books: str) -> None:
    async with connected(books) as owner:
        row = await owner.fetchrow(MIDDLE)
        names = await columns(owner, "transfer")
    assert row is not None
    for column in sorted({*names} - NAMES_ONLY):
        fault = await found_after(books, edit("transfer", row, column))
        assert (fault.epoch, fault.lane, fault.seq) == (row["epoch"], row["lane"], row["seq"]), (column, fault)


async def test_every_column_of_a_report_is_proven(books: str) -> None:
    async with connected(books) as owner:
        place = await owner.fetchrow(MIDDLE)
        assert place is not None
        row = await owner.fetchrow(
            "SELECT * FROM report WHERE (epoch, lane, seq) = ($1, $2, $3)", place["epoch"], place["lane"], place["seq"]
        )
        names = await columns(owner, "report")
    assert row is not None

    for column in names:
        fault = await found_after(books, edit("report", row, column))
        if column == "position":
            assert (fault.kind, fault.seal) == (FaultKind.SEALED_REPORTS_CHANGED, await seal_over(books, row[column]))
        else:
            assert (fault.epoch, fault.lane, fault.seq) == (row["epoch"], row["lane"], row["seq"]), (column, fault)


async def seal_over(books: str, position: int) -> int:
    async with connected(books) as owner:
        number: int = await owner.fetchval("SELECT min(number) FROM seal WHERE position >= $1", position)
        return number


@pytest.mark.parametrize("column", ["last_seq", "last_hash", "head"])
async def test_every_column_of_a_lane_is_proven(books: str, column: str) -> None:
    async with connected(books) as owner:
        row = await owner.fetchrow("SELECT * FROM lane WHERE last_seq > 0 ORDER BY epoch DESC, lane DESC LIMIT 1")
        assert row is not None
        assert {*await columns(owner, "lane")} == {"epoch", "lane", "last_seq", "last_hash", "head"}
    fault = await found_after(books, edit("lane", row, column))
    place = row["last_seq"] + 1 if column == "last_seq" else row["last_seq"]
    kind = FaultKind.REPORT_MISSING if column == "last_seq" else FaultKind.LANE_CHANGED
    assert (fault.kind, fault.epoch, fault.lane, fault.seq) == (kind, row["epoch"], row["lane"], place)


async def test_every_column_of_a_movement_is_proven(books: str) -> None:
    async with connected(books) as owner:
        row = await owner.fetchrow(MOVEMENT)
        names = await columns(owner, "transfer")
    assert row is not None
    for column in names:
        fault = await found_after(books, edit("transfer", row, column))
        # A movement with a number becomes a report, so that report is missing.
        expected = FaultKind.LANE_UNKNOWN if column == "seq" else FaultKind.SEALED_MOVEMENTS_CHANGED
        assert fault.kind is expected, (column, fault)
        assert column == "seq" or fault.seal == 3, (column, fault)


async def test_every_column_of_the_audit_is_proven(books: str) -> None:
    async with connected(books) as owner:
        row = await owner.fetchrow(ENTRY)
        names = await columns(owner, "audit")
    assert row is not None
    for column in names:
        fault = await found_after(books, edit("audit", row, column))
        assert (fault.kind, fault.seal) == (FaultKind.SEALED_AUDIT_CHANGED, 3), column


async def test_every_column_of_a_seal_is_proven(books: str) -> None:
    async with connected(books) as owner:
        row = await owner.fetchrow("SELECT * FROM seal WHERE number = 3")
        names = await columns(owner, "seal")
    assert row is not None

    for column in names:
        fault = await found_after(books, edit("seal", row, column))
        assert (fault.kind in {FaultKind.SEAL_CHANGED, FaultKind.SEAL_MISSING}, fault.seal) == (True, 3), column


@pytest.mark.parametrize("table", ["pool", "lease"])
async def test_every_account_of_a_pool_and_of_a_lease_is_proven(books: str, table: str) -> None:
    async with connected(books) as owner:
        accounts = [
            name
            for name in await columns(owner, table)
            if await owner.fetchval(f"SELECT pg_typeof({name})::text = 'bigint' FROM {table} LIMIT 1")
        ]
    # Columns that steer grants, and figures by the region itself, which reconciliation compares.
    steering = {"epoch", "demand_milli", "waiting", "last_grant", "region_consumed", "region_returned"}
    # The bound of overdrafts; actual overdrafts are booked as overage.
    steering |= {"overdraft", "overdrawn"}
    for account in sorted({*accounts} - steering):
        change = f"UPDATE {table} SET {account} = {account} + 1 WHERE quota = 'exports:tenant=acme'"
        fault = await found_after(books, sql(change))
        assert (fault.kind, fault.period) == (FaultKind.BALANCE, MONTH), account
        assert account in fault.reason


# --- whole rows -------------------------------------------------------------------------------------------------------

OF_THE_REPORT = "(epoch, lane, seq) = ({epoch}, {lane}, {seq})"
FORGERIES: dict[str, tuple[str, FaultKind]] = {
    "a transfer is deleted": ("DELETE FROM transfer WHERE id = {id}", FaultKind.LINES_DIFFER),
    "all transfers of a report are deleted": (
        f"DELETE FROM transfer WHERE {OF_THE_REPORT}",
        FaultKind.LINES_DIFFER,
    ),
    "a report is deleted, its transfers are left": (
        f"DELETE FROM report WHERE {OF_THE_REPORT}",
        FaultKind.TRANSFER_WITHOUT_REPORT,
    ),
    "a report is deleted with its transfers": (
        f"DELETE FROM transfer WHERE {OF_THE_REPORT}; DELETE FROM report WHERE {OF_THE_REPORT}",
        FaultKind.REPORT_MISSING,
    ),
    "a transfer is inserted": (
        "CREATE TEMP TABLE more AS SELECT * FROM transfer WHERE id = {id}; UPDATE more SET id = 900000, line = 900;"
        "INSERT INTO transfer SELECT * FROM more",
        FaultKind.LINES_DIFFER,
    ),
    "a transfer is inserted, and the report counts it": (
        "CREATE TEMP TABLE more AS SELECT * FROM transfer WHERE id = {id}; UPDATE more SET id = 900000, line = 900;"
        "INSERT INTO transfer SELECT * FROM more;"
        f"UPDATE report SET lines = lines + 1 WHERE {OF_THE_REPORT}",
        FaultKind.REPORT_CHANGED,
    ),
    "two transfers are swapped": (
        "UPDATE transfer SET line = CASE id WHEN {id} THEN (SELECT line FROM transfer WHERE id = {before}) ELSE {line}"
        " END WHERE id IN ({id}, {before})",
        FaultKind.REPORT_CHANGED,
    ),
    "the actor is changed": (
        f"UPDATE transfer SET region = 'ap-north' WHERE {OF_THE_REPORT}",
        FaultKind.REPORT_CHANGED,
    ),
    "two reports are swapped": (
        f"UPDATE transfer SET seq = -1 WHERE {OF_THE_REPORT}; UPDATE report SET seq = -1 WHERE {OF_THE_REPORT};"
        "UPDATE transfer SET seq = {seq} WHERE (epoch, lane, seq) = ({epoch}, {lane}, {seq} + 1);"
        "UPDATE report SET seq = {seq} WHERE (epoch, lane, seq) = ({epoch}, {lane}, {seq} + 1);"
        "UPDATE transfer SET seq = {seq} + 1 WHERE seq = -1; UPDATE report SET seq = {seq} + 1 WHERE seq = -1",
        FaultKind.REPORT_CHANGED,
    ),
}


@pytest.mark.parametrize("what", FORGERIES)
async def test_a_forged_row_is_found_at_its_place(books: str, what: str) -> None:
    async with connected(books) as owner:
        row = await owner.fetchrow(MIDDLE)
        assert row is not None
        of_it = row["epoch"], row["lane"], row["seq"]
        before = await owner.fetchval(
            "SELECT id FROM transfer WHERE (epoch, lane, seq) = ($1, $2, $3) AND line < $4 ORDER BY line DESC LIMIT 1",
            *of_it,
            row["line"],
        )
    sql, kind = FORGERIES[what]
    fault = await found_after(books, lambda forger: forger.execute(sql.format(**row, before=before)))
    assert (fault.kind, fault.epoch, fault.lane, fault.seq) == (kind, *of_it), fault


LAST = "(epoch, lane, seq) = (SELECT epoch, lane, last_seq FROM lane WHERE epoch = {epoch} AND lane = {lane})"
FIRST = "(epoch, lane, seq) = ({epoch}, {lane}, 1)"
ENDS: dict[str, tuple[str, FaultKind, int]] = {
    "the first report is gone": (
        f"DELETE FROM transfer WHERE {FIRST}; DELETE FROM report WHERE {FIRST}",
        FaultKind.REPORT_MISSING,
        1,
    ),
    "the last report is gone": (
        f"DELETE FROM transfer WHERE {LAST}; DELETE FROM report WHERE {LAST}",
        FaultKind.REPORT_MISSING,
        0,
    ),
    "the whole lane is empty": (
        "DELETE FROM transfer WHERE (epoch, lane) = ({epoch}, {lane});"
        "DELETE FROM report WHERE (epoch, lane) = ({epoch}, {lane})",
        FaultKind.REPORT_MISSING,
        1,
    ),
    "there is one more report": (
        "INSERT INTO report SELECT epoch, lane, {last_seq} + 1, 900000, body_hash, head, 0, recorded_at "
        "FROM report WHERE (epoch, lane, seq) = ({epoch}, {lane}, {last_seq})",
        FaultKind.REPORT_UNEXPECTED,
        -1,
    ),
    "there are transfers of one more report": (
        "CREATE TEMP TABLE more AS SELECT * FROM transfer WHERE (epoch, lane, seq) = ({epoch}, {lane}, {last_seq});"
        "UPDATE more SET id = id + 900000, seq = seq + 1; INSERT INTO transfer SELECT * FROM more",
        FaultKind.TRANSFER_WITHOUT_REPORT,
        -1,
    ),
}


@pytest.mark.parametrize("lane_is", ["ASC", "DESC"])  # one with successors, and the last
@pytest.mark.parametrize("what", ENDS)
async def test_neither_end_of_a_lane_can_be_moved(books: str, what: str, lane_is: str) -> None:
    sql, kind, place = ENDS[what]
    async with connected(books) as owner:
        lane = await owner.fetchrow(
            f"SELECT * FROM lane WHERE last_seq > 5 ORDER BY epoch {lane_is}, lane {lane_is} LIMIT 1"
        )
    assert lane is not None
    fault = await found_after(books, lambda forger: forger.execute(sql.format(**lane)))
    seq = place if place > 0 else lane["last_seq"] - place
    assert (fault.kind, fault.epoch, fault.lane, fault.seq) == (kind, lane["epoch"], lane["lane"], seq)


async def test_a_lane_that_was_never_opened_has_nothing_booked(books: str) -> None:
    row = (await one(books, "SELECT epoch, lane FROM lane WHERE last_seq > 0 LIMIT 1"))[0]
    fault = await found_after(books, lambda f: f.execute("DELETE FROM lane WHERE (epoch, lane) = ($1, $2)", *row))
    assert (fault.kind, fault.epoch, fault.lane, fault.seq) == (FaultKind.LANE_UNKNOWN, *row, 1)


async def test_a_lane_without_reports_stands_at_its_beginning(books: str) -> None:
    row = (await one(books, "SELECT epoch, lane FROM lane WHERE last_seq = 0 ORDER BY 1, 2 LIMIT 1"))[0]
    fault = await found_after(
        books,
        lambda f: f.execute("UPDATE lane SET head = sha256('x') WHERE (epoch, lane) = ($1, $2)", *row),
    )
    assert (fault.kind, fault.epoch, fault.lane) == (FaultKind.LANE_CHANGED, *row)


async def test_an_epoch_cannot_be_moved_to_another_region(books: str) -> None:
    epoch = (await one(books, "SELECT min(epoch) FROM report"))[0][0]
    fault = await found_after(
        books, lambda f: f.execute("UPDATE region_epoch SET region = 'ap-north' WHERE epoch = $1", epoch)
    )
    assert (fault.kind, fault.epoch, fault.seq) == (FaultKind.REPORT_CHANGED, epoch, 1)


# --- forgers who know the chain, found by seals -----------------------------------------------------------------------


async def test_a_lane_cut_together_with_its_row_differs_from_the_seal(books: str) -> None:
    async def cut(forger: Connection) -> None:
        lane = await forger.fetchrow("SELECT epoch, lane FROM lane WHERE last_seq > 9 ORDER BY 1, 2 LIMIT 1")
        assert lane is not None
        place = lane["epoch"], lane["lane"]
        await forger.execute("DELETE FROM transfer WHERE (epoch, lane) = ($1, $2) AND seq > 5", *place)
        await forger.execute("DELETE FROM report WHERE (epoch, lane) = ($1, $2) AND seq > 5", *place)
        await forger.execute(
            """UPDATE lane SET last_seq = seq, head = report.head, last_hash = body_hash FROM report
            WHERE (report.epoch, report.lane, seq) = ($1, $2, 5) AND (lane.epoch, lane.lane) = ($1, $2)""",
            *place,
        )

    fault = await found_after(books, cut)
    assert fault.kind is FaultKind.SEALED_REPORTS_CHANGED


async def test_an_invented_epoch_differs_from_the_seal(books: str) -> None:
    epoch = (await one(books, "SELECT max(epoch) FROM report"))[0][0]
    forgery = "; ".join(
        f"DELETE FROM {table} WHERE epoch = {epoch}"
        for table in ("transfer", "report", "lane", "lease", "region_epoch")
    )
    assert (await found_after(books, lambda f: f.execute(forgery))).kind is FaultKind.SEALED_REPORTS_CHANGED


async def test_a_deleted_or_invented_movement_differs_from_the_seal(books: str) -> None:
    movement = f"(SELECT id FROM ({MOVEMENT}) AS one)"
    for forgery in (
        f"DELETE FROM transfer WHERE id = {movement}",
        f"CREATE TEMP TABLE more AS {MOVEMENT}; UPDATE more SET part = 1; INSERT INTO transfer SELECT * FROM more",
    ):
        fault = await found_after(books, sql(forgery))
        assert (fault.kind, fault.seal) == (FaultKind.SEALED_MOVEMENTS_CHANGED, 3)


async def test_a_seal_that_is_missing_is_named(books: str) -> None:
    fault = await found_after(books, lambda f: f.execute("DELETE FROM seal WHERE number = 2"))
    assert (fault.kind, fault.seal) == (FaultKind.SEAL_MISSING, 2)


async def test_a_recomputed_seal_does_not_match_its_successor(books: str) -> None:
    async def forge(forger: Connection) -> None:
        third = seal_of(await forger.fetchrow("SELECT * FROM seal WHERE number = 3"))  # type: ignore[arg-type]
        forged = third._replace(sealed_at=third.sealed_at + timedelta(microseconds=1))
        await forger.execute(
            "UPDATE seal SET sealed_at = $1, hash = $2 WHERE number = 3", forged.sealed_at, seal_hash(forged)
        )

    fault = await found_after(books, forge)
    assert (fault.kind, fault.seal) == (FaultKind.SEAL_CHANGED, 4)


async def test_recomputed_seals_do_not_hide_a_wrong_balance(books: str) -> None:
    """The sums of a seal are compared with the transfers, not only with its hash."""

    async def forge(forger: Connection) -> None:
        last = seal_of(await forger.fetchrow("SELECT * FROM seal ORDER BY number DESC LIMIT 1"))  # type: ignore[arg-type]
        forged = last._replace(balances={**last.balances, MONTH: {**last.balances[MONTH], "consumed": 1}})
        await forger.execute(
            "UPDATE seal SET balances = $2, hash = $3 WHERE number = $1",
            forged.number,
            json.dumps(forged.balances),
            seal_hash(forged),
        )

    fault = await found_after(books, forge)
    assert (fault.kind, fault.period) == (FaultKind.SEALED_BALANCE_CHANGED, MONTH)


async def one(books: str, sql: str) -> list[Any]:
    async with connected(books) as owner:
        return list(await owner.fetch(sql))
