"""Two agents of one region have different stores: the region settles on refusing one, and operators can see it."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from leasehold.local_stack import embedded
from protocol.messages import OpenEpoch
from protocol.outcomes import EpochRefusal
from regional_agent.leasing.coordinator_client import CoordinatorClient, CoordinatorRefused
from tests.integration.regional_agent.store.test_topology import PASSWORD, spends, stores
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts

pytestmark = pytest.mark.anyio


def is_refused(agent: Agent) -> bool:
    return agent.region.epochs.refused == EpochRefusal.TWO_STORES


async def one_is_refused(agents: list[Agent]) -> tuple[Agent, Agent]:
    """Return which agent is refused. Each learns that its epoch has ended when it reports."""
    async for _ in attempts():
        for agent in agents:
            await agent.check(cost=1)
        if any(map(is_refused, agents)):
            agents.sort(key=is_refused, reverse=True)
            return agents[0], agents[1]
    raise AssertionError("they go on in turn")


async def asks(world: World, request: OpenEpoch) -> None:
    client = CoordinatorClient([world.url], SecretStr(world.tokens["us-east"]), "us-east")
    try:
        await client.open_epoch(request)
    finally:
        await client.close()


async def test_two_stores_of_one_region_come_to_rest(world: World, tmp_path: Path) -> None:
    document = (await world.admin.get("/v1/limits")).json()["document"]
    document["quotas"][0]["limit"] = 1_000_000  # enough for the units that they leave in each other's epochs
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    with stores(tmp_path, 2) as ports:
        agents = [await world.agent(store_url=embedded.store_url(port, PASSWORD)) for port in ports]
        refused, other = await one_is_refused(agents)
        answer = await refused.http.get("/readyz")
        assert answer.status_code == 503
        assert [each["code"] for each in answer.json()["reasons"]] == ["two_stores"]
        assert "two stores answer under its name" in (await refused.http.get("/v1/status")).json()["faults"][0]
        assert 'leasehold_epoch_refused{reason="two_stores"} 1.0' in (await refused.http.get("/metrics")).text
        assert (await world.admin.get("/v1/regions/us-east")).json()["split_brain"] is True
        with pytest.raises(CoordinatorRefused) as refusal:
            await asks(world, OpenEpoch(nonce="0" * 32, fingerprint=refused.region.store.fingerprint or ""))
        assert (refusal.value.refusal, refusal.value.retry_after_s) == (EpochRefusal.TWO_STORES, 15)
        opened = len(await world.epochs())
        await spends(other, 5)
        assert not is_refused(other)
        assert len(await world.epochs()) == opened
        await world.agents.aclose()
    assert await world.usage() >= 5
