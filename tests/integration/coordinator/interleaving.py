"""Steps of coordinators, and ways to run two of them at once in a fixed order."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from secrets import token_hex
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from coordinator.access.rules.audit import Actor
from coordinator.database.connection import Connection
from coordinator.epochs.open import open_epoch
from coordinator.epochs.retire import retire_epoch
from coordinator.exchange.parsing import parse_exchanges
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.transaction import apply_exchanges
from coordinator.limits.in_force import Documents
from coordinator.periods.close import CloseRequest, close_period
from coordinator.usage.reconcile import read_settled
from protocol.messages import Exchange, ExchangeReply, ExchangeRequest, LiveState, OpenEpoch
from tests.conftest import restricted
from tests.integration.coordinator.agent_harness import EXPORTS, PERIOD, Agent, AgentHarness
from tests.integration.coordinator.fixtures import connected

T = TypeVar("T")
Step = Callable[[Connection], Awaitable[T]]


# --- steps ------------------------------------------------------------------------------------------------------------


def says(
    agent_harness: AgentHarness, agent: Agent, seq: int, *leases: Any, quota: str = EXPORTS, demands: Sequence[Any] = ()
) -> Step[ExchangeReply]:
    """Apply one exchange as a coordinator does."""
    live = msgspec.convert({"demands": demands}, LiveState)
    exchanges = [Exchange(frozen=agent.frozen(seq, *leases, quota=quota), live=live)]
    return says_all(agent_harness, agent, exchanges)


def says_all(agent_harness: AgentHarness, agent: Agent, exchanges: Sequence[Exchange]) -> Step[ExchangeReply]:
    request = ExchangeRequest(fingerprint=agent.fingerprint, exchanges=list(exchanges))

    async def step(connection: Connection) -> ExchangeReply:
        call, terms = parse_exchanges(agent.region, msgspec.json.encode(request)), LeaseTerms(60_000)
        (applied,) = await apply_exchanges(connection, Documents(), [call], terms, agent_harness.clock.now())
        return applied.response.replies[0]

    return step


def opens(agent_harness: AgentHarness, agent: Agent) -> Step[Any]:
    """Open an epoch for another incarnation of its store."""
    request = OpenEpoch(nonce=token_hex(16), fingerprint="another incarnation")
    return lambda c: open_epoch(c, agent.region, request, agent.lanes, Actor("test"), agent_harness.clock.now())


def retires(agent_harness: AgentHarness, agent: Agent) -> Step[Any]:
    return lambda c: retire_epoch(c, agent.epoch, "gone", somebody(), agent_harness.clock.now())


def closes(agent_harness: AgentHarness, *, carry_suspense: bool = False) -> Step[Any]:
    request = CloseRequest(somebody(), carry_suspense=carry_suspense)

    async def step(connection: Connection) -> Any:
        settled = await read_settled(connection, PERIOD)
        return await close_period(connection, PERIOD, request, settled, timedelta(0), agent_harness.clock.now())

    return step


def somebody() -> Actor:
    return Actor(str(uuid4()))


# --- at the same moment -----------------------------------------------------------------------------------------------


async def in_transaction(connection: Connection, step: Step[T]) -> T:
    async with connection.transaction():
        return await step(connection)


async def committed(agent_harness: AgentHarness, step: Step[T]) -> T:
    async with connected(restricted(agent_harness.url)) as connection:
        return await in_transaction(connection, step)


async def one_after_the_other(agent_harness: AgentHarness, first: Step[T], second: Step[Any]) -> tuple[T, Any]:
    """Start the second before the first has ended, and check that it waits for the first."""
    async with connected(restricted(agent_harness.url)) as connection:
        transaction = connection.transaction()
        await transaction.start()
        before = await first(connection)
        waiting = asyncio.create_task(committed(agent_harness, second))
        await until_it_waits(agent_harness.owner, waiting)
        await transaction.commit()
    return before, await asyncio.wait_for(waiting, 20)


async def in_the_middle(
    agent_harness: AgentHarness, first: Step[T], statement: str, second: Step[Any]
) -> tuple[T, Any]:
    """Start the second just before the first runs the statement, and check that it waits for the first."""
    begun: list[asyncio.Task[Any]] = []

    async def begin() -> None:
        begun.append(asyncio.create_task(committed(agent_harness, second)))
        await until_it_waits(agent_harness.owner, begun[0])

    before = await committed(agent_harness, lambda c: first(Overtaken(c, statement, begin)))  # type: ignore[arg-type]  # as far as a step goes
    return before, await asyncio.wait_for(begun[0], 20)


class Overtaken:
    """A connection that lets another transaction run just before one statement is run for the first time."""

    def __init__(self, connection: Connection, statement: str, overtake: Callable[[], Awaitable[Any]]) -> None:
        self._connection, self._overtakes = connection, {statement: overtake}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def execute(self, sql: str, *arguments: Any) -> Any:
        await self._before(sql)
        return await self._connection.execute(sql, *arguments)

    async def fetch(self, sql: str, *arguments: Any, **how: Any) -> Any:
        await self._before(sql)
        return await self._connection.fetch(sql, *arguments, **how)

    async def fetchrow(self, sql: str, *arguments: Any) -> Any:
        await self._before(sql)
        return await self._connection.fetchrow(sql, *arguments)

    async def _before(self, sql: str) -> None:
        if overtake := self._overtakes.pop(sql, None):
            await overtake()


class Recorded:
    """A connection that records each statement, and lets another transaction run before the one with a number."""

    def __init__(self, connection: Connection, before: int, overtake: Callable[[], Awaitable[Any]]) -> None:
        self._connection, self._before_number, self._overtake = connection, before, overtake
        self.statements: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def execute(self, sql: str, *arguments: Any) -> Any:
        await self._next(sql)
        return await self._connection.execute(sql, *arguments)

    async def fetch(self, sql: str, *arguments: Any, **how: Any) -> Any:
        await self._next(sql)
        return await self._connection.fetch(sql, *arguments, **how)

    async def fetchrow(self, sql: str, *arguments: Any) -> Any:
        await self._next(sql)
        return await self._connection.fetchrow(sql, *arguments)

    async def fetchval(self, sql: str, *arguments: Any) -> Any:
        await self._next(sql)
        return await self._connection.fetchval(sql, *arguments)

    async def _next(self, sql: str) -> None:
        if len(self.statements) == self._before_number:
            await self._overtake()
        self.statements.append(sql)


async def until_it_waits(owner: Connection, waiting: asyncio.Task[Any]) -> None:
    async with asyncio.timeout(20):
        while not await owner.fetchval(_WAITING):
            assert not waiting.done(), "it waited for nobody"
            await asyncio.sleep(0.005)


_WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
"""
