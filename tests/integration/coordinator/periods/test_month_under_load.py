"""A month closes while sixteen regions report: finance gets what the regions recorded, to the unit."""

import asyncio
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from coordinator.database.connection import Connection
from coordinator.exchange.expire_leases import expire_leases
from coordinator.proof.verify import verify
from coordinator.usage.rules.statement import StatementId
from tests.integration.coordinator.adjustments.test_adjustments import ACME, NOVEMBER, People, people
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region, sealed
from tests.integration.coordinator.fixtures import connected

__all__ = ["people"]
pytestmark = pytest.mark.anyio

WRITERS = 16
TENANTS = ["acme", "globex", "initech"]
DECEMBER = "2026-12"
IN_DECEMBER = datetime(2026, 12, 1, 6, tzinfo=UTC)
REPORTS_BEFORE, REPORTS_AFTER, MOST_REPORTS = 6, 3, 500
PATIENCE_S = 120

Place = tuple[str, int, int, int]  # region, epoch, lane, seq


class Journal:
    """A record of what was sent: the hash of each report, and its units by tenant."""

    def __init__(self) -> None:
        self.hashes: dict[Place, str] = {}
        self.units: Counter[tuple[str, Place]] = Counter()

    async def keep(self, request: httpx.Request) -> None:
        if not request.url.path.endswith("/exchanges"):
            return
        for exchange in json.loads(request.content)["exchanges"]:
            batch = json.loads(exchange["frozen"])
            place = request.url.path.split("/")[3], batch["epoch"], batch["lane"], batch["seq"]
            self.hashes[place] = hashlib.sha256(exchange["frozen"].encode()).hexdigest()
            for lease in batch["leases"]:
                for line in lease["lines"]:
                    self.units[line["dimensions"]["tenant"], place] += line["units"]


class Writer:
    """A region that uses one or two units of one tenant after the other, in minutes of November."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.reports = 0

    async def lease(self) -> None:
        for tenant in TENANTS:
            quota = f"exports:tenant={tenant}"
            await self.region.exchange(quota, demands=[{"quota": quota, "waiting": 12}])

    async def report(self) -> None:
        quota = f"exports:tenant={TENANTS[self.reports % len(TENANTS)]}"
        lease = self.region.leases[quota, NOVEMBER]
        lines = [
            {"minute": _MINUTE + self.reports, "dimensions": {"tenant": quota[15:], "policy": policy}, "units": units}
            for policy, units in (("export", 1), ("bulk", 1 + self.reports % 2))
        ]
        lease["consumed"] += sum(int(str(line["units"])) for line in lines)
        self.reports += 1
        await self.region.exchange(quota, frozen=[lease | {"lines": lines}])


_MINUTE = int(datetime(2026, 11, 18, 9, tzinfo=UTC).timestamp()) // 60


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
async def writers(admin_harness: AdminHarness, admin: httpx.AsyncClient, journal: Journal) -> list[Writer]:
    """Yield the regions after all have leased and reported in November."""
    await admin.put("/v1/limits", json=DOCUMENT)
    writers = [Writer(await open_region(admin_harness, admin, f"r{number}")) for number in range(WRITERS)]
    for writer in writers:
        writer.region.client.event_hooks = {"request": [journal.keep]}
        await writer.lease()
    await asyncio.gather(*(several(writer, REPORTS_BEFORE) for writer in writers))
    admin_harness.clock.time = IN_DECEMBER
    return writers


async def several(writer: Writer, reports: int) -> None:
    for _ in range(reports):
        await writer.report()


@pytest.fixture
async def other(database: str) -> AsyncIterator[Connection]:
    """Return another connection of the owner."""
    async with connected(database) as connection:
        yield connection


async def close(admin_harness: AdminHarness, other: Connection) -> dict[str, Any]:
    """Repeat the request until it succeeds."""
    closer = await admin_harness.caller("period:close")
    for _ in range(MOST_REPORTS):
        answer = await closer.post(f"/v1/periods/{NOVEMBER}:close", json={"carry_suspense": True})
        if answer.status_code == 200:
            found: dict[str, Any] = answer.json()["period"]
            return found
        assert answer.status_code == 202, answer.text
        admin_harness.clock.move(minutes=1)
        async with other.transaction():
            await expire_leases(other, admin_harness.clock.now())
    raise AssertionError("it was never closed")


@pytest.mark.extended
async def test_a_closed_month_never_changes_and_each_later_report_is_a_correction(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, writers: list[Writer], journal: Journal, other: Connection
) -> None:
    are_writing, is_closed = asyncio.Barrier(WRITERS + 1), asyncio.Event()

    async def write(writer: Writer) -> None:
        """Report until the month is closed, and a while longer."""
        await writer.report()
        await are_writing.wait()
        for _ in range(MOST_REPORTS):
            if is_closed.is_set():
                break
            await writer.report()
        await several(writer, REPORTS_AFTER)

    async def end() -> dict[str, Any]:
        await are_writing.wait()
        at_close = await close(admin_harness, other)
        is_closed.set()
        return at_close

    async with asyncio.timeout(PATIENCE_S):
        at_close, *_ = await asyncio.gather(end(), *map(write, writers))
    assert at_close == (await finance.get(f"/v1/periods/{NOVEMBER}")).json()
    assert at_close["transfers"] == await admin_harness.owner.fetchval(TRANSFERS, NOVEMBER)
    booked = {row["is_late"]: row for row in await admin_harness.owner.fetch(BOOKED, at_close["position"])}
    assert (booked[False]["periods"], booked[True]["periods"]) == ([NOVEMBER], [DECEMBER])
    assert booked[True]["reports"] >= WRITERS * REPORTS_AFTER
    assert sum(row["units"] for row in booked.values()) == sum(journal.units.values())

    await sealed(admin_harness)
    assert await told(finance) == journal.units
    assert await hashes(finance) == {place: journal.hashes[place] for _, place in journal.units}
    async with admin_harness.owner.transaction(isolation="repeatable_read", readonly=True):
        assert (await verify(admin_harness.owner, admin_harness.clock.now())).fault is None
    for period in (NOVEMBER, DECEMBER):
        assert (await finance.get(f"/v1/periods/{period}/reconciliation")).json()["status"] == "balanced"


TRANSFERS = "SELECT count(*) FROM transfer WHERE period = $1"
BOOKED = """
SELECT report.position > $1 AS is_late, array_agg(DISTINCT transfer.period) AS periods, sum(units)::int AS units,
    count(DISTINCT report.position) AS reports
FROM transfer JOIN report USING (epoch, lane, seq)
WHERE dst = 'consumed' AND charge_period = '2026-11' GROUP BY 1
"""


async def sources(finance: httpx.AsyncClient) -> list[tuple[str, dict[str, Any]]]:
    """Return each report behind a line of a statement, with its tenant, and check that the lines sum up to the
    statement.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for tenant, period in itertools.product(TENANTS, (NOVEMBER, DECEMBER)):
        statement = (await finance.get(f"/v1/statements/{StatementId(period, tenant)}")).json()
        of_lines = [await of_line(finance, line) for line in statement["lines"]]
        assert statement["billed"] == sum(each["units"] for reports in of_lines for each in reports)
        found += [(tenant, each) for reports in of_lines for each in reports]
    return found


async def of_line(finance: httpx.AsyncClient, line: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    mark = "&" if "?" in line["reports"] else "?"
    after = ""
    while after is not None:
        page = (await finance.get(f"{line['reports']}{mark}page_size=7{after and f'&page_after={after}'}")).json()
        found, after = found + page["data"], page["page"]["next"]
    assert line["units"] == sum(each["units"] for each in found)
    return found


def place_of(report: dict[str, Any]) -> Place:
    return report["region"], report["epoch"], report["lane"], report["seq"]


async def told(finance: httpx.AsyncClient) -> Counter[tuple[str, Place]]:
    units: Counter[tuple[str, Place]] = Counter()
    for tenant, report in await sources(finance):
        units[tenant, place_of(report)] += report["units"]
    return units


async def hashes(finance: httpx.AsyncClient) -> dict[Place, str]:
    return {place_of(report): report["body_hash"] for _, report in await sources(finance)}


# --- answers as of a seal ---------------------------------------------------------------------------------------------

LATE = 1000


def questions(as_of: int) -> Iterator[str]:
    for shape in ("", "&granularity=P1D", "&granularity=PT1H", "&granularity=PT1M", "&zeros=true&granularity=P1D"):
        yield f"/v1/usage?from=2026-11-18&to=2026-11-19&group_by=tenant,region,policy{shape}&as_of={as_of}"
    yield f"/v1/usage?from=2026-11-01&to=2027-01-01&group_by=period,charge_period&as_of={as_of}"
    for shape, period in itertools.product(("json", "csv", "html"), (NOVEMBER, DECEMBER)):
        yield f"/v1/statements/{StatementId(period, 'acme')}?format={shape}&as_of={as_of}"


async def answers(finance: httpx.AsyncClient, as_of: int) -> dict[str, tuple[bytes, str]]:
    found = {question: await finance.get(question) for question in questions(as_of)}
    assert {answer.status_code for answer in found.values()} == {200}
    return {question: (answer.content, answer.headers["ETag"]) for question, answer in found.items()}


@pytest.mark.extended
async def test_an_answer_as_of_a_seal_survives_late_reports_and_adjustments(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, writers: list[Writer], people: People, other: Connection
) -> None:
    await close(admin_harness, other)
    await asyncio.gather(*(several(writer, 3) for writer in writers))
    await sealed(admin_harness)
    as_of: int = await admin_harness.owner.fetchval("SELECT max(position) FROM seal")
    before = await answers(finance, as_of)

    admin_harness.clock.move(seconds=1)
    await asyncio.gather(*(several(writer, -(-LATE // WRITERS)) for writer in writers))
    await people.adjusted(kind="credit", units=50)
    await people.adjusted(kind="write_off", units=20)
    await people.adjusted(kind="debit", units=30, period=DECEMBER)
    assert await answers(finance, as_of) == before
    await sealed(admin_harness)
    assert await answers(finance, as_of) == before
    for question, (_, tag) in before.items():
        assert (await finance.get(question, headers={"If-None-Match": tag})).status_code == 304
    newest: int = await admin_harness.owner.fetchval("SELECT max(position) FROM seal")
    assert newest >= as_of + LATE
    after = await answers(finance, newest)
    assert all(old != new for old, new in zip(before.values(), after.values(), strict=True))  # each says its position


# --- what is refused --------------------------------------------------------------------------------------------------

TABLES = (
    "period pool lease correction transfer report adjustment resolution quarantine usage_hour usage_day outbox audit"
)


async def everything(connection: Connection) -> dict[str, list[str]]:
    rows = "SELECT coalesce(array_agg(t::text ORDER BY t::text), ARRAY[]::text[]) FROM {} AS t"
    return {table: await connection.fetchval(rows.format(table)) for table in TABLES.split()}


async def test_forbidden_operations_are_refused_with_the_reason_and_change_nothing(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, people: People
) -> None:
    """Try a close with open suspense, a second approval by one person, two approvals at once, and a second close."""
    await admin.put("/v1/limits", json=DOCUMENT)
    region = await open_region(admin_harness, admin, "eu-west")
    await region.use(ACME, NOVEMBER, [Used(datetime(2026, 11, 18, 9, tzinfo=UTC), 60)])
    await region.exchange(ACME, demands=[{"quota": ACME, "waiting": 7}])
    admin_harness.clock.time = IN_DECEMBER
    async with admin_harness.owner.transaction():
        await expire_leases(admin_harness.owner, admin_harness.clock.now())
    path = f"/v1/periods/{NOVEMBER}:close"
    both, another = (
        await admin_harness.caller("adjust:propose", "adjust:approve"),
        await admin_harness.caller("adjust:approve"),
    )
    wish = {"epoch": region.epoch, "quota": ACME, "period": NOVEMBER, "kind": "charge", "reason": "why"}
    assert await refused(admin_harness, admin, path) == "grace,suspense"
    resolution = f"/v1/suspense/{(await both.post('/v1/suspense:propose', json=wish)).json()['id']}:approve"
    assert await refused(admin_harness, both, resolution) == "same_person"
    assert await refused(admin_harness, admin, path) == "grace,proposal,suspense"
    charged = (await people.approver.post(resolution)).json()
    assert await unchanged(admin_harness, another, resolution, 200) == charged  # it names who has approved

    adjustment = f"/v1/adjustments/{(await people.proposed(kind='write_off', units=10))['id']}:approve"
    assert await refused(admin_harness, people.proposer, adjustment) == "forbidden"
    approved = await people.approver.post(adjustment)
    assert await refused(admin_harness, another, adjustment) == "approved_before"
    assert await unchanged(admin_harness, people.approver, adjustment, 200) == approved.json()
    over = await people.proposed(kind="write_off", units=58)
    assert await refused(admin_harness, people.approver, f"/v1/adjustments/{over['id']}:approve") == "more_than_billed"

    for status in (202, 200):
        answer = await admin.post(path, json={})
        assert answer.status_code == status, answer.text
        admin_harness.clock.move(minutes=20)
    assert await unchanged(admin_harness, admin, path, 200) == answer.json()


async def refused(admin_harness: AdminHarness, client: httpx.AsyncClient, path: str) -> str:
    """Return the reason."""
    problem = await unchanged(admin_harness, client, path, 409, 403)
    missing = [each["what"] for each in problem.get("missing", ())]
    reason: str = problem.get("refusal") or ",".join(missing) or problem["type"].rpartition("/")[2]
    return reason


async def unchanged(
    admin_harness: AdminHarness, client: httpx.AsyncClient, path: str, *statuses: int
) -> dict[str, Any]:
    before = await everything(admin_harness.owner)
    answer = await client.post(path, json={} if path.endswith(":close") else None)
    assert answer.status_code in statuses, answer.text
    assert await everything(admin_harness.owner) == before
    found: dict[str, Any] = answer.json()
    return found
