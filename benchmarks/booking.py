"""What it costs to book usage: transfers and bytes in Postgres, by the pattern of the requests.

The stack of `leasehold up`, with its own Postgres. Batches of checks arrive at a steady pace, so what is measured
follows from the pace and not from the machine's speed. Sizes are those of all tables with their indexes, and beside
them the write-ahead log, which is what replicas and archives take.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import asyncpg
import httpx

from benchmarks.frame import Case, Figure, Lines
from benchmarks.stack import PLANS, REGION, Stack, local_stack, put_limits

PERIODS = ("hour", "day", "month")
PLENTY = 10**9
HOT_A_SECOND = 200  # checks of the hot tenant in each region, of all of its keys together
BUSY_TENANTS, BUSY_A_SECOND = 1_000, 1_000  # of all of them together
COLD_TENANTS = int(os.environ.get("LEASEHOLD_BENCH_COLD_TENANTS", "10000"))
COLD_A_SECOND = 250
BATCH = 50
WARM_UP_S = 75.0  # until pauses between reports have reached the longest
SHORTEST_S = 120.0
IDLE_S = 60.0
BOOKED_WITHIN_S = 75.0
LEAST_ADMITTED = 0.99


class Counted(NamedTuple):
    """The rows and bytes that Postgres has at one moment."""

    transfers: int
    reports: int
    table_bytes: int
    log_bytes: int
    commits: int

    def since(self, before: "Counted") -> "Counted":
        return Counted(*(now - then for now, then in zip(self, before, strict=True)))


def for_a_million(found: Counted, checks: int) -> Mapping[str, Figure | str]:
    millions = checks / 1_000_000
    return {
        "checks": f"{checks:,}",
        "transfers": f"{found.transfers / millions:,.0f}",
        "reports": f"{found.reports / millions:,.0f}",
        "MB of tables": f"{found.table_bytes / millions / 1e6:,.1f}",
        "MB of log": f"{found.log_bytes / millions / 1e6:,.1f}",
    }


class Stream(NamedTuple):
    """Checks of one region: those of one batch after the other, at so many checks a second."""

    region: str
    tenants: Sequence[str]
    routes: Sequence[str]
    per_second: float

    def batches(self) -> Iterator[bytes]:
        checks = (_check(tenant, route) for tenant in cycle(self.tenants) for route in self.routes)
        while True:
            yield json.dumps({"checks": list(islice(checks, BATCH))}).encode()


def limits() -> dict[str, object]:
    return {
        "plans": PLANS,
        "quotas": [{"name": each, "kind": "allowance", "limit": PLENTY, "period": each} for each in PERIODS],
        "policies": [
            {"name": each, "match": {"route": f"/{each}"}, "by": ["tenant"], "quota": each, "wait": "5s"}
            for each in PERIODS
        ],
    }


def _check(tenant: str, route: str) -> dict[str, object]:
    return {"subject": {"tenant": tenant, "route": route, "method": "GET"}}


async def run(_repeats: int, seconds: float, port: int) -> dict[str, Lines]:
    lasts_s = max(SHORTEST_S, seconds)
    async with local_stack(port) as stack:
        await put_limits(stack, limits(), _check("warm", "/month"), list(stack["agents"]))
        postgres = await asyncpg.connect(stack["postgres"])
        try:
            return await Bench(stack, postgres, lasts_s).tables()
        finally:
            await postgres.close()


class Bench:
    def __init__(self, stack: Stack, postgres: "asyncpg.Connection[asyncpg.Record]", lasts_s: float) -> None:
        self._stack, self._postgres, self._lasts_s = stack, postgres, lasts_s

    async def tables(self) -> dict[str, Lines]:
        routes = [f"/{period}" for period in PERIODS]
        hot = [Stream(region, ["hot"], routes, HOT_A_SECOND) for region in self._stack["agents"]]
        busy = [Stream(REGION, [f"busy-{each}" for each in range(BUSY_TENANTS)], ["/month"], BUSY_A_SECOND)]
        cold = [Stream(REGION, [f"cold-{each}" for each in range(COLD_TENANTS)], ["/month"], COLD_A_SECOND)]
        rows = [
            await self._measured(f"one hot tenant, {len(hot)} regions, {len(PERIODS)} allowances", hot, WARM_UP_S),
            await self._measured(f"{BUSY_TENANTS:,} busy tenants, one region", busy, WARM_UP_S),
            await self._measured(
                f"{COLD_TENANTS:,} cold tenants, one check each", cold, 0, COLD_TENANTS / COLD_A_SECOND
            ),
        ]
        return {
            "in Postgres for a million checks": [Case(name, columns) for name, columns, _ in rows],
            "transfers a minute of a hot key, for each region": await self._by_period(rows[0][2]),
            "nothing is checked": [await self._idle()],
        }

    async def _measured(
        self, name: str, streams: Sequence[Stream], warm_up_s: float, lasts_s: float | None = None
    ) -> tuple[str, Mapping[str, Figure | str], tuple[int, float]]:
        """Return the pattern's figures, and which transfers came in how many minutes of the load."""
        lasts_s = lasts_s or self._lasts_s
        if warm_up_s:
            await self.load(streams, warm_up_s)
        await asyncio.sleep(0 if warm_up_s else 1)
        before, first = await self.count(), await self._last_transfer()
        checks = await self.load(streams, lasts_s)
        if not warm_up_s:
            await asyncio.sleep(BOOKED_WITHIN_S)  # each key is booked once, and all of that belongs to it
        return name, for_a_million((await self.count()).since(before), checks), (first, lasts_s / 60)

    async def load(self, streams: Sequence[Stream], seconds: float) -> int:
        """Send batches at their pace. Return how many checks were admitted."""
        async with httpx.AsyncClient(timeout=60) as client:
            return sum(await asyncio.gather(*(self._send(client, stream, seconds) for stream in streams)))

    async def _send(self, client: httpx.AsyncClient, stream: Stream, seconds: float) -> int:
        url, headers = f"{self._stack['agents'][stream.region]}/v1/check:batch", {"Content-Type": "application/json"}
        began_s, admitted, batches = time.monotonic(), 0, round(seconds * stream.per_second / BATCH)
        for sent, batch in enumerate(islice(stream.batches(), batches)):
            await asyncio.sleep(max(0.0, began_s + sent * BATCH / stream.per_second - time.monotonic()))
            answer = await client.post(url, content=batch, headers=headers)
            answer.raise_for_status()
            admitted += sum(item["status"] == 200 for item in answer.json()["items"])
        if admitted < LEAST_ADMITTED * batches * BATCH:
            raise SystemExit(f"only {admitted} of {batches * BATCH} checks in {stream.region} were admitted")
        return admitted

    async def count(self) -> Counted:
        await self._postgres.execute("CHECKPOINT")
        row = await self._postgres.fetchrow(_COUNT)
        assert row is not None
        return Counted(*row)

    async def _last_transfer(self) -> int:
        return int(await self._postgres.fetchval("SELECT coalesce(max(id), 0) FROM transfer"))

    async def _by_period(self, after: tuple[int, float]) -> list[Case]:
        first, minutes = after
        rows = await self._postgres.fetch(_BY_QUOTA, first)
        regions = len(self._stack["agents"])
        return [
            Case(
                row["quota"],
                {
                    "all": f"{row['transfers'] / regions / minutes:.1f}",
                    "of usage": f"{row['usage'] / regions / minutes:.1f}",
                },
            )
            for row in rows
        ]

    async def _idle(self) -> Case:
        await asyncio.sleep(BOOKED_WITHIN_S)
        before = await self.count()
        await asyncio.sleep(IDLE_S)
        found = (await self.count()).since(before)
        return Case(
            "a minute later",
            {"transfers a minute": str(found.transfers), "transactions a second": f"{found.commits / IDLE_S:.1f}"},
        )


_COUNT = """
SELECT (SELECT count(*) FROM transfer), (SELECT count(*) FROM report),
    (SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace),
    (pg_current_wal_lsn() - '0/0')::bigint,
    (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database())
"""
_BY_QUOTA = """
SELECT split_part(quota, ':', 1) AS quota, count(*) AS transfers, count(*) FILTER (WHERE dst = 'consumed') AS usage
FROM transfer WHERE id > $1 AND quota LIKE '%=hot' GROUP BY 1 ORDER BY 1
"""
