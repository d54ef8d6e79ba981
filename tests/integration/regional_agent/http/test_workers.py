"""`leasehold agent --workers` runs several processes on one port, any of which may be killed at any time."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from leasehold.local_stack.processes import identity
from regional_agent.cluster.rules.cells import CELLS
from regional_agent.settings import AgentSettings
from tests.integration.regional_agent.cluster.clusters import a_cluster
from tests.integration.regional_agent.cluster.test_single_cluster import export, tenant_in
from tests.integration.regional_agent.store_outage.test_failures import Store
from tests.integration.regional_agent.store_outage.test_journal import DOCUMENT as UNBOUND
from tests.integration.regional_agent.store_outage.test_journal import OPEN, its_store, settings
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, World
from tests.waiting import attempts, until

__all__ = ["its_store"]  # a fixture

pytestmark = pytest.mark.anyio

COMMAND = [sys.executable, "-m", "leasehold.cli", "agent"]
TURNS = 2_000
CLIENTS = 8


def environ(settings: AgentSettings, **changed: object) -> dict[str, str]:
    given = settings.model_dump(exclude_unset=True) | {"port": 0} | changed
    values = {name: getattr(value, "get_secret_value", lambda v=value: v)() for name, value in given.items()}
    return os.environ | {f"LEASEHOLD_AGENT_{name.upper()}": str(value) for name, value in values.items()}


@dataclass
class Workers:
    process: Process
    log: Path
    http: httpx.AsyncClient

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines(keepends=True)
        return [said for line in lines if line.endswith("\n") and (said := json.loads(line))["event"] == event]

    def listening(self) -> list[dict[str, Any]]:
        """Return what the workers log in the order in which they begin to serve HTTP."""
        return [said for said in self.logged("listening") if said["address"].startswith("http")]

    def pids(self) -> list[int]:
        return [said["pid"] for said in self.listening()]

    async def get(self, path: str) -> httpx.Response:
        """Call on a new connection, so that any of them may answer."""
        return await self.http.get(path, headers={"Connection": "close"})

    async def samples(self) -> list[tuple[str, dict[str, str], float]]:
        text = (await self.get("/metrics")).text
        return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]

    async def up(self) -> list[float]:
        return [value for name, _, value in await self.samples() if name == "leasehold_worker_up"]

    async def allowed(self) -> dict[str, float]:
        """Return the figures by worker."""
        samples = [(labels, value) for name, labels, value in await self.samples() if name == "leasehold_checks_total"]
        return {labels["worker"]: value for labels, value in samples if labels["answer"] == "allowed"}

    async def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            return await self.process.wait()


@asynccontextmanager
async def running(world: World, tmp_path: Path, *options: str, **changed: object) -> AsyncIterator[Workers]:
    log = tmp_path / "agent.log"
    with log.open("wb") as output:
        settings = environ(world.settings("us-east"), **changed)
        process = await asyncio.create_subprocess_exec(*COMMAND, *options, env=settings, stdout=output)
    try:
        async with httpx.AsyncClient(timeout=30) as http:
            workers = Workers(process, log, http)
            await until(lambda: bool(workers.pids()))
            http.base_url = httpx.URL(workers.listening()[0]["address"])
            yield workers
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def all_up(workers: Workers, count: int) -> None:
    async for _ in attempts():
        if await workers.up() == [1.0] * count and (await workers.get("/readyz")).is_success:
            return
    raise AssertionError(f"{count} workers: {await workers.up()}")


@pytest.mark.extended
async def test_all_workers_answer_on_one_port_and_each_reports_all(world: World, tmp_path: Path) -> None:
    async with running(world, tmp_path, "--workers", "3", name="here") as workers:
        await all_up(workers, 3)
        who: Counter[str] = Counter()
        for _ in range(TURNS):
            answers = await asyncio.gather(*(workers.get("/v1/status") for _ in range(10)))
            who.update(answer.json()["agent"] for answer in answers)
            if len(who) == 3:
                break
        assert sorted(who) == ["here-0", "here-1", "here-2"]

        async def check() -> int:
            done = await workers.http.post("/v1/check", json={"subject": EXPORT}, headers={"Connection": "close"})
            return done.status_code

        assert await asyncio.gather(*(check() for _ in range(60))) == [200] * 60
        told = [await workers.allowed() for _ in range(10)]
        assert [sum(each.values()) for each in told] == [60] * 10
        assert len({identity(pid) for pid in workers.pids()} - {None}) == 3


async def test_a_worker_killed_under_load_is_replaced_and_no_unit_is_booked_twice(world: World, tmp_path: Path) -> None:
    limit = 800
    quotas = [DOCUMENT["quotas"][0] | {"limit": limit}, *DOCUMENT["quotas"][1:]]
    assert (await world.admin.put("/v1/limits", json=DOCUMENT | {"quotas": quotas})).is_success
    told: Counter[int] = Counter()  # 0: no answer, because the worker was killed

    async def ask(workers: Workers, headers: dict[str, str]) -> None:
        async with httpx.AsyncClient(base_url=workers.http.base_url, headers=headers, timeout=30) as http:
            while True:
                try:
                    status = (await http.post("/v1/check", json={"subject": EXPORT})).status_code
                except httpx.TransportError:
                    status = 0
                told[status] += 1
                if status == 429:
                    return

    async with running(world, tmp_path, "--workers", "2") as workers:
        await all_up(workers, 2)
        # Half of the clients keep their worker, half reach any that runs, even one just restarted.
        habits: list[dict[str, str]] = [{}, {"Connection": "close"}]
        clients = [asyncio.create_task(ask(workers, headers)) for headers in habits * (CLIENTS // 2)]
        await until(lambda: told[200] > 100)
        victim = workers.pids()[0]
        os.kill(victim, signal.SIGKILL)
        at = told[200]
        await until(lambda: told[200] > at + 100)
        await asyncio.gather(*clients)
        assert set(told) <= {200, 429, 0}
        assert told[0] <= CLIENTS, "only what it was at is lost, and nobody else is disturbed"
        assert limit - told[0] <= told[200] <= limit

        await until(lambda: len(workers.pids()) == 3)
        await all_up(workers, 2)
        [ended] = workers.logged("worker ended, restarting")
        assert ended["status"] == -signal.SIGKILL
        assert await workers.end() == 0
        assert await world.usage() == limit
    assert (await world.quota())["consumed"] == limit


@pytest.mark.extended
async def test_workers_share_a_cluster_and_a_killed_one_loses_nothing(world: World, tmp_path: Path) -> None:
    """A customer in each cell repeats each operation until it is answered, by any worker."""
    operations, admitted = 10, 0

    async def is_told_yes(workers: Workers, tenant: str, operation: int) -> None:
        asked = {"subject": export(tenant), "operation_id": str(operation)}
        async for _ in attempts():
            with suppress(httpx.TransportError):  # the worker was killed
                done = await workers.http.post("/v1/check", json=asked, headers={"Connection": "close"})
                if done.status_code == 200:
                    return
        raise AssertionError(f"operation {operation} of {tenant} is never admitted")

    async def spend(workers: Workers, tenant: str) -> None:
        nonlocal admitted
        for operation in range(operations):
            await is_told_yes(workers, tenant, operation)
            admitted += 1

    with a_cluster(tmp_path) as nodes:
        options = {"store_url": nodes.url, "report_interval_ms": 200}
        async with running(world, tmp_path, "--workers", "2", **options) as workers:
            await all_up(workers, 2)
            clients = [asyncio.create_task(spend(workers, tenant_in(cell))) for cell in range(CELLS)]
            await until(lambda: admitted > CELLS)
            os.kill(workers.pids()[0], signal.SIGKILL)
            await asyncio.gather(*clients)
            await until(lambda: len(workers.pids()) == 3)
            await all_up(workers, 2)
            assert await workers.end() == 0
        assert await world.usage() == operations * CELLS
        assert [state for _, state, _ in await world.epochs()] == ["current"] * CELLS, "opened once, for both"


@pytest.mark.extended
async def test_sigterm_reaches_all_and_waits_until_all_is_booked(world: World, tmp_path: Path) -> None:
    """No worker reports before its last exchange, which books everything."""
    async with running(world, tmp_path, workers=2, report_interval_ms=60_000) as workers:
        await all_up(workers, 2)
        async with asyncio.timeout(60):
            while len(await workers.allowed()) < 2:
                done = await workers.http.post("/v1/check", json={"subject": EXPORT}, headers={"Connection": "close"})
                assert done.is_success, done.text
        spent = sum((await workers.allowed()).values())
        assert await workers.end() == 0
        assert await world.usage() == spent
        assert {identity(pid) for pid in workers.pids()} == {None}


@pytest.mark.extended
async def test_a_killed_workers_local_admissions_are_booked_by_its_successor(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    """All keep their journals in one directory. A worker does not touch the journal of another that runs."""
    assert (await world.admin.put("/v1/limits", json=UNBOUND)).is_success
    journal = tmp_path / "journal"
    given = settings(its_store, journal, breaker_failures=1, breaker_pause_ms=60_000)
    async with running(world, tmp_path, "--workers", "2", **given) as workers:
        await all_up(workers, 2)
        its_store.stall()
        admitted = 0
        async with asyncio.timeout(60):
            while len(list(journal.glob("*.journal"))) < 2:
                done = await workers.http.post("/v1/check", json={"subject": OPEN}, headers={"Connection": "close"})
                admitted += done.json()["degraded"] == "open"
        os.kill(workers.pids()[0], signal.SIGKILL)
        await until(lambda: len(list(journal.glob("*.journal"))) == 1)
        assert 0 < await world.usage(degraded="open") < admitted
        its_store.go_on()
        assert await workers.end() == 0
    assert await world.usage(degraded="open") == admitted
    assert not list(journal.iterdir())


@pytest.mark.extended
async def test_a_hanging_worker_is_replaced(world: World, tmp_path: Path) -> None:
    async with running(world, tmp_path, "--workers", "2") as workers:
        await all_up(workers, 2)
        os.kill(workers.pids()[0], signal.SIGSTOP)
        await until(lambda: len(workers.pids()) == 3)
        await all_up(workers, 2)
        [hung] = workers.logged("worker killed because it hangs")
        assert hung["pid"] == workers.pids()[0]
        assert await workers.end() == 0


@pytest.mark.extended
async def test_a_worker_that_cannot_enforce_makes_the_agent_not_ready(world: World, tmp_path: Path) -> None:
    async with running(world, tmp_path, "--workers", "2", store_url="redis://127.0.0.1:1/0") as workers:
        await until(lambda: len(workers.pids()) == 2)
        answer = await workers.get("/readyz")
        assert answer.status_code == 503
        assert "is not connected" in answer.text  # and then why
        assert "(worker 0, 1)" in answer.text
        assert await workers.end() == 0


async def test_one_worker_is_the_process_itself(world: World, tmp_path: Path) -> None:
    async with running(world, tmp_path, name="alone") as workers:
        assert workers.pids() == [workers.process.pid]
        assert "worker" not in (await workers.get("/metrics")).text
        assert await workers.end() == 0
