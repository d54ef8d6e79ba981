"""Background jobs of coordinators: any number of coordinators may run, and each job is done by one of them at a time.

A job has a row in the database that says when it is due, by the database's clock. Each coordinator reads all rows in
one statement, and starts the jobs that are due and have work. If none has, it reads again after `IDLE_S`, or soon after
one of its requests has committed something, which may be work. To run a job, it locks the job's row, does the work, and
moves the due time on, all in one transaction; other coordinators skip a locked row. If a coordinator dies, its lock is
released and another one finds the job due. Therefore a job must be safe to repeat: its work may have been committed
while the new due time was not.

A job that fails is tried again soon, by any coordinator. Each failure is counted, and it is logged when a job begins to
fail and when it works again (`job_failures.py`).
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import NamedTuple

import asyncpg

from coordinator.database.engine import Database, Url, open_database
from coordinator.job_failures import JobFailures
from coordinator.metrics import CoordinatorMetrics
from protocol.clock import Clock, SystemClock

FIRST_LOOK_S = 1.0  # coordinators that start together do not all look at once
IDLE_S = 10.0  # between looks while no job has work and no request commits anything
RETRIES_PER_INTERVAL = 10  # how often a job that failed, or that another coordinator runs, is tried within its interval
GRACE_S = 5.0
AT_ONCE = 6  # jobs that one coordinator runs at a time; four of them may take long
CONNECTIONS_PER_JOB = 3  # one holds the row, the others are for the work
SCHEDULER = "scheduler"  # the name that failures to read the jobs' rows are counted under


class JobTookTooLong(RuntimeError):
    """The job ran longer than it may and was cancelled, so that others can try it."""


class Job(NamedTuple):
    name: str
    every_s: float
    run: Callable[[Database], Awaitable[object]]
    at_most_s: float = 25.0  # a coordinator that lost its network must not keep the others from the job for ever
    has_work: str = "true"  # an SQL condition; $2 is the time now. A job that is due and has no work does not run


class _Pause(NamedTuple):
    """Seconds until the jobs' rows are worth another look."""

    at_least_s: float
    idle_s: float  # unless a request commits something


def _pause(seconds: float) -> _Pause:
    return _Pause(seconds, seconds)


@asynccontextmanager
async def running(
    url: Url,
    jobs: Sequence[Job],
    metrics: CoordinatorMetrics,
    failures: JobFailures | None = None,
    clock: Clock | None = None,
) -> AsyncIterator["JobScheduler"]:
    """Run the jobs until the end of the block, on connections of their own, so that requests never wait for them."""
    async with open_database(url, CONNECTIONS_PER_JOB * AT_ONCE, metrics.pools, name="jobs") as database:
        scheduler = JobScheduler(jobs, database, metrics, failures or JobFailures(), clock or SystemClock())
        task = asyncio.create_task(scheduler.run(), name=SCHEDULER)
        try:
            yield scheduler
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await scheduler.stop()


class JobScheduler:
    """Starts each job when it is due. One statement reads all jobs' rows; between two of them it sleeps."""

    def __init__(
        self, jobs: Sequence[Job], database: Database, metrics: CoordinatorMetrics, failures: JobFailures, clock: Clock
    ) -> None:
        self._jobs = jobs
        self._database = database
        self._metrics = metrics
        self._failures = failures
        self._clock = clock
        self._select_due = select_due(jobs)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}  # of jobs that failed here, or that another coordinator runs
        self._finished = asyncio.Event()
        self._may_have_work = asyncio.Event()  # since the last look: a job has ended, or a request has committed

    def expect_work(self) -> None:
        """Look again soon: a request has committed something."""
        self._may_have_work.set()

    async def run(self) -> None:
        await asyncio.sleep(min([FIRST_LOOK_S, *(job.every_s for job in self._jobs)]) * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        while True:
            self._finished.clear()
            self._may_have_work.clear()
            pause = await self._start_due_jobs()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause.at_least_s):
                    await self._finished.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause.idle_s - pause.at_least_s):
                    await self._may_have_work.wait()

    async def stop(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_due_jobs(self) -> _Pause:
        """Start what is due and has work."""
        idle = [job for job in self._jobs if job.name not in self._running]
        try:
            names = [job.name for job in self._jobs]
            rows = await self._database.read(lambda c: c.fetch(self._select_due, names, self._clock.now()))
            if len(rows) < len(self._jobs):
                await self._database.read(lambda c: c.execute(_INSERT, names))
        except Exception as error:  # whatever failed, the next look is another chance
            self._note_failure(SCHEDULER, error)
            return _pause(min((job.every_s / RETRIES_PER_INTERVAL for job in idle), default=FIRST_LOOK_S))
        self._note_success(SCHEDULER)
        found = {row["name"]: row for row in rows}
        pauses = [self._start_if_due(job, found.get(job.name)) for job in idle] or [_pause(FIRST_LOOK_S)]
        return _Pause(min(pause.at_least_s for pause in pauses), min(pause.idle_s for pause in pauses))

    def _start_if_due(self, job: Job, row: asyncpg.Record | None) -> _Pause:
        """Start the job if it is due and has work. Return how long its row need not be looked at."""
        retry_interval_s = job.every_s / RETRIES_PER_INTERVAL
        if row is None:
            return _pause(retry_interval_s)
        pause_s: float = max(row["due_in_s"], self._not_before_s.get(job.name, 0) - monotonic())
        if pause_s > 0:
            if row["due_in_s"] > 0:  # it worked, here or in another coordinator
                self._note_success(job.name)
            return _pause(min(max(pause_s, retry_interval_s), job.every_s))
        if not row["has_work"]:
            self._note_success(job.name)
            self._metrics.job_last_success.labels(job.name).set_to_current_time()
            return _Pause(job.every_s, max(job.every_s, IDLE_S))
        if len(self._running) == AT_ONCE:
            return _pause(retry_interval_s)
        task = asyncio.create_task(self._run_job(job), name=job.name)
        self._running[job.name] = task
        task.add_done_callback(lambda _: self._note_finished(job))
        return _pause(job.every_s)

    def _note_finished(self, job: Job) -> None:
        del self._running[job.name]
        self._finished.set()
        self._may_have_work.set()

    async def _run_job(self, job: Job) -> None:
        started = monotonic()
        is_done = False
        try:
            is_done = await run_if_due(job, self._database)
        except Exception as error:  # whatever failed, the next attempt is another chance
            self._note_failure(job.name, error)
        if is_done:
            self._note_success(job.name)
            self._metrics.job_runs.labels(job.name).inc()
            self._metrics.job_seconds.labels(job.name).observe(monotonic() - started)
            self._metrics.job_last_success.labels(job.name).set_to_current_time()
        else:
            self._not_before_s[job.name] = monotonic() + job.every_s / RETRIES_PER_INTERVAL

    def _note_success(self, name: str) -> None:
        self._metrics.job_failures_in_a_row.labels(name).set(0)
        self._failures.worked(name)

    def _note_failure(self, name: str, error: Exception) -> None:
        self._metrics.job_failures.labels(name).inc()
        self._metrics.job_failures_in_a_row.labels(name).inc()
        self._failures.failed(name, error)


async def run_if_due(job: Job, database: Database) -> bool:
    """Run the job once, unless it is not due or another coordinator runs it. Return whether it ran."""
    async with database.transaction() as connection:
        await connection.execute(_SET_IDLE_TIMEOUT, str(round(1000 * (job.at_most_s + GRACE_S))))
        if await connection.fetchval(_CLAIM, job.name) is None:
            return False
        await _run_in_time(job, database)
        await connection.execute(_MOVE_ON, job.name, job.every_s)
        return True


async def _run_in_time(job: Job, database: Database) -> None:
    """Cancel the job after `at_most_s`. A time-out that the work itself raises is an outage of the database instead."""
    try:
        async with asyncio.timeout(job.at_most_s) as limit:
            await job.run(database)
    except TimeoutError as error:
        if limit.expired():
            raise JobTookTooLong(f"it was cancelled after {job.at_most_s:g} s") from error
        raise


def select_due(jobs: Sequence[Job]) -> str:
    """Return the statement that tells when each job is due, and whether one that is due has work.

    Its parameters are the names of the jobs, and the time now.
    """
    conditions = " ".join(f"WHEN '{job.name}' THEN {job.has_work}" for job in jobs)
    return _DUE.replace("{conditions}", conditions)


_DUE = """
SELECT name, extract(epoch FROM due_at - clock_timestamp())::float8 AS due_in_s,
    CASE WHEN due_at > clock_timestamp() OR $2::timestamptz IS NULL THEN NULL
        ELSE CASE name {conditions} END END AS has_work
FROM job WHERE name = ANY ($1::text[])
"""
_INSERT = """
INSERT INTO job (name, due_at) SELECT name, clock_timestamp() FROM unnest($1::text[]) AS name ON CONFLICT DO NOTHING
"""
# A connection that stays idle for longer than the work may take is ended by Postgres, and with it the lock.
_SET_IDLE_TIMEOUT = "SELECT set_config('idle_in_transaction_session_timeout', $1, true)"
_CLAIM = "SELECT name FROM job WHERE name = $1 AND due_at <= clock_timestamp() FOR UPDATE SKIP LOCKED"
# A job keeps its rhythm. After a long silence it starts from now: runs that were missed are not made up for.
_MOVE_ON = """
UPDATE job SET due_at = greatest(due_at + make_interval(secs => $2), clock_timestamp()) WHERE name = $1
"""
