"""A coordinator reports whether it can commit and may trust its clock, and which jobs fail and regions are silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from structlog.testing import capture_logs

from coordinator.access.issue_token import issue_token
from coordinator.clock import ComparedClock
from coordinator.database.engine import Database
from coordinator.job_failures import JobFailures
from coordinator.jobs import Job, running
from coordinator.main import create_app
from coordinator.metrics import CoordinatorMetrics
from coordinator.outages import ClockNotTrusted
from coordinator.settings import CoordinatorSettings
from protocol.clock import SystemClock
from tests.conftest import free_port, restricted
from tests.integration.coordinator.fixtures import NOON, StandingClock, connected

pytestmark = pytest.mark.anyio


class SkewedClock(SystemClock):
    def __init__(self, **ahead: float) -> None:
        self.ahead = timedelta(**ahead)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


@asynccontextmanager
async def coordinator(url: str, clock: SystemClock | None = None) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    app = create_app(CoordinatorSettings(database_url=SecretStr(url), database_pool_size=2), clock)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://c") as client:
        yield app, client


def codes(answer: httpx.Response) -> list[str]:
    return [reason["code"] for reason in answer.json()["reasons"]]


# --- commits ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def no_synchronous_standby(url: str) -> AsyncIterator[None]:
    """Make every commit of the server wait for a standby that does not exist."""
    async with connected(url) as owner:
        await owner.execute("SET synchronous_commit = off")

        try:
            await owner.execute("ALTER SYSTEM SET synchronous_standby_names = 'gone'")
            await owner.execute("SELECT pg_reload_conf()")
            yield
        finally:
            await owner.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await owner.execute("SELECT pg_reload_conf()")


async def test_a_coordinator_whose_commits_hang_is_not_ready_with_the_reason(database: str) -> None:
    async with connected(database) as owner:  # test servers do not wait for disks by default
        await owner.execute(f'ALTER DATABASE "{urlsplit(database).path[1:]}" SET synchronous_commit = "on"')
    async with coordinator(restricted(database)) as (_, client):
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "reasons": []})
        async with no_synchronous_standby(database):
            hung = await until_it_says(client, 503)
            assert (hung.json()["status"], codes(hung)) == ("not_ready", ["commits_fail"])
            assert hung.json()["reasons"][0]["since"].endswith("Z")
            assert "leasehold_coordinator_ready 0.0" in (await client.get("/metrics")).text
        assert codes(await until_it_says(client, 200)) == []


async def until_it_says(client: httpx.AsyncClient, status: int) -> httpx.Response:
    async with asyncio.timeout(30):
        while (answer := await client.get("/readyz")).status_code != status:  # noqa: ASYNC110 - it is asked each time
            await asyncio.sleep(0.05)
    return answer


async def test_a_scrape_runs_no_query(database: str) -> None:
    async with coordinator(restricted(database)) as (app, client):
        object.__setattr__(app.state.coordinator, "database", None)
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert "leasehold_coordinator_ledger_figures_timestamp_seconds" in answer.text


async def test_a_hanging_server_delays_neither_the_metrics_nor_the_start() -> None:
    """The server accepts connections and never answers, like a stopped process."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with asyncio.timeout(60), coordinator(f"postgresql://a:b@127.0.0.1:{port}/c") as (_, client):
        assert (await client.get("/metrics")).status_code == 200
        answer = await client.get("/readyz")
        assert (answer.status_code, codes(answer)[0]) == (503, "database_unavailable")
    silent.close()
    for writer in writers:
        writer.close()


# --- the clock --------------------------------------------------------------------------------------------------------


async def test_a_coordinator_whose_clock_is_ahead_decides_nothing(database: str) -> None:
    async with connected(database) as owner:
        await owner.execute("INSERT INTO region (name, weight, created_at) VALUES ('us-east', 1, now())")
        token = (await issue_token(owner, ["region:us-east"], "", NOON)).token
    clock = SkewedClock(hours=3)
    headers = {"Authorization": f"Bearer {token}"}
    async with coordinator(restricted(database), clock) as (app, client):
        ready = await client.get("/readyz")
        assert (ready.status_code, codes(ready)) == (503, ["clock_differs"])
        assert "10800.0 s ahead of the database's" in ready.json()["reasons"][0]["text"]
        body = {"nonce": "0" * 32, "fingerprint": "a store"}
        refused = await client.post("/v1/regions/us-east/epochs", json=body, headers=headers)
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/clock-not-trusted")
        batch = {"epoch": 1, "lane": 0, "seq": 1, "leases": []}
        exchanges = [{"frozen": json.dumps(batch), "live": {"demands": []}}]
        exchange = {"fingerprint": "a store", "exchanges": exchanges}
        refused = await client.post("/v1/regions/us-east/exchanges", json=exchange, headers=headers)
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/clock-not-trusted")
        clock.ahead = timedelta()
        await app.state.coordinator.health.look()
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/v1/regions/us-east/epochs", json=body, headers=headers)).status_code == 200
        clock.ahead = timedelta(seconds=-7)  # a jump of the clock is noticed before the next comparison
        assert (await client.post("/v1/regions/us-east/exchanges", json=exchange, headers=headers)).status_code == 503


async def test_a_small_difference_of_clocks_is_reported_and_stops_nothing(database: str) -> None:
    async with coordinator(restricted(database), SkewedClock(seconds=2.5)) as (_, client):
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["status"], codes(answer)) == (200, "degraded", ["clock_drifts"])
        assert "leasehold_coordinator_clock_offset_seconds 2." in (await client.get("/metrics")).text


def test_a_slow_database_is_no_difference_of_clocks() -> None:
    clock = ComparedClock(StandingClock(), 5_000)
    with pytest.raises(ClockNotTrusted, match="not been compared"):
        clock.now()
    clock.compare(NOON - timedelta(seconds=20), NOON - timedelta(seconds=9), NOON)
    assert (clock.difference_ms, clock.now()) == (0, NOON)
    clock.compare(NOON - timedelta(seconds=1), NOON + timedelta(seconds=6), NOON)
    assert clock.difference_ms == -6_000
    with pytest.raises(ClockNotTrusted, match=r"6\.0 s behind"):
        clock.now()


# --- jobs -------------------------------------------------------------------------------------------------------------


async def test_a_job_that_keeps_failing_is_a_reason_and_is_logged_once(database: str) -> None:
    async with coordinator(restricted(database)) as (app, client):
        health = app.state.coordinator.health
        failures: JobFailures = health._failures
        with capture_logs() as logs:
            for _ in range(7):
                failures.failed("seal of a test", RuntimeError("no"))
            answer = await client.get("/readyz")
            failures.worked("seal of a test")
            after = await client.get("/readyz")
    assert (answer.status_code, answer.json()["status"], codes(answer)) == (200, "degraded", ["job_failing"])
    assert "seal of a test" in answer.json()["reasons"][0]["text"]
    assert after.json() == {"status": "ready", "reasons": []}
    about = [(each["event"], each.get("failures")) for each in logs if each.get("job") == "seal of a test"]
    assert about == [("job fails", None), ("job works again", 7)]


async def test_an_outage_of_the_database_is_one_line_and_not_one_for_each_failure() -> None:
    nowhere, metrics = f"postgresql://a:b@127.0.0.1:{free_port()}/c", CoordinatorMetrics()
    failed = metrics.job_failures.labels("scheduler")

    async def nothing(_: Database) -> None:
        return None

    with capture_logs() as logs:
        async with (
            coordinator(nowhere) as (_, client),
            running(nowhere, [Job("count", 0.01, nothing)], metrics),
            asyncio.timeout(30),
        ):
            while _value(failed) < 30:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.01)
            for _ in range(3):
                await client.get("/readyz")
    events = [each["event"] for each in logs if each["event"] not in ("request", "signals interrupted")]
    assert events == ["coordinator not ready"]
    assert [each["event"] for each in logs].count("signals interrupted") <= 1


def _value(counter: Any) -> float:
    value: float = counter._value.get()
    return value


# --- regions ----------------------------------------------------------------------------------------------------------


async def test_a_silent_region_is_logged_and_shown(database: str) -> None:
    async with connected(database) as owner:
        await owner.execute("INSERT INTO region (name, weight, created_at) VALUES ('us-east', 1, now())")
        region = {"Authorization": f"Bearer {(await issue_token(owner, ['region:us-east'], '', NOON)).token}"}
        reader = {"Authorization": f"Bearer {(await issue_token(owner, ['quota:read'], '', NOON)).token}"}
        async with coordinator(restricted(database)) as (app, client):
            health = app.state.coordinator.health
            assert (await client.get("/v1/regions/us-east", headers=reader)).json()["last_seen_at"] is None
            await client.get("/v1/policies", headers=region)
            await health.share_and_read()
            last_seen_at = (await client.get("/v1/regions/us-east", headers=reader)).json()["last_seen_at"]
            assert last_seen_at.endswith("Z")
            with capture_logs() as logs:
                await owner.execute("UPDATE region_last_seen SET last_seen_at = last_seen_at - interval '61 seconds'")
                for _ in range(3):
                    await health.share_and_read()
                shown = (await client.get("/metrics")).text
                await client.get("/v1/policies", headers=region)
                await health.share_and_read()
    assert 'leasehold_coordinator_region_silent{region="us-east"} 1.0' in shown
    about = [each["event"] for each in logs if each.get("region") == "us-east"]
    assert about == ["region silent for a minute", "region reports again"]
