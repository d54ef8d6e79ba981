"""Over a Redis Cluster each bucket has its part of a rate from the cell that counts it."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from time import monotonic

import pytest

from regional_agent.cluster.rules.cells import CELLS, cell_of
from regional_agent.envoy.quota.rules import NANO_UNITS, bound_nano
from tests.integration.regional_agent.cluster.clusters import Nodes, a_cluster
from tests.integration.regional_agent.envoy.grpc_harness import grpc_agent
from tests.integration.regional_agent.envoy.quota.test_streams import DOCUMENT, SHARE, Proxy, proxy
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = pytest.mark.anyio

BURST = 300
PAUSE_S = 0.05


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with a_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


def tenant_of(cell: int) -> str:
    """Return some tenant whose rate is counted in that cell."""
    return next(name for name in map(str, range(1_000)) if cell_of(f"edge:tenant={name}") == cell)


class Gateway:
    """Admits as much as it is assigned, and reports it."""

    def __init__(self, at: Proxy, tenant: str) -> None:
        self._at = at
        self.bucket = {"tenant": tenant}
        self.admitted = 0

    async def run(self) -> None:
        before_s, rest = monotonic(), 0.0
        while True:
            await asyncio.sleep(PAUSE_S)
            now_s = monotonic()
            rest += max(0.0, self._at.rate(self.bucket)) * (now_s - before_s)
            before_s, units = now_s, int(rest)
            rest -= units
            self.admitted += units
            await self._at.report(self.bucket, units, SHARE)


@pytest.mark.extended
async def test_shares_are_taken_from_the_cell_of_each_rate(world: World, nodes: Nodes) -> None:
    cells = [next(cell for cell in range(CELLS) if nodes.of_cell(cell) is node) for node in nodes.primaries[:2]]
    tenants = [tenant_of(cell) for cell in cells]
    async with (
        grpc_agent(world, DOCUMENT, store_url=nodes.url) as at,
        AsyncExitStack() as running,
    ):
        began_s = monotonic()
        gateways = [Gateway(await running.enter_async_context(proxy(at)), tenant) for tenant in tenants * 2]
        for task in [asyncio.create_task(each.run()) for each in gateways]:
            running.callback(task.cancel)
        await until(lambda: all(each.admitted > SHARE for each in gateways))
        quotas = at.agent.whole.proxy_quotas
        assert quotas is not None
        for cell, tenant in zip(cells, tenants, strict=True):
            key = f"edge:tenant={tenant}"
            assert quotas.divisions.rates[key].cell.number == cell
            there = [bool(node.ask("KEYS", f"*:rate:{key}")) for node in nodes.primaries]
            assert there == [node is nodes.of_cell(cell) for node in nodes.primaries]
            admitted = sum(each.admitted for each in gateways if each.bucket["tenant"] == tenant)
            bound = bound_nano(SHARE * 1_000_000, BURST, 2) / NANO_UNITS
            assert admitted <= BURST + SHARE * (monotonic() - began_s) + bound
        nodes.of_cell(cells[0]).kill()
        gone, stays = (quotas.divisions.rates[f"edge:tenant={tenant}"] for tenant in tenants)
        clock = quotas._clock
        await until(lambda: not gone.is_answered(clock.monotonic_ms()))
        await until(lambda: stays.is_answered(clock.monotonic_ms()))
        more = [each.admitted for each in gateways]
        await until(lambda: all(each.admitted > more[1] for each in gateways if each.bucket["tenant"] == tenants[1]))
