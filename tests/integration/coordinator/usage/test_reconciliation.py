"""Reconciliation finds each way in which an owner of the database can unbalance the ledger."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest

from coordinator.database.connection import Connection
from coordinator.usage.reconcile import read_settled
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region, problem

pytestmark = pytest.mark.anyio

ACME = "exports:tenant=acme"
AT = datetime(2026, 11, 18, 9, 5, tzinfo=UTC)

IMPATIENT_S = 2


@pytest.fixture
async def regions(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> list[Region]:
    await admin.put("/v1/limits", json=DOCUMENT)
    regions = [await open_region(admin_harness, admin, name) for name in ("eu-west", "us-east")]
    await regions[0].use(ACME, "2026-11", [Used(AT, 30), Used(AT, 10, "bulk")])
    await regions[1].use(ACME, "2026-11", [Used(AT, 20)])
    await regions[0].exchange(ACME, demands=[{"quota": ACME, "waiting": 25}])
    return regions


async def reconciled(finance: httpx.AsyncClient) -> dict[str, Any]:
    answer = await finance.get("/v1/periods/2026-11/reconciliation")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def tampered(admin_harness: AdminHarness, *statements: str) -> None:
    """Change rows as the owner, without triggers. The CHECKs still hold, and the changes satisfy them."""
    async with admin_harness.owner.transaction():
        await admin_harness.owner.execute("SET LOCAL session_replication_role = replica")
        for statement in statements:
            assert (await admin_harness.owner.execute(statement)).split()[-1] == "1"


@pytest.mark.usefixtures("regions")
async def test_an_honest_ledger_is_balanced(admin_harness: AdminHarness, finance: httpx.AsyncClient) -> None:
    admin_harness.clock.time += timedelta(seconds=90)
    found = await reconciled(finance)
    assert (found["period"], found["status"], found["drift"], found["findings"]) == ("2026-11", "balanced", 0, [])
    (quota,) = found["quotas"]
    assert (quota["quota"], quota["quota_key"], quota["tenant"]) == ("exports", ACME, "acme")
    assert (quota["funded"], quota["consumed"], quota["suspense"], quota["overage"]) == (1000, 60, 0, 0)
    assert (quota["unallocated"], quota["outstanding"]) == (1000 - 60 - 25, 25)
    eu, us = quota["regions"]
    assert [(region["region"], region["consumed"], region["region_total"]) for region in (eu, us)] == [
        ("eu-west", 40, 40),
        ("us-east", 20, 20),
    ]
    assert [(region["granted"], region["outstanding"], region["returned"]) for region in (eu, us)] == [
        (65, 25, 0),
        (20, 0, 0),
    ]
    assert [region["oldest_unreported_age_ms"] for region in (eu, us)] == [90_000, None]
    for region in (eu, us):
        assert (region["drift"], region["gaps"], region["chain"]) == (0, 0, "intact")


@pytest.mark.usefixtures("regions")
async def test_each_account_is_balanced_three_ways(finance: httpx.AsyncClient) -> None:
    balance = (await finance.get("/v1/periods/2026-11/trial-balance")).json()
    assert (balance["status"], balance["sources"], balance["uses"]) == ("balanced", 1000, 1000)
    accounts = {account.pop("account"): list(account.values()) for account in balance["accounts"]}
    assert accounts["consumed"] == [60, 60, 60, 60]
    assert accounts["outstanding"] == [25, 25, 25, None]
    assert accounts["granted"] == [85, None, 85, None]
    assert accounts["returned"] == [0, None, 0, 0]
    assert accounts["unallocated"] == [915, 915, None, None]
    assert accounts["funded"] == [1000, 1000, None, None]


async def test_a_quarantined_lease_is_reported(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, regions: list[Region]
) -> None:
    """A region's two counts disagree: its units are in suspense, and the month is not balanced."""
    lease = regions[0].leases[ACME, "2026-11"] | {"consumed": 45, "lines": []}
    await regions[0].exchange(ACME, frozen=[lease])
    found = await reconciled(finance)
    eu = found["quotas"][0]["regions"][0]
    assert (eu["suspense"], eu["outstanding"], eu["region_total"]) == (25, 0, 45)
    assert (found["status"], found["drift"]) == ("drift", 5)


async def test_returns_of_a_lost_incarnation_stay_outstanding_without_a_fault(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, regions: list[Region]
) -> None:
    """They may have been spent as well, so they are not booked as returned; the ledger has no fault because of that."""
    await open_region(admin_harness, admin, "eu-west")
    await regions[0].exchange(ACME, frozen=[regions[0].leases[ACME, "2026-11"] | {"returned": 20, "lines": []}])
    found = await reconciled(finance)
    assert (found["status"], found["quotas"][0]["regions"][0]["outstanding"]) == ("balanced", 25)


IN_EU = "epoch = (SELECT epoch FROM region_epoch WHERE region = 'eu-west')"
LAST = f"{IN_EU} AND seq = (SELECT max(seq) FROM report WHERE {IN_EU})"


@pytest.mark.parametrize(
    ("statements", "word", "drift"),
    [
        # usage
        ([f"DELETE FROM transfer WHERE cause = 'usage' AND units = 10 AND {IN_EU}"], "drift", 10),
        ([f"UPDATE transfer SET units = 31 WHERE cause = 'usage' AND units = 30 AND {IN_EU}"], "drift", 1),
        ([f"UPDATE lease SET region_consumed = 39 WHERE {IN_EU}"], "drift", 1),
        # two that would hide each other in a sum
        (
            [
                f"UPDATE transfer SET units = 29 WHERE cause = 'usage' AND units = 30 AND {IN_EU}",
                "UPDATE transfer SET units = 21 WHERE cause = 'usage' AND units = 20",
            ],
            "drift",
            2,
        ),
        ([f"UPDATE lease SET region_returned = 1 WHERE {IN_EU}"], "returns", 0),
        # projections, within the CHECKs
        (["UPDATE pool SET funded = funded + 5, unallocated = unallocated + 5"], "projection", 0),
        (["UPDATE pool SET unallocated = unallocated - 5, written_off = written_off + 5"], "projection", 0),
        ([f"UPDATE lease SET granted = granted + 5, outstanding = outstanding + 5 WHERE {IN_EU}"], "projection", 0),
        (
            [f"UPDATE lease SET granted = granted + 5, returned = 5, region_returned = 5 WHERE {IN_EU}"],
            "projection",
            0,
        ),
        (
            ["UPDATE transfer SET units = units + 1 WHERE cause = 'funded'"],
            "projection",
            0,
        ),
        # reports
        ([f"DELETE FROM report WHERE {IN_EU} AND seq = 1"], "gaps", 0),
        ([f"DELETE FROM report WHERE {LAST}"], "gaps", 0),
        ([f"UPDATE report SET head = 'x' WHERE {LAST}"], "chain", 0),
        ([f"UPDATE lane SET head = 'x' WHERE last_seq > 0 AND {IN_EU}"], "chain", 0),
    ],
)
@pytest.mark.usefixtures("regions")
async def test_every_change_that_bypasses_the_ledger_is_found(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, statements: list[str], word: str, drift: int
) -> None:
    await tampered(admin_harness, *statements)
    found = await reconciled(finance)
    balance = (await finance.get("/v1/periods/2026-11/trial-balance")).json()
    assert balance["status"] == (word if word in ("drift", "returns", "projection") else "balanced")
    assert (found["status"], found["drift"]) == (word, drift), found["findings"]
    assert found["findings"][0]["kind"] == word
    assert all(finding["reason"] and finding["quota_key"] == ACME for finding in found["findings"])


@pytest.mark.usefixtures("regions")
async def test_a_truncated_lane_is_found(admin_harness: AdminHarness, finance: httpx.AsyncClient) -> None:
    """The newest report and its lane's last number are deleted together, but the head still shows it."""
    await tampered(
        admin_harness,
        f"DELETE FROM report WHERE {LAST}",
        f"UPDATE lane SET last_seq = last_seq - 1 WHERE last_seq > 0 AND {IN_EU}",
    )
    assert (await reconciled(finance))["status"] == "chain"
    await admin_harness.owner.execute("SET session_replication_role = replica")
    await admin_harness.owner.execute(f"DELETE FROM report WHERE {IN_EU}")
    await admin_harness.owner.execute(f"UPDATE lane SET last_seq = 0 WHERE {IN_EU}")
    assert (await reconciled(finance))["status"] == "chain"


@pytest.mark.usefixtures("regions")
async def test_periods_are_listed_and_read(finance: httpx.AsyncClient) -> None:
    november = {
        "id": "2026-11",
        "kind": "month",
        "from": "2026-11-01T00:00:00Z",
        "to": "2026-12-01T00:00:00Z",
        "state": "open",
        **dict.fromkeys(("close_requested_at", "closed_at", "closed_by", "position", "transfers", "root")),
    }
    assert (await finance.get("/v1/periods")).json() == {"data": [november], "page": {"next": None}}
    assert (await finance.get("/v1/periods/2026-11")).json() == november
    for path in (
        "2026-10",
        "2026-10/reconciliation",
        "2026-10/trial-balance",
        "x%00",
        "x%00/reconciliation",
        "2026-11-18",
    ):
        assert problem(await finance.get(f"/v1/periods/{path}")) == (404, [])
    assert problem(await finance.get("/v1/periods?state=open")) == (422, [("state", "unknown")])


# --- a large one ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def impatient(database: str) -> AsyncIterator[Connection]:
    """Open a session that, like a coordinator's, ends slow statements on both its sides."""
    settings = {"statement_timeout": f"{IMPATIENT_S}s"}
    connection = await asyncpg.connect(database, command_timeout=IMPATIENT_S, server_settings=settings)
    yield connection
    await connection.close()


@pytest.mark.usefixtures("regions")
async def test_reading_all_lines_of_a_period_may_take_longer_than_any_other_statement(
    admin_harness: AdminHarness, impatient: Connection
) -> None:
    """Otherwise a large month could not be closed. Each of the two statements is delayed for a while."""
    for table in ("transfer", "usage_day"):
        async with impatient.transaction(isolation="repeatable_read", readonly=True):
            transaction = admin_harness.owner.transaction()
            await transaction.start()
            await admin_harness.owner.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            reading = asyncio.create_task(read_settled(impatient, "2026-11"))
            await until_it_takes_long(admin_harness, reading, impatient.get_server_pid())
            await transaction.commit()
            assert (await reading).misrolled == []


async def until_it_takes_long(admin_harness: AdminHarness, reading: asyncio.Task[Any], pid: int) -> None:
    async with asyncio.timeout(60):
        while not reading.done() and not await admin_harness.owner.fetchval(TAKES_LONG, pid):  # noqa: ASYNC110 - it is Postgres
            await asyncio.sleep(0.02)


TAKES_LONG = """
SELECT wait_event_type = 'Lock' AND clock_timestamp() - query_start > interval '3 seconds'
FROM pg_stat_activity WHERE pid = $1
"""
