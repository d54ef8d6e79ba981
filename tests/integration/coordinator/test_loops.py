"""Two coordinators' loops on one database: each tick is done once, and by whoever is there."""

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import generate_latest

from coordinator.database.engine import Database, open_database
from coordinator.jobs import Job, JobTookTooLong, running, tick
from coordinator.metrics import Metrics
from tests.conftest import free_port
from tests.integration.coordinator.standing import connected

pytestmark = pytest.mark.anyio

DUE = "UPDATE job SET due_at = now() WHERE name = 'count'"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what counts has no event
            await asyncio.sleep(0.005)


class Counting:
    """A job that counts who is at it."""

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


async def test_a_tick_is_done_by_one_and_once(database: str) -> None:
    counting = Counting()
    async with open_database(database, 4) as here, open_database(database, 4) as there:
        first, second = counting.job("here", every_s=60), counting.job("there", every_s=60)
        await tick_when_free(first, here)
        counting.go_on.clear()
        async with connected(database) as owner:
            await owner.execute(DUE)
        at_it = asyncio.create_task(tick(first, here))
        await until(lambda: counting.at_once == 1)
        assert not (await tick(second, there)).is_done  # somebody is at it
        counting.go_on.set()
        assert (await at_it).is_done
        assert not (await tick(second, there)).is_done  # it is done
    assert (counting.done, counting.most_at_once) == (["here", "here"], 1)


async def test_what_is_not_due_says_when_it_will_be(database: str) -> None:
    counting = Counting()
    async with open_database(database, 2) as here:
        await tick_when_free(counting.job("here", every_s=60), here)
        again = await tick(counting.job("here", every_s=60), here)
    assert not again.is_done
    assert 0 < again.due_in_s <= 60


async def test_loops_of_two_coordinators_never_work_at_once_and_one_goes_on_alone(database: str) -> None:
    counting = Counting()
    async with running(database, [counting.job("here")], Metrics()):
        async with running(database, [counting.job("there")], Metrics()):
            await until(lambda: {"here", "there"} == {*counting.done})
        done = len(counting.done)
        await until(lambda: len(counting.done) > done + 3)
        assert {*counting.done[done + 1 :]} == {"here"}
    assert counting.most_at_once == 1


async def test_a_coordinator_that_dies_in_the_middle_leaves_the_job_to_others(database: str) -> None:
    """Its connections end with it; nothing of it is waited for."""
    counting = Counting()
    counting.go_on.clear()
    async with (
        connected(database) as owner,
        open_database(database, 4) as there,
        running(database, [counting.job("here")], Metrics()),
    ):
        await until(lambda: counting.at_once == 1)
        assert not (await tick(counting.job("there"), there)).is_done
        killed = await owner.fetchval(
            """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
            WHERE datname = current_database() AND state = 'idle in transaction' AND query LIKE '%FROM job%'"""
        )
        assert killed == 1
        counting.go_on.set()
        await tick_when_free(counting.job("there"), there)
    assert "there" in counting.done


async def tick_when_free(job: Job, database: Database) -> None:
    """A job that was never done is made first, and the database needs a moment to notice that a connection is gone."""
    async with asyncio.timeout(20):
        while not (await tick(job, database)).is_done:  # noqa: ASYNC110 - it is waited for in Postgres
            await asyncio.sleep(0.005)


async def test_a_job_that_fails_is_counted_and_tried_again(database: str) -> None:
    metrics, tried = Metrics(), 0

    async def fail_twice(_: Database) -> None:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise RuntimeError("not yet")

    async with running(database, [Job("count", 0.05, fail_twice)], metrics):
        await until(lambda: 'job_runs_total{job="count"}' in generate_latest(metrics.registry).decode())
    said = generate_latest(metrics.registry).decode()
    assert 'leasehold_coordinator_job_failures_total{job="count"} 2.0' in said
    assert 'leasehold_coordinator_job_last_success_timestamp_seconds{job="count"}' in said


async def test_a_job_that_hangs_is_ended_so_that_others_may_try(database: str) -> None:
    counting = Counting()
    counting.go_on.clear()
    async with open_database(database, 2) as here:
        with pytest.raises(JobTookTooLong):
            await tick_when_free(counting.job("here", at_most_s=0.01), here)
        counting.go_on.set()
        await tick_when_free(counting.job("here"), here)
    assert counting.done == ["here"]


async def test_without_a_database_a_loop_waits_and_ends_with_its_coordinator() -> None:
    metrics = Metrics()
    nowhere = f"postgresql://nobody@127.0.0.1:{free_port()}/nothing"
    async with running(nowhere, [Counting().job("here", every_s=0.05)], metrics):
        await until(lambda: "job_failures_total{" in generate_latest(metrics.registry).decode())
