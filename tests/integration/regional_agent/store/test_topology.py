"""Stores fail over, fail back and are demoted below their agents, and an old epoch never returns."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop, wait_until
from regional_agent.store import keys
from tests.conftest import free_port
from tests.integration.regional_agent.world import Agent, World, running
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

PASSWORD = "secret"


class Switch:
    """One address that leads to one of several stores. Switching it closes connections, unless disabled."""

    def __init__(self) -> None:
        self.target = 0
        self.delay_s = 0.0  # delay of every byte, each way
        self.rewrite: Callable[[bytes], bytes] = lambda data: data  # of what the store answers
        self._writers: list[asyncio.StreamWriter] = []

    async def accept(self, near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        far, far_writer = await asyncio.open_connection(embedded.LOOPBACK, self.target)
        self._writers += (near_writer, far_writer)
        answers = self._carry(far, near_writer, self.rewrite)
        await asyncio.gather(self._carry(near, far_writer, lambda data: data), answers)

    def turn(self, target: int) -> None:
        self.target = target
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rewrite: Callable[[bytes], bytes]
    ) -> None:
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(self.delay_s)
                writer.write(rewrite(data))
        except OSError:
            pass
        finally:
            writer.transport.abort()


@asynccontextmanager
async def a_switch(target: int) -> AsyncIterator[tuple[Switch, int]]:
    switch = Switch()
    switch.target = target
    server = await asyncio.start_server(switch.accept, embedded.LOOPBACK, 0)
    try:
        yield switch, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        switch.turn(0)


@contextmanager
def stores(directory: Path, count: int, more: str = "") -> Any:
    """Start stores, and yield their ports. `more` is added to their configuration."""
    ports = [free_port() for _ in range(count)]
    processes = [
        embedded.start_store(directory / str(p), p, PASSWORD, more=more, log=directory / f"{p}.log") for p in ports
    ]
    try:
        assert all(wait_until(lambda p=p: embedded.store_is_ready(p, PASSWORD), 30) for p in ports)  # type: ignore[misc]
        yield ports
    finally:
        for process in processes:
            stop(process)


def epoch_of(agent: Agent) -> int:
    return agent.region.epochs.current.epoch if agent.region.epochs.current else 0


def moved_on(agent: Agent, last: int) -> bool:
    """It was no older epoch in between either."""
    assert epoch_of(agent) in {0, last} or epoch_of(agent) > last
    return epoch_of(agent) > last


async def spends(agent: Agent, units: int) -> None:
    async for _ in attempts():
        if (await agent.check(cost=units)).status_code == 200:
            return
    raise AssertionError("it is never admitted")


async def test_no_old_epoch_returns_after_failover_and_failback(world: World, tmp_path: Path) -> None:
    with stores(tmp_path, 2) as (one, other):
        async with a_switch(one) as (switch, port):
            url = embedded.store_url(port, PASSWORD)
            agent = await world.agent(store_url=url)
            await spends(agent, 5)
            seen = [epoch_of(agent)]
            for target in (other, one, other):
                switch.turn(target)
                await until(lambda: moved_on(agent, seen[-1]))
                seen.append(epoch_of(agent))
                await spends(agent, 5)
            assert seen == [seen[0] + step for step in range(4)]
            await world.agents.aclose()
    assert await world.usage() >= 10, "what both stores were asked for last is booked; the rest waits in them"


async def test_an_agent_that_missed_the_failover_leaves_a_fenced_epoch_too(world: World, tmp_path: Path) -> None:
    """Its store failed over and back while the agent was away, which the coordinator reports."""
    with stores(tmp_path, 2) as (one, other):
        async with running(world.settings("us-east", store_url=embedded.store_url(one, PASSWORD))) as agent:
            await agent.ready()
            await spends(agent, 5)
            first = epoch_of(agent)
        async with running(world.settings("us-east", store_url=embedded.store_url(other, PASSWORD))) as agent:
            await agent.ready()
            second = epoch_of(agent)
        async with running(world.settings("us-east", store_url=embedded.store_url(one, PASSWORD))) as agent:
            await agent.ready()
            assert epoch_of(agent) == first or epoch_of(agent) > second, "only an exchange can tell"
            await agent.check(cost=20)
            await until(lambda: epoch_of(agent) > second)
            await spends(agent, 50)


async def test_a_demoted_store_is_left_and_its_promotion_is_another_incarnation(world: World, tmp_path: Path) -> None:
    with stores(tmp_path, 1) as (port,):
        agent = await world.agent(store_url=embedded.store_url(port, PASSWORD))
        await spends(agent, 5)
        first, fingerprint = epoch_of(agent), agent.region.store.fingerprint
        embedded.send_to_store(port, PASSWORD, f"REPLICAOF 127.0.0.1 {free_port()}")
        # Its disconnection cannot be awaited: it reconnects at once, and is left again at the next write.
        assert (await agent.check(cost=1)).status_code == 503
        embedded.send_to_store(port, PASSWORD, "REPLICAOF NO ONE")
        # It may have reconnected before the promotion to the old incarnation, as a connection is not notified of one.
        embedded.send_to_store(port, PASSWORD, "CLIENT KILL TYPE normal")
        await until(lambda: epoch_of(agent) > first)
        assert agent.region.store.fingerprint != fingerprint
        await spends(agent, 5)
        await world.agents.aclose()


async def test_an_incarnation_that_changed_below_a_connection_is_seen_before_opening(
    world: World, tmp_path: Path
) -> None:
    """There is neither error nor lost link: the fingerprint is read again before the compare-and-set, and the
    connection left.
    """
    with stores(tmp_path, 1) as (port,):
        agent = await world.agent(store_url=embedded.store_url(port, PASSWORD))
        first, fingerprint = epoch_of(agent), agent.region.store.fingerprint
        for command in (f"REPLICAOF 127.0.0.1 {free_port()}", "REPLICAOF NO ONE"):
            embedded.send_to_store(port, PASSWORD, command)
        agent.region.epochs.invalidate()
        await until(lambda: epoch_of(agent) > first)
        fence = await agent.region.scripts.read_fence()
        assert fence.fingerprint == agent.region.store.fingerprint != fingerprint
        assert await agent.region.store.call("EXISTS", keys.FENCE) == 1
        await world.agents.aclose()
