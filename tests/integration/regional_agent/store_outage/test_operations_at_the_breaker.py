"""A retry with the same operation_id that meets the open circuit breaker is charged once, whatever the store did."""

from pathlib import Path
from typing import Any

import pytest

from protocol.circuit_breaker import BreakerState
from tests.integration.regional_agent.store_outage.test_failures import FAILURES, Store
from tests.integration.regional_agent.store_outage.test_journal import (
    DOCUMENT,
    OPEN,
    all_is_booked,
    its_store,
    settings,
)
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

__all__ = ["its_store"]

ROUNDS, OPERATIONS = 3, FAILURES + 3
UNLIMITED: dict[str, Any] = DOCUMENT | {
    "quotas": [{**quota, "limit": 100_000} if "period" in quota else quota for quota in DOCUMENT["quotas"]]
}


async def an_agent(world: World, its_store: Store, journal: Path) -> Agent:
    agent = await world.agent(**settings(its_store, journal, decision_timeout_ms=100))
    await until(lambda: agent.region.epochs.current is not None)
    return agent


async def decides(agents: list[Agent]) -> None:
    """Peek until each quota is answered by its store; a peek consumes nothing and requests units."""
    for agent in agents:
        async for _ in attempts():
            answer = await agent.check(OPEN, cost=50, mode="peek")
            if answer.status_code == 200 and answer.json()["degraded"] is None:
                break
        else:
            raise AssertionError(answer.text)


async def ask(agent: Agent, names: list[str]) -> list[int]:
    return [(await agent.check(OPEN, operation_id=name)).status_code for name in names]


async def test_an_operation_that_timed_out_and_was_admitted_again_is_booked_once(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    """The scripts of the first attempts wait in the store's socket and are executed when it continues."""
    assert (await world.admin.put("/v1/limits", json=UNLIMITED)).is_success
    agent = await an_agent(world, its_store, tmp_path / "journal")
    for turn in range(ROUNDS):
        await decides([agent])
        names = [f"{turn}/{number}" for number in range(OPERATIONS)]
        its_store.stall()
        assert 503 in await ask(agent, names)
        assert await ask(agent, names) == [200] * OPERATIONS
        its_store.go_on()
        await all_is_booked(world, (turn + 1) * OPERATIONS, quota="exports")
        await until(lambda: not list((tmp_path / "journal").iterdir()))
    charged = agent.region.metrics.registry.get_sample_value("leasehold_outage_journal_duplicate_operations_total")
    assert charged
    assert ROUNDS <= charged <= ROUNDS * FAILURES
    assert (await world.quota())["overage"] == 0


async def test_two_agents_that_admit_the_same_operations_book_them_once(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    """A load balancer sends the retries to the other agent, whose circuit breaker is open as well."""
    assert (await world.admin.put("/v1/limits", json=UNLIMITED)).is_success
    agents = [await an_agent(world, its_store, tmp_path / name) for name in ("one", "two")]
    for turn in range(ROUNDS):
        await decides(agents)
        names = [f"{turn}/{number}" for number in range(OPERATIONS)]
        its_store.stall()
        for agent in agents:
            await ask(agent, names)
        await until(lambda: all(agent.region.breaker.state is not BreakerState.CLOSED for agent in agents))
        for agent in agents:
            assert await ask(agent, names) == [200] * OPERATIONS
        its_store.go_on()
        await all_is_booked(world, (turn + 1) * OPERATIONS, quota="exports")
        await until(lambda: not [*(tmp_path / "one").iterdir(), *(tmp_path / "two").iterdir()])
    await all_is_booked(world, ROUNDS * OPERATIONS, quota="exports")


async def journal_of_an_agent_that_left(world: World, its_store: Store, tmp_path: Path) -> Path:
    """Let an agent admit operations while its store hangs, and shut down; return its journal's directory."""
    assert (await world.admin.put("/v1/limits", json=UNLIMITED)).is_success
    journal = tmp_path / "journal"
    agent = await an_agent(world, its_store, journal)
    agent.region.shutdown.timeout_s = 0.2
    await decides([agent])
    names = [f"{number}" for number in range(OPERATIONS)]
    its_store.stall()
    await ask(agent, names)
    assert await ask(agent, names) == [200] * OPERATIONS
    await world.agents.aclose()
    return journal


async def test_an_agent_that_ends_while_its_store_hangs_leaves_its_journal_to_the_next(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    journal = await journal_of_an_agent_that_left(world, its_store, tmp_path)
    assert list(journal.iterdir()), "the store may have charged some of them"
    its_store.go_on()
    await an_agent(world, its_store, journal)
    await until(lambda: not list(journal.iterdir()))
    await all_is_booked(world, OPERATIONS, quota="exports")


async def test_a_journal_of_another_region_in_the_same_directory_is_not_booked(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    """Two regions' agents have one directory by mistake: neither books what the other admitted."""
    journal = await journal_of_an_agent_that_left(world, its_store, tmp_path)
    other = await world.agent("eu-west", journal_dir=journal)
    health = (await other.http.get("/readyz")).json()
    assert (health["status"], [each["code"] for each in health["reasons"]]) == ("degraded", ["journal_foreign"])
    await decides([other])
    assert len(list(journal.iterdir())) == 1
    its_store.go_on()
    await an_agent(world, its_store, journal)
    await until(lambda: not list(journal.iterdir()))
    await all_is_booked(world, OPERATIONS, quota="exports")
    other.region.journal.recover()
    assert (await other.http.get("/readyz")).json()["status"] == "ready"
