"""Store batches of the decision log: by COPY, each in a transaction of its own.

The log is never in the way of exchanges. It has two connections of its own, a few batches wait for them, and beyond
that agents are answered 503 and keep their batches. Commits do not wait for the disk: a crash of the database may lose
the last moment of the log. A batch that comes again violates the primary key with its first row, and is stored already.
It goes to Kafka again, with the same ids: whether it was sent is not known.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, time, timedelta
from typing import NamedTuple

import asyncpg

from coordinator.database.connection import Connection
from coordinator.database.engine import Database, Url, open_database
from coordinator.database.pool_use import PoolMetrics
from coordinator.decision_log.metrics import StoredDecisionMetrics
from coordinator.decision_log.publisher import DecisionPublisher
from coordinator.decision_log.rules.hashing import KeyHasher, PlainKeys
from coordinator.decision_log.rules.rows import DecisionRow, Rows, rows_of
from coordinator.outages import DatabaseUnavailable
from protocol.clock import Clock
from protocol.decision_log.messages import DecisionBatch, DecisionsStored
from protocol.limits.document import LoggedKeys

CONNECTIONS = 2
MOST_WAITING = 16  # batches: some five megabytes
NEW_RULES_AFTER_S = 1.0  # the limits document says whether keys are hashed
SENT_OF_DAYS = 7  # older decisions are refused where PostgreSQL keeps none
DAYS_AHEAD = 2  # for which there are partitions, beyond today
SETTINGS = {"application_name": "leasehold-decision-log", "synchronous_commit": "off", "statement_timeout": "10s"}
DROP_WITHIN_MS = 2_000  # readers that hold a partition for longer make the job try again


class _Rules(NamedTuple):
    """The hasher of logged keys, and the time when the rules were read."""

    hasher: KeyHasher
    read_at_s: float


class DecisionStore:
    def __init__(
        self,
        database: Database,
        clock: Clock,
        retention_days: int,
        metrics: StoredDecisionMetrics,
        publisher: DecisionPublisher | None = None,
    ) -> None:
        """`database` has connections of its own. With 0 days nothing is stored; without a publisher nothing is sent."""
        self._database = database
        self._clock = clock
        self._retention_days = retention_days
        self._metrics = metrics
        self._publisher = publisher
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._waiting = 0
        self._rules: _Rules | None = None

    async def store(self, region: str, batch: DecisionBatch) -> DecisionsStored:
        """Store a batch once. Raises DatabaseUnavailable where the agent should send it again later."""
        if self._waiting >= MOST_WAITING:
            raise DatabaseUnavailable("too many batches of the decision log wait")
        self._waiting += 1
        try:
            async with self._places:
                return await self._store(region, batch)
        finally:
            self._waiting -= 1

    async def _store(self, region: str, batch: DecisionBatch) -> DecisionsStored:
        hasher, now = (await self._current_rules()).hasher, self._clock.now()
        since = first_moment(now, self._retention_days or SENT_OF_DAYS)
        made = await asyncio.to_thread(rows_of, region, batch, hasher, since, now)
        if self._retention_days and made.rows:
            await self._copy(made.rows, now)
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.publish, made.rows)
        return self._answer(region, made)

    def _answer(self, region: str, made: Rows) -> DecisionsStored:
        self._metrics.stored.labels(region).inc(len(made.rows))
        self._metrics.refused.labels(region).inc(made.refused)
        return DecisionsStored(len(made.rows), made.refused)

    async def _copy(self, rows: list[DecisionRow], now: datetime) -> None:
        try:
            await self._database.attempt(lambda connection: copy_rows(connection, rows))
        except asyncpg.UniqueViolationError:
            return
        except asyncpg.CheckViolationError:  # a day has no partition yet: these are the first rows
            first = min(row.at for row in rows)
            await self._database.attempt(lambda connection: keep_days(connection, first, now, self._retention_days))
            await self._database.attempt(lambda connection: copy_rows(connection, rows))

    async def _current_rules(self) -> _Rules:
        now_s = self._clock.monotonic_ms() / 1000
        if self._rules is None or now_s - self._rules.read_at_s >= NEW_RULES_AFTER_S:
            self._rules = _Rules(await self._database.read(read_hasher), now_s)
        return self._rules


async def copy_rows(connection: Connection, rows: list[DecisionRow]) -> None:
    await connection.copy_records_to_table("decision", records=rows, columns=DecisionRow._fields)


async def keep_days(connection: Connection, first: datetime, now: datetime, retention_days: int) -> None:
    """Make the partitions from a first moment to the next days, and drop those whose time is over."""
    kept_from, last = first_moment(now, retention_days), now + timedelta(days=DAYS_AHEAD)
    await connection.execute(f"SET LOCAL lock_timeout = {DROP_WITHIN_MS}")
    days = (each.astimezone(UTC).date() for each in (kept_from, first, last))
    await connection.execute("SELECT keep_decisions($1, $2, $3)", *days)


def first_moment(now: datetime, retention_days: int) -> datetime:
    """Return the beginning of the first day that is kept: whole days, beside the current one."""
    day = now.astimezone(UTC).date() - timedelta(days=retention_days)
    return datetime.combine(day, time(), UTC)


async def read_hasher(connection: Connection) -> KeyHasher:
    """Return what hashes keys under the limits document in force."""
    key, keys = await connection.fetchrow(_HASHING) or (b"", None)
    return PlainKeys(key) if keys == LoggedKeys.PLAIN else KeyHasher(key)


@asynccontextmanager
async def open_decision_store(
    url: Url,
    clock: Clock,
    retention_days: int,
    metrics: StoredDecisionMetrics,
    pools: PoolMetrics | None = None,
    publisher: DecisionPublisher | None = None,
) -> AsyncIterator[DecisionStore]:
    async with open_database(url, CONNECTIONS, pools, name="decision log", settings=SETTINGS) as database:
        yield DecisionStore(database, clock, retention_days, metrics, publisher)


_HASHING = """
SELECT key, (SELECT document #>> '{decisions,keys}' FROM limits_version ORDER BY version DESC LIMIT 1)
FROM decision_hash_key
"""
