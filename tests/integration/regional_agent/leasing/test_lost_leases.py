"""A store loses a lease and keeps its fingerprint: the same units are not admitted twice."""

from functools import partial
from typing import Any

import pytest

from protocol.identifiers import lane_of
from regional_agent.store import keys
from tests.integration.regional_agent.leasing.test_exchange_loop import eventually
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio

QUOTA, LIMIT = "exports:tenant=acme", 100
SEARCH = {"tenant": "acme", "route": "/v1/search"}


def document(**policy: Any) -> dict[str, Any]:
    export = {"name": "export", "match": {"route": EXPORT["route"]}, "by": ["tenant"], "quota": "exports", "wait": "1s"}
    others = [each for each in DOCUMENT["policies"] if each["name"] != "export"]
    return DOCUMENT | {"policies": [export | policy, *others]}


async def spend(agent: Agent, checks: int) -> int:
    """Return how many of so many checks were admitted."""
    return sum([(await agent.check()).status_code == 200 for _ in range(checks)])


async def lose_lease(agent: Agent, *more: str) -> None:
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    lane = lane_of(QUOTA, incarnation.lanes)
    names = {"lease": keys.lease, "lines": keys.usage_lines}
    for kind in ("lease", *more):
        await agent.region.store.call("DEL", names[kind](lane, incarnation.epoch, QUOTA))


async def epochs(world: World) -> list[tuple[str, bool]]:
    return [(state, lost) for _, state, lost in await world.epochs()]


async def totals(world: World) -> tuple[int, int]:
    """Return what is booked, and what is locked until people or evidence resolve it."""
    [row] = await world._rows("SELECT sum(consumed) AS consumed, sum(outstanding + suspense) AS unknown FROM lease")
    return int(row["consumed"]), int(row["unknown"])


async def test_reported_units_of_a_lost_lease_are_not_admitted_again(world: World) -> None:
    assert (await world.admin.put("/v1/limits", json=document())).is_success
    agent = await world.agent()
    await agent.lease(LIMIT)
    assert await spend(agent, 60) == 60
    await eventually(world.usage, 60)
    await lose_lease(agent)
    agent.region.quotas.fetch(QUOTA)
    await eventually(partial(epochs, world), [("fenced", True), ("current", False)])
    assert await spend(agent, 10) == 0, "the rest is in suspense: it may have been spent"
    await eventually(partial(totals, world), (60, 40))


@pytest.mark.parametrize("more", [(), ("lines",)])
async def test_unreported_units_of_a_lost_lease_are_not_admitted_again(world: World, more: tuple[str, ...]) -> None:
    assert (await world.admin.put("/v1/limits", json=document())).is_success
    agent = await world.agent(report_interval_ms=60_000)
    await agent.lease(LIMIT)
    assert await spend(agent, 60) == 60
    await lose_lease(agent, *more)
    agent.region.quotas.fetch(QUOTA)
    await eventually(partial(epochs, world), [("fenced", True), ("current", False)])
    assert await spend(agent, 10) == 0


async def test_a_store_that_may_evict_leases_admits_no_allowance(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """This applies as soon as its settings are read again, on a connection that has been open for long."""
    monkeypatch.setattr("regional_agent.leasing.epoch.WATCH_S", 0.05)
    assert (await world.admin.put("/v1/limits", json=document())).is_success
    agent = await world.agent()
    await agent.lease(LIMIT)
    assert await spend(agent, 1) == 1
    store = agent.region.store
    try:
        await store.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        await until(lambda: agent.region.epochs.may_evict)
        answer = await agent.check()
        assert (answer.status_code, answer.json()["degraded"]) == (503, "closed")
        assert (await agent.check(SEARCH)).status_code == 200, "of a rate nothing is lost"
        ready = await agent.http.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"][0]["code"]) == (503, "store_evicts")
    finally:
        await store.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await until(lambda: not agent.region.epochs.may_evict)
    assert await spend(agent, 1) == 1
    await eventually(world.usage, 2)
