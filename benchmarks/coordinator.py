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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import msgspec
from pydantic import SecretStr

from benchmarks.frame import Load, Row, compare
from benchmarks.load import http_is_whole
from coordinator.api.frozen import call_of
from coordinator.database.engine import open_database
from coordinator.domain.period import minute_of, period_at
from coordinator.metrics import Metrics
from coordinator.operations.issue_token import issue_token
from coordinator.operations.open_epoch import open_epoch
from coordinator.operations.put_limits import put_limits
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from coordinator.state import Coordinator
from leasehold import embedded
from migrations.run import upgrade
from protocol.clock import SystemClock
from protocol.identifiers import lane_of
from protocol.messages import Exchange, ExchangeRequest, LeaseWant, LiveState, OpenEpoch, Versions
from protocol.policy import LimitsDocument, PeriodKind

REGIONS = 16
LINES = 500
COLD, HOT_QUOTA = "exports:tenant=acme", "exports:tenant=globex"
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
    """One region that talks without end: each exchange is the next of its lane."""

    name: str
    quota: str
    epoch: int
    lanes: int
    token: str
    seq: int = 0
    consumed: int = 0

    def request(self, lines: int) -> ExchangeRequest:
        """With usage lines of one unit each, or none; asking for as many units as it reports, or for one."""
        self.seq += 1
        self.consumed += lines
        now = datetime.now(UTC)
        minute = minute_of(now)
        lease = {
            "quota": self.quota,
            "period": period_at(PeriodKind.MONTH, now).id,
            "granted": 0,
            "overage": 0,
            "consumed": self.consumed,
            "returned": 0,
            "lines": [
                {"minute": minute, "dimensions": {"tenant": "acme", "policy": f"p{number}"}, "units": 1}
                for number in range(lines)
            ],
        }
        batch = {"epoch": self.epoch, "lane": lane_of(self.quota, self.lanes), "seq": self.seq, "leases": [lease]}
        live = LiveState(wants=[LeaseWant(quota=self.quota, waiting=lines or 1)])
        frozen = Exchange(frozen=msgspec.json.encode(batch).decode(), live=live)
        return ExchangeRequest(fingerprint="a life", versions=Versions(), exchanges=[frozen])


@dataclass
class Bench:
    url: str
    owner: "asyncpg.Connection[asyncpg.Record]"
    coordinator: Coordinator
    address: str
    seconds: float


async def measured(
    bench: Bench,
    quota: str,
    per_call: int,
    count: int,
    speak: "Callable[[Region], Awaitable[None]]",
    regions: list[Region],
) -> Load:
    """So many regions, the same in every turn, each with one call under way."""
    while len(regions) < count:
        regions.append(await new_region(bench.owner, quota))
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


async def new_region(owner: "asyncpg.Connection[asyncpg.Record]", quota: str) -> Region:
    name, now = f"r-{secrets.token_hex(6)}", datetime.now(UTC)
    async with owner.transaction():
        await owner.execute("INSERT INTO region (name, created_at) VALUES ($1, $2)", name, now)
        issued = await issue_token(owner, [f"region:{name}"], "a benchmark", now)
        asked = OpenEpoch(nonce=secrets.token_hex(16), fingerprint="a life")
        opened = await open_epoch(owner, name, asked, 4, now)
    return Region(name, quota, opened.epoch, opened.lanes, issued.token)  # type: ignore[union-attr]


# --- the subjects -----------------------------------------------------------------------------------------------------


async def direct(bench: Bench, lines: int, region: Region) -> None:
    applied = await bench.coordinator.gathering.apply(call_of(region.name, region.request(lines)))
    assert applied.response.replies[0].outcome == "applied", applied.response


async def over_http(bench: Bench, lines: int, sockets: dict[str, Any], region: Region) -> None:
    if region.name not in sockets:
        address = urlsplit(bench.address)
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


async def pgbench(bench: Bench, script: Path) -> Load:
    where = urlsplit(bench.url)
    # Connecting counts, and 16 times that is slow on a busy machine: at least three seconds.
    command = ["-n", "-c", str(REGIONS), "-j", "1", "-T", str(max(3, round(bench.seconds))), "-f", str(script)]
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
        async with process(url, port + 1) as address, open_database(url, 8) as database:
            settings = CoordinatorSettings(database_url=SecretStr(url))
            coordinator = Coordinator(settings, SystemClock(), database, SignalHub(), Metrics())
            yield Bench(url, owner, coordinator, address, seconds)
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
            assert time.monotonic() < ends, self._log.read_text()
            time.sleep(0.1)
        return embedded.postgres_url(self._port, password)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_S)


@asynccontextmanager
async def process(url: str, port: int) -> AsyncIterator[str]:
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
        yield f"http://127.0.0.1:{port}"
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
        await direct(bench, LINES, await new_region(bench.owner, COLD))
        with TemporaryDirectory() as directory:
            script = Path(directory) / "one_grant.sql"
            script.write_text(ONE_GRANT)
            return {about: await compare(turns, repeats) for about, turns in _tables(bench, script)}


def _tables(bench: Bench, script: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    four = partial(measured, bench, COLD, LINES, 4)
    yield (
        f"usage lines booked, {LINES} an exchange, 4 regions at once",
        {
            "COPY into a plain table": partial(copy, bench),
            "exchanges without HTTP": partial(four, partial(direct, bench, LINES), []),
            "exchanges over HTTP": partial(four, partial(over_http, bench, LINES, {}), []),
        },
    )
    all_ = partial(measured, bench, HOT_QUOTA, 1, REGIONS)
    yield (
        f"grants of one hot allowance, {REGIONS} regions at once",
        {
            "pgbench, one a transaction": partial(pgbench, bench, script),
            "exchanges without HTTP": partial(all_, partial(direct, bench, 0), []),
            "exchanges over HTTP": partial(all_, partial(over_http, bench, 0, {}), []),
        },
    )
