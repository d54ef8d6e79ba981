"""A shard of a Cluster of six nodes is cut off, fails over and back, and loses a slot under load."""

import asyncio
import signal
from pathlib import Path

import pytest

from regional_agent.cluster.rules.cells import cell_of
from tests.integration.regional_agent.cluster.clusters import a_cluster
from tests.integration.regional_agent.store.test_sentinels import (
    LIMIT,
    SERVERS,
    Load,
    assert_exact,
    binary_of,
    limit_to,
)
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = pytest.mark.anyio

CELL = cell_of("exports:tenant=acme")


@pytest.mark.extended
@pytest.mark.parametrize("server", SERVERS)
async def test_a_shard_fails_over_and_back_and_its_slot_moves_under_load(
    world: World, tmp_path: Path, server: str
) -> None:
    await limit_to(world, LIMIT)
    with a_cluster(tmp_path, replicas=3, binary=binary_of(server)) as nodes:
        agents = [await world.agent(store_url=nodes.url, decision_timeout_ms=250) for _ in range(2)]
        first = nodes.of_cell(CELL)
        replica = nodes.replicas[nodes.primaries.index(first)]
        load = Load(agents)
        seen = [0]

        async def is_in_a_later_epoch() -> None:
            def later() -> bool:
                epochs = [agent.whole.cells[CELL].epochs.current for agent in agents]
                return all(each is not None and each.epoch > seen[-1] for each in epochs)

            await until(later)
            seen.append(max(each.epoch for agent in agents if (each := agent.whole.cells[CELL].epochs.current)))
            await load.admits_more()

        async with load.running():
            await is_in_a_later_epoch()
            await asyncio.to_thread(nodes.promote_by_themselves, 2_000)
            first.signal(signal.SIGSTOP)
            await is_in_a_later_epoch()
            first.signal(signal.SIGCONT)
            await asyncio.to_thread(first.until_it_is, "role:slave")
            await asyncio.to_thread(first.take_over)
            await is_in_a_later_epoch()
            target = next(node for node in nodes.primaries if node is not first)
            await asyncio.to_thread(nodes.move, CELL, first, target)
            await is_in_a_later_epoch()
        await asyncio.to_thread(replica.until_it_is, "role:slave")
        await world.agents.aclose()
    await assert_exact(world, load)
