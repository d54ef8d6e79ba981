"""A store that restarts keeps its epoch or gets a new one, by its settings, and the old epoch is settled."""

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop, wait_until
from regional_agent.store import keys
from tests.conftest import free_port
from tests.integration.regional_agent.store.test_topology import PASSWORD, a_switch, epoch_of, spends, stores
from tests.integration.regional_agent.world import Agent, World, running
from tests.waiting import until

pytestmark = pytest.mark.anyio


@contextmanager
def store(directory: Path, port: int, appendfsync: str) -> Iterator[None]:
    """One incarnation of the store at this port."""
    process = embedded.start_store(
        directory / "store", port, PASSWORD, appendfsync=appendfsync, log=directory / "store.log"
    )
    try:
        assert wait_until(lambda: embedded.store_is_ready(port, PASSWORD), 30)
        yield
    finally:
        stop(process)


def lives_in(agent: Agent) -> str | None:
    return agent.region.epochs.current.fingerprint if agent.region.epochs.current else None


@asynccontextmanager
async def restarted(world: World, directory: Path, first: str, then: str) -> AsyncIterator[tuple[Agent, int]]:
    """Return an agent whose store restarted with other settings, and the epoch of before."""
    port = free_port()
    with store(directory, port, first):
        agent = await world.agent(store_url=embedded.store_url(port, PASSWORD))
        await spends(agent, 5)
        before = epoch_of(agent)
    await until(lambda: agent.region.store.fingerprint is None)
    with store(directory, port, then):
        await until(lambda: lives_in(agent) == agent.region.store.fingerprint is not None)
        yield agent, before
        await world.agents.aclose()


async def test_a_store_that_fsyncs_every_write_keeps_its_epoch(world: World, tmp_path: Path) -> None:
    async with restarted(world, tmp_path, "always", "always") as (agent, before):
        assert epoch_of(agent) == before
        await spends(agent, 95)
        assert (await agent.check(cost=1)).status_code == 429, "nothing was forgotten, and nothing stranded"
        assert not agent.region.exchange_loop.stopped_lanes
    assert await world.usage() == 100


@pytest.mark.parametrize(("first", "then"), [("always", "everysec"), ("everysec", "always"), ("everysec", "everysec")])
async def test_any_other_store_gets_a_new_epoch(world: World, tmp_path: Path, first: str, then: str) -> None:
    async with restarted(world, tmp_path, first, then) as (agent, before):
        assert epoch_of(agent) > before
        await spends(agent, 5)
    epochs = await world.epochs()
    assert [(state, lost) for _, state, lost in epochs] == [("fenced", True), ("current", False)]


@pytest.mark.extended
async def test_a_replica_or_other_settings_end_the_exemption(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if they are restored before the restart, with the data of when it was exempt."""
    monkeypatch.setattr("regional_agent.leasing.epoch.WATCH_S", 0.05)
    port = free_port()
    with store(tmp_path, port, "always"):
        agent = await world.agent(store_url=embedded.store_url(port, PASSWORD))
        await spends(agent, 5)
        before = epoch_of(agent)
        assert (await agent.region.scripts.read_fence()).is_exempt
        embedded.send_to_store(port, PASSWORD, "CONFIG SET appendfsync everysec")
        await until(lambda: epoch_of(agent) > before)
        assert not agent.region.epochs.is_exempt
        await spends(agent, 5)
        ended = epoch_of(agent)
    with store(tmp_path, port, "always"):
        await until(lambda: epoch_of(agent) > ended)
        await world.agents.aclose()
    assert (await world.epochs())[0][1:] == ("fenced", False)


async def test_a_store_that_crashes_unflushed_has_admitted_nothing_it_forgets(world: World, tmp_path: Path) -> None:
    """The crash is long before its settings are read again."""
    port, data = free_port(), tmp_path / "store"
    changed: dict[str, Any] = {"decision_timeout_ms": 100, "store_timeout_ms": 100, "report_interval_ms": 60_000}
    with store(tmp_path, port, "always"):
        agent = await world.agent(store_url=embedded.store_url(port, PASSWORD), **changed)
        await agent.lease(100)
        await spends(agent, 5)
        embedded.send_to_store(port, PASSWORD, "CONFIG SET appendfsync no")
        shutil.copytree(data, tmp_path / "on disk")
        answers = [(await agent.check(cost=1)).status_code for _ in range(10)]
        assert agent.region.epochs.is_exempt, "its settings have not been looked at"
    admitted = 5 + answers.count(200)
    await until(lambda: agent.region.store.fingerprint is None)
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "on disk", data)
    with store(tmp_path, port, "always"):
        await until(lambda: lives_in(agent) == agent.region.store.fingerprint is not None)
        await agent.ready()
        admitted += sum([(await agent.check(cost=1)).status_code == 200 for _ in range(120)])
        await world.agents.aclose()
    assert admitted <= 100


@pytest.mark.extended
async def test_a_backup_in_place_of_the_data_gets_a_new_epoch(world: World, tmp_path: Path) -> None:
    """Its exchanges are behind those in the ledger."""
    port = free_port()
    url = embedded.store_url(port, PASSWORD)
    with store(tmp_path, port, "always"):
        async with running(world.settings("us-east", store_url=url)) as agent:
            await agent.ready()
            await spends(agent, 5)
            before = epoch_of(agent)
    with store(tmp_path, port, "always"):
        for lane in range(4):
            embedded.send_to_store(port, PASSWORD, f"HSET {keys.lane(lane, before).decode()} seq 0")
        agent = await world.agent(store_url=url)
        assert epoch_of(agent) > before
        await world.agents.aclose()
    assert [lost for _, _, lost in await world.epochs()] == [True, False]


@pytest.mark.extended
async def test_an_epoch_replaced_by_another_store_returns_its_rest(world: World, tmp_path: Path) -> None:
    """The address led to another store for a while.

    The old store kept its data, and reports so: no unit stays in suspense.
    """
    with stores(tmp_path, 2) as (one, other):
        async with a_switch(one) as (switch, port):
            agent = await world.agent(store_url=embedded.store_url(port, PASSWORD))
            await agent.lease(60)
            await spends(agent, 5)
            first = epoch_of(agent)
            switch.turn(other)
            await until(lambda: epoch_of(agent) > first)
            await spends(agent, 5)
            second = epoch_of(agent)
            switch.turn(one)
            await until(lambda: epoch_of(agent) > second)
            await spends(agent, 30)
            await world.agents.aclose()
    states = {epoch: lost for epoch, _, lost in await world.epochs()}
    assert (states[first], states[second]) == (False, True)
    [lease] = await world.leases(first)
    assert (lease["state"], lease["outstanding"], lease["suspense"]) == ("fenced", 0, 0)
    assert lease["granted"] == lease["consumed"] + lease["returned"]
