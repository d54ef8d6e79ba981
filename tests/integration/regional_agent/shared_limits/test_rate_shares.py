"""Three regions share a rate by demand, with a real coordinator, three stores and the network between."""

import asyncio
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any, NamedTuple

import pytest

from protocol.limits.rates import Rate
from regional_agent.store.types import AgentRateDemand
from tests.budget import cases
from tests.integration.regional_agent.world import REGIONS, Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

KEY = "shared:tenant=acme"
ASK = {"tenant": "acme", "route": "/v1/shared"}
LIMIT, SAFE = 30_000_000, 10_000_000  # so few that a busy machine requests more as well


async def limit(world: World, sharing: str, rate: str = "30/second, burst 6") -> None:
    more: dict[str, list[dict[str, Any]]] = {
        "quotas": [{"name": "shared", "kind": "rate", "limit": rate, "sharing": sharing}],
        "policies": [{"name": "shared", "match": {"route": "/v1/shared"}, "by": ["tenant"], "quota": "shared"}],
    }
    await world.try_out(more)


class Turn(NamedTuple):
    """Return what was admitted between two times, on one clock for all regions."""

    asked_s: float
    answered_s: float
    admitted: int


class Asking:
    """A load of one region, with a settable number of requests a second."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.per_turn = 0
        self.turns: list[Turn] = []

    @property
    def admitted(self) -> int:
        return sum(turn.admitted for turn in self.turns)

    def left_ms(self) -> int:
        """Return for how long it has its share without further replies."""
        sharing = self.agent.region.share_loop
        return max((limit.share.expires_ms for limit in sharing.reported_limits()), default=0) - sharing.now_ms()

    async def run(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            asked_s = now()
            answers = await asyncio.gather(*(self.agent.check(ASK) for _ in range(self.per_turn)))
            admitted = sum(answer.status_code == 200 for answer in answers)
            self.turns.append(Turn(asked_s, now(), admitted))
            await asyncio.sleep(0.02)


def most_beyond(turns: list[Turn], per_second: int) -> float:
    """Return the units surely admitted beyond the limit within a stretch of time, as the maximum of all stretches."""
    by_answer, most = sorted(turns, key=lambda turn: turn.answered_s), 0.0
    for begin_s in {turn.asked_s for turn in turns}:
        within = [turn for turn in by_answer if turn.asked_s >= begin_s]
        sums = accumulate(turn.admitted for turn in within)
        pairs = zip(sums, within, strict=True)
        most = max(most, *(admitted - per_second * (turn.answered_s - begin_s) for admitted, turn in pairs))
    return most


async def in_force(agent: Agent) -> tuple[int, int]:
    """Return the number of the share in the store, and its rate."""
    cell = agent.region
    assert cell.epochs.current is not None
    assert cell.share_loop.policies is not None
    safe = cell.share_loop.policies.shared(KEY)
    assert isinstance(safe, Rate)
    reported = await cell.scripts.report_rates(cell.epochs.current, "who looks", [AgentRateDemand(KEY, safe, 0, False)])
    return reported.reports[0].number, reported.reports[0].rate_micro


async def until_rate(agent: Agent, is_it: Any) -> int:
    async for _ in attempts():
        _, rate_micro = await in_force(agent)
        if is_it(rate_micro):
            return rate_micro
    raise AssertionError(f"it is {await in_force(agent)}")


@pytest.fixture
async def asking(world: World) -> AsyncIterator[list[Asking]]:
    found = [Asking(await world.agent(region)) for region in REGIONS]
    tasks = [asyncio.create_task(each.run()) for each in found]
    yield found
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_force_everywhere(world: World, asking: list[Asking], sharing: str, *rate: str) -> None:
    await limit(world, sharing, *rate)
    await until(lambda: all(each.agent.region.share_loop.policies.shared(KEY) is not None for each in asking))  # type: ignore[union-attr]


@pytest.mark.parametrize("sharing", cases(["strict", "adaptive"], short=1))
async def test_the_share_follows_the_demand_from_one_region_to_another(
    world: World, asking: list[Asking], sharing: str
) -> None:
    await in_force_everywhere(world, asking, sharing)
    one, other, _ = asking
    one.per_turn = 5
    await until_rate(one.agent, lambda rate: rate > 2 * SAFE)
    await until_rate(other.agent, lambda rate: rate < SAFE // 2)
    one.per_turn, other.per_turn = 0, 5
    await until_rate(other.agent, lambda rate: rate > 2 * SAFE)
    await until_rate(one.agent, lambda rate: rate < SAFE // 2)
    assert other.admitted > 0


async def test_strict_shares_never_exceed_the_limit_at_any_moment(world: World, asking: list[Asking]) -> None:
    """Check the lower bound of three consecutive reads: numbers show which share changed meanwhile."""
    await in_force_everywhere(world, asking, "strict")
    looked = 0
    for step in range(120):
        for place, each in enumerate(asking):
            each.per_turn = 5 if step // 20 % 3 == place else 0
        before = [await in_force(each.agent) for each in asking]
        after = [await in_force(each.agent) for each in asking]
        if before == after:  # no share changed during the reads
            looked += 1
            assert sum(rate_micro for _, rate_micro in before) <= LIMIT
        await asyncio.sleep(0.01)
    assert looked > 10


@pytest.mark.parametrize(("sharing", "bound_milli"), cases([("strict", 0), ("adaptive", 30_000)], short=1))
async def test_what_three_regions_admit_is_never_beyond_the_published_worst_case(
    world: World, asking: list[Asking], sharing: str, bound_milli: int
) -> None:
    """One region has the whole rate and is partitioned, and the others claim their parts."""
    await in_force_everywhere(world, asking, sharing)
    one, *others = asking
    one.per_turn = 5
    await until_rate(one.agent, lambda rate: rate > LIMIT * 5 // 6)
    await until(lambda: one.left_ms() > 4_000)
    world.weather.swallows_replies_to.add("/us-east/shares")
    for other in others:
        other.per_turn = 5
    await until_rate(one.agent, lambda rate: rate <= SAFE)
    world.weather.swallows_replies_to.clear()
    for other in others:
        await until_rate(other.agent, lambda rate: rate > SAFE * 3 // 4)
    [shown] = (await world.admin.get("/v1/rates")).json()["data"]
    beyond = most_beyond([turn for each in asking for turn in each.turns], LIMIT // 1_000_000)
    assert (shown["quota"], shown["bound_milli"]) == (KEY, bound_milli)
    assert beyond - 6 <= shown["overshoot_milli"] / 1000 <= bound_milli / 1000


@pytest.mark.extended
async def test_a_partitioned_region_has_no_more_than_its_safe_share(world: World, asking: list[Asking]) -> None:
    await in_force_everywhere(world, asking, "strict")
    one, *_ = asking
    one.per_turn = 5
    await until_rate(one.agent, lambda rate: rate > 2 * SAFE)
    world.weather.swallows_requests = True
    assert await until_rate(one.agent, lambda rate: rate <= SAFE) == SAFE
    world.weather.swallows_requests = False
    await until_rate(one.agent, lambda rate: rate > 2 * SAFE)


@pytest.mark.extended
async def test_a_quiet_key_costs_no_message(world: World, asking: list[Asking]) -> None:
    await in_force_everywhere(world, asking, "adaptive", "300/second, burst 60")
    for _ in range(10):
        assert (await asking[0].agent.check(ASK)).status_code == 200
        await asyncio.sleep(0.05)
    assert await world._rows("SELECT quota FROM shared_limit") == []
    assert (await in_force(asking[0].agent)) == (0, 10 * SAFE)


@pytest.mark.extended
async def test_a_slow_rate_with_units_in_its_bucket_costs_no_message(world: World, asking: list[Asking]) -> None:
    await in_force_everywhere(world, asking, "adaptive", "1/minute, burst 600")
    for _ in range(5):
        assert (await asking[0].agent.check(ASK)).status_code == 200
        await asyncio.sleep(0.05)
    assert await world._rows("SELECT quota FROM shared_limit") == []
    asking[0].per_turn = 5
    await until(lambda: any(limit.share.is_contended for limit in asking[0].agent.region.share_loop.reported_limits()))


@pytest.mark.extended
async def test_status_shows_shared_rates(world: World, asking: list[Asking]) -> None:
    await in_force_everywhere(world, asking, "adaptive")
    asking[0].per_turn = 5
    await until_rate(asking[0].agent, lambda rate: rate > 2 * SAFE)
    [shown] = (await asking[0].agent.http.get("/v1/status")).json()["shares"]
    assert (shown["quota"], shown["base_share_micro"], shown["contended"]) == (KEY, SAFE, True)
    assert shown["share_micro"] > 2 * SAFE
    assert shown["demand_micro"] > 2 * SAFE
    assert 0 <= shown["overshoot_milli"] <= shown["bound_milli"] == LIMIT // 1000, "as published, and so far"
