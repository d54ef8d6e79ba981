"""Every algorithm of a rate works from the limits document to the answer to a service."""

import asyncio

import pytest

from protocol.limits.rates import WINDOWS, RateAlgorithm
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = pytest.mark.anyio


def document(algorithm: str) -> dict[str, object]:
    limit = "30/hour" if algorithm in WINDOWS else "3/hour, burst 30"
    return {
        "quotas": [{"name": "api", "kind": "rate", "limit": limit, "sharing": "regional", "algorithm": algorithm}],
        "policies": [{"name": "search", "match": {"route": "/v1/search"}, "by": ["tenant"], "quota": "api"}],
    }


@pytest.mark.parametrize("algorithm", sorted(RateAlgorithm))
async def test_a_region_admits_its_share_by_every_algorithm(world: World, algorithm: str) -> None:
    assert (await world.admin.put("/v1/limits", json=document(algorithm))).is_success
    agent = await world.agent()
    subject = {"tenant": "acme", "route": "/v1/search", "method": "GET"}
    answers = await asyncio.gather(*(agent.check(subject) for _ in range(25)))
    allowed = [answer.json() for answer in answers if answer.status_code == 200]
    assert len(allowed) == 10, "a third of 30"
    delays_ms = [body["policies"][0]["delay_ms"] for body in allowed]
    if algorithm == RateAlgorithm.LEAKY_BUCKET:
        assert min(delays_ms) == 0
        assert len(set(delays_ms)) == 10, "each has its own turn"
    else:
        assert set(delays_ms) == {0}
    denied = next(answer for answer in answers if answer.status_code == 429)
    assert 0 < denied.json()["retry_after_ms"] < 2 * 3_600_000
    if algorithm in WINDOWS:
        assert denied.headers["RateLimit-Policy"] == '"search";q=10;w=3600'


async def test_a_change_of_the_algorithm_applies_at_once_and_starts_without_state(world: World) -> None:
    assert (await world.admin.put("/v1/limits", json=document("fixed_window"))).is_success
    agent = await world.agent()
    subject = {"tenant": "acme", "route": "/v1/search", "method": "GET"}
    assert (await agent.check(subject, cost=10)).status_code == 200
    assert (await agent.check(subject)).status_code == 429
    version = (await world.admin.put("/v1/limits", json=document("sliding_log"))).json()["version"]
    await until(
        lambda: agent.region.admission.policies is not None and agent.region.admission.policies.version >= version
    )
    assert (await agent.check(subject, cost=10)).status_code == 200
    assert (await agent.check(subject)).status_code == 429
