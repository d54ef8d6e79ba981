"""Two agents of one region divide its share by what their proxies demand, without a message between them."""

import pytest

from tests.integration.regional_agent.envoy.grpc_harness import GrpcAgent, grpc_agent
from tests.integration.regional_agent.envoy.quota.test_streams import DOCUMENT, SHARE, proxy, reporting
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = pytest.mark.anyio


MANY = 6  # messages, so that some seconds have passed


def is_in_debt(at: GrpcAgent) -> bool:
    """Return whether proxies have used units that the region's bucket did not have."""
    quotas = at.agent.whole.proxy_quotas
    assert quotas is not None
    return any(each.division.share.level_nano < 0 for each in quotas.divisions.rates.values())


async def test_two_agents_of_a_region_divide_its_share(world: World) -> None:
    acme = {"tenant": "acme"}
    async with (
        grpc_agent(world, DOCUMENT, name="agent-1") as at,
        grpc_agent(world, DOCUMENT, name="agent-2") as at_other,
        proxy(at) as one,
        proxy(at_other) as other,
        reporting(one, acme, 2_000),
        reporting(other, acme, 2_000),
    ):
        await until(lambda: all(0.3 * SHARE < each.rate(acme) < 0.7 * SHARE for each in (one, other)))
        await until(lambda: not is_in_debt(at) and one.messages > MANY)
        assert one.rate(acme) + other.rate(acme) <= 1.3 * SHARE  # with what is in the bucket
