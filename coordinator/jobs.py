"""What coordinators do by themselves: any number of them may run, and each job is done by one at a time.

A job has a row in the database that says when it is due, by the database's clock. Whoever finds it due locks the row,
does the work and moves the row on, all before the lock is let go; the others skip a locked row. So a tick is done once,
and when a coordinator dies in the middle its lock dies with it, and another one finds the job due. What a job does must
be safe to repeat: the work may have been committed where the moving on was not.

A job that fails is tried again shortly, by any coordinator. Each failure is counted, and logged when the job begins to
fail and when it works again (`job_failures.py`); only the end of the coordinator ends a loop.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import NamedTuple

from coordinator.database.connection import Connection
from coordinator.database.engine import Database, open_database
from coordinator.job_failures import JobFailures
from coordinator.metrics import Metrics

FIRST_LOOK_S = 1.0  # coordinators that start together do not all look at once
LOOKS_PER_TICK = 10  # how often a job that is due and not done is looked at again
GRACE_S = 5.0
CONNECTIONS_PER_JOB = 3  # the one that holds the row, and what the work needs


class JobTookTooLong(RuntimeError):
    """The work was ended, so that other coordinators can try it."""


class Job(NamedTuple):
    name: str
    every_s: float
    run: Callable[[Database], Awaitable[object]]
    at_most_s: float = 25.0  # a coordinator that is cut off must not keep the others from it for ever


@asynccontextmanager
async def running(
    url: str, jobs: Sequence[Job], metrics: Metrics, failures: JobFailures | None = None
) -> AsyncIterator[None]:
    """Until the end of the block. On connections of their own, so that requests never wait for them."""
    failures = failures or JobFailures()
    async with open_database(url, CONNECTIONS_PER_JOB * max(1, len(jobs))) as database:
        tasks = [asyncio.create_task(_loop(job, database, metrics, failures), name=job.name) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _loop(job: Job, database: Database, metrics: Metrics, failures: JobFailures) -> None:
    pause_s = min(FIRST_LOOK_S, job.every_s)
    while True:
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        pause_s = await _look(job, database, metrics, failures)


async def _look(job: Job, database: Database, metrics: Metrics, failures: JobFailures) -> float:
    """Does the job if it is due. The seconds until it is worth while to look again."""
    started = monotonic()
    try:
        done = await tick(job, database)
    except Exception as error:  # whatever it was, the next tick is another chance
        metrics.job_failures.labels(job.name).inc()
        failures.failed(job.name, error)
        return job.every_s / LOOKS_PER_TICK
    if done.is_done or done.due_in_s > 0:  # here, or by another coordinator
        failures.worked(job.name)
    if done.is_done:
        metrics.job_runs.labels(job.name).inc()
        metrics.job_seconds.labels(job.name).observe(monotonic() - started)
        metrics.job_last_success.labels(job.name).set_to_current_time()
    return min(max(done.due_in_s, job.every_s / LOOKS_PER_TICK), job.every_s)


class Tick(NamedTuple):
    is_done: bool
    due_in_s: float


async def tick(job: Job, database: Database) -> Tick:
    """Once: the work, if it is due and nobody else is at it."""
    async with database.transaction() as connection:
        await connection.execute(_ALLOW_TO_WAIT, str(round(1000 * (job.at_most_s + GRACE_S))))
        if await connection.fetchval(_CLAIM, job.name) is None:
            return Tick(False, await _due_in_s(job, connection))
        await _run_in_time(job, database)
        return Tick(True, await connection.fetchval(_MOVE_ON, job.name, job.every_s))


async def _run_in_time(job: Job, database: Database) -> None:
    """What the work itself reports as a time-out is an outage of the database; its own slowness is not."""
    try:
        async with asyncio.timeout(job.at_most_s) as limit:
            await job.run(database)
    except TimeoutError as error:
        if limit.expired():
            raise JobTookTooLong(f"it was ended after {job.at_most_s:g} s") from error
        raise


async def _due_in_s(job: Job, connection: Connection) -> float:
    """A job that was never done is due at once, after this transaction: nobody shall wait for a row being made."""
    await connection.execute(_MAKE, job.name)
    due_in_s: float = await connection.fetchval(_DUE_IN_S, job.name)
    return due_in_s


# A connection that waits longer for its coordinator than the work may take is ended, and with it the lock.
_ALLOW_TO_WAIT = "SELECT set_config('idle_in_transaction_session_timeout', $1, true)"
_MAKE = "INSERT INTO job (name, due_at) VALUES ($1, clock_timestamp()) ON CONFLICT DO NOTHING"
_CLAIM = "SELECT name FROM job WHERE name = $1 AND due_at <= clock_timestamp() FOR UPDATE SKIP LOCKED"
_DUE_IN_S = "SELECT extract(epoch FROM due_at - clock_timestamp())::float8 FROM job WHERE name = $1"
# In step with what was due; after a long silence from now on, for what was missed is not made up for.
_MOVE_ON = """
UPDATE job SET due_at = greatest(due_at + make_interval(secs => $2), clock_timestamp()) WHERE name = $1
RETURNING extract(epoch FROM due_at - clock_timestamp())::float8
"""
