"""A very large report is booked in pieces, once, while other tenants are served."""

import asyncio
from typing import Any

import pytest

from protocol.identifiers import lane_of
from regional_agent.store import keys
from regional_agent.store.scripts import MAX_LINES, Scripts
from regional_agent.store.types import FrozenBytes
from tests.budget import size
from tests.integration.regional_agent.leasing.test_exchange_loop import eventually
from tests.integration.regional_agent.leasing.test_refused_items import LANES, tenants_of_lane
from tests.integration.regional_agent.world import EXPORT, Agent, World

pytestmark = pytest.mark.anyio

LINES = size("LEASEHOLD_LINES_PLANTED", 3_000)  # for each tenant


async def plant(agent: Agent, tenant: str, lines: int, policy: str = "export") -> None:
    """Write usage as checks of so many API keys would."""
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    quota = f"exports:tenant={tenant}"
    lane, call = lane_of(quota, incarnation.lanes), agent.region.store.call
    period = (await agent.region.scripts.lease_fields(incarnation, quota))["period"]
    minute = int((await agent.region.scripts.lease_fields(incarnation, quota))["first_minute"])
    fields = [
        b'%s|%d|{"api_key":"%016x","policy":"%s"}' % (period.encode(), minute + n % 60, n, policy.encode())
        for n in range(lines)
    ]
    for at in range(0, lines, 5_000):
        pairs = [part for field in fields[at : at + 5_000] for part in (field, b"1")]
        await call("HSET", keys.usage_lines(lane, incarnation.epoch, quota), *pairs)
    await call("HINCRBY", keys.lease(lane, incarnation.epoch, quota), "consumed", lines)
    await call("ZADD", keys.dirty(lane, incarnation.epoch), 0, quota)


async def test_three_lanes_with_very_many_lines_are_booked_to_the_unit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await world.agent()
    tenants = [tenants_of_lane(lane, 1, "many")[0] for lane in range(3)]
    for tenant in tenants:
        assert (await agent.check(EXPORT | {"tenant": tenant})).status_code == 200
    await eventually(world.usage, len(tenants))
    longest: list[int] = []
    real = Scripts.freeze

    async def freeze(self: Scripts, *arguments: Any) -> FrozenBytes:
        frozen = await real(self, *arguments)
        longest.append(frozen.bytes.count('"minute"'))
        return frozen

    monkeypatch.setattr(Scripts, "freeze", freeze)
    await asyncio.gather(*(plant(agent, tenant, LINES) for tenant in tenants))
    other = tenants_of_lane(LANES - 1, 1, "other")[0]
    assert (await agent.check(EXPORT | {"tenant": other})).status_code == 200
    for _ in range(60 * LINES // 1000):
        if await world.usage() == len(tenants) * (LINES + 1) + 1:
            break
        await asyncio.sleep(0.1)
    for tenant in tenants:
        assert await world.usage(tenant=tenant) == LINES + 1
    assert 0 < max(longest) <= MAX_LINES
    assert agent.region.exchange_loop.stopped_lanes == {}
    reconciliation = await world.quota(f"exports:tenant={tenants[0]}")
    assert reconciliation["consumed"] == LINES + 1
