"""Background jobs of two coordinators on one database: each job is run by one coordinator at a time."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import generate_latest

from coordinator.database.engine import Database, open_database
from coordinator.jobs import Job, JobTookTooLong, run_if_due, running
from coordinator.metrics import CoordinatorMetrics
from tests.conftest import free_port
from tests.integration.coordinator.fixtures import connected

pytestmark = pytest.mark.anyio

DUE = "INSERT INTO job (name, due_at) VALUES ('count', now()) ON CONFLICT (name) DO UPDATE SET due_at = now()"
CONNECTIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'leasehold-coordinator'
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what counts has no event
            await asyncio.sleep(0.005)


class Counting:
    """A job that counts its concurrent runs."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.at_once = self.most_at_once = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    def job(self, who: str, every_s: float = 0.05, at_most_s: float = 25) -> Job:
        async def run(_: Database) -> None:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await self.go_on.wait()
            finally:
                self.at_once -= 1
            self.done.append(who)

        return Job("count", every_s, run, at_most_s)


async def make_due(database: str) -> None:
    async with connected(database) as owner:
        await owner.execute(DUE)


async def test_a_due_job_is_run_once_by_one_coordinator(database: str) -> None:
    counting = Counting()
    await make_due(database)
    async with open_database(database, 4) as here, open_database(database, 4) as there:
        first, second = counting.job("here", every_s=60), counting.job("there", every_s=60)
        counting.go_on.clear()
        at_it = asyncio.create_task(run_if_due(first, here))
        await until(lambda: counting.at_once == 1)
        assert not await run_if_due(second, there), "another coordinator runs it"
        counting.go_on.set()
        assert await at_it
        assert not await run_if_due(second, there), "it is not due again"
    assert (counting.done, counting.most_at_once) == (["here"], 1)


async def test_a_job_without_work_does_not_run_and_is_counted_as_working(database: str) -> None:
    counting, metrics = Counting(), CoordinatorMetrics()
    has_work = "EXISTS (SELECT FROM region WHERE name = 'us-east' AND created_at < $2)"
    await make_due(database)
    async with (
        running(database, [counting.job("here")._replace(has_work=has_work)], metrics),
        connected(database) as owner,
    ):
        await until(
            lambda: 'job_last_success_timestamp_seconds{job_name="count"}' in generate_latest(metrics.registry).decode()
        )
        assert not counting.done
        await owner.execute(
            "INSERT INTO region (name, weight, created_at) VALUES ('us-east', 1, now() - interval '1 s')"
        )
        await until(lambda: counting.done != [])


async def test_an_idle_coordinator_reads_all_jobs_in_one_statement(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty jobs that have no work: one statement for all of them at a time, on one connection, and no transaction."""
    monkeypatch.setattr("coordinator.jobs.IDLE_S", 0.0)
    statements: list[str] = []
    read = Database.read

    async def count(self: Database, operation: Any) -> Any:
        statements.append("read")
        return await read(self, operation)

    def refuse(self: Database, **_: object) -> None:
        statements.append("transaction")

    monkeypatch.setattr(Database, "read", count)
    monkeypatch.setattr(Database, "transaction", refuse)
    counting = Counting()
    idle = [counting.job("here", every_s=0.2)._replace(name=f"idle-{number}", has_work="false") for number in range(20)]
    async with connected(database) as owner:
        await owner.executemany("INSERT INTO job (name, due_at) VALUES ($1, now())", [(job.name,) for job in idle])
        async with running(database, idle, CoordinatorMetrics()):
            await until(lambda: len(statements) >= 5)
            assert await owner.fetchval(CONNECTIONS) == 1
    assert {*statements} == {"read"}
    assert not counting.done


async def test_an_idle_coordinator_looks_again_after_a_commit(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would look after an hour. A commit is enough, whatever it was."""
    monkeypatch.setattr("coordinator.jobs.IDLE_S", 3_600.0)
    counting, metrics = Counting(), CoordinatorMetrics()
    job = counting.job("here")._replace(has_work="EXISTS (SELECT FROM region)")
    await make_due(database)
    async with running(database, [job], metrics) as scheduler, open_database(database, 1) as requests:
        requests.on_commit = scheduler.expect_work
        await until(
            lambda: 'job_last_success_timestamp_seconds{job_name="count"}' in generate_latest(metrics.registry).decode()
        )
        await requests.run(lambda c: c.execute("INSERT INTO region (name, weight, created_at) VALUES ('a', 1, now())"))
        await until(lambda: counting.done != [])


async def test_two_coordinators_never_run_a_job_at_once_and_one_goes_on_alone(database: str) -> None:
    counting = Counting()
    async with running(database, [counting.job("here")], CoordinatorMetrics()):
        async with running(database, [counting.job("there")], CoordinatorMetrics()):
            await until(lambda: {"here", "there"} == {*counting.done})
        done = len(counting.done)
        await until(lambda: len(counting.done) > done + 3)
        assert {*counting.done[done + 1 :]} == {"here"}
    assert counting.most_at_once == 1


async def test_a_coordinator_that_dies_in_the_middle_leaves_the_job_to_others(database: str) -> None:
    """Its connections end with it, and no timeout has to pass."""
    counting = Counting()
    counting.go_on.clear()
    await make_due(database)
    async with (
        connected(database) as owner,
        open_database(database, 4) as there,
        running(database, [counting.job("here")], CoordinatorMetrics()),
    ):
        await until(lambda: counting.at_once == 1)
        assert not await run_if_due(counting.job("there"), there)
        killed = await owner.fetchval(
            """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
            WHERE datname = current_database() AND state = 'idle in transaction' AND query LIKE '%FROM job%'"""
        )
        assert killed == 1
        counting.go_on.set()
        await run_when_free(counting.job("there"), there)
    assert "there" in counting.done


async def run_when_free(job: Job, database: Database) -> None:
    """Wait until Postgres notices that a connection is gone."""
    async with asyncio.timeout(20):
        while not await run_if_due(job, database):  # noqa: ASYNC110 - Postgres has no event for it
            await asyncio.sleep(0.005)


async def test_a_job_that_fails_is_counted_and_tried_again(database: str) -> None:
    metrics, tried = CoordinatorMetrics(), 0

    async def fail_twice(_: Database) -> None:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise RuntimeError("not yet")

    async with running(database, [Job("count", 0.05, fail_twice)], metrics):
        await until(lambda: 'job_runs_total{job_name="count"}' in generate_latest(metrics.registry).decode())
    said = generate_latest(metrics.registry).decode()
    assert 'leasehold_coordinator_job_failures_total{job_name="count"} 2.0' in said
    assert 'leasehold_coordinator_job_last_success_timestamp_seconds{job_name="count"}' in said


async def test_a_job_that_hangs_is_ended_so_that_others_may_try(database: str) -> None:
    counting = Counting()
    counting.go_on.clear()
    await make_due(database)
    async with open_database(database, 2) as here:
        with pytest.raises(JobTookTooLong):
            await run_if_due(counting.job("here", at_most_s=0.01), here)
        counting.go_on.set()
        await run_when_free(counting.job("here"), here)
    assert counting.done == ["here"]


async def test_without_a_database_the_scheduler_waits_and_ends_with_its_coordinator() -> None:
    metrics = CoordinatorMetrics()
    nowhere = f"postgresql://nobody@127.0.0.1:{free_port()}/nothing"
    async with running(nowhere, [Counting().job("here", every_s=0.05)], metrics):
        await until(lambda: "job_failures_total{" in generate_latest(metrics.registry).decode())
