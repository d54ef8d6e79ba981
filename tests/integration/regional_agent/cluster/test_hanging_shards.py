"""A shard hangs: its connections stay open without replies, until it continues or its replica is promoted.

Short waits are shown by the number of calls, never by measured time.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from protocol.circuit_breaker import BreakerState
from regional_agent.cluster.rules.cells import CELLS
from tests.integration.regional_agent.cluster.clusters import Node, a_cluster
from tests.integration.regional_agent.cluster.test_single_cluster import (
    epochs_of,
    export,
    tenant_in,
    until_booked,
    until_it_answers,
)
from tests.integration.regional_agent.store_outage.test_failures import FOR_EVER_MS
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

LIMIT = 100


@asynccontextmanager
async def hanging(node: Node) -> AsyncIterator[None]:
    node.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.signal(signal.SIGCONT)


class Customers:
    """Clients, one in each cell, that repeat an operation until it is answered."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._numbers = count()
        self._untold: list[tuple[int, str]] = []
        self.admitted: Counter[int] = Counter()

    async def ask_each(self, cells: Iterable[int]) -> set[int]:
        """Return their answers to a new operation."""
        asked = [(cell, f"o-{next(self._numbers)}") for cell in cells]
        return {await self._ask(cell, operation) for cell, operation in asked}

    async def ask_again(self) -> None:
        async for _ in attempts():
            untold, self._untold = self._untold, []
            if not untold:
                return
            for cell, operation in untold:
                await self._ask(cell, operation)
        raise AssertionError(f"of these nobody is told yes or no: {self._untold}")

    async def use_up(self, cell: int) -> None:
        while (await self._agent.check(export(tenant_in(cell)))).status_code == 200:
            self.admitted[cell] += 1

    async def _ask(self, cell: int, operation: str) -> int:
        status = (await self._agent.check(export(tenant_in(cell)), operation_id=operation)).status_code
        self.admitted[cell] += status == 200
        if status == 503:
            self._untold.append((cell, operation))
        return status


async def booked(world: World) -> dict[int, int]:
    """Return the figures of each cell's customer."""
    rows = await world._rows("SELECT quota, sum(consumed)::bigint AS units FROM lease GROUP BY quota")
    units = {str(row["quota"]): int(row["units"]) for row in rows}
    return {cell: units.get(f"exports:tenant={tenant_in(cell)}", 0) for cell in range(CELLS)}


async def until_each_is_booked(world: World, customers: Customers) -> None:
    """Check that exactly what was admitted is booked."""
    admitted = {cell: customers.admitted[cell] for cell in range(CELLS)}
    async for _ in attempts():
        if await booked(world) == admitted:
            break
    assert await booked(world) == admitted
    assert max(admitted.values()) <= LIMIT
    for cell in range(CELLS):
        await world.quota(f"exports:tenant={tenant_in(cell)}")  # its identities hold


async def fails_by_its_modes(agent: Agent, cell: int) -> None:
    tenant = tenant_in(cell)
    for route, status, mode in (("/v1/search", 503, "closed"), ("/v1/open", 200, "open")):
        answer = await agent.check({"tenant": tenant, "route": route})
        assert (answer.status_code, answer.json()["degraded"]) == (status, mode)
    local = [await agent.check({"tenant": tenant, "route": "/v1/local"}) for _ in range(6)]
    assert [answer.status_code for answer in local] == [200] * 5 + [429], "half of the region's ten"
    assert {answer.json()["degraded"] for answer in local} == {"local"}


@pytest.mark.extended
async def test_while_a_shard_hangs_no_request_waits_and_other_shards_serve(world: World, tmp_path: Path) -> None:
    """Its cells are called until the circuit breaker opens; the results of those calls are found when it continues."""
    with a_cluster(tmp_path) as nodes:
        agent = await world.agent(
            store_url=nodes.url, decision_timeout_ms=250, breaker_failures=2, breaker_pause_ms=FOR_EVER_MS
        )
        cells, hung, customers = agent.whole.cells, nodes.primaries[1], Customers(agent)
        own = [cell for cell in range(CELLS) if nodes.of_cell(cell) is hung]
        others = [cell for cell in range(CELLS) if cell not in own]
        for cell in range(CELLS):
            await until_it_answers(agent, export(tenant_in(cell)), 200, mode="peek", cost=20)
        before = epochs_of(agent)
        async with hanging(hung):
            for _ in range(2):
                assert await customers.ask_each(own) == {503}
            calls = [cells[cell].breaker.calls for cell in own]
            for cell in own:
                assert cells[cell].breaker.state is BreakerState.OPEN
                await fails_by_its_modes(agent, cell)
            for _ in range(10):
                assert await customers.ask_each(own) == {503}
                assert await customers.ask_each(others) == {200}
            assert [cells[cell].breaker.calls for cell in own] == calls, "it is left alone"
            assert {cells[cell].breaker.state for cell in others} == {BreakerState.CLOSED}
            await until_booked(world, 10 * len(others))
        cells[own[0]].store.reconnect()  # the endless pause ends with a new connection
        await customers.ask_again()
        assert epochs_of(agent) == before, "nothing was lost"
        assert dict(customers.admitted) == {cell: 12 if cell in own else 10 for cell in range(CELLS)}
        await until_each_is_booked(world, customers)
        await world.agents.aclose()


@pytest.mark.extended
async def test_a_hanging_shard_with_a_promoted_replica_oversells_nothing(world: World, tmp_path: Path) -> None:
    """The nodes agree on it by themselves.

    The hanging node returns as a replica, and drops writes it never acknowledged.
    """
    with a_cluster(tmp_path, replicas=1) as nodes:
        agent = await world.agent(store_url=nodes.url, decision_timeout_ms=250)
        hung, replica, customers = nodes.primaries[0], nodes.replicas[0], Customers(agent)
        own = [cell for cell in range(CELLS) if nodes.of_cell(cell) is hung]
        others = [cell for cell in range(CELLS) if cell not in own]
        for cell in range(CELLS):
            await until_it_answers(agent, export(tenant_in(cell)), 200, mode="peek", cost=20)
        assert await customers.ask_each(range(CELLS)) == {200}
        await until_each_is_booked(world, customers)
        before = epochs_of(agent)
        nodes.promote_by_themselves(after_ms=3_000)
        async with hanging(hung):
            assert await customers.ask_each(own) == {503}
            await asyncio.to_thread(replica.until_it_is, "role:master")
            await until(lambda: all(epochs_of(agent)[cell] > before[cell] for cell in own))
            await customers.ask_each(range(CELLS))
            await customers.ask_again()
        await asyncio.to_thread(hung.until_it_is, "master_link_status:up")
        await customers.ask_each(range(CELLS))
        await customers.ask_again()
        await until(lambda: all(epochs_of(agent)))
        assert [epochs_of(agent)[cell] for cell in others] == [before[cell] for cell in others]
        assert {epoch for epoch, _, lost_data in await world.epochs() if lost_data} == {before[cell] for cell in own}
        assert dict(customers.admitted) == {cell: 4 if cell in own else 3 for cell in range(CELLS)}
        await until_each_is_booked(world, customers)
        await asyncio.gather(*map(customers.use_up, own))
        await until_each_is_booked(world, customers)
        await world.agents.aclose()
