"""What finance waits for, on a large ledger: usage by tenant and day, a statement, an export; beside SQL alone.

The references read the transfers themselves, as somebody would who had nothing but them; an export has as its reference
Postgres' own COPY of the same lines as CSV, of a million of them at most; its memory is looked at over all of them.
Before anything is measured both sides have to agree, and each hour and day of the rollups with its transfers.
LEASEHOLD_BENCH_LEDGER_LINES and LEASEHOLD_BENCH_TENANTS say how large the month is: 200,000 lines of 100 tenants by
default, 10000000 and 1000 for the real size.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

import asyncpg

from benchmarks.coordinator import loaded, one_after_the_other, postgres, resident_mib
from benchmarks.frame import Lines, Load, compare, facts
from coordinator.database.engine import Database, open_database
from coordinator.exports.job import file_of
from coordinator.exports.requests import Chunk, Export, ExportRequest, ask_export, walk
from coordinator.exports.rules import ExportFormat
from coordinator.proof.seal import seal
from coordinator.usage.read_statement import read_statement
from coordinator.usage.read_usage import read_usage
from coordinator.usage.reconcile import read_settled
from coordinator.usage.rules.statement import Statement, StatementId
from coordinator.usage.rules.usage import Dimension, Granularity, UsageQuestion, boundaries
from migrations.run import upgrade
from web.serving import collect_garbage_rarely

LINES = int(os.environ.get("LEASEHOLD_BENCH_LEDGER_LINES", "200000"))
TENANTS = int(os.environ.get("LEASEHOLD_BENCH_TENANTS", "100"))
AT_ONCE = 200_000  # lines that are booked in one statement
EXPORTED = min(LINES, 1_000_000)  # in a turn
PERIOD, FROM, TO = "2026-10", datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
TENANT = "t7"
MOST_ROWS = 1_000_000


@dataclass(frozen=True)
class Bench:
    owner: "asyncpg.Connection[asyncpg.Record]"
    database: Database
    export: Export
    seconds: float


async def run(repeats: int, seconds: float, port: int) -> Mapping[str, Lines]:
    with TemporaryDirectory() as directory, postgres(Path(directory), port) as url:
        await asyncio.to_thread(upgrade, url)
        owner = await asyncpg.connect(url, server_settings={"jit": "off"})  # as a coordinator's sessions are
        try:
            await _book(owner)
            collect_garbage_rarely()  # as a coordinator does
            async with open_database(url, 2) as database:
                return await _measure(Bench(owner, database, await _asked(owner), seconds), repeats)
        finally:
            await owner.close()


async def _measure(bench: Bench, repeats: int) -> Mapping[str, Lines]:
    await _agree(bench)
    size = f"{LINES} lines, {TENANTS} tenants"
    return {
        f"usage by tenant and day ({size})": await compare(
            {
                "from the transfers, in SQL": partial(_repeated, bench, RAW_USAGE, FROM, TO),
                "GET /v1/usage": partial(one_after_the_other, bench.seconds, partial(_usage, bench)),
            },
            repeats,
        ),
        f"a statement ({size})": await compare(
            {
                "from the transfers, in SQL": partial(_repeated, bench, RAW_STATEMENT, PERIOD, TENANT),
                "its lines": partial(one_after_the_other, bench.seconds, partial(_statement, bench)),
            },
            repeats,
        ),
        f"{EXPORTED} lines exported ({size})": await compare(
            {
                "COPY TO, as CSV": partial(_copied, bench),
                "an export as CSV": partial(_exported, bench, walk),
                "an export as Parquet": partial(_exported, bench, file_of),
            },
            repeats,
        ),
        f"memory of an export as CSV, MiB ({size})": facts(await _memory(bench, walk)),
        f"memory of an export as Parquet, MiB ({size})": facts(await _memory(bench, file_of)),
    }


async def _repeated(bench: Bench, sql: str, *values: object) -> Load:
    return await one_after_the_other(bench.seconds, lambda: bench.owner.fetch(sql, *values))


_BY_DAY = UsageQuestion(boundaries(FROM, TO, Granularity.DAY, UTC), [Dimension.TENANT], {})


async def _usage(bench: Bench) -> dict[tuple[datetime, str | None], int]:
    page = await read_usage(bench.owner, _BY_DAY, None, 0, MOST_ROWS)
    return {(row.start, row.dimensions[Dimension.TENANT]): row.units for row in page.rows}


async def _statement(bench: Bench) -> Statement:
    async with bench.owner.transaction(isolation="repeatable_read", readonly=True):
        found = await read_statement(bench.owner, StatementId(PERIOD, TENANT), None)
    assert isinstance(found, Statement)
    return found


async def _agree(bench: Bench) -> None:
    """Check that both sides return the same, or there is nothing to compare."""
    raw = await bench.owner.fetch(RAW_USAGE, FROM, TO)
    assert await _usage(bench) == {(row["day"], row["tenant"]): row["units"] for row in raw}
    lines = {(line.quota, line.charge_period, line.region): line.units for line in (await _statement(bench)).lines}
    assert lines == {tuple(row)[:3]: row["units"] for row in await bench.owner.fetch(RAW_STATEMENT, PERIOD, TENANT)}
    settled = await read_settled(bench.owner, PERIOD)
    assert (settled.transfers, settled.misrolled) == (LINES, [])


async def _copied(bench: Bench) -> Load:
    async def forget(_: bytes) -> None:
        return

    started = time.perf_counter()
    await bench.owner.copy_from_query(RAW_LINES, PERIOD, EXPORTED, output=forget, format="csv")
    return _of_lines(started)


Written = Callable[[Database, Export], AsyncIterator[Chunk]]


async def _exported(bench: Bench, written: Written) -> Load:
    started, rows = time.perf_counter(), 0
    async for chunk in written(bench.database, bench.export):
        rows += chunk.rows
        if rows >= EXPORTED:
            break
    assert rows == EXPORTED
    return _of_lines(started)


def _of_lines(started: float) -> Load:
    took = time.perf_counter() - started
    return loaded(EXPORTED / took, [took * 1e6])


async def _memory(bench: Bench, written: Written) -> dict[str, list[float]]:
    """Return this process's memory during the export: after a tenth of the lines, and after all."""
    seen: dict[str, list[float]] = {"after a tenth": [], "after all": []}
    rows = 0
    async for chunk in written(bench.database, bench.export):
        before, rows = rows, rows + chunk.rows
        if before < LINES // 10 <= rows:
            seen["after a tenth"].append(await resident_mib(os.getpid()))
    seen["after all"].append(await resident_mib(os.getpid()))
    return seen


# --- the month --------------------------------------------------------------------------------------------------------


async def _book(owner: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Insert rows directly: reading does not depend on how they were booked."""
    await owner.execute(PERIODS)
    await owner.execute(POOLS, TENANTS)
    for first in range(0, LINES, AT_ONCE):
        await owner.execute(BOOKED, TENANTS, LINES, first, min(LINES, first + AT_ONCE) - 1)
    await owner.execute("VACUUM ANALYZE")
    async with owner.transaction():
        await seal(owner, datetime.now(UTC))


async def _asked(owner: "asyncpg.Connection[asyncpg.Record]") -> Export:
    nobody = UUID(int=0)
    async with owner.transaction():
        request = ExportRequest(PERIOD, None, ExportFormat.CSV)
        found = await ask_export(owner, nobody, request, nobody, datetime.now(UTC))
    assert isinstance(found, Export)
    return found


PERIODS = """
INSERT INTO region (name, created_at) VALUES ('us-east', now());
INSERT INTO region_epoch (region, nonce, fingerprint, lanes, opened_at) VALUES ('us-east', 'n', 'f', 1, now());
INSERT INTO lane (epoch, lane, head) VALUES (1, 0, '');
INSERT INTO period (id, kind, starts_at, ends_at) VALUES ('2026-10', 'month', '2026-10-01Z', '2026-11-01Z');
"""
POOLS = """
INSERT INTO pool (quota, period, name, tenant)
SELECT 'exports:tenant=t' || n, '2026-10', 'exports', 't' || n FROM generate_series(1, $1::int) AS n
"""
# In the order of their minutes, as a month is booked, and each minute's spread over tenants, regions and policies; five
# hundred to a report. The triggers roll them up, as they do for everybody.
BOOKED = """
WITH line AS (SELECT n FROM generate_series($3::int, $4::int) AS n), reported AS (
    INSERT INTO report (epoch, lane, seq, body_hash, head, lines, recorded_at)
    SELECT 1, 0, 1 + n / 500, '', '', 500, now() FROM line WHERE n % 500 = 0
)
INSERT INTO transfer (period, quota, src, dst, units, cause, region, epoch, lane, seq, line, window_at, dimensions,
    charge_period, recorded_at)
SELECT '2026-10', 'exports:tenant=t' || 1 + n % $1, 'outstanding', 'consumed', 1 + n % 9, 'usage',
    (ARRAY['us-east', 'eu-west', 'ap-south'])[1 + n / $1 % 3], 1, 0, 1 + n / 500, n % 500,
    timestamptz '2026-10-01Z' + n::bigint * 44640 / $2::int * interval '1 minute',
    CASE WHEN n / $1 / 3 % 5 = 0 THEN '{"policy": "bulk"}' ELSE '{"policy": "export"}' END::jsonb, '2026-10', now()
FROM line
"""
RAW_USAGE = """
SELECT date_trunc('day', window_at, 'UTC') AS day, pool.tenant, sum(units)::bigint AS units
FROM transfer JOIN pool USING (quota, period)
WHERE dst = 'consumed' AND window_at >= $1 AND window_at < $2 GROUP BY 1, 2
"""
RAW_STATEMENT = """
SELECT pool.name, charge_period, region, sum(units)::bigint AS units FROM transfer JOIN pool USING (quota, period)
WHERE dst = 'consumed' AND period = $1 AND pool.tenant = $2 GROUP BY 1, 2, 3
"""
RAW_LINES = """
SELECT transfer.*, pool.name, pool.tenant FROM transfer JOIN pool USING (quota, period)
WHERE dst = 'consumed' AND period = $1 LIMIT $2
"""
