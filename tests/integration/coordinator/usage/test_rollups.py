"""Usage is answered from hourly and daily rollups, which equal the sums of the transfers."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import asyncpg
import httpx
import msgspec
import pytest

from coordinator.database.connection import Connection
from coordinator.usage.read_usage import read_usage
from coordinator.usage.reconcile import reconcile_period
from coordinator.usage.rules.usage import Dimension, Granularity, StoredUsage, UsageQuestion, boundaries
from tests.conftest import restricted
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Used, open_region
from tests.integration.coordinator.fixtures import NOON, connected

pytestmark = pytest.mark.anyio

FIRST = datetime(2026, 11, 16, tzinfo=UTC)
PERIODS = ("2026-11", "2026-11-17", "2026-11-18T09")
QUOTAS = {"exports:tenant=acme": "acme", "exports:tenant=globex": "globex", "searches": None}
REGIONS = ("eu-west", "us-east")


class Line(NamedTuple):
    position: int
    period: str
    charge_period: str
    quota: str
    region: str
    at: datetime
    dimensions: dict[str, str]
    units: int

    def value(self, dimension: str) -> str | None:
        if dimension == Dimension.TENANT:
            return QUOTAS[self.quota] or self.dimensions.get("tenant")
        if dimension in LABELS:
            return label(self.dimensions.get("labels"), dimension.partition(".")[2])
        return {
            Dimension.QUOTA: self.quota.partition(":")[0],
            Dimension.QUOTA_KEY: self.quota,
            Dimension.REGION: self.region,
            Dimension.POLICY: self.dimensions.get("policy"),
            Dimension.ROUTE_CLASS: self.dimensions.get("route_class"),
            Dimension.API_KEY: self.dimensions.get("api_key"),
            Dimension.PERIOD: self.period,
            Dimension.CHARGE_PERIOD: self.charge_period,
            Dimension.DEGRADED: self.dimensions.get("degraded"),
            Dimension.COUNTED_AS: self.dimensions.get("counted_as", "included"),
        }[Dimension(dimension)]


def label(labels: str | None, name: str) -> str | None:
    if labels is None or labels == "*":
        return labels
    return dict(pair.split("=") for pair in labels.split(",")).get(name)


class RandomBooks:
    """Book reports with usage of any kind with the coordinator's role, and count the same in plain Python."""

    def __init__(self, connection: Connection, seed: int) -> None:
        self.connection, self.random, self.lines = connection, random.Random(seed), list[Line]()
        self.reports = 0

    async def open(self) -> None:
        for period in PERIODS:
            kind = {7: "month", 10: "day", 13: "hour"}[len(period)]
            await self.connection.execute(
                "INSERT INTO period (id, kind, starts_at, ends_at) VALUES ($1, $2, $3, $4)",
                *(period, kind, FIRST, FIRST + timedelta(days=3)),
            )
            for quota, tenant in QUOTAS.items():
                await self.connection.execute(
                    "INSERT INTO pool (quota, period, name, tenant) VALUES ($1, $2, $3, $4)",
                    *(quota, period, quota.partition(":")[0], tenant),
                )

    async def book(self, reports: int) -> None:
        for _ in range(reports):
            async with self.connection.transaction():
                await self._report()

    async def _report(self) -> None:
        self.reports += 1
        position: int = await self.connection.fetchval(
            """INSERT INTO report (epoch, lane, seq, body_hash, head, lines, recorded_at)
               VALUES (1, 0, $1, '', '', 0, now()) RETURNING position""",
            self.reports,
        )
        lines = [self._line(position) for _ in range(self.random.randrange(12))]
        await self.connection.execute(
            """INSERT INTO transfer (period, quota, src, dst, units, cause, region, epoch, lane, seq, line, window_at,
                   dimensions, charge_period, recorded_at)
               SELECT period, quota, 'outstanding', 'consumed', units, 'usage', region, 1, 0, $1, line, at, dimensions,
                   charge_period, now()
               FROM unnest($2::text[], $3::text[], $4::bigint[], $5::text[], $6::int[], $7::timestamptz[], $8::jsonb[],
                       $9::text[])
                   AS line (period, quota, units, region, line, at, dimensions, charge_period)""",
            self.reports,
            *([each.period for each in lines], [each.quota for each in lines], [each.units for each in lines]),
            *([each.region for each in lines], list(range(len(lines))), [each.at for each in lines]),
            [msgspec.json.encode(each.dimensions).decode() for each in lines],
            [each.charge_period for each in lines],
        )
        # Only usage is rolled up.
        await self.connection.execute(
            """INSERT INTO transfer (period, quota, src, dst, units, cause, region, epoch, lane, seq, line,
                   charge_period, recorded_at)
               VALUES ('2026-11', 'searches', 'unallocated', 'outstanding', 5, 'grant', 'eu-west', 1, 0, $1, 99,
                   '2026-11', now())""",
            self.reports,
        )
        self.lines += lines

    def _line(self, position: int) -> Line:
        pick = self.random.choice
        dimensions = {"tenant": pick(("acme", "initech")), "policy": pick(("export", "bulk")), "user": pick("abc")}
        dimensions |= {"route_class": pick(("heavy", "light")), "api_key": pick(("0a1b", "2c3d"))}
        dimensions = {name: value for name, value in dimensions.items() if self.random.random() < 0.8}
        if self.random.random() < 0.5:
            dimensions["labels"] = pick(("model=large,tier=gold", "model=large", "model=small", "tier=gold", "*"))
        if self.random.random() < 0.2:
            dimensions["degraded"] = pick(("open", "local"))
        if self.random.random() < 0.2:
            dimensions["counted_as"] = "overage"
        at = FIRST + timedelta(minutes=self.random.randrange(3 * 24 * 60))
        units = pick((1, 2, 7, 2**40))
        return Line(position, pick(PERIODS), pick(PERIODS), pick(list(QUOTAS)), pick(REGIONS), at, dimensions, units)

    def question(self) -> UsageQuestion:
        pick, zone = self.random.choice, ZoneInfo(self.random.choice(("UTC", "Europe/Berlin", "Asia/Kathmandu")))
        start = FIRST + timedelta(minutes=pick((0, 0, 60, 90, 1440, 47)))
        end = FIRST + timedelta(minutes=pick((4320, 4320, 2880, 4000, 3001)))
        cuts = boundaries(start, end, pick((None, *Granularity)), zone)
        groups = self.random.sample(list(FILTERS), self.random.randrange(len(FILTERS) + 1))
        filters = {each: [pick(FILTERS[each])] for each in self.random.sample(list(FILTERS), pick((0, 0, 1, 2)))}
        return UsageQuestion(cuts, groups, filters, zeros=len(cuts) < 100 and pick((False, True)))

    def answer(self, question: UsageQuestion, as_of: int | None) -> Counter[tuple[Any, ...]]:
        sums: Counter[tuple[Any, ...]] = Counter()
        for line in self.lines:
            if as_of is not None and line.position > as_of:
                continue
            if not question.boundaries[0] <= line.at < question.boundaries[-1]:
                continue
            if all(line.value(dimension) in values for dimension, values in question.filters.items()):
                start = max(cut for cut in question.boundaries if cut <= line.at)
                sums[start, *(line.value(dimension) for dimension in question.group_by)] += line.units
        return _with_zeros(question, sums) if question.zeros else sums


def _with_zeros(question: UsageQuestion, sums: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    kinds = {tuple(rest) for _, *rest in sums} if question.group_by else {()}
    return Counter({(start, *kind): sums[start, *kind] for start in question.boundaries[:-1] for kind in kinds})


LABELS = ("labels.model", "labels.tier")
FILTERS: dict[str, Sequence[str]] = {
    "labels.model": ("large", "small", "*"),
    "labels.tier": ("gold",),
    Dimension.TENANT: ("acme", "globex", "initech"),
    Dimension.QUOTA: ("exports", "searches"),
    Dimension.QUOTA_KEY: tuple(QUOTAS),
    Dimension.REGION: REGIONS,
    Dimension.POLICY: ("export", "bulk"),
    Dimension.ROUTE_CLASS: ("heavy", "light"),
    Dimension.API_KEY: ("0a1b", "2c3d"),
    Dimension.PERIOD: PERIODS,
    Dimension.CHARGE_PERIOD: PERIODS,
    Dimension.DEGRADED: ("open", "local"),
    Dimension.COUNTED_AS: ("included", "overage"),
}


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    async with connected(database) as owner:
        await owner.execute("INSERT INTO region (name, created_at) VALUES ('eu-west', now())")
        await owner.execute(
            """INSERT INTO region_epoch (region, nonce, fingerprint, lanes, opened_at)
               VALUES ('eu-west', 'n', 'f', 1, now())"""
        )
        await owner.execute("INSERT INTO lane (epoch, lane, head) VALUES (1, 0, '')")
    async with connected(restricted(database)) as connection:
        yield connection


@pytest.mark.parametrize("seed", range(4))
async def test_every_query_equals_the_sum_of_the_transfers(connection: Connection, seed: int) -> None:
    """Query as of now and as of an earlier position, from any source."""
    books = RandomBooks(connection, seed)
    await books.open()
    read_from: Counter[StoredUsage] = Counter()
    for _ in range(4):
        await books.book(6)
        for _ in range(20):
            question, as_of = books.question(), books.random.choice((None, None, 3, 5))
            page = await read_usage(connection, question, as_of, 0, 100_000)
            found = {(row.start, *row.dimensions.values()): row.units for row in page.rows}
            assert found == books.answer(question, as_of), question
            read_from[question.read_from] += 1
    assert set(read_from) == set(StoredUsage)
    for period in PERIODS:
        found_wrong = await reconcile_period(connection, period, NOON)
        assert found_wrong is not None
        assert not [finding for finding in found_wrong.findings if finding.kind == "rollup"]


def utc(*parts: str) -> list[datetime]:
    return [datetime.fromisoformat(part).replace(tzinfo=UTC) for part in parts]


@pytest.mark.parametrize(
    ("cuts", "kept"),
    [
        (utc("2026-11-01", "2026-12-01"), StoredUsage.DAY),
        (utc("2026-11-01", "2026-11-02", "2026-11-03"), StoredUsage.DAY),
        (utc("2026-10-31T23:00", "2026-11-30T23:00"), StoredUsage.HOUR),
        (utc("2026-11-01", "2026-11-01T01:00"), StoredUsage.HOUR),
        (utc("2026-11-01", "2026-11-01T00:30", "2026-11-02"), StoredUsage.MINUTE),
        (utc("2026-11-01T00:00:01", "2026-11-02"), StoredUsage.MINUTE),
        (utc("1960-01-01", "1960-01-02"), StoredUsage.DAY),
    ],
)
def test_the_query_selects_its_source(cuts: Sequence[datetime], kept: StoredUsage) -> None:
    assert UsageQuestion(list(cuts), [], {}).read_from is kept


ACME = "exports:tenant=acme"


@pytest.fixture
async def booked(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    region = await open_region(admin_harness, admin, "eu-west")
    await region.use(ACME, "2026-11", [Used(FIRST + timedelta(days=2, hours=9), 30), Used(FIRST, 10, "bulk")])


@pytest.mark.usefixtures("booked")
@pytest.mark.parametrize("kept", [StoredUsage.HOUR, StoredUsage.DAY])
@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE usage_{} SET units = units + 4 WHERE policy = 'export'",
        "DELETE FROM usage_{} WHERE policy = 'bulk'",
        """INSERT INTO usage_{} (begins_at, period, charge_period, quota, name, region, units)
           SELECT begins_at, period, charge_period, quota, name, 'ap-south', 1 FROM usage_{} LIMIT 1""",
        "UPDATE usage_{} SET charge_period = '2026-10' WHERE policy = 'bulk'",
        "UPDATE usage_{} SET begins_at = begins_at + interval '1 day' WHERE policy = 'bulk'",
    ],
)
async def test_a_rollup_that_differs_is_found(
    admin_harness: AdminHarness, finance: httpx.AsyncClient, kept: StoredUsage, sql: str
) -> None:
    await admin_harness.owner.execute(sql.format(kept.value, kept.value))
    found = (await finance.get("/v1/periods/2026-11/reconciliation")).json()
    assert found["status"] == "rollup"
    assert [finding["kind"] for finding in found["findings"]] == ["rollup"] * len(found["findings"])
    assert all(f"of usage_{kept.value} " in finding["reason"] for finding in found["findings"])


@pytest.mark.usefixtures("booked")
async def test_each_query_reads_its_source(admin_harness: AdminHarness, finance: httpx.AsyncClient) -> None:
    """The sources are distinguished by rows that were made different."""
    await admin_harness.owner.execute("UPDATE usage_hour SET units = 1000 WHERE policy = 'export'")
    await admin_harness.owner.execute("UPDATE usage_day SET units = 2000 WHERE policy = 'export'")
    for query, units in {
        "granularity=P1D": 2000,
        "granularity=P1M": 2000,
        "": 2000,
        "granularity=PT1H": 1000,
        "granularity=P1D&time_zone=Europe/Berlin": 1000,
        "granularity=PT1M": 30,
        "granularity=PT1H&time_zone=Asia/Kolkata": 30,
    }.items():
        rows = (await finance.get(f"/v1/usage?policy=export&{query}")).json()["data"]
        assert [row["units"] for row in rows] == [units], query


async def test_rollups_are_written_by_transfers_only(connection: Connection) -> None:
    for sql in (
        "INSERT INTO usage_day SELECT * FROM usage_hour",
        "UPDATE usage_hour SET units = 1",
        "DELETE FROM usage_day",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(sql)
