"""What booking costs: usage lines beside a COPY of the same rows, and grants of one hot allowance beside pgbench.

The references do what no ledger could do with less: COPY into a table without a key, a check or an index; and one
UPDATE of one row with one INSERT beside it, in a transaction of its own. All run on one Postgres, which waits for its
disk. "Without HTTP" calls what the door calls, gathering included, in the process that makes the load: how much of its
time the making takes is a table of its own. Over HTTP the coordinator is a process of its own, and the load generator
shares the cores with it and with Postgres.

A region says in each exchange what it has heard of its lease, so whoever asks for a unit is granted one, every time.
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
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import asyncpg
import msgspec
from pydantic import SecretStr

from benchmarks.frame import FEWEST_TURNS, Fact, Lines, Load, Row, compare, facts, row
from benchmarks.load import http_is_whole
from coordinator.access.issue_token import issue_token
from coordinator.access.rules.audit import Actor
from coordinator.clock import ComparedClock
from coordinator.database.engine import open_database
from coordinator.decision_log.store import open_decision_store
from coordinator.epochs.open import open_epoch
from coordinator.exchange.parsing import parse_exchanges
from coordinator.health.monitor import CoordinatorHealth
from coordinator.job_failures import JobFailures
from coordinator.limits.put_limits import put_limits
from coordinator.metrics import CoordinatorMetrics
from coordinator.regions.put_region import put_region
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from coordinator.state import Coordinator
from coordinator.usage.read_usage import read_usage
from coordinator.usage.rules.usage import Dimension, UsageQuestion
from leasehold.local_stack import embedded
from migrations.run import upgrade
from protocol.clock import SystemClock
from protocol.diagnosis.checks import CheckResult
from protocol.identifiers import lane_of
from protocol.limits.document import LimitsDocument, PeriodKind
from protocol.messages import Exchange, ExchangeRequest, ExchangeResponse, LeaseDemand, LiveState, OpenEpoch
from protocol.outcomes import ExchangeOutcome
from protocol.periods import Calendar, minute_of, period_at
from web.diagnosis.self_diagnosis import SelfDiagnosis
from web.serving import collect_garbage_rarely

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
    granted: Counter[str] = field(default_factory=Counter)
    overage: Counter[str] = field(default_factory=Counter)

    def request(self, lines: int, exchanges: int = 1) -> ExchangeRequest:
        """Return exchanges of consecutive quotas, all in different lanes."""
        said = [self._exchange(lines) for _ in range(exchanges)]
        return ExchangeRequest(fingerprint="an incarnation", exchanges=said)

    def hear(self, response: ExchangeResponse) -> None:
        for reply in response.replies:
            assert reply.outcome is ExchangeOutcome.APPLIED, response
            for lease in reply.leases:
                self.granted[lease.quota], self.overage[lease.quota] = lease.granted, lease.overage

    def _exchange(self, lines: int) -> Exchange:
        """Return an exchange with usage lines of one unit each, or none; it requests as many units as it reports, or
        one.
        """
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
            "granted": self.granted[quota],
            "overage": self.overage[quota],
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
        live = LiveState(demands=[LeaseDemand(quota=quota, waiting=lines or 1)])
        return Exchange(frozen=msgspec.json.encode(batch).decode(), live=live)


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
    regions: list[Region] = field(default_factory=list)  # the same few in all that is measured

    async def talking(self, how_many: int, quotas: Sequence[str], policies: int = POLICIES) -> list[Region]:
        """Open regions. The quotas are divided over them, with two regions for each."""
        while len(self.regions) < how_many:
            self.regions.append(await new_region(self.owner))
        chosen, part = self.regions[:how_many], -(-len(quotas) // how_many)
        for number, region in enumerate(chosen):
            region.quotas = [*quotas[number * part :], *quotas[: number * part]][: 2 * part]
            region.policies = policies
        return chosen


async def measured(
    bench: Bench,
    per_call: int,
    how_many: int,
    speak: "Callable[[Region], Awaitable[None]]",
    quotas: Sequence[str],
    policies: int = POLICIES,
) -> Load:
    """Run many regions, the same in every turn, with one call under way each."""
    regions = await bench.talking(how_many, quotas, policies)
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


async def new_region(owner: "asyncpg.Connection[asyncpg.Record]", lanes: int = 4) -> Region:
    name, now = f"r-{secrets.token_hex(6)}", datetime.now(UTC)
    async with owner.transaction():
        await put_region(owner, name, None, None, None, now)
        issued = await issue_token(owner, [f"region:{name}"], "a benchmark", now)
        asked = OpenEpoch(nonce=secrets.token_hex(16), fingerprint="an incarnation")
        opened = await open_epoch(owner, name, asked, lanes, Actor("a benchmark"), now)
    return Region(name, [], opened.epoch, opened.lanes, issued.token)  # type: ignore[union-attr]


# --- the subjects -----------------------------------------------------------------------------------------------------


async def direct(bench: Bench, lines: int, region: Region) -> None:
    applied = await bench.coordinator.batcher.apply(
        parse_exchanges(region.name, msgspec.json.encode(region.request(lines)))
    )
    region.hear(applied.response)


async def over_http(
    bench: Bench, lines: int, sockets: dict[str, Any], region: Region, *, coordinators: int = 1, exchanges: int = 1
) -> None:
    if region.name not in sockets:
        address = urlsplit(bench.processes[len(sockets) % coordinators].address)
        sockets[region.name] = await asyncio.open_connection(address.hostname, address.port)
    reader, writer = sockets[region.name]
    body = msgspec.json.encode(region.request(lines, exchanges))
    head = f"POST /v1/regions/{region.name}/exchanges HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {region.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = b""
    while not http_is_whole(answer):
        answer += await reader.read(65536)
    region.hear(msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=ExchangeResponse))


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
        clock, metrics = ComparedClock(SystemClock(), 0), CoordinatorMetrics()
        async with (
            process(url, port + 1) as one,
            process(url, port + 2) as another,
            open_database(url, 8) as database,
            open_decision_store(url, clock, 7, metrics.decisions) as decisions,
        ):
            settings = CoordinatorSettings(database_url=SecretStr(url))
            health = CoordinatorHealth(
                url,
                clock,
                metrics,
                JobFailures(),
                clock_warn_ms=settings.clock_warn_ms,
                addresses=frozenset({"here"}),
            )
            diagnosis = SelfDiagnosis(_no_checks, clock)
            coordinator = Coordinator(settings, clock, database, SignalHub(), metrics, health, diagnosis, decisions)
            collect_garbage_rarely()  # as a coordinator does
            yield Bench(url, owner, coordinator, [one, another], seconds)
        await owner.close()


async def _no_checks() -> list[CheckResult]:
    return []


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


async def run(repeats: int, seconds: float, port: int) -> dict[str, Lines]:
    async with stand(port, seconds) as bench:
        (region,) = await bench.talking(1, [COLD])
        await direct(bench, LINES, region)
        await booked_month(bench.owner)
        with TemporaryDirectory() as directory:
            script = Path(directory) / "one_grant.sql"
            script.write_text(ONE_GRANT)
            tables: dict[str, Lines] = {about: await compare(turns, repeats) for about, turns in _tables(bench, script)}
        tables[f"CPU µs of each exchange without HTTP, {REGIONS} regions"] = await shares(bench, repeats)
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
        f"exchanges on {ALLOWANCES} allowances, each of two regions, 64 regions at once",
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
        "exchanges without HTTP": partial(four, partial(direct, bench, LINES)),
        "exchanges over HTTP": partial(four, partial(over_http, bench, LINES, {})),
        "without HTTP, each line another policy's": partial(four, partial(direct, bench, LINES), policies=LINES),
    }


def _asking(bench: Bench, place: str, regions: int, quotas: Sequence[str]) -> "Callable[[], Awaitable[Load]]":
    speaks = {
        "without HTTP": partial(direct, bench, 0),
        "one coordinator": partial(over_http, bench, 0, {}),
        "two coordinators": partial(over_http, bench, 0, {}, coordinators=2),
    }
    return partial(measured, bench, 1, regions, speaks[place], quotas)


# --- whose time it is -------------------------------------------------------------------------------------------------


async def shares(bench: Bench, repeats: int) -> list[Fact]:
    """The load is made in the process that is measured: so much of what that takes is not the coordinator's."""
    own, all_of_it = list[float](), list[float]()
    for _ in range(max(repeats, FEWEST_TURNS)):
        own.append(await _cpu_us(bench, _only_make))
        all_of_it.append(await _cpu_us(bench, partial(direct, bench, 0)))
    return facts({"all": all_of_it, "of that, making the load": own})


async def _cpu_us(bench: Bench, speak: "Callable[[Region], Awaitable[None]]") -> float:
    regions, before = await bench.talking(REGIONS, ["exports:tenant=whose"]), time.process_time()
    await exchanged(speak, regions, 100 * REGIONS)
    return (time.process_time() - before) / (100 * REGIONS) * 1e6


async def _only_make(region: Region) -> None:
    region.request(0)
    region.seqs.subtract([lane_of(region.quotas[0], region.lanes)])  # nobody heard it


# --- memory -----------------------------------------------------------------------------------------------------------

INTERVALS = 10
LANES = 16  # as many exchanges a call: so a million take minutes


async def memory(bench: Bench) -> list[Row]:
    """Measure memory over many exchanges: it must not grow, and the last exchanges are as quick as the first."""
    regions = [await new_region(bench.owner, LANES) for _ in range(REGIONS)]
    for region in regions:
        region.quotas = _one_of_each_lane(region.lanes)
    speak = partial(over_http, bench, 0, {}, exchanges=LANES)
    await exchanged(speak, regions, 10 * REGIONS)  # whatever is made once is made
    loads, rows = [], []
    calls = max(1, EXCHANGES // INTERVALS // LANES // REGIONS) * REGIONS
    for number in range(1, INTERVALS + 1):
        loads.append(await exchanged(speak, regions, calls, LANES))
        name = f"after {number * calls * LANES:,}: {await resident_mib(bench.processes[0].pid):.1f} MiB"
        rows.append(row(name, loads[-1:], loads[:1]))
    return rows


def _one_of_each_lane(lanes: int) -> list[str]:
    found: dict[int, str] = {}
    for number in count():
        quota = f"exports:tenant=long-{number}"
        found.setdefault(lane_of(quota, lanes), quota)
        if len(found) == lanes:
            break
    return list(found.values())


async def exchanged(
    speak: "Callable[[Region], Awaitable[None]]", regions: Sequence[Region], calls: int, per_call: int = 1
) -> Load:
    latencies_us: list[float] = []

    async def talk(region: Region) -> None:
        for _ in range(calls // len(regions)):
            began = time.perf_counter()
            await speak(region)
            latencies_us.append((time.perf_counter() - began) * 1e6)

    started = time.perf_counter()
    await asyncio.gather(*map(talk, regions))
    return loaded(len(latencies_us) * per_call / (time.perf_counter() - started), latencies_us)


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
