"""A region's store is a Cluster, whose cells work independently and together make one region."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from leasehold.local_stack.processes import wait_until
from protocol.identifiers import replicas_of
from regional_agent.cluster.cell import Cell
from regional_agent.cluster.rules.cells import CELLS, cell_of
from regional_agent.cluster.rules.slot_map import SLOTS, slot_of
from regional_agent.store.topology import Cluster
from tests.budget import cases
from tests.integration.regional_agent.cluster.clusters import PASSWORD, PRIMARIES, Nodes, a_cluster
from tests.integration.regional_agent.world import EXPORT, Agent, World, running
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with a_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def nodes(standing: Nodes) -> Nodes:
    standing.forget_everything()
    return standing


@pytest.fixture
async def agent(world: World, nodes: Nodes) -> AsyncIterator[Agent]:
    yield await world.agent(store_url=nodes.url)
    await world.agents.aclose()  # it sends its last exchange while the Cluster still runs


def tenant_in(cell: int) -> str:
    """Return some tenant whose quotas lie there."""
    return next(name for name in map(str, range(1_000)) if cell_of(f"exports:tenant={name}") == cell)


def export(tenant: str) -> dict[str, str]:
    return {**EXPORT, "tenant": tenant}


async def test_each_cell_is_a_store_of_its_own_and_together_they_are_one_region(world: World, agent: Agent) -> None:
    incarnations = [cell.epochs.current for cell in agent.whole.cells]
    assert len({incarnation.epoch for incarnation in incarnations if incarnation}) == CELLS
    for cell in range(CELLS):
        assert (await agent.check(export(tenant_in(cell)), cost=cell + 1)).status_code == 200
    await until_booked(world, sum(range(1, CELLS + 1)))
    assert [state for _, state, _ in await world.epochs()] == ["current"] * CELLS
    status = (await agent.http.get("/v1/status")).json()
    assert [cell["epoch"] for cell in status["cells"]] == [
        incarnation.epoch for incarnation in incarnations if incarnation
    ]
    assert sorted(lease["consumed"] for lease in status["leases"]) == list(range(1, CELLS + 1))
    assert (await agent.http.get("/readyz")).status_code == 200


async def until_booked(world: World, units: int) -> None:
    async for _ in attempts():
        if await world.usage() == units:
            return
    assert await world.usage() == units


def epochs_of(agent: Agent) -> list[int]:
    return [cell.epochs.current.epoch if cell.epochs.current else 0 for cell in agent.whole.cells]


async def test_requests_of_one_turn_are_one_call_for_each_cell(agent: Agent) -> None:
    tenants = [tenant_in(3), tenant_in(4)]
    for tenant in tenants:
        await agent.check(export(tenant), mode="peek", cost=10)
    calls = [agent.whole.cells[cell].breaker.calls for cell in (3, 4)]
    checks = [{"subject": export(tenant)} for tenant in tenants * 10]
    answer = await agent.http.post("/v1/check:batch", json={"checks": checks})
    assert {item["status"] for item in answer.json()["items"]} == {200}
    assert [agent.whole.cells[cell].breaker.calls for cell in (3, 4)] == [each + 1 for each in calls]


async def test_a_moved_slot_begins_another_incarnation_of_its_cell_only(
    world: World, agent: Agent, nodes: Nodes
) -> None:
    """The evidence of the older incarnation moves with the slot, and is booked."""
    for cell in range(CELLS):
        assert (await agent.check(export(tenant_in(cell)), cost=7)).status_code == 200
    before = epochs_of(agent)
    source = nodes.of_cell(5)
    target = next(node for node in nodes.primaries if node is not source)
    nodes.move(5, source, target)
    try:
        await until(lambda: epochs_of(agent)[5] > before[5])
        assert [after for cell, after in enumerate(epochs_of(agent)) if cell != 5] == [*before[:5], *before[6:]]
        await spends(agent, tenant_in(5), 7)
        await until_booked(world, 7 * (CELLS + 1))
        assert agent.whole.cells[5].store.node == f"127.0.0.1:{target.port}/0"
    finally:
        await world.agents.aclose()
        nodes.move(5, target, source)


@pytest.mark.extended
async def test_a_redirection_is_enough_to_reload_the_slot_map(world: World, agent: Agent, nodes: Nodes) -> None:
    """A node replies MOVED, and the slot map was not reloaded since."""
    cluster, source = agent.whole.store, nodes.of_cell(5)
    assert isinstance(cluster, Cluster)
    target = next(node for node in nodes.primaries if node is not source)
    await until_it_answers(agent, export(tenant_in(5)), 200)
    cluster.refresh_interval_s = 3_600
    node = agent.whole.cells[6].store
    node.reconnect()
    await until(lambda: node.connected)  # by then it reloads no more by itself
    nodes.move(5, source, target)
    try:
        await spends(agent, tenant_in(5), 1)
        assert agent.whole.cells[5].store.node == f"127.0.0.1:{target.port}/0"
    finally:
        await world.agents.aclose()
        nodes.move(5, target, source)


async def spends(agent: Agent, tenant: str, units: int) -> None:
    async for _ in attempts():
        if (await agent.check(export(tenant), cost=units)).status_code == 200:
            return
    raise AssertionError("it is never admitted")


@pytest.mark.extended
async def test_a_shard_that_fails_over_and_back_loses_its_own_epochs_and_no_others(
    world: World, tmp_path: Path
) -> None:
    with a_cluster(tmp_path, replicas=1) as nodes:
        first, replica = nodes.primaries[0], nodes.replicas[0]
        agent = await world.agent(store_url=nodes.url)
        own = [cell for cell in range(CELLS) if nodes.of_cell(cell) is first]
        others = [cell for cell in range(CELLS) if cell not in own]
        for cell in range(CELLS):
            assert (await agent.check(export(tenant_in(cell)), cost=1)).status_code == 200
        before = epochs_of(agent)
        for primary in (replica, first):
            last = epochs_of(agent)
            await asyncio.to_thread(primary.take_over)
            await until(lambda last=last: all(epochs_of(agent)[cell] > last[cell] for cell in own))  # type: ignore[misc]
            assert [epochs_of(agent)[cell] for cell in others] == [before[cell] for cell in others]
            for cell in range(CELLS):
                await spends(agent, tenant_in(cell), 1)
        lost = {epoch for epoch, _, lost_data in await world.epochs() if lost_data}
        assert lost == {epoch for epoch, state, _ in await world.epochs() if state == "fenced"}
        assert len(lost) == 2 * len(own)
        await world.agents.aclose()
        assert await world.usage() == 3 * CELLS, "a failover that waited for its replica loses nothing"


@pytest.mark.extended
async def test_a_shard_that_fails_over_with_all_data_leaves_nothing_to_people(world: World, tmp_path: Path) -> None:
    with a_cluster(tmp_path, replicas=1) as nodes:
        first, replica = nodes.primaries[0], nodes.replicas[0]
        agent = await world.agent(store_url=nodes.url, decision_timeout_ms=250, store_confirm_in_replicas=True)
        own = [cell for cell in range(CELLS) if nodes.of_cell(cell) is first]
        await until(lambda: all(is_confirmed(agent.whole.cells[cell]) for cell in own))
        for cell in own:
            await spends(agent, tenant_in(cell), 1)
        last = epochs_of(agent)
        await asyncio.to_thread(replica.take_over)
        await until(lambda: all(epochs_of(agent)[cell] > last[cell] for cell in own))
        await spends(agent, tenant_in(own[0]), 1)
        await world.agents.aclose()
        assert await world.usage() == len(own) + 1
    assert [epoch for epoch, _, lost_data in await world.epochs() if lost_data] == []
    kept = (await world.admin.get("/v1/audit", params={"action": "epoch.kept"})).json()["data"]
    assert {int(each["object"]) for each in kept} == {last[cell] for cell in own}


def is_confirmed(cell: Cell) -> bool:
    return cell.epochs.current is not None and bool(replicas_of(cell.epochs.current.fingerprint))


@pytest.mark.extended
async def test_while_a_shard_is_gone_its_policies_fail_by_their_modes_and_no_others(
    world: World, tmp_path: Path
) -> None:
    with a_cluster(tmp_path) as nodes:
        agent = await world.agent(store_url=nodes.url)
        gone = nodes.primaries[1]
        for cell in range(CELLS):
            assert (await agent.check(export(tenant_in(cell)), cost=1)).status_code == 200
        before = epochs_of(agent)
        gone.kill()
        for cell in range(CELLS):
            is_gone = nodes.of_cell(cell) is gone
            for route, status in (("/v1/exports", 503 if is_gone else 200), ("/v1/open", 200)):
                subject = {"tenant": tenant_in(cell), "route": route, "method": "POST"}
                await until_it_answers(agent, subject, status)
        ready = await agent.http.get("/readyz")
        assert ready.status_code == 503
        assert f"{gone.port}/0 is not connected" in ready.text
        gone.start()
        await until(lambda: all(epochs_of(agent)) and epochs_of(agent) != before)
        for cell in range(CELLS):
            await spends(agent, tenant_in(cell), 1)
            assert (epochs_of(agent)[cell] > before[cell]) == (nodes.of_cell(cell) is gone)
        await world.agents.aclose()


async def until_it_answers(agent: Agent, subject: dict[str, str], status: int, **fields: Any) -> None:
    """A call in progress on a closed connection is answered by the failure mode, once."""
    async for _ in attempts():
        if (await agent.check(subject, **fields)).status_code == status:
            return
    raise AssertionError(f"{subject} is never answered {status}")


# --- every algorithm -------------------------------------------------------------------------------------------------

WINDOWED = ("fixed_window", "sliding_window", "sliding_log")
BUCKETS = ("token_bucket", "gcra", "leaky_bucket")
PASS = 40
RATE = {"kind": "rate", "sharing": "regional"}
EVERY: dict[str, Any] = {
    "quotas": [
        # A third of each is this region's; so slow, or so long, that nothing refills while the test runs.
        *(RATE | {"name": name, "limit": "3/hour, burst 120", "algorithm": name} for name in BUCKETS),
        *(RATE | {"name": name, "limit": "120/hour", "algorithm": name} for name in WINDOWED),
        {"name": "allowance", "kind": "allowance", "limit": PASS, "period": "month"},
        {"name": "concurrency", "kind": "concurrency", "limit": 3 * PASS},
    ],
    "policies": [
        {"name": name, "match": {"route": f"/{name}"}, "by": ["tenant"], "quota": name}
        for name in (*BUCKETS, *WINDOWED, "allowance", "concurrency")
    ],
}


@pytest.mark.parametrize("algorithm", cases(["allowance", "concurrency", *BUCKETS, *WINDOWED], short=2))
async def test_of_200_clients_at_once_exactly_the_limit_passes(
    world: World, agent: Agent, nodes: Nodes, algorithm: str
) -> None:
    """The clients call two agents of the region."""
    assert (await world.admin.put("/v1/limits", json=EVERY)).is_success
    agents = [agent, await world.agent(store_url=nodes.url)]
    subject = {"tenant": "acme", "route": f"/{algorithm}"}
    for each in agents:
        await until_it_answers(each, {"tenant": "acme", "route": "/allowance"}, 200, mode="peek", cost=PASS)

    async def ask(number: int) -> int:
        http = agents[number % 2].http
        if algorithm != "concurrency":
            return (await http.post("/v1/check", json={"subject": subject})).status_code
        hold = {"subject": subject, "units": 1, "ttl_ms": 60_000, "operation_id": str(number)}
        return (await http.post("/v1/holds", json=hold)).status_code

    statuses = await asyncio.gather(*map(ask, range(200)))
    assert sum(status in (200, 201) for status in statuses) == PASS
    assert set(statuses) <= {200, 201, 429}


# --- exchanges -------------------------------------------------------------------------------------------------------


@pytest.mark.extended
async def test_a_shutdown_returns_the_units_of_every_cell_if_configured(world: World, nodes: Nodes) -> None:
    async with running(world.settings("us-east", store_url=nodes.url, return_on_stop=True)) as agent:
        await agent.ready()
        for cell in range(CELLS):
            await until_it_answers(agent, export(tenant_in(cell)), 200, mode="peek", cost=50)
            assert (await agent.check(export(tenant_in(cell)), cost=cell)).status_code == (200 if cell else 422)
    for cell in range(CELLS):
        quota = await world.quota(f"exports:tenant={tenant_in(cell)}")
        assert (quota["consumed"], quota["outstanding"], quota["unallocated"]) == (cell, 0, 100 - cell)


@pytest.mark.extended
async def test_idle_units_of_a_cell_are_recalled_for_requests_elsewhere(world: World, agent: Agent) -> None:
    asker, tenant = await world.agent("eu-west"), tenant_in(9)
    await until_it_answers(agent, export(tenant), 200, mode="peek", cost=90)
    assert (await agent.check(export(tenant), cost=20)).status_code == 200
    assert (await asker.check(export(tenant), cost=80)).status_code == 200
    assert (await agent.check(export(tenant))).status_code == 429


# --- errors of a Cluster ---------------------------------------------------------------------------------------------


@pytest.mark.extended
async def test_a_migrating_slot_fails_by_its_modes_until_it_has_arrived(
    world: World, agent: Agent, nodes: Nodes
) -> None:
    """Half of its keys are on each node, and neither half may be taken for all."""
    tenant = tenant_in(5)
    await until_it_answers(agent, export(tenant), 200)
    source = nodes.of_cell(5)
    target = next(node for node in nodes.primaries if node is not source)
    beside = tenant_in(next(cell for cell in range(CELLS) if cell != 5 and nodes.of_cell(cell) is source))
    await until_it_answers(agent, export(beside), 200)
    before = epochs_of(agent)
    nodes.begin_to_move(5, source, target)
    try:
        for _ in range(20):
            assert (await agent.check(export(tenant))).status_code == 503
            assert (await agent.check({**export(tenant), "route": "/v1/open"})).status_code == 200
            assert (await agent.check(export(beside))).status_code == 200, "it keeps the connection that they share"
        await until_it_answers(agent, export(tenant_in(6)), 200)
        nodes.move(5, source, target)
        await spends(agent, tenant, 1)
        assert epochs_of(agent)[5] > before[5]
        await until_booked(world, 24)
    finally:
        await world.agents.aclose()
        nodes.move(5, target, source)


@pytest.mark.extended
async def test_a_cluster_that_is_down_fails_by_the_modes_and_comes_back(world: World, tmp_path: Path) -> None:
    """A node misses a slot, and replies CLUSTERDOWN for each of the others that it has."""
    with a_cluster(tmp_path) as nodes:
        for node in nodes.primaries:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "yes")
        agent = await world.agent(store_url=nodes.url)
        await until_it_answers(agent, EXPORT, 200)
        there = nodes.of_cell(cell_of("exports:tenant=acme"))
        cells = {slot_of(b"%d" % cell) for cell in range(CELLS)}
        first = nodes.primaries.index(there) * SLOTS // PRIMARIES + 1
        slot = next(slot for slot in range(first, SLOTS) if slot not in cells)
        there.ask("CLUSTER", "DELSLOTS", slot)  # its own, which no other node tells it of again
        assert wait_until(lambda: "cluster_state:fail" in there.ask("CLUSTER", "INFO"), 30)
        await until_it_answers(agent, EXPORT, 503)
        await until_it_answers(agent, {**EXPORT, "route": "/v1/open"}, 200)
        there.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        await until_it_answers(agent, EXPORT, 200)
        await world.agents.aclose()


async def test_a_plain_address_of_a_node_is_refused_with_an_explanation(world: World, nodes: Nodes) -> None:
    url = f"redis://:{PASSWORD}@127.0.0.1:{nodes.primaries[0].port}"
    async with running(world.settings("us-east", store_url=url)) as agent:
        await until(lambda: "redis+cluster://" in agent.region.store.fault)
        ready = await agent.http.get("/readyz")
        assert (ready.status_code, "it is a node of a Cluster" in ready.text) == (503, True)


@pytest.mark.extended
async def test_admissions_of_a_cell_without_its_shard_are_booked_when_it_is_back(world: World, tmp_path: Path) -> None:
    document = {
        "quotas": [{"name": "exports", "kind": "allowance", "limit": 1_000, "period": "month"}],
        "policies": [
            {"name": "open", "match": {"route": "/o"}, "by": ["tenant"], "quota": "exports", "on_store_failure": "open"}
        ],
    }
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    with a_cluster(tmp_path) as nodes:
        agent = await world.agent(store_url=nodes.url, journal_dir=tmp_path / "journal")
        gone = nodes.of_cell(3)
        subjects = [{"tenant": tenant_in(cell), "route": "/o"} for cell in range(CELLS)]
        for subject in subjects:
            await until_it_answers(agent, subject, 200)
        gone.kill()
        await until(lambda: not agent.whole.cells[3].store.connected)
        admitted: list[str | None] = []
        for subject in subjects:
            answer = await agent.check(subject, cost=2)
            assert answer.status_code == 200, answer.text
            admitted.append(answer.json()["degraded"])
        away = [nodes.of_cell(cell) is gone for cell in range(CELLS)]
        assert admitted == ["open" if is_away else None for is_away in away]
        written = {path.parent.name for path in (tmp_path / "journal").rglob("*.journal")}
        assert written == {f"cell-{cell}" for cell in range(CELLS) if away[cell]}, "each is found again by its own cell"
        gone.start()
        await until_booked(world, 3 * CELLS)
        assert await world.usage(degraded="open") == 2 * sum(away)
        await world.agents.aclose()
