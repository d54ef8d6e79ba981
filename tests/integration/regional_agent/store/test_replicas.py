"""Where replicas confirm each reply, a failover to one of them leaves nothing in suspense. Otherwise it does."""

import signal
from pathlib import Path
from typing import Any

import pytest

from leasehold.local_stack import embedded
from protocol.identifiers import replicas_of
from regional_agent.leasing import epoch as epochs
from tests.budget import cases
from tests.integration.regional_agent.store.sentinels import Watched, watched
from tests.integration.regional_agent.store.test_sentinels import (
    LIMIT,
    SERVERS,
    Load,
    assert_exact,
    binary_of,
    limit_to,
)
from tests.integration.regional_agent.store.test_topology import PASSWORD, epoch_of, spends
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def confirmed_agent(world: World, servers: Watched) -> Agent:
    agent = await world.agent(store_url=servers.url, decision_timeout_ms=250, store_confirm_in_replicas=True)
    await until(lambda: confirming(agent) == 2)
    return agent


def confirming(agent: Agent) -> int:
    """Return how many replicas confirm the replies of the agent's epoch."""
    current = agent.region.epochs.current
    return len(replicas_of(current.fingerprint)) if current else 0


async def kept(world: World) -> list[dict[str, Any]]:
    answer = await world.admin.get("/v1/audit", params={"action": "epoch.kept"})
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


@pytest.mark.parametrize("server", cases(SERVERS, short=1))
async def test_a_failover_with_all_data_books_each_unit_and_holds_none_in_suspense(
    world: World, tmp_path: Path, server: str
) -> None:
    """The primary is killed under load. A grant whose answer it did not live to see goes back as well."""
    await limit_to(world, LIMIT)
    with watched(tmp_path, binary_of(server)) as servers:
        agents = [await confirmed_agent(world, servers) for _ in range(2)]
        load, epoch = Load(agents), epoch_of(agents[0])
        async with load.running():
            await load.admits_more()
            servers.signal(servers.ports[0], signal.SIGKILL)
            await until(lambda: all(epoch_of(agent) > epoch for agent in agents))
            await load.admits_more()
        await world.agents.aclose()
    quota = await world.quota()
    assert load.admitted <= quota["consumed"] <= load.admitted + load.unsure, "each unit that was answered is booked"
    assert [(lease["outstanding"], lease["suspense"]) for lease in await world.leases(epoch)] == [(0, 0)]
    (entry,) = [each for each in await kept(world) if each["object"] == str(epoch)]
    assert entry["details"]["promoted"]["offset"] > 0
    assert (epoch, "fenced", False) in await world.epochs()


@pytest.mark.extended
async def test_a_replica_that_restarted_proves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have come back with an older state. The agent has not noticed: it would have opened another epoch."""
    monkeypatch.setattr(epochs, "WATCH_S", 3600)
    await limit_to(world, LIMIT)
    with watched(tmp_path) as servers:
        agent = await confirmed_agent(world, servers)
        load, epoch = Load([agent]), epoch_of(agent)
        async with load.running():
            await load.admits_more()
            for port in servers.ports[1:]:
                servers.restart(port)
            await until(lambda: servers.has_replicas(servers.ports[0], 2))
            await until(lambda: _fails_over(servers))
            await until(lambda: epoch_of(agent) > epoch)
            await load.admits_more()
        await world.agents.aclose()
    await assert_exact(world, load)
    assert await kept(world) == []
    assert (epoch, "fenced", True) in await world.epochs()


def _fails_over(servers: Watched) -> bool:
    """Ask for a failover, which sentinels refuse until they know the restarted replicas."""
    try:
        servers.fail_over()
    except AssertionError:
        return False
    return True


@pytest.mark.extended
async def test_nothing_is_answered_that_a_replica_has_not_confirmed(world: World, tmp_path: Path) -> None:
    """A replica that hangs is waited for. When the store has dropped it, another epoch does without it."""
    await limit_to(world, LIMIT)
    with watched(tmp_path) as servers:
        agent = await confirmed_agent(world, servers)
        await spends(agent, 1)
        epoch, hung = epoch_of(agent), servers.ports[1]
        servers.signal(hung, signal.SIGSTOP)
        answer = await agent.check(cost=1)
        assert (answer.status_code, answer.json()["degraded"]) == (503, "closed")
        await until(lambda: epoch_of(agent) > epoch and confirming(agent) == 1)
        await spends(agent, 1)
        servers.signal(hung, signal.SIGCONT)
        await until(lambda: confirming(agent) == 2)
        await spends(agent, 1)
        await world.agents.aclose()
    assert [lost for _, _, lost in await world.epochs()] == [False] * 3
    assert (await world.quota())["suspense"] == 0


@pytest.mark.extended
async def test_a_replica_that_is_linked_again_begins_another_epoch(world: World, tmp_path: Path) -> None:
    """It may have been a primary meanwhile, or another process may listen at its address by now."""
    await limit_to(world, LIMIT)
    with watched(tmp_path) as servers:
        agent = await confirmed_agent(world, servers)
        await spends(agent, 1)
        epoch = epoch_of(agent)
        assert embedded.lines_of_store(servers.ports[0], PASSWORD, "CLIENT KILL TYPE replica", 1) == [":2"]
        await until(lambda: epoch_of(agent) > epoch and confirming(agent) == 2)
        await spends(agent, 1)
        await world.agents.aclose()
    assert not any(lost for _, _, lost in await world.epochs())


@pytest.mark.extended
async def test_agents_of_one_store_confirm_in_the_same_way(world: World, tmp_path: Path) -> None:
    """An agent without the setting counts no reply that the replicas of the epoch have not confirmed."""
    await limit_to(world, LIMIT)
    with watched(tmp_path) as servers:
        await confirmed_agent(world, servers)
        other = await world.agent(store_url=servers.url, decision_timeout_ms=250)
        await until(lambda: confirming(other) == 2)
        servers.signal(servers.ports[1], signal.SIGSTOP)
        answer = await other.check(cost=1)
        assert (answer.status_code, answer.json()["degraded"]) == (503, "closed")
        servers.signal(servers.ports[1], signal.SIGCONT)
        await world.agents.aclose()
