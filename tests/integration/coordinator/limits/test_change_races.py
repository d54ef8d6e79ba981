"""Change limits between any two statements of an exchange: nothing is granted by limits that were replaced.

The change commits before the statement runs, or waits for a lock that the exchange holds. Each position has a tenant of
its own, so that one database serves all of them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import pytest

from coordinator.database.connection import Connection
from coordinator.database.engine import Database, open_database
from coordinator.exchange.parsing import parse_exchanges
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.statements import balances, lanes, leases, pools
from coordinator.exchange.transaction import apply_exchanges
from coordinator.limits import in_force
from coordinator.limits.in_force import Documents
from coordinator.limits.put_limits import put_limits
from coordinator.limits.read_catalogue import CATALOGUE, read_catalogue
from coordinator.limits.subscriptions import delete_subscription, put_subscription
from coordinator.overrides.operations import add_override, delete_override
from coordinator.overrides.read_overrides import Override
from coordinator.rebalancing.rebalance import RebalanceRequest, begin_rebalance
from coordinator.rebalancing.schemas import Rebalance, RegionSettingPatch, Weigh
from coordinator.regions.put_region import put_region
from coordinator.shared_limits import statements as shared_limits_statements
from coordinator.shared_limits.share_rates import share_rates
from protocol.identifiers import lane_of
from protocol.limits.document import LimitsDocument
from protocol.messages import Exchange, ExchangeReply, ExchangeRequest, LiveState, RateReport, SharesRequest
from tests.conftest import restricted
from tests.integration.coordinator.agent_harness import DOCUMENT, PERIOD, Agent, AgentHarness, want
from tests.integration.coordinator.fixtures import NOON
from tests.integration.coordinator.interleaving import Recorded, Step, committed, somebody

pytestmark = pytest.mark.anyio

HELD, WANTED, LOWERED, BOUGHT = 5, 900, 10, 1000
POSITIONS = 12  # more than the statements of an exchange, so the last change comes after all of them


class Scene(NamedTuple):
    agent_harness: AgentHarness
    agent: Agent
    tenant: str

    @property
    def quota(self) -> str:
        return f"exports:tenant={self.tenant}"


def lowers_plan(scene: Scene) -> Step[Any]:
    return lambda c: put_subscription(c, Documents(), scene.tenant, "free", None, NOON)


def deletes_subscription(scene: Scene) -> Step[Any]:
    return lambda c: delete_subscription(c, Documents(), scene.tenant, None, NOON)


def applies_lower_limits(scene: Scene) -> Step[Any]:
    return lambda c: put_limits(c, document(LOWERED), lambda _: True, None, NOON)


def overrides(scene: Scene) -> Step[Any]:
    return adds(override_of(scene.tenant, LOWERED))


def adds(override: Override) -> Step[Any]:
    async def step(connection: Connection) -> None:
        added = await add_override(connection, override, somebody(), NOON)
        assert not added.faults

    return step


def override_of(tenant: str, limit: int) -> Override:
    return Override(
        id=uuid4(),
        quota="exports",
        subject={"tenant": tenant},
        limit=limit,
        valid_from=NOON,
        valid_until=None,
        reason="a test",
        created_at=NOON,
        created_by="somebody",
    )


def sets_ceiling(scene: Scene) -> Step[Any]:
    asked = Weigh(mode="weigh", quota=scene.quota, settings={scene.agent.region: RegionSettingPatch(ceiling=LOWERED)})
    wish = RebalanceRequest(uuid4(), asked, somebody(), lambda _: True)

    async def step(connection: Connection) -> None:
        assert isinstance(await begin_rebalance(connection, Documents(), wish, NOON), Rebalance)

    return step


def drains(scene: Scene) -> Step[Any]:
    return lambda c: put_region(c, scene.agent.region, None, "draining", None, NOON)


def takes_down(scene: Scene) -> Step[Any]:
    return lambda c: put_region(c, scene.agent.region, None, "down", None, NOON)


Change = Callable[[Scene], Step[Any]]
CHANGES: list[Change] = [
    lowers_plan,
    deletes_subscription,
    applies_lower_limits,
    overrides,
    sets_ceiling,
    drains,
    takes_down,
]
IN_THE_BOOKS_AT_ONCE = (lowers_plan, deletes_subscription)


def document(pro: int = BOUGHT) -> LimitsDocument:
    quotas = [{"name": "exports", "kind": "allowance", "limit": {"free": LOWERED, "pro": pro}, "period": "month"}]
    rate = {"name": "api", "kind": "rate", "limit": "1000/second, burst 1000"}
    policy = {"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports"}
    return msgspec.convert(DOCUMENT | {"quotas": [*quotas, rate], "policies": [policy]}, LimitsDocument)


class Race:
    """Run an exchange that wants much, with a change before one of its statements."""

    def __init__(self, scene: Scene, database: Database, number: int, change: Step[Any], seq: int) -> None:
        self.documents = Documents()
        self.scene, self.database, self.number, self.change, self.seq = scene, database, number, change, seq
        self.attempts: list[list[str]] = []
        self.came_first = False  # the change was committed before the version was read under the locks
        self._changing: asyncio.Task[Any] | None = None

    async def run(self) -> ExchangeReply:
        await self.database.run(lambda c: read_catalogue(c, self.documents, [], NOON))
        reply = await self.database.run(self._attempt)
        if self._changing is None:
            await self._begin_change()
        assert self._changing is not None
        await asyncio.wait_for(self._changing, 20)
        return reply

    async def _attempt(self, connection: Connection) -> ExchangeReply:
        never = 10_000
        recorded = Recorded(connection, never if self.attempts else self.number, self._begin_change)
        self.attempts.append(recorded.statements)
        live = msgspec.convert({"demands": [want(self.scene.quota, waiting=WANTED)]}, LiveState)
        frozen = self.scene.agent.frozen(self.seq, quota=self.scene.quota)
        request = ExchangeRequest(
            fingerprint=self.scene.agent.fingerprint,
            exchanges=[Exchange(frozen=frozen, live=live)],
        )
        call = parse_exchanges(self.scene.agent.region, msgspec.json.encode(request))
        (applied,) = await apply_exchanges(recorded, self.documents, [call], LeaseTerms(60_000), NOON)  # type: ignore[arg-type]  # as far as an exchange goes
        return applied.response.replies[0]

    async def _begin_change(self) -> None:
        agent_harness = self.scene.agent_harness
        is_before = leases._LEASES_AND_VERSION not in self.attempts[-1]
        self._changing = asyncio.create_task(committed(agent_harness, self.change))
        async with asyncio.timeout(20):
            while not (self._changing.done() or await agent_harness.owner.fetchval(_SOMEBODY_WAITS)):
                await asyncio.wait([self._changing], timeout=0.005)
        self.came_first = is_before and self._changing.done()


_SOMEBODY_WAITS = """
SELECT count(*) > 0 FROM pg_stat_activity
WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
"""


class Seqs:
    """Return the next number of each lane of an agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._last = agent, Counter[int]()

    def next(self, quota: str) -> int:
        lane = lane_of(quota, self._agent.lanes)
        self._last[lane] += 1
        return self._last[lane]


async def hold_some(scene: Scene, seqs: Seqs) -> None:
    """Create a tenant with a large limit, of which the region holds a little."""
    await committed(scene.agent_harness, lambda c: put_subscription(c, Documents(), scene.tenant, "pro", None, NOON))
    reply = await scene.agent.say(seqs.next(scene.quota), demands=[want(scene.quota, waiting=HELD)], quota=scene.quota)
    assert reply.leases[0].granted == HELD


async def restore(scene: Scene) -> None:
    await committed(scene.agent_harness, lambda c: put_region(c, scene.agent.region, None, "active", None, NOON))
    await committed(scene.agent_harness, lambda c: put_limits(c, document(), lambda _: True, None, NOON))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_nothing_is_granted_by_limits_that_a_committed_change_replaced(
    agent_harness: AgentHarness, agent: Agent, change: Change
) -> None:
    seqs = Seqs(agent)
    positions = set[bool]()
    async with open_database(restricted(agent_harness.url), 2) as database:
        for number in range(POSITIONS):
            scene = Scene(agent_harness, agent, f"tenant{number}")
            await restore(scene)
            await hold_some(scene, seqs)
            race = Race(scene, database, number, change(scene), seqs.next(scene.quota))
            await race.run()
            positions.add(race.came_first)
            pool = await agent_harness.pool(scene.quota)
            most = HELD if change in (drains, takes_down) else LOWERED
            if race.came_first:
                assert pool["outstanding"] <= most, (number, pool)
            if change in IN_THE_BOOKS_AT_ONCE:
                assert pool["funded"] == max(LOWERED, pool["outstanding"]), (number, pool)
    assert positions == {True, False}


async def test_a_change_of_another_tenant_repeats_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    """The catalogue and its regions are read once more, and the exchange continues."""
    seqs = Seqs(agent)
    scene = Scene(agent_harness, agent, "acme")
    await restore(scene)
    await hold_some(scene, seqs)
    other: Step[Any] = lambda c: put_subscription(c, Documents(), "other", "pro", None, NOON)  # noqa: E731
    async with open_database(restricted(agent_harness.url), 2) as database:
        alone = Race(scene, database, 10_000, other, seqs.next(scene.quota))
        first = await alone.run()
        race = Race(scene, database, 1, lowers_plan_of_other(scene), seqs.next(scene.quota))
        await race.run()
    assert first.leases[0].granted == HELD + WANTED
    assert race.came_first
    (statements,), (steady,) = race.attempts, alone.attempts
    assert [sql for sql in statements if sql not in steady] == [CATALOGUE, in_force._REGIONS]


def lowers_plan_of_other(scene: Scene) -> Step[Any]:
    return lambda c: put_subscription(c, Documents(), "other", "free", None, NOON)


@pytest.mark.extended
async def test_a_steady_catalogue_costs_an_exchange_no_statement(agent_harness: AgentHarness, agent: Agent) -> None:
    """Count four round trips besides BEGIN and COMMIT: lanes and catalogue; pools; leases and version; the writes."""
    seqs = Seqs(agent)
    scene = Scene(agent_harness, agent, "acme")
    await restore(scene)
    await hold_some(scene, seqs)
    async with open_database(restricted(agent_harness.url), 2) as database:
        race = Race(scene, database, 10_000, lowers_plan(scene), seqs.next(scene.quota))
        await race.run()
    (statements,) = race.attempts
    assert statements == [
        lanes._LANES_AND_CATALOGUE,
        pools._LOCK_POOLS,
        leases._LEASES_AND_VERSION,
        balances._WRITE_BOOKED,
    ]


@pytest.mark.extended
async def test_a_rate_is_not_shared_by_a_replaced_limit(agent_harness: AgentHarness, agent: Agent) -> None:
    """The change comes after the share is locked, and before it is written."""
    await committed(agent_harness, lambda c: put_limits(c, document(), lambda _: True, None, NOON))
    report = RateReport(quota="api:tenant=acme", demand_micro=900_000_000, number=1, rate_micro=0, spent=0)
    request = SharesRequest(rates=[report])
    lower = document()
    lower = msgspec.structs.replace(
        lower, quotas=[*lower.quotas[:1], msgspec.structs.replace(lower.quotas[1], limit="100/second, burst 100")]
    )
    changed: list[bool] = []

    async def change() -> None:
        changed.append(True)
        await committed(agent_harness, lambda c: put_limits(c, lower, lambda _: True, None, NOON))

    async def attempt(connection: Connection) -> Any:
        recorded = _Before(connection, shared_limits_statements._WRITE, None if changed else change)
        return await share_rates(recorded, Documents(), agent.region, request, NOON)  # type: ignore[arg-type]  # as far as it goes

    async with open_database(restricted(agent_harness.url), 2) as database:
        out = await database.run(attempt)
    assert changed
    assert out.response.rates[0].rate_micro <= 100_000_000


class _Before(Recorded):
    """Run the change, if any, before the named statement."""

    def __init__(self, connection: Connection, sql: str, change: Any) -> None:
        super().__init__(connection, -1, change)
        self._sql, self._change = sql, change

    async def _next(self, sql: str) -> None:
        if sql == self._sql and self._change is not None:
            await self._change()
        await super()._next(sql)


@pytest.mark.extended
async def test_an_override_deleted_meanwhile_grants_nothing(agent_harness: AgentHarness, agent: Agent) -> None:
    """The plan's limit is low and the override's high; the override is deleted just before the pool is locked."""
    seqs = Seqs(agent)
    scene = Scene(agent_harness, agent, "acme")
    await restore(scene)
    override = override_of(scene.tenant, BOUGHT)
    await committed(agent_harness, adds(override))
    async with open_database(restricted(agent_harness.url), 2) as database:
        ends: Step[Any] = lambda c: delete_override(c, override.id, somebody(), NOON)  # noqa: E731
        race = Race(scene, database, 1, ends, seqs.next(scene.quota))
        await race.run()
    assert len(race.attempts) == 2
    assert (await agent_harness.pool(scene.quota))["outstanding"] <= LOWERED
    assert (await agent_harness.pool(scene.quota))["funded"] == LOWERED


async def test_a_quota_whose_period_changes_meanwhile_is_granted_in_the_new_one(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    seqs = Seqs(agent)
    scene = Scene(agent_harness, agent, "acme")
    await restore(scene)
    daily = document()
    daily = msgspec.structs.replace(
        daily, quotas=[msgspec.structs.replace(daily.quotas[0], period="day"), *daily.quotas[1:]]
    )
    async with open_database(restricted(agent_harness.url), 2) as database:
        race = Race(
            scene, database, 1, lambda c: put_limits(c, daily, lambda _: True, None, NOON), seqs.next(scene.quota)
        )
        reply = await race.run()
    assert [lease.period for lease in reply.leases if lease.granted] == ["2026-11-18"]
    assert await agent_harness.one("SELECT count(*) FROM lease WHERE period = $1", PERIOD) == 0
