"""What one coordinator measures is shown by all, and no scrape of the metrics waits for Postgres."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from coordinator.health.figures import measure, measure_deliveries
from coordinator.jobs import Job, running
from tests.conftest import restricted
from tests.integration.coordinator.agent_harness import AgentHarness, want
from tests.integration.coordinator.fixtures import NOON, connected, frozen
from tests.integration.coordinator.health.test_health import coordinator
from tests.integration.coordinator.suspense.test_bulk import fail_over
from tests.promtool import check_metrics, touch
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio


def value(text: str, series: str) -> float:
    """Return the value of one series of an exposition."""
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{series} "))


async def test_suspense_is_shown_by_region_with_the_time_of_the_last_report(agent_harness: AgentHarness) -> None:
    await fail_over(agent_harness, await agent_harness.agent(), tenants=3)
    text = await agent_harness.metrics()
    assert value(text, 'leasehold_coordinator_suspense_units{region="us-east"}') == 30
    since = value(text, 'leasehold_coordinator_suspense_oldest_timestamp_seconds{region="us-east"}')
    assert since == NOON.timestamp()
    assert value(text, 'leasehold_coordinator_quota_keys{quota="exports"}') == 3
    assert value(text, "leasehold_coordinator_drifting_leases") == 0


async def test_dead_letters_and_waiting_events_are_counted(agent_harness: AgentHarness) -> None:
    await agent_harness.metrics()  # the row of the figures
    owner = agent_harness.owner
    await owner.execute(
        """
        WITH hook AS (
            INSERT INTO webhook (id, url, events, secret, created_at, created_by)
            VALUES (gen_random_uuid(), 'https://example.org', '{drift.found}', 's', $1, 'test') RETURNING id
        ), event AS (
            INSERT INTO outbox (id, kind, data, occurred_at)
            SELECT gen_random_uuid(), 'drift.found', '{}', $1 FROM generate_series(1, 3) RETURNING id
        )
        INSERT INTO delivery (event, webhook, next_attempt_at, dead_at)
        SELECT event.id, hook.id, '2100-01-01', CASE row_number() OVER () WHEN 1 THEN $1::timestamptz END
        FROM event, hook
        """,
        NOON,
    )
    async with connected(restricted(agent_harness.url)) as role:
        await measure_deliveries(role)
        await measure(role, NOON)  # leaves the other figures alone
    await agent_harness.app.state.coordinator.health.share_and_read()
    text = (await (await agent_harness.client()).get("/metrics")).text
    assert value(text, "leasehold_coordinator_webhook_dead_letters") == 1
    assert value(text, "leasehold_coordinator_webhook_deliveries_waiting") == 2
    assert value(text, "leasehold_coordinator_webhook_oldest_event_timestamp_seconds") == NOON.timestamp()


async def test_who_waits_for_a_connection_is_shown(agent_harness: AgentHarness) -> None:
    database = agent_harness.app.state.coordinator.database
    size = database.use.pool.get_max_size()
    async with AsyncExitStack() as held:
        for _ in range(size):
            await held.enter_async_context(database.transaction())
        waiting = asyncio.create_task(database.read(lambda c: c.fetchval("SELECT 1")))
        await until(lambda: database.use.waiting)
        text = (await (await agent_harness.client()).get("/metrics")).text
        assert value(text, 'leasehold_coordinator_database_waiters{pool="requests"}') == 1
        assert value(text, 'leasehold_coordinator_database_connections{pool="requests",state="in_use"}') == size
        assert value(text, 'leasehold_coordinator_database_connections_limit{pool="requests"}') == size
    assert await waiting == 1
    assert database.use.waiting == 0


async def test_failures_of_a_job_in_a_row_are_shown_until_it_works(database: str) -> None:
    left = [RuntimeError("no"), RuntimeError("no")]

    async def run(_: object) -> None:
        seen.append(gauge._value.get())
        if left:
            raise left.pop()

    async with coordinator(restricted(database)) as (app, client):
        metrics = app.state.coordinator.metrics
        gauge = metrics.job_failures_in_a_row.labels("trial")
        seen: list[float] = []
        async with running(restricted(database), [Job("trial", 0.05, run)], metrics):
            await until(lambda: len(seen) > 3)
        assert seen[:3] == [0, 1, 2]
        text = (await client.get("/metrics")).text
        assert value(text, 'leasehold_coordinator_job_failures_in_a_row{job_name="trial"}') == 0


@pytest.mark.extended
async def test_promtool_finds_no_fault_in_the_metrics(agent_harness: AgentHarness) -> None:
    agent = await agent_harness.agent()
    assert (await agent.say(1, demands=[want(waiting=10)])).outcome == "applied"
    touch(agent_harness.app.state.coordinator.metrics)
    check_metrics(await agent_harness.metrics())


# --- a hanging server -------------------------------------------------------------------------------------------------


async def test_metrics_are_served_while_postgres_is_frozen(database: str) -> None:
    """A query would fail after five seconds at the earliest, and then the answer would not be 200."""
    async with coordinator(restricted(database)) as (app, client), connected(database) as owner:
        health = app.state.coordinator.health
        await until(lambda: health.report().status == "ready")
        async with frozen(owner):
            async for _ in attempts():
                if value(text := await _scrape(client), "leasehold_coordinator_ready") == 0:
                    break
            assert value(text, "leasehold_coordinator_ready") == 0
            assert "leasehold_coordinator_ledger_figures_timestamp_seconds" in text
            assert value(text, 'leasehold_coordinator_database_connections_limit{pool="requests"}') == 2
        await until(lambda: health.report().status == "ready")


async def _scrape(client: httpx.AsyncClient) -> str:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return answer.text
