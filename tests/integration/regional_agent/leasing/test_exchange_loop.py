"""Admissions reach the ledger, and grants the region, with and without failures."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop, wait_until
from protocol.identifiers import lane_of
from protocol.outcomes import ExchangeOutcome
from regional_agent.store import keys
from regional_agent.store.connection import Argument
from regional_agent.store.types import StoreIncarnation
from tests.conftest import free_port
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, REGIONS, Agent, World, another_coordinator, running
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio


async def eventually(ask: Callable[[], Awaitable[Any]], expected: Any) -> None:
    async for _ in attempts():
        found = await ask()
        if found == expected:
            return
    raise AssertionError(f"{found} and not {expected}")


async def statuses(agents: list[Agent], each: int) -> list[int]:
    answers = await asyncio.gather(*(agent.check() for agent in agents for _ in range(each)))
    return [answer.status_code for answer in answers]


async def test_three_regions_at_once_admit_the_limit_to_the_unit(world: World) -> None:
    agents = [await world.agent(region) for region in REGIONS]
    found = await statuses(agents, 50)
    assert (found.count(200), found.count(429)) == (100, 50)
    await eventually(world.usage, 100)
    quota = await world.quota()
    assert (quota["consumed"], quota["outstanding"], quota["unallocated"]) == (100, 0, 0)


async def test_idle_units_of_other_regions_are_recalled_for_waiting_requests(world: World) -> None:
    holder, asker = await world.agent("us-east"), await world.agent("eu-west")
    await holder.lease(90)
    await holder.check(cost=20)
    assert (await asker.check(cost=80)).status_code == 200
    assert (await asker.check()).status_code == 429


async def test_a_grant_whose_reply_was_lost_is_returned_when_its_epoch_ends(world: World) -> None:
    """The store has kept all of the epoch, and does not know of the lease."""
    agent = await world.agent()
    ended = agent.region.epochs.current
    assert ended is not None
    world.weather.swallows_replies_to = {"/exchanges"}
    waiting = asyncio.create_task(agent.check())

    async def held() -> list[int]:
        return [lease["outstanding"] + lease["suspense"] for lease in await world.leases(ended.epoch)]

    async for _ in attempts():
        if sum(await held()):
            break
    assert await agent.region.scripts.lease_fields(ended, "exports:tenant=acme") == {}
    agent.region.epochs.on_epoch_closed(ended)
    world.weather.swallows_replies_to = set()
    assert (await waiting).status_code in (200, 429, 503)
    await eventually(held, [0])
    [lease] = await world.leases(ended.epoch)
    assert (lease["granted"], lease["consumed"]) == (lease["returned"], 0)


async def test_a_lost_reply_loses_nothing_and_books_nothing_twice(world: World) -> None:
    agent = await world.agent()
    await agent.lease(50)
    world.weather.swallows_replies_to = {"/exchanges"}
    assert (await agent.check(cost=11)).status_code == 200
    await until(lambda: world.weather.swallowed >= 2)
    assert await world.usage() == 11, "it was booked, though nobody was told"
    assert (await agent.check(cost=5)).status_code == 200
    world.weather.swallows_replies_to = set()
    await eventually(world.usage, 16)
    assert (await statuses([agent], 100)).count(200) == 84
    await eventually(world.usage, 100)
    assert (await world.quota())["consumed"] == 100


@pytest.mark.extended
async def test_a_missing_reply_does_not_delay_waiting_requests(world: World) -> None:
    hangs = asyncio.Event()

    async def until_the_end() -> None:
        await hangs.wait()

    world.weather.before_replies_to["/exchanges"] = until_the_end
    with capture_logs() as logs:
        agent = await world.agent()
        await agent.lease(10)
        assert not hangs.is_set(), "the first reply never came"
        hangs.set()
    assert [each["reason"] for each in logs if each["event"] == "exchange failed"][:1] == ["no reply in time"]


async def test_a_partitioned_region_spends_its_lease_and_reports_later(world: World) -> None:
    agent = await world.agent()
    await agent.lease(40)
    world.weather.swallows_requests = True
    assert (await statuses([agent], 60)).count(200) == 40
    world.weather.swallows_requests = False
    await eventually(world.usage, 40)


async def test_a_shutdown_reports_usage_and_keeps_the_rest(world: World) -> None:
    async with running(world.settings("us-east", report_interval_ms=60_000)) as agent:
        await agent.ready()
        await agent.lease(50)
        await agent.check(cost=11)
    assert await world.usage() == 11
    assert (await world.quota())["outstanding"] == 39


@pytest.mark.extended
async def test_a_shutdown_returns_the_rest_if_configured(world: World) -> None:
    async with running(world.settings("us-east", return_on_stop=True)) as agent:
        await agent.ready()
        await agent.lease(50)
        await agent.check(cost=30)
    quota = await world.quota()
    assert (quota["consumed"], quota["outstanding"], quota["unallocated"]) == (30, 0, 70)


async def test_the_next_agent_of_a_region_continues_where_the_last_one_stopped(world: World) -> None:
    """The agent died midway: its batch waits in the store, unreported."""
    async with running(world.settings("us-east")) as agent:
        await agent.ready()
        await agent.lease(50)
        world.weather.swallows_replies_to = {"/exchanges"}
        await agent.check(cost=5)
        await until(lambda: world.weather.swallowed >= 1)
        incarnation = agent.region.epochs.current
    world.weather.swallows_replies_to = set()
    next_agent = await world.agent()
    assert next_agent.region.epochs.current == incarnation
    assert (await next_agent.check(cost=45)).status_code == 200
    await eventually(world.usage, 50)


@pytest.mark.extended
async def test_denied_requests_are_admitted_soon_after_a_raised_limit(world: World) -> None:
    agent = await world.agent()
    await agent.check(cost=100)
    assert (await agent.check()).status_code == 429
    raised = DOCUMENT | {"quotas": [DOCUMENT["quotas"][0] | {"limit": 150}, *DOCUMENT["quotas"][1:]]}
    assert (await world.admin.put("/v1/limits", json=raised)).is_success

    async def ask() -> int:
        return (await agent.check(cost=50)).status_code

    await eventually(ask, 200)
    await eventually(world.usage, 150)


@pytest.mark.extended
async def test_the_last_known_policies_outlive_the_coordinator(world: World, tmp_path: Path) -> None:
    first = await world.agent(state_dir=tmp_path)
    await first.check(cost=10)
    world.weather.swallows_requests = True
    async with running(world.settings("us-east", state_dir=tmp_path)) as agent:
        await agent.ready()
        assert (await agent.check({"tenant": "acme", "route": "/v1/search"})).status_code == 200
        world.weather.swallows_requests = False


async def test_without_its_store_each_policy_follows_its_failure_mode_and_recovers(
    world: World, tmp_path: Path
) -> None:
    port, password, log = free_port(), "secret", tmp_path / "log"

    def start() -> Any:
        process = embedded.start_store(tmp_path / "data", port, password, log=log)
        assert wait_until(lambda: embedded.store_is_ready(port, password), 30), log.read_text()
        return process

    process = start()
    try:
        agent = await world.agent(store_url=embedded.store_url(port, password))
        await agent.lease(50)
        assert (await agent.check(cost=10)).status_code == 200
        await eventually(world.usage, 10)
        first = agent.region.epochs.current
        world.weather.swallows_requests = True
        assert (await agent.check()).status_code == 200
        stop(process)
        await until(lambda: not agent.region.store.connected)

        closed, opened = await agent.check(), await agent.check({"tenant": "acme", "route": "/v1/open"})
        assert (closed.status_code, closed.json()["degraded"]) == (503, "closed")
        assert closed.json()["type"] == "/problems/store-unavailable"
        assert int(closed.headers["Retry-After"]) >= 1
        assert (opened.status_code, opened.json()["degraded"]) == (200, "open")
        assert (await agent.http.get("/readyz")).status_code == 503

        process = start()
        world.weather.swallows_requests = False
        await until(lambda: agent.region.epochs.current not in {None, first})
        # Another incarnation has another epoch; usage of the older one is still booked, and its rest stays
        # reserved.
        await eventually(world.usage, 11)
        assert (await agent.check(EXPORT, cost=5)).status_code == 200
        await eventually(world.usage, 16)
        quota = await world.quota()
        assert quota["outstanding"] + quota["suspense"] >= 39  # in suspense as soon as the next tick
        assert quota["consumed"] + quota["outstanding"] + quota["suspense"] + quota["unallocated"] == 100
    finally:
        await world.agents.aclose()
        stop(process)


@pytest.mark.extended
async def test_a_recall_that_was_missed_as_a_signal_is_in_the_next_reply(world: World) -> None:
    world.weather.swallows_replies_to = {"/signals"}
    holder, asker = await world.agent("us-east"), await world.agent("eu-west")
    await holder.lease(100)

    async def spend_and_ask() -> int:
        await holder.check()  # so that it has something to report, and gets a reply
        return (await asker.check(cost=20)).status_code

    await eventually(spend_and_ask, 200)


async def test_an_epoch_opened_for_an_ended_incarnation_admits_nothing(world: World) -> None:
    """The store fails over while its epoch is being opened: the epoch belongs to the incarnation before."""
    async with running(world.settings("us-east")) as agent:
        await agent.ready()
        first = agent.region.epochs.current
        fence, scripts = "lh:fence", agent.region.scripts
        await agent.region.store.call("HSET", fence, "fingerprint", "another incarnation")

        async def fail_over() -> None:
            await agent.region.store.call("HSET", fence, "fingerprint", "a third life", "nonce", "0" * 32)

        world.weather.before_replies_to["/epochs"] = fail_over
        assert (await agent.check()).status_code == 503
        await until(lambda: not world.weather.before_replies_to)
        await until(lambda: agent.region.epochs.current not in {None, first})
        incarnation = agent.region.epochs.current
        assert incarnation is not None
        assert (await scripts.read_fence()).fingerprint == incarnation.fingerprint == agent.region.store.fingerprint
        assert first is not None
        assert incarnation.epoch == first.epoch + 2, "the one in between was never adopted"


QUOTA = "exports:tenant=acme"


async def spent_and_booked(agent: Agent, world: World) -> tuple[StoreIncarnation, int]:
    """Spend and book five units, and return their incarnation and lane."""
    await agent.lease(50)
    assert (await agent.check(cost=5)).status_code == 200
    await eventually(world.usage, 5)
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    lane = lane_of(QUOTA, incarnation.lanes)
    await until_acknowledged(agent, incarnation, lane)
    return incarnation, lane


async def until_acknowledged(agent: Agent, incarnation: StoreIncarnation, lane: int) -> None:
    async def waits() -> bool:
        return await agent.region.scripts.frozen_seq(incarnation, lane) is not None

    await eventually(waits, False)


async def status_of_check(agent: Agent) -> int:
    return (await agent.check(cost=1)).status_code


LOSSES: dict[str, Callable[[StoreIncarnation, int], tuple[Argument, ...]]] = {
    "an older seq": lambda incarnation, lane: ("HSET", keys.lane(lane, incarnation.epoch), "seq", 0),
    "the last seq": lambda incarnation, lane: ("HINCRBY", keys.lane(lane, incarnation.epoch), "seq", -1),
    "an older total": lambda incarnation, lane: ("HSET", keys.lease(lane, incarnation.epoch, QUOTA), "consumed", 0),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_restored_store_gets_another_epoch_and_its_evidence_is_kept(world: World, loss: str) -> None:
    """The fingerprint is the same, so only the exchange shows it. One new incarnation begins, for both agents."""
    agents = [await world.agent() for _ in range(2)]
    for agent in agents:
        agent.region.exchange_loop.offer_again_ms = 100
    incarnation, lane = await spent_and_booked(agents[0], world)
    await agents[0].region.store.call(*LOSSES[loss](incarnation, lane))
    answers = await asyncio.gather(*(agent.check(cost=2) for agent in agents))
    assert {answer.status_code for answer in answers} <= {200, 503}
    await until(lambda: any(agent.region.epochs.current not in {None, incarnation} for agent in agents))

    for agent in agents:
        # An agent whose usage the other reported learns of it with its own next request.
        await eventually(partial(status_of_check, agent), 200)
        assert (await agent.http.get("/readyz")).status_code == 200
    [epoch] = {agent.region.epochs.current.epoch for agent in agents if agent.region.epochs.current}
    assert epoch == incarnation.epoch + 1, "whoever found it, it was done once"
    await eventually(world.usage, 7)
    await until(lambda: any(agent.region.exchange_loop.stopped_lanes for agent in agents))
    refused = next(agent for agent in agents if agent.region.exchange_loop.stopped_lanes)
    assert list((await refused.http.get("/v1/status")).json()["stopped_lanes"]) == [f"{incarnation.epoch}/{lane}"]
    assert await refused.region.scripts.frozen_seq(incarnation, lane) is not None, "what cannot be booked stays"
    assert [old.epoch for old in await refused.region.scripts.older_epochs(StoreIncarnation("", epoch, 4))] == [
        incarnation.epoch
    ]


async def test_a_lane_with_a_gap_stops_with_an_error_until_it_is_resolved(world: World, database: str) -> None:
    """The ledger lost data: the epoch continues, nothing is dropped, and the batch is sent again."""
    agent = await world.agent()
    agent.region.exchange_loop.offer_again_ms = 10
    incarnation, lane = await spent_and_booked(agent, world)
    await agent.region.store.call("HINCRBY", keys.lane(lane, incarnation.epoch), "seq", 5)
    assert (await agent.check(cost=2)).status_code == 200
    await until(lambda: agent.region.exchange_loop.stopped_lanes == {(incarnation.epoch, lane): ExchangeOutcome.GAP})
    found = (await agent.http.get("/readyz")).json()
    assert (found["status"], [reason["code"] for reason in found["reasons"]]) == ("degraded", ["lanes_stopped"])
    assert "leasehold_stopped_lanes 1.0" in (await agent.http.get("/metrics")).text
    assert list((await agent.http.get("/v1/status")).json()["stopped_lanes"]) == [f"{incarnation.epoch}/{lane}"]
    assert agent.region.epochs.current == incarnation
    assert await world.usage() == 5

    connection = await asyncpg.connect(database)
    await connection.execute(
        "UPDATE lane SET last_seq = last_seq + 5 WHERE epoch = $1 AND lane = $2", incarnation.epoch, lane
    )
    await connection.close()
    await eventually(world.usage, 7)
    await until(lambda: not agent.region.exchange_loop.stopped_lanes)
    assert (await agent.http.get("/readyz")).status_code == 200


async def test_a_retired_epoch_is_left_and_its_reports_are_acknowledged(world: World) -> None:
    agent = await world.agent()
    incarnation, lane = await spent_and_booked(agent, world)
    retired = await world.admin.post(f"/v1/epochs/{incarnation.epoch}:retire", json={"reason": "the region moved"})
    assert retired.is_success
    assert (await agent.check(cost=2)).status_code == 200
    await until(lambda: agent.region.epochs.current not in {None, incarnation})
    await until_acknowledged(agent, incarnation, lane)
    assert (await agent.check(cost=3)).status_code == 200
    await eventually(world.usage, 8)
    assert agent.region.exchange_loop.stopped_lanes == {}


@pytest.mark.extended
async def test_a_store_that_may_evict_is_not_ready(world: World) -> None:
    async with running(world.settings("ap-south")) as other:
        await other.ready()
        await other.region.store.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        try:
            agent = await world.agent()
            answer = await agent.http.get("/readyz")
            assert answer.status_code == 503
            assert "noeviction" in answer.json()["reasons"][0]["text"]
        finally:
            await other.region.store.call("CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_an_unused_lease_is_renewed(world: World, database: str) -> None:
    """Otherwise it would expire in its store, and its units would go to suspense at the coordinator."""
    async with another_coordinator(database, lease_ms=1_000) as url:
        agent = await world.agent(coordinator_url=url)
        await agent.lease(50)
        first = await expires_us(agent)
        async for _ in attempts():
            if await expires_us(agent) > first + 1_000_000:
                break
        else:
            raise AssertionError("it was not renewed")
        await world.agents.aclose()


async def expires_us(agent: Agent) -> int:
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    return int((await agent.region.scripts.lease_fields(incarnation, "exports:tenant=acme"))["expires"])
