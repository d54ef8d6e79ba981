"""Under a soft cap services get the remaining units of the limit, without those of the cap."""

import pytest

from tests.integration.regional_agent.world import DOCUMENT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def agent(world: World) -> Agent:
    soft = [quota | {"cap": "soft"} if quota["name"] == "exports" else quota for quota in DOCUMENT["quotas"]]
    assert (await world.admin.put("/v1/limits", json=DOCUMENT | {"quotas": soft})).is_success
    agent = await world.agent()
    await until(lambda: agent.region.admission.policies is not None and agent.region.admission.policies.version >= 2)
    return agent


async def remaining(agent: Agent, cost: int) -> tuple[int, int]:
    answer = await agent.check(cost=cost)
    assert answer.status_code == 200, answer.text
    [policy] = answer.json()["policies"]
    return policy["limit"], policy["remaining"]


async def test_remaining_units_of_a_soft_limit_never_grow_with_usage(agent: Agent) -> None:
    told = [await remaining(agent, 20) for _ in range(8)]
    assert {limit for limit, _ in told} == {100}
    left = [units for _, units in told]
    assert left == sorted(left, reverse=True)
    assert all(units <= max(0, 100 - 20 * number) for number, units in enumerate(left, 1))
    assert left[-1] == 0
