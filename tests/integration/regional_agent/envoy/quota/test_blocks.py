"""What a limits document or a block changes reaches proxies as another assignment."""

import pytest

from tests.integration.regional_agent.envoy.grpc_harness import grpc_agent
from tests.integration.regional_agent.envoy.quota.test_streams import DENY, DOCUMENT, proxy, reporting
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_a_block_and_another_limit_reach_proxies(world: World) -> None:
    acme = {"tenant": "acme"}
    slower = {**DOCUMENT, "quotas": [DOCUMENT["quotas"][0] | {"limit": "30/second"}, *DOCUMENT["quotas"][1:]]}
    async with grpc_agent(world, DOCUMENT) as at, proxy(at) as one, reporting(one, acme, 1_000):
        await until(lambda: one.rate(acme) > 50)
        (await world.admin.put("/v1/limits", json=slower)).raise_for_status()
        await until(lambda: 0 <= one.rate(acme) <= 20)
        block = {"field": "tenant", "value": "acme", "reason": "abuse"}
        (await world.admin.post("/v1/blocks", json=block)).raise_for_status()
        await until(lambda: (found := one.strategy(acme)) is not None and found.blanket_rule == DENY)


async def test_a_bucket_without_requests_is_abandoned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regional_agent.envoy.quota.divisions.IDLE_MS", 300)
    acme, other = {"tenant": "acme"}, {"kind": "other"}
    acme_id, other_id = tuple(acme.items()), tuple(other.items())
    async with grpc_agent(world, DOCUMENT) as at, proxy(at) as one:
        await one.report(acme, 1)
        await one.report(other, 1)
        await until(lambda: {acme_id, other_id} <= one.strategies.keys())
        await until(lambda: one.strategies[acme_id] is None and one.strategies[other_id] is None)
        quotas = at.agent.whole.proxy_quotas
        assert quotas is not None
        await until(lambda: not quotas.divisions.rates)  # when the last assignment has expired
