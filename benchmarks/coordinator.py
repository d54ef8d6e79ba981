"""What booking costs: usage lines beside a COPY of the same rows, and grants of one hot allowance beside pgbench.

The references do what no ledger could do with less: COPY into a table without a key, a check or an index; and one
UPDATE of one row with one INSERT beside it, in a transaction of its own. All run on one Postgres, which waits for its
disk. "Without HTTP" calls what the door calls, gathering included; over HTTP the coordinator is a process of its own,
and the load generator shares the cores with it and with Postgres.
"""

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import asyncpg
import msgspec
from pydantic import SecretStr

from benchmarks.frame import Load, Row, compare, row
from benchmarks.load import http_is_whole
from coordinator.api.frozen import call_of
from coordinator.database.engine import open_database
from coordinator.domain.usage import Dimension, UsageQuestion
from coordinator.metrics import Metrics
from coordinator.operations.issue_token import issue_token
from coordinator.operations.open_epoch import open_epoch
from coordinator.operations.put_limits import put_limits
from coordinator.operations.read_usage import read_usage
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from coordinator.state import Coordinator
from doors.serving import collect_garbage_rarely
from leasehold import embedded
from migrations.run import upgrade
from protocol.clock import SystemClock
from protocol.identifiers import lane_of
from protocol.messages import Exchange, ExchangeRequest, LeaseWant, LiveState, OpenEpoch, Versions
from protocol.periods import Calendar, minute_of, period_at
from protocol.policy import LimitsDocument, PeriodKind

REGIONS = 16
LINES = 500
COLD = "exports:tenant=acme"
ALLOWANCES = 1000
POLICIES = 10  # of which a quota's usage may come: what the rollups are kept by, beside the hour
TRANSFERS = int(
    os.environ.get("LEASEHOLD_BENCH_TRANSFERS", "200000")
)  # under the statement; 10000000 for the real size
EXCHANGES = int(os.environ.get("LEASEHOLD_BENCH_EXCHANGES", "10000"))  # under the memory; 1000000 for the real size
LIMIT = 10**12
DOCUMENT: dict[str, Any] = {
    "quotas": [{"name": "exports", "kind": "allowance", "limit": LIMIT, "period": "month"}],
}
PATIENCE_S = 60
HOT = "CREATE TABLE hot (id int PRIMARY KEY, units bigint NOT NULL); INSERT INTO hot VALUES (1, 1000000000000)"
LOG = "CREATE TABLE given (id bigint GENERATED ALWAYS AS IDENTITY, units bigint NOT NULL)"
ONE_GRANT = "BEGIN;\nUPDATE hot SET units = units - 1 WHERE id = 1;\nINSERT INTO given (units) VALUES (1);\nEND;\n"
PLAIN = "CREATE TABLE plain AS SELECT * FROM transfer WITH NO DATA"


@dataclass
class Region:
    """One region that talks without end, of one quota after the other: each exchange is the next of its lane."""

    name: str
    quotas: Sequence[str]
    epoch: int
    lanes: int
    token: str
    policies: int = POLICIES
    turns: int = 0
    seqs: Counter[int] = field(default_factory=Counter)
    consumed: Counter[str] = field(default_factory=Counter)

    def request(self, lines: int) -> ExchangeRequest:
        """With usage lines of one unit each, or none; asking for as many units as it reports, or for one."""
        quota = self.quotas[self.turns % len(self.quotas)]
        lane = lane_of(quota, self.lanes)
        self.turns += 1
        self.seqs[lane] += 1
        self.consumed[quota] += lines
        now = datetime.now(UTC)
        minute = minute_of(now)
        lease = {
            "quota": quota,
            "period": period_at(Calendar(PeriodKind.MONTH), now).id,
            "granted": 0,
            "overage": 0,
            "consumed": self.consumed[quota],
            "returned": 0,
            "lines": [
                {
                    "minute": minute - number // self.policies,
                    "dimensions": {"tenant": "acme", "policy": f"p{number % self.policies}"},
                    "units": 1,
                }
                for number in range(lines)
            ],
        }
        batch = {"epoch": self.epoch, "lane": lane, "seq": self.seqs[lane], "leases": [lease]}
        live = LiveState(wants=[LeaseWant(quota=quota, waiting=lines or 1)])
        frozen = Exchange(frozen=msgspec.json.encode(batch).decode(), live=live)
        return ExchangeRequest(fingerprint="a life", versions=Versions(), exchanges=[frozen])


class Process(NamedTuple):
    """A coordinator that listens."""

    address: str
    pid: int


@dataclass
class Bench:
    url: str
    owner: "asyncpg.Connection[asyncpg.Record]"
    coordinator: Coordinator
    processes: Sequence["Process"]
    seconds: float


async def measured(
    bench: Bench,
    per_call: int,
    count: int,
    speak: "Callable[[Region], Awaitable[None]]",
    regions: list[Region],
    quotas: Sequence[str],
    policies: int = POLICIES,
) -> Load:
    """So many regions, the same in every turn, each with one call under way."""
    while len(regions) < count:
        regions.append(await new_region(bench.owner, quotas, policies))
    latencies_us: list[float] = []
    ends = time.perf_counter() + bench.seconds

    async def talk(region: Region) -> None:
        while (started := time.perf_counter()) < ends:
            await speak(region)
            latencies_us.append((time.perf_counter() - started) * 1e6)

    started = time.perf_counter()
    await asyncio.gather(*map(talk, regions))
    elapsed = time.perf_counter() - started
    return loaded(len(latencies_us) * per_call / elapsed, latencies_us)


def loaded(per_second: float, latencies_us: list[float]) -> Load:
    ordered = sorted(latencies_us)
    return Load(per_second, ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], 0)


async def new_region(owner: "asyncpg.Connection[asyncpg.Record]", quotas: Sequence[str], policies: int) -> Region:
    name, now = f"r-{secrets.token_hex(6)}", datetime.now(UTC)
    async with owner.transaction():
        await owner.execute("INSERT INTO region (name, created_at) VALUES ($1, $2)", name, now)
        issued = await issue_token(owner, [f"region:{name}"], "a benchmark", now)
        asked = OpenEpoch(nonce=secrets.token_hex(16), fingerprint="a life")
        opened = await open_epoch(owner, name, asked, 4, now)
    return Region(name, quotas, opened.epoch, opened.lanes, issued.token, policies)  # type: ignore[union-attr]


# --- the subjects -----------------------------------------------------------------------------------------------------


async def direct(bench: Bench, lines: int, region: Region) -> None:
    applied = await bench.coordinator.gathering.apply(call_of(region.name, region.request(lines)))
    assert applied.response.replies[0].outcome == "applied", applied.response


async def over_http(
    bench: Bench, lines: int, sockets: dict[str, Any], region: Region, *, coordinators: int = 1
) -> None:
    if region.name not in sockets:
        address = urlsplit(bench.processes[len(sockets) % coordinators].address)
        sockets[region.name] = await asyncio.open_connection(address.hostname, address.port)
    reader, writer = sockets[region.name]
    body = msgspec.json.encode(region.request(lines))
    head = f"POST /v1/regions/{region.name}/exchanges HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {region.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = b""
    while not http_is_whole(answer):
        answer += await reader.read(65536)
    assert b'"outcome":"applied"' in answer, answer


# --- the references ---------------------------------------------------------------------------------------------------


async def copy(bench: Bench) -> Load:
    """Rows as the ledger has them, in portions as large as an exchange's, each in its own transaction."""
    row = await bench.owner.fetchrow("SELECT * FROM transfer WHERE cause = 'usage' LIMIT 1")
    assert row is not None
    rows, latencies_us = [tuple(row.values())] * LINES, []
    started = time.perf_counter()
    while (began := time.perf_counter()) < started + bench.seconds:
        await bench.owner.copy_records_to_table("plain", records=rows)
        latencies_us.append((time.perf_counter() - began) * 1e6)
    return loaded(len(latencies_us) * LINES / (time.perf_counter() - started), latencies_us)


async def pgbench(bench: Bench, script: Path, clients: int) -> Load:
    where = urlsplit(bench.url)
    # Connecting counts, and 16 times that is slow on a busy machine: at least three seconds.
    command = ["-n", "-c", str(clients), "-j", "1", "-T", str(max(3, round(bench.seconds))), "-f", str(script)]
    command += ["-h", str(where.hostname), "-p", str(where.port), "-U", str(where.username), where.path.strip("/")]
    secret = os.environ | {"PGPASSWORD": unquote(where.password or "")}  # where no other user of the machine sees it
    process = await asyncio.create_subprocess_exec(
        embedded.postgres_binary("pgbench"), *command, env=secret, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    shown, wrong = await process.communicate()
    found = re.search(rb"tps = ([\d.]+)", shown)
    latency = re.search(rb"latency average = ([\d.]+) ms", shown)
    assert found is not None, (wrong + shown).decode()
    assert latency is not None
    average_us = float(latency[1]) * 1000
    return Load(float(found[1]), average_us, average_us, 0)  # it tells the average only


# --- the stand --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stand(port: int, seconds: float) -> AsyncIterator[Bench]:
    with TemporaryDirectory() as directory, postgres(Path(directory), port) as url:
        await asyncio.to_thread(upgrade, url)
        owner = await asyncpg.connect(url)
        for sql in (HOT, LOG, PLAIN):
            await owner.execute(sql)
        async with owner.transaction():
            document = msgspec.convert(DOCUMENT, LimitsDocument)
            await put_limits(owner, document, lambda _: True, None, datetime.now(UTC))
        async with (
            process(url, port + 1) as one,
            process(url, port + 2) as another,
            open_database(url, 8) as database,
        ):
            settings = CoordinatorSettings(database_url=SecretStr(url))
            coordinator = Coordinator(settings, SystemClock(), database, SignalHub(), Metrics())
            collect_garbage_rarely()  # as a coordinator does
            yield Bench(url, owner, coordinator, [one, another], seconds)
        await owner.close()


class postgres:  # noqa: N801 - read as a word of `with`
    def __init__(self, directory: Path, port: int) -> None:
        self._data, self._log, self._port = directory / "data", directory / "log", port

    def __enter__(self) -> str:
        password = secrets.token_urlsafe()
        embedded.initialise_postgres(self._data, password)
        self._process = embedded.start_postgres(self._data, self._port, log=self._log)
        ends = time.monotonic() + PATIENCE_S
        while not embedded.postgres_is_ready(self._data):
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < ends, self._log.read_text()
            time.sleep(0.1)
        return embedded.postgres_url(self._port, password)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_S)


@asynccontextmanager
async def process(url: str, port: int) -> AsyncIterator[Process]:
    environment = os.environ | {
        "LEASEHOLD_COORDINATOR_DATABASE_URL": url,
        "LEASEHOLD_COORDINATOR_PORT": str(port),
        "LEASEHOLD_COORDINATOR_LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", "leasehold.cli", "coordinator"]
    started = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await _listens(port):  # noqa: ASYNC110 - another process would have to set the event
                await asyncio.sleep(0.1)
        yield Process(f"http://127.0.0.1:{port}", started.pid)
    finally:
        started.terminate()
        await started.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def run(repeats: int, seconds: float, port: int) -> dict[str, list[Row]]:
    async with stand(port, seconds) as bench:
        await direct(bench, LINES, await new_region(bench.owner, [COLD], POLICIES))
        await booked_month(bench.owner)
        with TemporaryDirectory() as directory:
            script = Path(directory) / "one_grant.sql"
            script.write_text(ONE_GRANT)
            tables = {about: await compare(turns, repeats) for about, turns in _tables(bench, script)}
        return tables | {"memory of one coordinator, as exchanges come; ratio to the first": await memory(bench)}


def _tables(bench: Bench, script: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"usage lines booked, {LINES} an exchange, 4 regions at once", _lines(bench)
    hot = {f"{place}, {regions} regions": (place, regions) for regions in (REGIONS, 64) for place in _PLACES}
    yield (
        "exchanges on one hot allowance, each asking for one unit",
        {
            "pgbench, one grant a transaction, one client": partial(pgbench, bench, script, 1),
            f"the same, {REGIONS} clients": partial(pgbench, bench, script, REGIONS),
            **{
                name: _asking(bench, *which, [f"exports:tenant=hot-{n}"]) for n, (name, which) in enumerate(hot.items())
            },
        },
    )
    many = [f"exports:tenant=t{number}" for number in range(ALLOWANCES)]
    yield (
        f"exchanges on {ALLOWANCES} allowances, 64 regions at once",
        {
            "pgbench, one grant a transaction, one client": partial(pgbench, bench, script, 1),
            **{place: _asking(bench, place, 64, many) for place in _PLACES},
        },
    )
    yield (
        f"the month of one tenant, of {TRANSFERS} transfers more",
        {
            "a row by its primary key": partial(look_up, bench),
            "the statement": partial(statement, bench),
        },
    )


_PLACES = ("without HTTP", "one coordinator", "two coordinators")


def _lines(bench: Bench) -> dict[str, Any]:
    four = partial(measured, bench, LINES, 4, quotas=[COLD])
    return {
        "COPY into a plain table": partial(copy, bench),
        "exchanges without HTTP": partial(four, partial(direct, bench, LINES), []),
        "exchanges over HTTP": partial(four, partial(over_http, bench, LINES, {}), []),
        "without HTTP, each line another policy's": partial(four, partial(direct, bench, LINES), [], policies=LINES),
    }


def _asking(bench: Bench, place: str, regions: int, quotas: Sequence[str]) -> "Callable[[], Awaitable[Load]]":
    speaks = {
        "without HTTP": partial(direct, bench, 0),
        "one coordinator": partial(over_http, bench, 0, {}),
        "two coordinators": partial(over_http, bench, 0, {}, coordinators=2),
    }
    return partial(measured, bench, 1, regions, speaks[place], [], quotas)


# --- memory -----------------------------------------------------------------------------------------------------------

INTERVALS = 10


async def memory(bench: Bench) -> list[Row]:
    """What stays of many exchanges: in memory nothing may, and the last are answered like the first."""
    regions = [await new_region(bench.owner, ["exports:tenant=long"], POLICIES) for _ in range(REGIONS)]
    speak = partial(over_http, bench, 0, {})
    await exchanged(speak, regions, 10 * REGIONS)  # whatever is made once is made
    loads, rows = [], []
    for number in range(1, INTERVALS + 1):
        loads.append(await exchanged(speak, regions, EXCHANGES // INTERVALS))
        name = f"after {number * EXCHANGES // INTERVALS:,}: {await resident_mib(bench.processes[0].pid):.1f} MiB"
        rows.append(row(name, loads[-1:], loads[:1]))
    return rows


async def exchanged(speak: "Callable[[Region], Awaitable[None]]", regions: Sequence[Region], count: int) -> Load:
    latencies_us: list[float] = []

    async def talk(region: Region) -> None:
        for _ in range(count // len(regions)):
            began = time.perf_counter()
            await speak(region)
            latencies_us.append((time.perf_counter() - began) * 1e6)

    started = time.perf_counter()
    await asyncio.gather(*map(talk, regions))
    return loaded(len(latencies_us) / (time.perf_counter() - started), latencies_us)


async def resident_mib(pid: int) -> float:
    ps = await asyncio.create_subprocess_exec("ps", "-o", "rss=", "-p", str(pid), stdout=subprocess.PIPE)
    shown, _ = await ps.communicate()
    return int(shown) / 1024


# --- the month --------------------------------------------------------------------------------------------------------

# A tenth of it is of the tenant that is asked about, over the hours of the month so far.
USAGE = """
INSERT INTO transfer (period, quota, src, dst, units, cause, region, epoch, lane, seq, line, window_at, dimensions,
    charge_period, recorded_at)
SELECT $1, CASE WHEN n % 10 = 0 THEN $2::text ELSE $2 || n % 100 END, 'outstanding', 'consumed', 1, 'usage', 'booked',
    1, 0, 1000000 + n / 500, n % 500, $3::timestamptz + (n % 40000) * interval '1 minute', '{"policy": "p"}', $1, now()
FROM generate_series(1, $4::int) AS n
"""
POOLS = """
INSERT INTO pool (quota, period, name, tenant)
SELECT $1::text || n, $2, 'exports', $3::text || n FROM unnest($4::text[]) AS n
"""
MONTH_OF = "exports:tenant=month"


async def booked_month(owner: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Usage by the hundred thousand, as rows: what a statement reads does not depend on how it was booked."""
    month = period_at(Calendar(PeriodKind.MONTH), datetime.now(UTC))
    tails = ["", *(str(n) for n in range(1, 100) if n % 10)]
    await owner.execute(POOLS, MONTH_OF, month.id, "month", tails)
    await owner.execute(USAGE, month.id, MONTH_OF, month.starts_at, TRANSFERS)
    await owner.execute("VACUUM ANALYZE transfer, usage_day, usage_hour")


async def statement(bench: Bench) -> Load:
    month = period_at(Calendar(PeriodKind.MONTH), datetime.now(UTC))
    question = UsageQuestion([month.starts_at, month.ends_at], [Dimension.QUOTA], {Dimension.TENANT: ["month"]})

    async def ask() -> None:
        page = await read_usage(bench.owner, question, None, 0, 100)
        assert page.rows, "the month is empty"

    return await one_after_the_other(bench.seconds, ask)


async def look_up(bench: Bench) -> Load:
    key = await bench.owner.fetchrow("SELECT epoch, lane, seq FROM report LIMIT 1")
    assert key is not None
    sql = "SELECT * FROM report WHERE epoch = $1 AND lane = $2 AND seq = $3"
    return await one_after_the_other(bench.seconds, partial(bench.owner.fetchrow, sql, *key))


async def one_after_the_other(seconds: float, ask: "Callable[[], Awaitable[object]]") -> Load:
    latencies_us: list[float] = []
    started = time.perf_counter()
    while (began := time.perf_counter()) < started + seconds:
        await ask()
        latencies_us.append((time.perf_counter() - began) * 1e6)
    return loaded(len(latencies_us) / (time.perf_counter() - started), latencies_us)
