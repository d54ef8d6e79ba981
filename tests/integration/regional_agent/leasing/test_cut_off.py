"""A region is partitioned under load: what it admits and answers, and how the ledger becomes exact again.

The partition lasts LEASEHOLD_TEST_CUT_S seconds, by default a few. With 60 its lease expires as well.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
import structlog

from tests.budget import size
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts

pytestmark = pytest.mark.anyio
log = structlog.get_logger()
CUT_S = size("LEASEHOLD_TEST_CUT_S", 2.0)
PRINTS = "prints:tenant=acme"
ASK = {"tenant": "acme", "route": "/v1/prints"}
LIMIT = 200


async def leased(agent: Agent) -> int:
    """Return what it may still spend, as its store has it."""
    assert agent.region.epochs.current is not None
    fields = await agent.region.scripts.lease_fields(agent.region.epochs.current, PRINTS)
    total = {name: int(fields.get(name, "0")) for name in ("granted", "overage", "consumed", "returned", "held")}
    return total["granted"] + total["overage"] - total["consumed"] - total["returned"] - total["held"]


async def until_leased(agent: Agent, units: int) -> None:
    """Repeat a check where a reply takes longer than a request waits."""
    async for _ in attempts():
        if (await agent.check(ASK, cost=units, mode="peek")).status_code == 200:
            return
    raise AssertionError(f"{await leased(agent)} of {units}")


async def ask(agent: Agent, answers: Counter[int]) -> None:
    answers[(await agent.check(ASK)).status_code] += 1
    await asyncio.sleep(0.02)


async def until_booked(world: World, units: int) -> dict[str, Any]:
    """Check that the ledger has no drift, and contains all of it."""
    async for _ in attempts():
        [period] = (await world.admin.get("/v1/periods")).json()["data"]
        found = (await world.admin.get(f"/v1/periods/{period['id']}/reconciliation")).json()
        quota: dict[str, Any] = next(each for each in found["quotas"] if each["quota_key"] == PRINTS)
        if (found["drift"], quota["consumed"]) == (0, units):
            return quota
    raise AssertionError(f"{units} were admitted: {found}")


OVERDRAFT = 20


async def status(agent: Agent) -> dict[str, Any]:
    found: dict[str, Any] = (await agent.http.get("/v1/status")).json()
    return found


async def test_a_partitioned_region_spends_its_part_of_the_overdraft(world: World) -> None:
    """Two agents of one region share the overdraft, and so do regions: each of two has a half."""
    prints = {"name": "prints", "kind": "allowance", "limit": LIMIT, "period": "month", "cap": {"overdraft": OVERDRAFT}}
    policies = [{"name": "print", "match": {"route": "/v1/prints"}, "by": ["tenant"], "quota": "prints"}]
    await world.try_out({"quotas": [prints], "policies": policies})
    cut, beside, other = [await world.agent(region) for region in ("us-east", "us-east", "eu-west")]
    await until_leased(cut, 60)
    await until_leased(other, 40)
    before, after = Counter[int](), Counter[int]()
    await ask(cut, before)

    world.weather.swallows_requests = True
    lease = await leased(cut)
    part = (await status(cut))["leases"][0]["overdraft"]
    assert 0 < part < OVERDRAFT
    for _ in range(3_000):
        await ask(cut, after)
        await ask(beside, after)
        if after[200] == lease + part:
            break
    for agent in [cut, beside] * 5:
        await ask(agent, after)
    assert after[200] == lease + part, "so much and no more"
    [told] = (await status(cut))["leases"]
    assert (told["overdrawn"], told["owed"], told["available"]) == (part, part, -part)

    world.weather.swallows_requests = False
    quota = await until_booked(world, before[200] + after[200])
    assert (quota["consumed"], quota["overage"]) == (1 + lease + part, 0), "units were left: they cover it"
    assert sum(each["overdrawn"] for each in quota["regions"]) == part


@pytest.mark.extended
async def test_a_partitioned_region_spends_its_lease_and_then_denies(world: World) -> None:
    quotas = [{"name": "prints", "kind": "allowance", "limit": LIMIT, "period": "month"}]
    policies = [{"name": "print", "match": {"route": "/v1/prints"}, "by": ["tenant"], "quota": "prints"}]
    await world.try_out({"quotas": quotas, "policies": policies})
    cut, other = await world.agent("us-east"), await world.agent("eu-west")
    for agent, units in ((cut, 60), (other, 40)):
        await until_leased(agent, units)
    now, before, after = asyncio.get_running_loop().time, Counter[int](), Counter[int]()
    for _ in range(5):
        await ask(cut, before)

    world.weather.swallows_requests = True
    begun_s, lease = now(), await leased(cut)
    while now() < begun_s + CUT_S or not after[429]:
        await ask(cut, after)
    assert before[200] == 5
    assert set(after) <= {200, 429}
    assert 0 < after[200] <= lease

    world.weather.swallows_requests = False
    healed_s = now()
    quota = await until_booked(world, before[200] + after[200])
    log.info("cut off", s=healed_s - begun_s, lease=lease, answers=dict(after), no_drift_after_s=now() - healed_s)
    assert quota["overage"] == 0
    assert (await other.check(ASK)).status_code == 200
