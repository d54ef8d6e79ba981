"""Admissions from allowances during a store outage are on disk before the answer, and booked
exactly once afterwards.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import spawn
from protocol.circuit_breaker import BreakerState
from regional_agent.store.types import AllowanceCharge
from regional_agent.store_outage.journal import JournalDirectory
from regional_agent.store_outage.rules.records import read
from tests.budget import cases
from tests.conftest import free_port
from tests.integration.regional_agent.store.test_topology import PASSWORD
from tests.integration.regional_agent.store_outage.test_failures import FAILURES, Store, a_small_disk, a_store, fill
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

OPEN, LOCAL, SHUT = ({"tenant": "acme", "route": f"/{route}"} for route in ("open", "local", "local/shut"))
DOCUMENT: dict[str, Any] = {
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": 100, "period": "month"},
        {"name": "mails", "kind": "allowance", "limit": 100, "period": "month"},
        {"name": "calls", "kind": "rate", "limit": "1000/second"},
    ],
    "policies": [
        {"name": "open", "match": {"route": "/open"}, "by": ["tenant"], "quota": "exports", "on_store_failure": "open"}
        | {"usage_by": ["route_class", "labels.model"]},
        {
            "name": "local",
            "match": {"route": "/local*"},
            "by": ["tenant"],
            "quota": "mails",
            "on_store_failure": "local",
            "local_fraction": 0.5,
        },
        {"name": "shut", "match": {"route": "/local/shut"}, "by": ["tenant"], "quota": "calls"},
    ],
}


@pytest.fixture
def its_store(tmp_path: Path) -> Iterator[Store]:
    with a_store(tmp_path, free_port()) as store:
        yield store


def settings(its_store: Store, journal: Path | None, **changed: Any) -> dict[str, Any]:
    return {
        "store_url": its_store.url,
        "journal_dir": journal,
        "decision_timeout_ms": 250,
        "breaker_failures": FAILURES,
        "breaker_pause_ms": 20,
    } | changed


async def an_agent(world: World, its_store: Store, journal: Path | None, **changed: Any) -> Agent:
    """Wait for sufficient leases of both allowances, since grants in advance depend on the rate of checks."""
    assert (await world.admin.put("/v1/limits", json=DOCUMENT)).is_success
    agent = await world.agent(**settings(its_store, journal, **changed))
    for subject in (OPEN, LOCAL):
        hold = await until_held(agent.http, subject, 45)
        assert (await agent.http.post(f"/v1/holds/{hold}:release")).status_code == 200
        await until_allowed(agent.http, subject)
        assert (await agent.check(subject, cost=40, mode="peek")).status_code == 200
    await all_is_booked(world, 1, quota="exports")
    return agent


async def until_allowed(http: httpx.AsyncClient, subject: dict[str, str], degraded: str | None = None) -> int:
    """Return how many admissions were marked as possibly spent before."""
    for refused in range(6_000):
        try:
            answer = await http.post("/v1/check", json={"subject": subject})
        except httpx.TransportError:
            await asyncio.sleep(0.02)
            continue
        if answer.status_code == 200 and answer.json()["policies"] and answer.json()["degraded"] == degraded:
            return refused
        await asyncio.sleep(0.01)
    raise AssertionError(f"never allowed: {answer.text}")


async def until_held(http: httpx.AsyncClient, subject: dict[str, str], units: int) -> str:
    asked = {"subject": subject, "units": units, "ttl_ms": 60_000, "operation_id": f"for {subject['route']}"}
    async for _ in attempts():
        answer = await http.post("/v1/holds", json=asked)
        if answer.status_code == 201:
            return str(answer.json()["hold_id"])
    raise AssertionError(f"never held: {answer.text}")


async def stalled(agent: Agent, its_store: Store) -> int:
    """Return how many requests were sent to a hanging store, which will decide them when it continues."""
    its_store.stall()
    asked = 0
    while agent.region.breaker.state is BreakerState.CLOSED:
        answer = await agent.check(OPEN)
        assert (answer.status_code, answer.json()["degraded"]) == (503, "closed"), "it may have been spent"
        asked += 1
    assert asked <= FAILURES, "a look at the store that the agent makes by itself may be one of them"
    return asked


async def all_is_booked(world: World, expected: int, **filters: str) -> None:
    async for _ in attempts():
        if await world.usage(**filters) == expected:
            break
    assert await world.usage(**filters) == expected


async def test_open_admissions_are_booked_once_and_marked_after_the_outage(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    agent = await an_agent(world, its_store, journal)
    asked = await stalled(agent, its_store)
    models = [{"labels": {"model": "large" if n < 5 else "small"}} for n in range(20)]
    answers = await asyncio.gather(*(agent.check(OPEN | labels, cost=2) for labels in models))
    assert {(answer.status_code, answer.json()["degraded"]) for answer in answers} == {(200, "open")}
    [segment] = journal.iterdir()
    assert sum(entry.units for entry in read(segment.read_bytes()).entries) == 40, "before anybody was answered"
    flushes = agent.region.metrics.registry.get_sample_value("leasehold_outage_journal_flushes_total")
    assert flushes is not None
    assert flushes <= 3, "those that wait are flushed together"
    its_store.go_on()
    await all_is_booked(world, 1 + asked + 40, quota="exports")
    await until(lambda: not list(journal.iterdir()))
    await all_is_booked(world, 40, quota="exports", degraded="open")
    for model, units in {"large": 10, "small": 30}.items():
        assert await world.usage(**{"degraded": "open", "labels.model": model, "route_class": "*"}) == units
    assert await agent.check(OPEN)
    await all_is_booked(world, 2 + asked + 40, quota="exports")
    assert (await world.quota())["overage"] == 0


async def test_units_admitted_during_an_outage_cannot_be_spent_again(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    """The region holds the whole limit and could spend it again. Another region is not granted it either."""
    agent = await an_agent(world, its_store, tmp_path / "journal")
    assert (await agent.check(OPEN, cost=99, mode="peek")).status_code == 200
    asked = await stalled(agent, its_store)
    assert (await agent.check(OPEN, cost=40)).status_code == 200
    its_store.go_on()
    await all_is_booked(world, 1 + asked + 40, quota="exports")
    await until(lambda: not list((tmp_path / "journal").iterdir()))
    other = await world.agent("eu-west")
    answers = [await each.check(OPEN) for each in (agent, other) for _ in range(60)]
    assert sum(answer.status_code == 200 for answer in answers) <= 100 - (1 + asked + 40)


@pytest.mark.extended
async def test_units_spent_while_a_journal_is_booked_do_not_reduce_its_part(
    world: World, its_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All units of the journal are reserved, whatever the store admits in the same moment."""
    agent = await an_agent(world, its_store, tmp_path / "journal")
    assert (await agent.check(OPEN, cost=90, mode="peek")).status_code == 200
    await stalled(agent, its_store)
    assert (await agent.check(OPEN, cost=40)).status_code == 200
    scripts, incarnation = agent.region.scripts, agent.region.epochs.current
    assert incarnation is not None
    give_back, returned = scripts.return_units, list[int]()

    async def after_a_check(*arguments: Any, **named: Any) -> int:
        await scripts.check(
            incarnation, "enforce", [AllowanceCharge("exports:tenant=acme", 5, 100, '{"policy":"open"}')]
        )
        returned.append(await give_back(*arguments, **named))
        return returned[-1]

    monkeypatch.setattr(scripts, "return_units", after_a_check)
    its_store.go_on()
    await until(lambda: not list((tmp_path / "journal").iterdir()))
    assert returned[0] == 40


@pytest.mark.extended
@pytest.mark.parametrize("workers", [1, 3])
async def test_local_admissions_are_a_fraction_of_the_rest_of_the_lease(
    world: World, its_store: Store, tmp_path: Path, workers: int
) -> None:
    """One of several workers admits an equal part of it: together they are one agent."""
    agent = await an_agent(world, its_store, tmp_path / "journal", workers=workers)
    seen = (await agent.check(LOCAL, mode="peek")).json()
    incarnation = agent.region.epochs.current
    assert seen["allowed"]
    assert incarnation is not None
    fields = await agent.region.scripts.lease_fields(incarnation, "mails:tenant=acme")
    left = int(fields["granted"]) - int(fields["consumed"]) - int(fields.get("returned", 0))
    part = left * (500_000 // workers) // 1_000_000
    assert part > 0
    await stalled(agent, its_store)
    answers = [await agent.check(LOCAL) for _ in range(part + 3)]
    assert [answer.status_code for answer in answers] == [200] * part + [429] * 3
    assert {answer.json()["degraded"] for answer in answers} == {"local"}
    assert (await agent.check(LOCAL | {"tenant": "unseen"})).status_code == 429, "of a lease it knows nothing of"
    assert (await agent.check(SHUT)).json()["denied_by"] == "shut"
    peek = await agent.check(OPEN, mode="peek")
    assert peek.json()["degraded"] == "open"
    its_store.go_on()
    await all_is_booked(world, 1 + part, quota="mails")


def test_two_workers_in_one_directory_do_not_touch_each_others_files(tmp_path: Path) -> None:
    """One creates and drops segments, while another searches for abandoned ones."""
    ours, others = JournalDirectory(tmp_path), JournalDirectory(tmp_path)

    def write() -> None:
        for _ in range(300):
            asyncio.run(ours.begin("us-east/")).remove(keep_a_copy=False)

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        while not writing.done():
            assert [segment.read() for segment in others.left()] == []
        writing.result()


@pytest.mark.extended
async def test_no_hold_of_an_allowance_is_granted_during_an_outage(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    """A later commit to it would find no record of it."""
    agent = await an_agent(world, its_store, tmp_path / "journal")
    asked = await stalled(agent, its_store)
    wanted = {"subject": OPEN, "units": 5, "ttl_ms": 60_000, "operation_id": "a hold"}
    answer = await agent.http.post("/v1/holds", json=wanted)
    assert (answer.status_code, answer.json()["denied_by"]) == (503, "open")
    its_store.go_on()
    await all_is_booked(world, 1 + asked, quota="exports")


async def test_without_a_journal_an_allowance_fails_closed(world: World, its_store: Store) -> None:
    agent = await an_agent(world, its_store, None)
    await stalled(agent, its_store)
    answer = await agent.check(OPEN)
    assert (answer.status_code, answer.json()["denied_by"]) == (503, "open")
    its_store.go_on()
    await until_allowed(agent.http, OPEN)


@pytest.mark.extended
async def test_a_journal_on_a_full_disk_admits_nothing_and_reports_why(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    with a_small_disk(tmp_path / "disk") as disk:
        agent = await an_agent(world, its_store, disk / "journal")
        asked = await stalled(agent, its_store)
        assert (await agent.check(OPEN)).status_code == 200
        fill(disk / "others")
        taken = 1
        while (answer := await agent.check(OPEN)).status_code == 200:  # what was left of a block
            taken += 1
        assert (answer.status_code, answer.json()["degraded"]) == (503, "closed")
        assert "No space left on device" in (await agent.http.get("/readyz")).text
        (disk / "others").unlink()
        assert (await agent.check(OPEN)).status_code == 200, "it is tried again"
        its_store.go_on()
        await all_is_booked(world, 1 + asked + taken + 1, quota="exports")
        await until(lambda: not list((disk / "journal").iterdir()))
        await world.agents.aclose()


@pytest.mark.extended
async def test_an_operation_admitted_during_an_outage_is_charged_once(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    """The operation is repeated during the outage, after it, and at another agent of the region."""
    agent = await an_agent(world, its_store, tmp_path / "journal")
    other = await world.agent(**settings(its_store, tmp_path / "journal"))
    asked = await stalled(agent, its_store)
    for _ in range(3):
        assert (await agent.check(OPEN, operation_id="once")).json()["degraded"] == "open"
    assert (await agent.check(OPEN, operation_id="once", cost=2)).status_code == 422
    its_store.go_on()
    await all_is_booked(world, 1 + asked + 1, quota="exports")
    await until(lambda: not list((tmp_path / "journal").iterdir()))
    for each in (agent, other):
        await until(lambda each=each: each.region.breaker.allows_calls())  # type: ignore[misc]
        assert (await each.check(OPEN, operation_id="once")).status_code == 200
    assert (await other.check(OPEN, operation_id="once", cost=2)).status_code == 422
    await other.check(OPEN)
    await all_is_booked(world, 1 + asked + 1 + 1, quota="exports")


async def test_a_journal_whose_receipt_was_lost_is_reported_again_and_booked_once(
    world: World, its_store: Store, tmp_path: Path
) -> None:
    agent = await an_agent(world, its_store, tmp_path / "journal")
    asked = await stalled(agent, its_store)
    for _ in range(5):
        assert (await agent.check(OPEN)).status_code == 200
    world.weather.swallows_replies_to = {"/exchanges"}
    its_store.go_on()
    await until(lambda: world.weather.swallowed >= 3)
    assert list((tmp_path / "journal").iterdir()), "nobody knows here that it is booked"
    world.weather.swallows_replies_to = set()
    await until(lambda: not list((tmp_path / "journal").iterdir()))
    await all_is_booked(world, 1 + asked + 5, quota="exports")


@asynccontextmanager
async def a_process(
    world: World, its_store: Store, journal: Path, log: Path
) -> AsyncIterator[tuple[subprocess.Popen[bytes], httpx.AsyncClient]]:
    port = free_port()
    environ = {
        "REGION": "us-east",
        "COORDINATOR_URL": world.url,
        "COORDINATOR_TOKEN": world.tokens["us-east"],
        "STORE_URL": embedded.store_url(its_store.port, PASSWORD),
        "PORT": str(port),
        "JOURNAL_DIR": str(journal),
        "DECISION_TIMEOUT_MS": "250",
        "BREAKER_FAILURES": "1",
        "BREAKER_PAUSE_MS": "60000",
    }
    named = {f"LEASEHOLD_AGENT_{name}": value for name, value in environ.items()}
    program = [sys.executable, "-m", "leasehold.cli", "agent"]
    process = spawn(program, log=log, environ=os.environ | named)
    try:
        async with httpx.AsyncClient(base_url=f"http://{embedded.LOOPBACK}:{port}", timeout=30) as http:
            yield process, http
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


@pytest.mark.parametrize("dies", cases(["after it is booked", "before it is told"], short=1))
async def test_a_killed_agent_reports_its_journal_at_its_next_start(
    world: World, its_store: Store, tmp_path: Path, dies: str
) -> None:
    assert (await world.admin.put("/v1/limits", json=DOCUMENT)).is_success
    journal, log = tmp_path / "journal", tmp_path / "agent.log"
    async with a_process(world, its_store, journal, log) as (process, http):
        await until_allowed(http, OPEN)
        await until(lambda: not list(journal.iterdir()))  # admissions before there was an epoch
        before = await world.usage(quota="exports", degraded="open")
        its_store.stall()
        await until_allowed(http, OPEN, "open")
        burst = [asyncio.create_task(http.post("/v1/check", json={"subject": OPEN})) for _ in range(200)]
        await asyncio.wait(burst, return_when=asyncio.FIRST_COMPLETED)
        os.kill(process.pid, signal.SIGKILL)  # some are answered, some only on disk, some neither
        answers = await asyncio.gather(*burst, return_exceptions=True)
    heard = 1 + sum(isinstance(answer, httpx.Response) and answer.status_code == 200 for answer in answers)
    [segment] = journal.iterdir()
    kept = sum(entry.units for entry in read(segment.read_bytes()).entries)
    assert heard <= kept <= 201, "nobody was told of what is not there"
    with segment.open("ab") as torn:
        torn.write(b"0badc0de [[[")
    copy = shutil.copy(segment, tmp_path)
    its_store.go_on()
    for _ in range(1 + (dies == "after it is booked")):
        async with a_process(world, its_store, journal, log):
            await until(lambda: not list(journal.iterdir()))
        await all_is_booked(world, before + kept, quota="exports", degraded="open")
        shutil.copy(copy, journal)  # as if it had died before dropping it
