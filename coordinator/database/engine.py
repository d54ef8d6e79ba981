"""Connect to Postgres. Every statement goes through `run`, `read` or `transaction`.

`run` owns all retries. It repeats, a bounded number of times, what failed because of another transaction (a deadlock, a
lock timeout, a concurrent insert, limits that changed) or because a connection was lost. Each attempt is a whole
transaction. So an operation may run twice even if its first commit succeeded and only the reply was lost, and every
operation is written to be safe to repeat. If Postgres stays unreachable, `DatabaseUnavailable` is raised, which routes
answer with 503; if it is reachable and the transaction failed, `TransactionFailed`.

READ COMMITTED with row locks in one fixed order is what the ledger needs (docs/adr). Reads that must be of one moment
use `snapshot=True`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import asyncpg
from asyncpg.transaction import Transaction
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from coordinator.database.connection import Connection, read_sums_as_integers
from coordinator.database.pool_use import Pool, PoolMetrics, PoolUse
from coordinator.database.session import refuse_startup, require_session
from coordinator.outages import DatabaseUnavailable, DecisionOutdated, TransactionFailed
from migrations.connect import TIMEOUT_S
from migrations.connect import connect as connect_to_primary

if TYPE_CHECKING:
    BaseConnection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    BaseConnection = asyncpg.Connection

Result = TypeVar("Result")
Url: TypeAlias = str | Callable[[], str]  # a function is called for each connection: a password in a file may change
Errors: TypeAlias = tuple[type[Exception], ...]

ATTEMPTS = 4
CONNECT_TIMEOUT_S = 5
ACQUIRE_TIMEOUT_S = 5
COMMAND_TIMEOUT_S = 30
END_WITHIN_S = 2  # a rollback, or giving a connection back: beyond it the connection is ended
SESSION = {
    "application_name": "leasehold-coordinator",
    "lock_timeout": "5s",
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "30s",
    "jit": "off",  # short statements: compiling them costs more than running them
    "timezone": "UTC",
}

CONTENTION = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
    DecisionOutdated,
)
TOO_MUCH = (
    asyncpg.QueryCanceledError,  # statement timeout
    asyncpg.OutOfMemoryError,  # of the server or its lock table
)
LOST = (
    ConnectionError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InterfaceError,  # a rollback on a connection that was just lost
    asyncpg.InternalClientError,  # raised if the server disconnects between the two steps of a query
)
TRIED_AGAIN = (*CONTENTION, *LOST, asyncpg.UniqueViolationError)
TRIED_AGAIN_WITHOUT_LOCKS = tuple(error for error in TRIED_AGAIN if error is not asyncpg.LockNotAvailableError)
OUTAGE = (
    *LOST,
    OSError,
    TimeoutError,
    asyncpg.OperatorInterventionError,  # shutting down, crashed, cannot connect now
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ReadOnlySQLTransactionError,  # the primary has become a standby
)


class Session(BaseConnection):
    """A connection that is not reset between uses, because operations leave nothing behind but their transaction."""

    def get_reset_query(self) -> str:
        return ""


class Database:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.use = PoolUse(pool)
        self.on_commit: Callable[[], None] = lambda: None  # called when `run` has committed

    async def run(
        self,
        operation: Callable[[Connection], Awaitable[Result]],
        *,
        snapshot: bool = False,
        lock_timeout_ms: int | None = None,
        idle_timeout_ms: int | None = None,
    ) -> Result:
        """Run an operation in one transaction and commit it; repeat it after contention or a lost connection.

        With `lock_timeout_ms` it waits that long for each lock, and is not repeated if a lock was not free by then.
        With `idle_timeout_ms` Postgres frees its locks if this process sends nothing for so long: it may hang.
        """
        timeouts = {"lock_timeout": lock_timeout_ms, "idle_in_transaction_session_timeout": idle_timeout_ms}
        settings = "; ".join(f"SET LOCAL {name} = {ms}" for name, ms in timeouts.items() if ms is not None)

        async def once() -> Result:
            async with self.transaction(snapshot=snapshot) as connection:
                if settings:
                    await connection.execute(settings)
                return await operation(connection)

        result = await _retried(once, TRIED_AGAIN if lock_timeout_ms is None else TRIED_AGAIN_WITHOUT_LOCKS)
        if not snapshot:
            self.on_commit()
        return result

    async def read(self, operation: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Run a single statement, such as a token look-up, without a transaction around it."""

        async def once() -> Result:
            async with self._connection() as connection:
                return await operation(connection)

        return await _retried(once)

    async def attempt(self, operation: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Run an operation in one transaction, and do not repeat it whatever happens."""
        with _naming_failures():
            async with self.transaction() as connection:
                return await operation(connection)

    @asynccontextmanager
    async def transaction(self, *, snapshot: bool = False) -> AsyncIterator[Connection]:
        """Make one attempt: commit at the end of the block, roll back if it raises."""
        async with self._connection() as connection:
            isolation: Literal["repeatable_read"] | None = "repeatable_read" if snapshot else None
            transaction = connection.transaction(isolation=isolation, readonly=snapshot)
            await transaction.start()
            try:
                yield connection
            except BaseException:
                await _roll_back(connection, transaction)
                raise
            await transaction.commit()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection of the pool, and note how long that took."""
        began_s = perf_counter()
        self.use.waiting += 1
        try:
            connection = await self._pool.acquire(timeout=ACQUIRE_TIMEOUT_S)
        finally:
            self.use.waiting -= 1
            self.use.wait_s.observe(perf_counter() - began_s)
        try:
            yield connection
        except asyncpg.ReadOnlySQLTransactionError:
            connection.terminate()  # the primary has become a standby: the next connection finds the new one
            raise
        finally:
            await self._pool.release(connection, timeout=END_WITHIN_S)


async def _roll_back(connection: Connection, transaction: Transaction) -> None:
    """Roll back, or else end the connection: a server that hangs does not answer, and the cause of this is known."""
    try:
        async with asyncio.timeout(END_WITHIN_S):
            await transaction.rollback()
    except BaseException as error:
        connection.terminate()
        if not isinstance(error, Exception):
            raise


async def _retried(once: Callable[[], Awaitable[Result]], tried_again: Errors = TRIED_AGAIN) -> Result:
    with _naming_failures():
        with suppress(*tried_again):  # the first attempt without tenacity, whose overhead exceeds a round trip
            return await once()
        return await _again(tried_again)(once)


@contextmanager
def _naming_failures() -> Iterator[None]:
    """Raise TransactionFailed or DatabaseUnavailable in place of the driver's errors that mean it."""
    try:
        yield
    except (*CONTENTION, *TOO_MUCH) as error:
        raise TransactionFailed(type(error).__name__) from error
    except OUTAGE as error:
        raise DatabaseUnavailable(type(error).__name__) from error


def _again(tried_again: Errors) -> AsyncRetrying:
    """Retry at once, and then after growing pauses."""
    return AsyncRetrying(
        retry=retry_if_exception_type(tried_again),
        wait=wait_random_exponential(multiplier=0.02, max=0.2),
        stop=stop_after_attempt(ATTEMPTS - 1),
        reraise=True,
    )


async def connect(
    url: Url,
    *,
    timeout_s: float = TIMEOUT_S,
    server_settings: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> BaseConnection:
    """Connect to the database as its URL is now, and raise SessionNotKept if a pooler keeps no session for it."""

    async def once() -> BaseConnection:
        address = url if isinstance(url, str) else url()
        return await connect_to_primary(address, timeout_s=timeout_s, server_settings=dict(server_settings), **options)

    try:
        connection = await once()
    except asyncpg.ProtocolViolationError as error:
        raise refuse_startup(error) from error
    await require_session(connection, server_settings, once)
    return connection


@asynccontextmanager
async def open_database(
    url: Url,
    pool_size: int,
    metrics: PoolMetrics | None = None,
    *,
    name: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Database]:
    """Open a pool that connects on use. Without Postgres a coordinator starts and reports that it is not ready.

    `name` is the pool's in the metrics. `settings` of Postgres take precedence over those of other sessions.
    """

    async def another(dsn: str | None = None, **options: Any) -> BaseConnection:
        assert dsn is None
        return await connect(url, timeout_s=CONNECT_TIMEOUT_S, **options)

    pool = asyncpg.create_pool(
        connect=another,
        min_size=0,
        max_size=pool_size,
        command_timeout=COMMAND_TIMEOUT_S,
        server_settings={**SESSION, **settings},
        connection_class=Session,
        init=read_sums_as_integers,
    )
    async with pool:
        database = Database(pool)
        if metrics is not None:
            metrics.pools[name] = database.use
        yield database
