"""Two people correct the ledger by adjustments, which are bounded and booked once."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import asyncpg
import httpx
import pytest

from coordinator.periods.close import period_root
from coordinator.proof.verify import verify
from protocol.periods import minute_of
from tests.integration.coordinator.admin_harness import (
    DOCUMENT,
    AdminHarness,
    Region,
    Used,
    open_region,
    problem,
    sealed,
)

pytestmark = pytest.mark.anyio

ACME, NOVEMBER, OCTOBER = "exports:tenant=acme", "2026-11", "2026-10"
CREDIT = {"quota": ACME, "period": NOVEMBER, "kind": "credit", "units": 100, "reason": "an outage", "document": "T-1"}
NOT_THERE = "00000000-0000-0000-0000-000000000000"


class People:
    """Let one person propose and the other approve."""

    def __init__(self, proposer: httpx.AsyncClient, approver: httpx.AsyncClient) -> None:
        self.proposer, self.approver = proposer, approver

    async def proposed(self, **changes: Any) -> dict[str, Any]:
        answer = await self.proposer.post("/v1/adjustments", json=CREDIT | changes)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def approve(self, made: Mapping[str, Any]) -> httpx.Response:
        return await self.approver.post(f"/v1/adjustments/{made['id']}:approve")

    async def adjusted(self, **changes: Any) -> dict[str, Any]:
        answer = await self.approve(await self.proposed(**changes))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture
async def people(admin_harness: AdminHarness) -> People:
    return People(await admin_harness.caller("adjust:propose"), await admin_harness.caller("adjust:approve"))


@pytest.fixture
async def region(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> Region:
    """A region that has used 60 of the 1,000 units of November."""
    await admin.put("/v1/limits", json=DOCUMENT)
    region = await open_region(admin_harness, admin, "eu-west")
    await region.use(ACME, NOVEMBER, [Used(datetime(2026, 11, 18, 9, 5, tzinfo=UTC), 60)])
    return region


async def pool(admin_harness: AdminHarness, period: str = NOVEMBER) -> dict[str, int]:
    row = await admin_harness.owner.fetchrow("SELECT * FROM pool WHERE (quota, period) = ($1, $2)", ACME, period)
    assert row is not None
    columns = ("funded", "adjustment", "credited", "unallocated", "consumed", "written_off")
    return {name: row[name] for name in columns}


async def moved(admin_harness: AdminHarness) -> list[tuple[Any, ...]]:
    rows = await admin_harness.owner.fetch(
        """SELECT movement_id::text, period, charge_period, src, dst, units, cause FROM transfer
        WHERE 'adjustment' IN (src, dst) ORDER BY id"""
    )
    return [tuple(row) for row in rows]


async def all_agree(admin_harness: AdminHarness, finance: httpx.AsyncClient) -> None:
    """Book, seal and close, and run all verifications."""
    await sealed(admin_harness)
    async with admin_harness.owner.transaction(isolation="repeatable_read"):
        proven = await verify(admin_harness.owner, admin_harness.clock.now())
    assert proven.fault is None
    for period in (await finance.get("/v1/periods")).json()["data"]:
        found = (await finance.get(f"/v1/periods/{period['id']}/reconciliation")).json()
        assert (found["status"], found["findings"]) == ("balanced", [])
        balance = (await finance.get(f"/v1/periods/{period['id']}/trial-balance")).json()
        assert (balance["status"], balance["sources"]) == ("balanced", balance["uses"])


async def closed(admin_harness: AdminHarness, admin: httpx.AsyncClient, period: str) -> None:
    await admin.post(f"/v1/periods/{period}:close", json={})
    admin_harness.clock.move(minutes=20)
    answer = await admin.post(f"/v1/periods/{period}:close", json={})
    assert (answer.status_code, answer.json()["period"]["state"]) == (200, "closed"), answer.text


@pytest.mark.usefixtures("region")
async def test_a_credit_can_be_spent_and_a_debit_cannot(
    admin_harness: AdminHarness, people: People, finance: httpx.AsyncClient
) -> None:
    credit = await people.adjusted()
    assert (credit["state"], credit["booked_in"]) == ("approved", NOVEMBER)
    debit = await people.adjusted(kind="debit", units=140)
    assert await moved(admin_harness) == [
        (credit["id"], NOVEMBER, NOVEMBER, "adjustment", "unallocated", 100, "credited"),
        (debit["id"], NOVEMBER, NOVEMBER, "unallocated", "adjustment", 140, "debited"),
    ]
    assert await pool(admin_harness) == {
        "funded": 1000,
        "adjustment": -40,
        "credited": -40,
        "unallocated": 900,
        "consumed": 60,
        "written_off": 0,
    }
    await all_agree(admin_harness, finance)


async def test_a_credit_raises_the_reported_limit_and_can_be_used(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region, people: People, finance: httpx.AsyncClient
) -> None:
    await people.adjusted()
    await region.use(ACME, NOVEMBER, [Used(datetime(2026, 11, 18, 9, 6, tzinfo=UTC), 1040)])
    found = await pool(admin_harness)
    assert (found["consumed"], found["unallocated"]) == (1100, 0)
    allowance = (await finance.get(f"/v1/periods/{NOVEMBER}/reconciliation")).json()["quotas"][0]
    assert (allowance["overage"], allowance["adjustment"]) == (0, 100)
    await admin.put("/v1/limits", json=DOCUMENT | {"default_plan": "pro"})
    await all_agree(admin_harness, finance)


async def test_a_lower_limit_takes_no_credit_away(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region, people: People
) -> None:
    await people.adjusted()
    lower = [quota | {"limit": 60} if quota["name"] == "exports" else quota for quota in DOCUMENT["quotas"]]
    await admin.put("/v1/limits", json=DOCUMENT | {"quotas": lower})
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 1}])
    found = await pool(admin_harness)
    assert (found["funded"], found["credited"], found["unallocated"]) == (60, 100, 99)


@pytest.mark.usefixtures("region")
async def test_a_write_off_stays_used_and_is_not_billed(
    admin_harness: AdminHarness, people: People, finance: httpx.AsyncClient
) -> None:
    made = await people.adjusted(kind="write_off", units=40)
    assert await moved(admin_harness) == [
        (made["id"], NOVEMBER, NOVEMBER, "adjustment", "written_off", 40, "written_off")
    ]
    found = await pool(admin_harness)
    assert (found["consumed"], found["written_off"], found["unallocated"], found["credited"]) == (60, 40, 940, 0)
    await all_agree(admin_harness, finance)
    answer = await people.approve(await people.proposed(kind="write_off", units=21))
    assert (answer.status_code, answer.json()["refusal"]) == (409, "more_than_billed")
    await people.adjusted(kind="write_off", units=20)


@pytest.mark.usefixtures("region")
async def test_a_debit_never_exceeds_the_free_units(admin_harness: AdminHarness, people: People) -> None:
    before = await pool(admin_harness)
    answer = await people.approve(await people.proposed(kind="debit", units=941))
    assert (answer.status_code, answer.json()["refusal"]) == (409, "more_than_unallocated")
    assert await pool(admin_harness) == before
    await people.adjusted(kind="debit", units=940)


async def test_a_debit_before_the_first_lease_lowers_the_limit(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, people: People, finance: httpx.AsyncClient
) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    await people.adjusted(kind="debit", units=300)
    found = await pool(admin_harness)
    assert (found["funded"], found["unallocated"]) == (1000, 700)
    await all_agree(admin_harness, finance)


async def softly(admin: httpx.AsyncClient, **changes: Any) -> None:
    """The quota has a soft cap."""
    first, *others = DOCUMENT["quotas"]
    answer = await admin.put("/v1/limits", json=DOCUMENT | {"quotas": [first | {"cap": "soft"} | changes, *others]})
    assert answer.status_code == 200, answer.text


async def test_a_debit_is_of_the_limit_and_not_of_its_soft_cap(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region, people: People, finance: httpx.AsyncClient
) -> None:
    await softly(admin)
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 800}])
    for _ in range(2):
        await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 1}])  # the soft cap always has more
        await people.adjusted(kind="debit", units=500)
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 1}])
    answer = await people.approve(await people.proposed(kind="debit", units=1))
    assert (answer.status_code, answer.json()["refusal"]) == (409, "more_than_unallocated")
    await region.use(ACME, NOVEMBER, [Used(datetime(2026, 11, 18, 9, 6, tzinfo=UTC), 70)])
    kept = await admin_harness.owner.fetchrow("SELECT consumed, overage_used, funded + credited FROM pool")
    assert tuple(kept or ()) == (130, 70, 0)  # all that was used after it is overage
    await all_agree(admin_harness, finance)


async def test_a_lower_limit_keeps_the_debit(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region, people: People, finance: httpx.AsyncClient
) -> None:
    await softly(admin)
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 900}])
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 1}])  # the soft cap always has more
    await people.adjusted(kind="debit", units=500)
    for limit in (1000, 10):
        await softly(admin, limit=limit)
        await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 1}])
    kept = await admin_harness.owner.fetchrow("SELECT funded + credited >= 0 FROM pool")
    assert tuple(kept or ()) == (True,)
    await all_agree(admin_harness, finance)


async def test_a_credit_before_the_first_check_is_added_to_the_limit(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, people: People, finance: httpx.AsyncClient
) -> None:
    """Work was done during a store outage, and is reported before a first lease."""
    await admin.put("/v1/limits", json=DOCUMENT)
    await people.adjusted()
    region = await open_region(admin_harness, admin, "eu-west")
    lines = [{"minute": minute_of(datetime(2026, 11, 18, 9, 5, tzinfo=UTC)), "dimensions": {}, "units": 500}]
    done = {"quota": ACME, "period": NOVEMBER, "granted": 0, "overage": 0, "consumed": 500, "returned": 0}
    await region.exchange(ACME, frozen=[done | {"lines": lines}])
    kept = await admin_harness.owner.fetchrow("SELECT consumed, overage_used, funded + credited FROM pool")
    assert tuple(kept or ()) == (500, 0, 1100)
    await all_agree(admin_harness, finance)


async def test_an_adjustment_of_a_closed_period_is_booked_in_the_current_one(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, region: Region, people: People, finance: httpx.AsyncClient
) -> None:
    """A period that has ended, closed or not, has no units to spend."""
    admin_harness.clock.time = datetime(2026, 12, 2, 12, tzinfo=UTC)
    open_yet = await people.adjusted(units=1)
    assert open_yet["booked_in"] == "2026-12"
    await closed(admin_harness, admin, NOVEMBER)
    before = await pool(admin_harness)
    made = [await people.adjusted(kind=kind, units=5) for kind in ("credit", "debit", "write_off")]
    assert [each["booked_in"] for each in made] == ["2026-12"] * 3
    assert [row[1:6] for row in (await moved(admin_harness))[1:]] == [
        ("2026-12", NOVEMBER, "adjustment", "unallocated", 5),
        ("2026-12", NOVEMBER, "unallocated", "adjustment", 5),
        ("2026-12", NOVEMBER, "adjustment", "written_off", 5),
    ]
    assert await pool(admin_harness) == before
    answer = await people.approve(await people.proposed(kind="write_off", units=56))
    assert (answer.status_code, answer.json()["refusal"]) == (409, "more_than_billed")
    await all_agree(admin_harness, finance)
    admin_harness.clock.time = datetime(2027, 1, 2, 12, tzinfo=UTC)
    await closed(admin_harness, admin, "2026-12")
    await all_agree(admin_harness, finance)


@pytest.mark.usefixtures("region")
async def test_the_proposer_cannot_approve(admin_harness: AdminHarness, people: People) -> None:
    both = await admin_harness.caller("adjust:propose", "adjust:approve")
    made = (await both.post("/v1/adjustments", json=CREDIT)).json()
    before = await pool(admin_harness)
    answer = await both.post(f"/v1/adjustments/{made['id']}:approve")
    assert (answer.status_code, answer.json()["refusal"]) == (409, "same_person")
    with pytest.raises(asyncpg.CheckViolationError, match="adjustment_has_two_people"):
        await admin_harness.owner.execute(
            "UPDATE adjustment SET approved_by = proposed_by, approved_at = expires_at, booked_in = period"
        )
    assert (await pool(admin_harness), await moved(admin_harness)) == (before, [])


@pytest.mark.usefixtures("region")
async def test_an_adjustment_is_approved_once(admin_harness: AdminHarness, people: People) -> None:
    made = await people.proposed()
    first, again = await people.approve(made), await people.approve(made)
    assert (first.status_code, first.json()) == (200, again.json())
    another = await admin_harness.caller("adjust:approve")
    refused = await another.post(f"/v1/adjustments/{made['id']}:approve")
    assert (refused.status_code, refused.json()["refusal"]) == (409, "approved_before")
    withdrawn = await people.proposer.post(f"/v1/adjustments/{made['id']}:withdraw")
    assert (withdrawn.status_code, withdrawn.json()["refusal"]) == (409, "approved_before")
    assert len(await moved(admin_harness)) == 1
    rows = await admin_harness.owner.fetch("SELECT action FROM audit WHERE action LIKE 'adjustment%' ORDER BY id")
    assert [row["action"] for row in rows] == ["adjustment.proposed", "adjustment.approved"]


@pytest.mark.usefixtures("region")
async def test_parallel_approvals_book_an_adjustment_once(admin_harness: AdminHarness, people: People) -> None:
    made = await people.proposed()
    approvers = [await admin_harness.caller("adjust:approve") for _ in range(4)]
    answers = await asyncio.gather(*(each.post(f"/v1/adjustments/{made['id']}:approve") for each in approvers))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    assert (len(await moved(admin_harness)), (await pool(admin_harness))["credited"]) == (1, 100)


@pytest.mark.usefixtures("region")
async def test_two_adjustments_that_do_not_fit_together_are_not_both_approved(
    admin_harness: AdminHarness, people: People
) -> None:
    """Twice 40 of the 60 used units, and twice 500 of the 940 that are left."""
    for kind, units in (("write_off", 40), ("debit", 500)):
        made = [await people.proposed(kind=kind, units=units) for _ in range(2)]
        answers = await asyncio.gather(*map(people.approve, made))
        assert sorted(answer.status_code for answer in answers) == [200, 409]


@pytest.mark.usefixtures("region")
async def test_a_withdrawn_or_expired_adjustment_is_not_approved(admin_harness: AdminHarness, people: People) -> None:
    withdrawn, expired = await people.proposed(), await people.proposed()
    path = f"/v1/adjustments/{withdrawn['id']}:withdraw"
    first, again = await people.proposer.post(path), await people.proposer.post(path)
    assert (first.status_code, first.json()["state"], first.json()) == (200, "withdrawn", again.json())
    admin_harness.clock.move(days=31)
    for made, refusal in ((withdrawn, "withdrawn"), (expired, "expired")):
        answer = await people.approve(made)
        assert (answer.status_code, answer.json()["refusal"]) == (409, refusal)
    assert await moved(admin_harness) == []
    reader = await admin_harness.caller("usage:read")
    listed = (await reader.get("/v1/adjustments?state=expired")).json()["data"]
    assert [each["id"] for each in listed] == [expired["id"]]


async def test_the_same_request_proposes_once(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, people: People
) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    key = {"Idempotency-Key": "k"}
    made = [await people.proposer.post("/v1/adjustments", json=CREDIT, headers=key) for _ in range(2)]
    assert made[0].json() == made[1].json()
    assert made[0].headers["Location"] == f"/v1/adjustments/{made[0].json()['id']}"
    other = await people.proposer.post("/v1/adjustments", json=CREDIT | {"units": 2}, headers=key)
    assert other.status_code == 422
    await admin_harness.owner.execute("DELETE FROM idempotency_record")  # the work was done and its answer lost
    assert (await people.proposer.post("/v1/adjustments", json=CREDIT, headers=key)).json() == made[0].json()
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM adjustment") == 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"quota": "nothing:tenant=acme"}, ("quota", "known")),
        ({"quota": "api:tenant=acme"}, ("quota", "known")),
        ({"quota": "exports"}, ("quota", "format")),
        ({"period": "2026-11-18"}, ("quota", "known")),
        ({"period": "2026-13"}, ("period", "format")),
        ({"period": "2026-12"}, ("period", "begun")),
        ({"kind": "gift"}, ("kind", "enum")),
        ({"units": 0}, ("units", "minimum")),
        ({"units": 2**53}, ("units", "maximum")),
        ({"reason": ""}, ("reason", "min_length")),
        ({"document": "\x1b"}, ("document", "text")),
        ({"note": "x"}, ("note", "unknown")),
    ],
)
async def test_faults_of_a_proposal_are_named(
    admin_harness: AdminHarness,
    admin: httpx.AsyncClient,
    people: People,
    changes: dict[str, Any],
    fault: tuple[str, str],
) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    answer = await people.proposer.post("/v1/adjustments", json=CREDIT | changes)
    assert problem(answer) == (422, [fault])
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM adjustment") == 0


@pytest.mark.usefixtures("region")
async def test_more_than_can_be_counted_is_refused(people: People) -> None:
    answer = await people.approve(await people.proposed(units=2**53 - 1))
    assert (answer.status_code, answer.json()["refusal"]) == (409, "too_large")


@pytest.mark.usefixtures("region")
async def test_adjustments_are_listed_page_by_page(
    admin_harness: AdminHarness, people: People, finance: httpx.AsyncClient
) -> None:
    made = []
    for units in (1, 2, 3):
        made.append((await people.proposed(units=units))["id"])
        admin_harness.clock.move(seconds=1)
    first = (await finance.get(f"/v1/adjustments?page_size=2&period={NOVEMBER}")).json()
    after = first["page"]["next"]
    second = (await finance.get(f"/v1/adjustments?page_size=2&period={NOVEMBER}&page_after={after}")).json()
    assert [each["id"] for each in (*first["data"], *second["data"])] == made
    assert (await finance.get(f"/v1/adjustments?period={OCTOBER}")).json()["data"] == []
    assert (await finance.get(f"/v1/adjustments/{made[0]}")).json()["units"] == 1
    assert (await finance.get(f"/v1/adjustments/{NOT_THERE}")).status_code == 404


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE pool SET adjustment = adjustment + 1, unallocated = unallocated + 1",
        "UPDATE pool SET credited = credited - 1",
        "UPDATE adjustment SET units = 99",
        "UPDATE adjustment SET kind = 'write_off'",
        "DELETE FROM adjustment",
        "DELETE FROM transfer WHERE src = 'adjustment'",
    ],
)
@pytest.mark.usefixtures("region")
async def test_reconciliation_finds_changed_adjustments(
    admin_harness: AdminHarness, people: People, finance: httpx.AsyncClient, statement: str
) -> None:
    await people.adjusted()
    async with admin_harness.owner.transaction():
        await admin_harness.owner.execute("SET LOCAL session_replication_role = replica")
        assert (await admin_harness.owner.execute(statement)).split()[-1] == "1"
    found = (await finance.get(f"/v1/periods/{NOVEMBER}/reconciliation")).json()
    assert found["status"] == "projection"


@pytest.mark.usefixtures("region")
async def test_a_root_hashes_the_adjustments_of_its_period(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, people: People
) -> None:
    await people.adjusted()
    admin_harness.clock.time = datetime(2026, 12, 2, 12, tzinfo=UTC)
    await closed(admin_harness, admin, NOVEMBER)
    async with admin_harness.owner.transaction():
        await admin_harness.owner.execute("SET LOCAL session_replication_role = replica")
        await admin_harness.owner.execute("UPDATE adjustment SET document = 'T-2'")
    async with admin_harness.owner.transaction(isolation="repeatable_read"):
        root = await admin_harness.owner.fetchval("SELECT root FROM period WHERE id = $1", NOVEMBER)
        assert await period_root(admin_harness.owner, NOVEMBER) != root
        proven = await verify(admin_harness.owner, admin_harness.clock.now())
    assert proven.fault is not None
    assert (proven.fault.kind, proven.fault.table) == ("adjustment_changed", "adjustment")
