"""A refusal affects only its cause: one want, lane or share is set aside, and everything else continues."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from protocol.identifiers import lane_of
from protocol.outcomes import ExchangeOutcome
from regional_agent.leasing.rules.lanes import FIRST_PAUSE_MS
from tests.integration.regional_agent.leasing.test_exchange_loop import eventually, spent_and_booked
from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

LANES = 4
MALFORMED = b'{"title": "Invalid request"}'


def tenants_of_lane(lane: int, count: int, prefix: str = "tenant") -> list[str]:
    names = (f"{prefix}-{number}" for number in range(1_000))
    return [name for name in names if lane_of(f"exports:tenant={name}", LANES) == lane][:count]


def refusing(is_refused: Callable[[dict[str, Any]], bool], status: int = 422) -> Callable[[str, bytes], Any]:
    """A coordinator that refuses a whole call if one of its exchanges is of that kind."""

    def answer(path: str, body: bytes) -> tuple[int, bytes] | None:
        if not path.endswith("/exchanges"):
            return None
        is_hit = any(is_refused(exchange) for exchange in json.loads(body)["exchanges"])
        return (status, MALFORMED) if is_hit else None

    return answer


def demands(tenant: str) -> Callable[[dict[str, Any]], bool]:
    return lambda exchange: any(want["quota"].endswith(f"={tenant}") for want in exchange["live"]["demands"])


async def check(agent: Agent, tenant: str) -> int:
    return (await agent.check(EXPORT | {"tenant": tenant})).status_code


async def faults(agent: Agent) -> list[str]:
    found: list[str] = (await agent.http.get("/v1/status")).json()["faults"]
    return found


@pytest.mark.parametrize("status", [413, 422, 500])
async def test_a_want_that_refuses_its_call_is_found_and_set_aside(world: World, status: int) -> None:
    agent = await world.agent()
    world.weather.answers_for_it = refusing(demands("culprit"), status)
    others = [name for lane in range(LANES) for name in tenants_of_lane(lane, 3)]
    asking = asyncio.create_task(check(agent, "culprit"))
    assert set(await asyncio.gather(*(check(agent, name) for name in others))) == {200}
    assert await asking == 429
    await eventually(world.usage, len(others))
    assert await check(agent, "culprit") == 429
    assert "exports:tenant=culprit" in (await faults(agent))[-1]
    readiness = await agent.http.get("/readyz")
    assert readiness.status_code == 200, "it concerns one key"
    assert [reason["code"] for reason in readiness.json()["reasons"]] == ["items_set_aside"]
    text = (await agent.http.get("/metrics")).text
    assert 'leasehold_exchange_items_refused_total{kind="demand"} 1.0' in text
    assert "leasehold_exchange_items_set_aside 1.0" in text


async def test_an_item_set_aside_is_not_sent_again(world: World) -> None:
    agent = await world.agent()
    offered: list[bytes] = []
    refuse = refusing(demands("culprit"))

    def answer(path: str, body: bytes) -> tuple[int, bytes] | None:
        if b"culprit" in body:
            offered.append(body)
        answered: tuple[int, bytes] | None = refuse(path, body)
        return answered

    world.weather.answers_for_it = answer
    assert await check(agent, "culprit") == 429
    offers = len(offered)
    agent.region.quotas.retry_all()
    for number in range(5):
        assert await check(agent, "culprit") == 429
        assert await check(agent, f"other-{number}") == 200
    assert len(offered) == offers


async def test_a_want_that_is_refused_by_itself_is_set_aside(world: World) -> None:
    agent = await world.agent()

    def answer(path: str, body: bytes) -> tuple[int, bytes] | None:
        if not path.endswith("/exchanges") or b"culprit" not in body:
            return None
        exchanges = json.loads(body)["exchanges"]
        replies = []
        for exchange in exchanges:
            frozen = json.loads(exchange["frozen"])
            refused = [
                {"quota": want["quota"], "refusal": "invalid", "reason": "quota: too long"}
                for want in exchange["live"]["demands"]
            ]
            replies.append({"outcome": "stale", "lane": frozen["lane"], "seq": frozen["seq"]} | {"refused": refused})
            replies[-1]["outcome"] = "replayed"
        return 200, json.dumps({"replies": replies, "versions": {"policies": 0, "blocks": 0}}).encode()

    world.weather.answers_for_it = answer
    assert await check(agent, "culprit") == 429
    assert any("quota: too long" in fault for fault in await faults(agent))


@pytest.mark.parametrize("status", [422, 500])
async def test_a_batch_that_is_refused_stops_its_lane_and_no_other(world: World, status: int) -> None:
    agent = await world.agent()
    incarnation, lane = await spent_and_booked(agent, world)
    lanes = agent.region.exchange.lanes
    others = tenants_of_lane((lane + 1) % LANES, 3)
    agent.region.exchange_loop._pacing.interval_ms = 60_000
    assert (await agent.check(cost=2)).status_code == 200

    async def reported_usage() -> int:
        if world.weather.answers_for_it is None:
            lanes._paused_until_ms.clear()  # the answer to an exchange that was under way pauses the lane again
        agent.region.exchange_loop.report_now()  # otherwise usage may wait for a minute
        return await world.usage()

    def is_of_the_lane(exchange: dict[str, Any]) -> bool:
        frozen = json.loads(exchange["frozen"])
        return bool(frozen["lane"] == lane and frozen["leases"])

    world.weather.answers_for_it = refusing(is_of_the_lane, status)
    agent.region.exchange_loop.report_now()
    for name in others:
        assert await check(agent, name) == 200
    agent.region.exchange_loop._pacing.interval_ms = 20
    await eventually(reported_usage, 5 + len(others))
    if status == 500:
        paused_for_ms = partial(lanes.paused_for_ms, (incarnation.epoch, lane))
        await until(lambda: paused_for_ms(agent.region._clock.monotonic_ms()) > 0)
    else:
        stopped = {(incarnation.epoch, lane): ExchangeOutcome.REFUSED}
        await until(lambda: agent.region.exchange_loop.stopped_lanes == stopped)
        assert any(
            f"lane {lane} of epoch {incarnation.epoch} is refused: 422" in fault for fault in await faults(agent)
        )
        assert 'leasehold_exchange_items_refused_total{kind="lane"} 1.0' in (await agent.http.get("/metrics")).text
        lanes.stopped[incarnation.epoch, lane].offer_at_ms -= FIRST_PAUSE_MS
        agent.region.exchange_loop.offer_again_ms = 10
    world.weather.answers_for_it = None
    await eventually(reported_usage, 7 + len(others))
    await until(lambda: agent.region.exchange_loop.stopped_lanes == {})


@pytest.mark.extended
async def test_a_briefly_refused_exchange_is_resent_and_the_others_are_booked(world: World) -> None:
    agent = await world.agent()
    _, lane = await spent_and_booked(agent, world)
    refusals: list[int] = []
    fault = {"field": "", "rule": "contention", "reason": "another transaction holds a lock", "again_in_ms": 100}

    def answer(path: str, body: bytes) -> tuple[int, bytes] | None:
        if not path.endswith("/exchanges") or len(refusals) >= 3:
            return None
        replies = []
        for exchange in json.loads(body)["exchanges"]:
            frozen = json.loads(exchange["frozen"])
            if frozen["lane"] != lane:
                return None
            replies.append({"outcome": "refused", "lane": lane, "seq": frozen["seq"], "fault": fault})
        refusals.append(lane)
        return 200, json.dumps({"replies": replies, "versions": {"policies": 0, "blocks": 0}}).encode()

    world.weather.answers_for_it = answer
    assert (await agent.check(cost=2)).status_code == 200
    await eventually(world.usage, 7)
    assert len(refusals) == 3
    assert agent.region.exchange_loop.stopped_lanes == {}


@pytest.mark.extended
async def test_an_agent_that_did_not_send_the_batch_learns_that_its_lane_continues(world: World) -> None:
    """Lane state is the region's: another agent's batch was accepted, so the lane has not stopped any more."""
    agents = [await world.agent(name=f"agent-{number}") for number in range(2)]
    incarnation, lane = await spent_and_booked(agents[0], world)
    world.weather.answers_for_it = refusing(lambda exchange: bool(json.loads(exchange["frozen"])["leases"]))
    assert (await agents[0].check(cost=2)).status_code == 200
    for agent in agents:
        agent.region.exchange.lanes.unacknowledged = set(range(LANES))
        agent.region.exchange_loop.report_now()
    await until(lambda: all(agent.region.exchange_loop.stopped_lanes for agent in agents))
    world.weather.answers_for_it = None
    offering, other = agents
    offering.region.exchange.lanes.stopped[incarnation.epoch, lane].offer_at_ms = 0
    offering.region.exchange_loop.offer_again_ms = 10
    await eventually(world.usage, 7)
    await until(lambda: other.region.exchange_loop.stopped_lanes == {})
    assert (await other.http.get("/readyz")).status_code == 200
    assert (await other.check(cost=1)).status_code == 200


@pytest.mark.extended
async def test_a_share_that_refuses_its_call_is_set_aside_and_the_others_accepted(world: World) -> None:
    document: dict[str, list[dict[str, Any]]] = {
        "quotas": [{"name": "pages", "kind": "rate", "limit": "90/second, burst 90", "sharing": "adaptive"}],
        "policies": [{"name": "page", "match": {"route": "/pages"}, "by": ["tenant"], "quota": "pages"}],
    }
    await world.try_out(document)
    agent = await world.agent()

    def answer(path: str, body: bytes) -> tuple[int, bytes] | None:
        return (422, MALFORMED) if path.endswith("/shares") and b"culprit" in body else None

    world.weather.answers_for_it = answer
    sharing = agent.region.share_loop

    async def ask() -> None:
        for tenant in ("culprit", "one", "two"):
            await agent.check({"tenant": tenant, "route": "/pages"}, cost=20)

    async def is_heard() -> bool:
        await ask()
        heard = {limit.quota for limit in sharing.reported_limits() if limit.share.expires_ms}
        return heard == {"pages:tenant=one", "pages:tenant=two"}

    await eventually(is_heard, True)
    assert any("pages:tenant=culprit" in fault for fault in await faults(agent))
    assert 'leasehold_exchange_items_refused_total{kind="share"} 1.0' in (await agent.http.get("/metrics")).text
