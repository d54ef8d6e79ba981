"""Several agents of one region share exchanges: one dies midway, and a refill is requested once."""

import asyncio

import asyncpg
import pytest
from pydantic import SecretStr

from protocol.identifiers import lane_of
from protocol.messages import Exchange, ExchangeRequest
from regional_agent.leasing.coordinator_client import CoordinatorClient
from regional_agent.store.types import StoreIncarnation
from tests.integration.regional_agent.leasing.test_exchange_loop import QUOTA, eventually
from tests.integration.regional_agent.world import DOCUMENT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio


def incarnation_of(agent: Agent) -> StoreIncarnation:
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    return incarnation


@pytest.mark.parametrize("dies", ["before it sent", "after it sent"])
async def test_an_agent_that_dies_in_the_middle_of_an_exchange_leaves_it_to_the_others(world: World, dies: str) -> None:
    """The lane is idle otherwise, so only the batch itself informs the other agents."""
    agent = await world.agent(report_interval_ms=60_000)
    await agent.lease(50)
    await agent.check(cost=7)
    incarnation = incarnation_of(agent)
    lane = lane_of(QUOTA, incarnation.lanes)
    frozen = await agent.region.scripts.freeze(incarnation, lane, [QUOTA])  # this agent dies here
    if dies == "after it sent":
        client = CoordinatorClient([world.url], SecretStr(world.tokens["us-east"]), "us-east")
        exchanges = [Exchange(frozen=frozen.bytes)]
        await client.exchange(ExchangeRequest(fingerprint=incarnation.fingerprint, exchanges=exchanges))
        await client.close()
    assert await agent.region.scripts.dirty_quotas(incarnation, lane, 10) == []

    agent.region.exchange_loop.offer_again_ms = 10
    agent.region.exchange_loop.report_now()

    async def waits() -> bool:
        agent.region.exchange_loop.report_now()
        return await agent.region.scripts.frozen_seq(incarnation, lane) is not None

    await eventually(waits, False)
    assert await world.usage() == 7


async def test_two_agents_forget_an_older_epoch_only_once_all_of_it_is_acknowledged(
    world: World,
) -> None:
    """While one waits for its reply, the other is quicker, freezes the lane's next batch, and never gets that reply."""
    agent = await world.agent(report_interval_ms=60_000)
    await agent.lease(50)
    await agent.check(cost=7)
    older, scripts = incarnation_of(agent), agent.region.scripts
    await scripts.return_units(older, QUOTA, 0)  # nothing is left that would trigger another look-up
    lane = lane_of(QUOTA, older.lanes)
    left: list[int | None] = []

    async def the_other() -> None:
        frozen = await scripts.freeze(older, lane, [])
        client = CoordinatorClient([world.url], SecretStr(world.tokens["us-east"]), "us-east")
        exchanges = [Exchange(frozen=frozen.bytes)]
        request = ExchangeRequest(fingerprint=older.fingerprint, exchanges=exchanges)
        [reply] = (await client.exchange(request)).replies
        await client.close()
        await scripts.settle(older, lane, frozen.mono_us, reply)
        left.append((await scripts.freeze(older, lane, [QUOTA])).seq - frozen.seq)

    async def listen() -> None:
        world.weather.before_replies_to["/exchanges"] = the_other

    world.weather.before_replies_to["/epochs"] = listen
    await agent.region.store.call("HSET", "lh:fence", "fingerprint", "another incarnation")
    assert (await agent.check()).status_code == 503
    await until(lambda: agent.region.epochs.current not in {None, older})
    agent.region.exchange_loop.report_now()

    async def older_epochs() -> list[StoreIncarnation]:
        return await scripts.older_epochs(incarnation_of(agent))

    await eventually(older_epochs, [])
    assert left == [1], "there was a next batch"
    assert await scripts.frozen_seq(older, lane) is None, "and its receipt is in"
    assert await world.usage() == 7


@pytest.mark.extended
async def test_a_refill_is_requested_ahead_once_for_all_agents_without_waits(world: World, database: str) -> None:
    """Under steady load there is about one exchange for each grant, however many requests it serves."""
    quotas = [DOCUMENT["quotas"][0] | {"limit": 1_000_000}, *DOCUMENT["quotas"][1:]]
    assert (await world.admin.put("/v1/limits", json=DOCUMENT | {"quotas": quotas})).is_success
    agent = await world.agent(report_interval_ms=60_000)
    await until(lambda: agent.region.admission.policies is not None)
    await spend(agent, 600)  # until the demand is known
    waits, exchanges, grants = waits_of(agent), exchanges_of(agent), await grants_of(database)
    await spend(agent, 3_000)
    exchanges, grants = exchanges_of(agent) - exchanges, await grants_of(database) - grants
    assert waits_of(agent) == waits
    assert grants - 1 <= exchanges <= grants + 2, "each exchange brought a grant"
    assert exchanges <= 300, "and each grant served many requests"


async def spend(agent: Agent, times: int) -> None:
    for _ in range(times // 10):
        answers = await asyncio.gather(*(agent.check() for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}


def waits_of(agent: Agent) -> float:
    return sample(agent, "leasehold_lease_waits_total")


def exchanges_of(agent: Agent) -> float:
    return sample(agent, "leasehold_exchanges_total", outcome="applied")


def sample(agent: Agent, name: str, **labels: str) -> float:
    return agent.region.metrics.registry.get_sample_value(name, labels) or 0.0


async def grants_of(database: str) -> int:
    connection = await asyncpg.connect(database)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM transfer WHERE cause = 'grant'"))
    finally:
        await connection.close()


async def test_a_region_that_is_drained_returns_what_it_has(world: World) -> None:
    agent = await world.agent()
    await agent.lease(50)
    await agent.check(cost=20)
    assert (await world.admin.put("/v1/regions/us-east", json={"status": "draining"})).is_success
    agent.region.exchange_loop.report_now()

    async def outstanding() -> int:
        await agent.check(mode="peek")
        return int((await world.quota())["outstanding"])

    await eventually(outstanding, 0)
    quota = await world.quota()
    assert (quota["consumed"], quota["unallocated"]) == (20, 80)
