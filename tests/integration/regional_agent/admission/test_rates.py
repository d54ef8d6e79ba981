"""Every algorithm of a rate works from the limits document to the answer to a service."""

import asyncio
from datetime import UTC, datetime

import pytest

from protocol.limits.rates import WINDOWS, RateAlgorithm
from protocol.limits.windows import calendar_window
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = pytest.mark.anyio


def document(algorithm: str, time: str = "1 hour") -> dict[str, object]:
    limit = f"30 per {time}" if algorithm in WINDOWS else f"3 per {time}, burst 30"
    return {
        "quotas": [{"name": "api", "kind": "rate", "limit": limit, "sharing": "regional", "algorithm": algorithm}],
        "policies": [{"name": "search", "match": {"route": "/v1/search"}, "by": ["tenant"], "quota": "api"}],
    }


@pytest.mark.parametrize(("time", "time_s"), [("1 hour", 3_600), ("10 minutes", 600), ("2 weeks", 1_209_600)])
@pytest.mark.parametrize("algorithm", sorted(RateAlgorithm))
async def test_a_region_admits_its_share_by_every_algorithm(
    world: World, algorithm: str, time: str, time_s: int
) -> None:
    assert (await world.admin.put("/v1/limits", json=document(algorithm, time))).is_success
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
    assert 0 < denied.json()["retry_after_ms"] < 2_000 * time_s
    if algorithm in WINDOWS:
        assert denied.headers["RateLimit-Policy"] == f'"search";q=30;w={time_s}'


async def test_a_window_of_the_calendar_ends_at_midnight_of_its_zone(world: World) -> None:
    zone = "Pacific/Auckland"
    changed = document(RateAlgorithm.FIXED_WINDOW, "1 day")
    changed["quotas"][0] |= {"align": "calendar", "time_zone": zone}  # type: ignore[index]
    assert (await world.admin.put("/v1/limits", json=changed)).is_success
    assert (await world.admin.get("/v1/limits")).json()["document"]["quotas"][0]["limit"] == "30 per 1 day"
    agent = await world.agent()
    subject = {"tenant": "acme", "route": "/v1/search", "method": "GET"}
    window = calendar_window(86_400_000, zone, datetime.now(UTC))
    answers = [await agent.check(subject) for _ in range(11)]
    denied = answers[-1]
    assert [each.status_code for each in answers] == [200] * 10 + [429]
    left_ms = window.ends_ms - datetime.now(UTC).timestamp() * 1000
    assert abs(denied.json()["retry_after_ms"] - left_ms) < 60_000
    assert denied.headers["RateLimit-Policy"] == '"search";q=30;w=86400'


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
