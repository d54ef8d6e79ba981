"""`/readyz`, `/v1/status` and the metrics report when an agent cannot enforce, and when it is degraded."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from protocol.circuit_breaker import BreakerState
from protocol.clock import SystemClock
from protocol.outcomes import ExchangeOutcome
from tests.integration.regional_agent.http.test_workers import all_up
from tests.integration.regional_agent.http.test_workers import running as workers_running
from tests.integration.regional_agent.leasing.test_exchange_loop import eventually
from tests.integration.regional_agent.store_outage.test_failures import Store, its_store, quiet_agent
from tests.integration.regional_agent.world import EXPORT, Agent, World, running
from tests.waiting import attempts, until

__all__ = ["its_store"]  # a fixture

pytestmark = pytest.mark.anyio


async def readiness(agent: Agent) -> tuple[int, str, list[str]]:
    """Return the status code, the state, and the codes of the reasons."""
    answer = await agent.http.get("/readyz")
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert set(found) == {"status", "reasons"}
    for reason in found["reasons"]:
        assert set(reason) == {"code", "since", "text"}
    return answer.status_code, found["status"], [reason["code"] for reason in found["reasons"]]


async def becomes(agent: Agent, status: int, word: str, *codes: str) -> None:
    found = None
    async for _ in attempts():
        if (found := await readiness(agent)) == (status, word, list(codes)):
            return
    raise AssertionError(found)


async def shown(agent: Agent) -> dict[str, Any]:
    """Return the status during a store outage, and check that it answers in time."""
    async with asyncio.timeout(30):
        answer = await agent.http.get("/v1/status")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_a_hung_store_makes_an_idle_agent_not_ready_and_status_still_answers(
    world: World, its_store: Store
) -> None:
    agent = await quiet_agent(world, store_url=its_store.url)
    await becomes(agent, 200, "ready")
    its_store.stall()
    found = await shown(agent)
    assert found["incomplete"] is not None
    assert found["leases"] == []
    await becomes(agent, 503, "not_ready", "store_failing")
    first = (await agent.http.get("/readyz")).json()["reasons"][0]["since"]
    found = await shown(agent)
    assert (found["status"], found["reasons"][0]["code"]) == ("not_ready", "store_failing")
    text = (await agent.http.get("/metrics")).text
    assert "leasehold_ready 0.0" in text
    assert 'leasehold_health_reason{code="store_failing",severity="not_ready"} 1.0' in text
    assert (await agent.http.get("/readyz")).json()["reasons"][0]["since"] == first
    its_store.go_on()
    await becomes(agent, 200, "ready")
    assert "leasehold_ready 1.0" in (await agent.http.get("/metrics")).text
    assert (await shown(agent))["incomplete"] is None


async def test_a_full_store_makes_the_agent_not_ready(world: World, its_store: Store) -> None:
    agent = await quiet_agent(world, store_url=its_store.url)
    its_store.told("CONFIG SET maxmemory 1mb")
    await becomes(agent, 503, "not_ready", "store_failing")
    assert "OOM" in (await agent.http.get("/readyz")).json()["reasons"][0]["text"]
    its_store.told("CONFIG SET maxmemory 0")
    await becomes(agent, 200, "ready")


async def test_a_successful_probe_does_not_outweigh_failed_checks(world: World) -> None:
    agent = await quiet_agent(world)
    breaker = agent.region.breaker
    for _ in range(2):
        breaker._record_failure("as if a check had failed")
    breaker.watch()
    await until(lambda: not breaker._is_watching)
    breaker._record_failure("a third check")
    assert breaker.state is BreakerState.OPEN


async def test_a_partitioned_agent_is_degraded_until_its_leases_are_spent(world: World) -> None:
    agent = await world.agent()
    await agent.lease(10)
    world.weather.swallows_requests = True
    assert (await agent.check()).status_code == 200
    await becomes(agent, 200, "degraded", "cut_off")
    spent = 0
    while (await agent.check()).status_code == 200:
        spent += 1
        assert spent < 100
    await becomes(agent, 503, "not_ready", "leases_exhausted")
    world.weather.swallows_requests = False
    await becomes(agent, 200, "ready")


async def test_an_agent_whose_exchanges_are_refused_reports_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regional_agent.health.REFUSED_FOR_MS", 1_500)
    agent = await world.agent()
    await agent.lease(10)
    monkeypatch.setattr(agent.region.exchange.delivery._coordinator._http, "auth", httpx.BasicAuth("no", "token"))
    assert (await agent.check()).status_code == 200
    await becomes(agent, 200, "degraded", "exchanges_refused")
    await becomes(agent, 503, "not_ready", "exchanges_refused")
    monkeypatch.undo()
    await becomes(agent, 200, "ready")


@pytest.mark.extended
@pytest.mark.parametrize("status", ["draining", "down"])
async def test_a_region_that_is_granted_nothing_is_not_ready_until_it_is_active(world: World, status: str) -> None:
    """This includes an agent without requests, as no load balancer sends it any."""
    agent = await world.agent()
    await agent.lease(10)
    assert (await world.admin.put("/v1/regions/us-east", json={"status": status})).is_success
    await becomes(agent, 503, "not_ready", "region_drained")

    async def reason() -> str | None:
        [policy] = (await agent.check()).json()["policies"]
        found: str | None = policy.get("reason")
        return found

    await eventually(reason, "drained")  # what it still has of its lease is spent or returned before
    assert (await world.admin.put("/v1/regions/us-east", json={"status": "active"})).is_success
    await becomes(agent, 200, "ready")


@pytest.mark.extended
async def test_one_stopped_lane_only_degrades_the_agent(world: World) -> None:
    agent = await world.agent(report_interval_ms=60_000)
    incarnation, lanes = agent.region.epochs.current, agent.region.exchange.lanes
    assert incarnation is not None
    lanes.stop((incarnation.epoch, 0), 1, ExchangeOutcome.GAP, "", now_ms=0)
    assert await readiness(agent) == (200, "degraded", ["lanes_stopped"])
    for lane in range(incarnation.lanes):
        lanes.stop((incarnation.epoch, lane), 1, ExchangeOutcome.GAP, "", now_ms=0)
    assert await readiness(agent) == (503, "not_ready", ["lanes_stopped"])
    lanes.stopped.clear()


async def test_a_reason_that_begins_while_another_lasts_is_logged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resume_none(*_: object) -> None:
        """Leave the lane stopped, although its batch is not frozen."""

    agent = await world.agent(report_interval_ms=60_000)
    region = agent.region
    monkeypatch.setattr(type(region.exchange), "resume_resolved_lanes", resume_none)
    incarnation = region.epochs.current
    assert incarnation is not None
    now_ms = SystemClock().monotonic_ms()
    with capture_logs() as logs:
        region.exchange.lanes.stop((incarnation.epoch, 0), 1, ExchangeOutcome.GAP, "", now_ms=now_ms)
        await until(lambda: [*reasons_logged(logs)] == [["lanes_stopped"]])
        region.quotas.set_aside.add("exports:tenant=a", "too long", now_ms)
        await until(lambda: [*reasons_logged(logs)][1:] == [["items_set_aside", "lanes_stopped"]])
        region.exchange.lanes.stopped.clear()
        await until(lambda: [*reasons_logged(logs)][2:] == [["items_set_aside"]])


def reasons_logged(logs: list[EventDict]) -> Iterator[list[str]]:
    for line in logs:
        if line["event"] == "agent is degraded":
            yield sorted(line["reasons"])


async def test_an_agent_without_an_epoch_is_not_ready(world: World) -> None:
    world.weather.swallows_requests = True
    async with running(world.settings("us-east")) as agent:
        await becomes(agent, 503, "not_ready", "no_epoch", "no_policies", "no_blocks")


@pytest.mark.extended
@pytest.mark.parametrize("options", [[], ["--workers", "2"]])
async def test_from_sigterm_on_the_agent_is_not_ready_and_still_answers(
    world: World, tmp_path: Path, options: list[str]
) -> None:
    async with workers_running(world, tmp_path, *options, lame_duck_ms=60_000) as workers:
        if options:
            await all_up(workers, 2)
        async for _ in attempts():
            if (await workers.get("/readyz")).is_success:
                break
        workers.process.send_signal(signal.SIGTERM)
        async for _ in attempts():
            answer = await workers.get("/readyz")
            if answer.status_code == 503:
                break
        assert {reason["code"] for reason in answer.json()["reasons"]} == {"shutting_down"}
        done = await workers.http.post("/v1/check", json={"subject": EXPORT}, headers={"Connection": "close"})
        assert done.status_code == 200
        workers.process.send_signal(signal.SIGTERM)  # a second signal ends it at once
        async with asyncio.timeout(30):
            assert await workers.process.wait() == 0


@pytest.mark.extended
async def test_the_listener_closes_when_the_lame_duck_period_is_over(world: World, tmp_path: Path) -> None:
    async with workers_running(world, tmp_path, lame_duck_ms=300) as workers:
        workers.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await workers.process.wait() == 0
        with pytest.raises(httpx.ConnectError):
            await workers.get("/healthz")
        [said] = workers.logged("shutting down, reporting not ready")
        assert said["closes_in_ms"] == 300


@pytest.mark.extended
async def test_sigint_ends_the_agent_without_a_lame_duck_period(world: World, tmp_path: Path) -> None:
    async with workers_running(world, tmp_path, lame_duck_ms=60_000) as workers:
        workers.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await workers.process.wait() == 0
