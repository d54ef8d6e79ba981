"""A store hangs, is slow, refuses or fails: requests wait briefly at most, and its return is noticed.

Short waits are shown by the number of calls, never by measured time.
"""

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from leasehold.local_stack import embedded
from leasehold.local_stack.processes import stop, wait_until
from protocol.check import Check, Subject
from protocol.circuit_breaker import BreakerState
from protocol.clock import SystemClock
from protocol.identifiers import lane_of, quota_key
from regional_agent.agent import RegionalAgent
from regional_agent.store import keys
from regional_agent.store.connection import OnReply, Reply
from tests.conftest import free_port
from tests.integration.regional_agent.store.test_topology import PASSWORD, a_switch
from tests.integration.regional_agent.world import Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

OPEN, SEARCH = ({"tenant": "acme", "route": route} for route in ("/v1/open", "/v1/search"))
FOR_EVER_MS = 60_000  # no pause ends within a test
FAILURES = 3


class Store(NamedTuple):
    port: int
    pid: int

    @property
    def url(self) -> str:
        return embedded.store_url(self.port, PASSWORD)

    def told(self, command: str) -> str:
        return embedded.send_to_store(self.port, PASSWORD, command)

    def stall(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def a_store(directory: Path, port: int) -> Iterator[Store]:
    process = embedded.start_store(directory / "store", port, PASSWORD, log=directory / "store.log")
    try:
        assert wait_until(lambda: embedded.store_is_ready(port, PASSWORD), 30)
        yield Store(port, process.pid)
    finally:
        process.send_signal(signal.SIGCONT)
        stop(process)


@contextmanager
def a_small_disk(mount: Path) -> Iterator[Path]:
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", mount], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("only root may mount a file system of its own")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def fill(file: Path) -> None:
    with suppress(OSError), file.open("wb", buffering=0) as rest:
        while True:
            rest.write(b"x" * 4096)


@pytest.fixture
def its_store(tmp_path: Path) -> Iterator[Store]:
    with a_store(tmp_path, free_port()) as store:
        yield store


async def quiet_agent(world: World, **changed: Any) -> Agent:
    """Configure rare background calls, so that a test counts its own checks."""
    given: dict[str, Any] = {"report_interval_ms": 60_000, "decision_timeout_ms": 250, "breaker_failures": FAILURES}
    agent = await world.agent(**(given | changed))
    await decides(agent)
    return agent


async def decides(agent: Agent) -> None:
    """Wait until its store is called again."""
    async for _ in attempts():
        if (await agent.check(OPEN, mode="peek")).json()["degraded"] is None:
            return
    raise AssertionError("the store is never asked again")


async def fails(agent: Agent, times: int) -> None:
    for _ in range(times):
        assert (await agent.check(OPEN)).json()["degraded"] == "open"


async def is_left_alone(agent: Agent) -> None:
    """Send so many checks, which every failure mode must answer without a call."""
    assert agent.region.breaker.state is BreakerState.OPEN
    before = agent.region.breaker.calls
    answers = await asyncio.gather(*(agent.check(subject) for subject in (OPEN, SEARCH) for _ in range(100)))
    assert [answer.status_code for answer in answers] == [200] * 100 + [503] * 100
    assert agent.region.breaker.calls == before


async def metric(agent: Agent, name: str) -> float:
    text = (await agent.http.get("/metrics")).text
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} "))


async def test_a_hanging_store_is_called_a_few_times_before_the_breaker_opens(world: World, its_store: Store) -> None:
    agent = await quiet_agent(world, store_url=its_store.url, breaker_pause_ms=FOR_EVER_MS)
    its_store.stall()
    before = agent.region.breaker.calls
    await fails(agent, FAILURES)
    assert agent.region.breaker.calls == before + FAILURES
    await is_left_alone(agent)
    assert await metric(agent, "leasehold_store_circuit_breaker_opened_total") == 1
    assert await metric(agent, 'leasehold_store_circuit_breaker{leasehold_store_circuit_breaker="open"}') == 1
    assert await metric(agent, 'leasehold_outage_fallback_checks_total{mode="closed",policy="search"}') == 100
    its_store.go_on()
    await world.agents.aclose()


class Trials:
    """Return the agent's own probes of the store."""

    def __init__(self, probe: Callable[[OnReply], None]) -> None:
        self._probe = probe
        self.made = self.heard = 0
        self.most_at_once = 0

    def __call__(self, on_reply: OnReply) -> None:
        def heard(reply: Reply | Exception) -> None:
            self.heard += 1
            on_reply(reply)

        self.made += 1
        self.most_at_once = max(self.most_at_once, self.made - self.heard)
        self._probe(heard)


async def test_a_recovered_store_is_found_by_one_probe_and_not_by_a_herd(world: World, its_store: Store) -> None:
    """No request during the outage is a trial call: the agent probes by itself, again and again."""
    settings = world.settings(
        "us-east", store_url=its_store.url, report_interval_ms=60_000, decision_timeout_ms=250, breaker_pause_ms=20
    )
    region = RegionalAgent(settings, SystemClock())
    (cell,) = region.cells
    trials = Trials(cell.breaker._probe)
    cell.breaker._probe = trials  # a slow machine has time for an unknown number

    async def modes() -> Counter[str | None]:
        verdicts = await asyncio.gather(
            *(region.admission.decide(Check(subject=msgspec.convert(OPEN, Subject))) for _ in range(200))
        )
        return Counter(verdict.answer.degraded for verdict in verdicts)

    async with region.running():
        await until(lambda: cell.epochs.current is not None and region.admission.policies is not None)
        assert (await modes())[None] == 200
        its_store.stall()
        await until(lambda: cell.breaker.state is not BreakerState.CLOSED)
        cell.share_loop.raises += 1  # a recent denial is served from the cache for some seconds
        calls, heard = cell.breaker.calls, trials.heard
        for _ in range(10):
            assert await modes() == {"open": 200}
        assert cell.breaker.calls - calls == trials.heard - heard, "none of the two thousand tries"
        await until(lambda: trials.heard >= heard + 2)
        assert trials.most_at_once == 1
        its_store.go_on()
        await until(lambda: cell.breaker.state is BreakerState.CLOSED)
        assert (await modes())[None] == 200


@pytest.mark.extended
async def test_a_slow_store_opens_the_circuit_breaker_too(world: World, its_store: Store) -> None:
    """Every byte takes 200 ms each way on an open connection, so replies are later than a call's timeout."""
    async with a_switch(its_store.port) as (switch, port):
        url = embedded.store_url(port, PASSWORD)
        agent = await quiet_agent(world, store_url=url, breaker_pause_ms=FOR_EVER_MS, decision_timeout_ms=100)
        switch.delay_s = 0.2
        await fails(agent, FAILURES)
        await is_left_alone(agent)
        await world.agents.aclose()


@pytest.mark.extended
async def test_the_timeout_follows_a_slower_store(world: World, its_store: Store) -> None:
    """Late replies are measured, too: soon no call fails any more, and metric and status show why."""
    async with a_switch(its_store.port) as (switch, port):
        url = embedded.store_url(port, PASSWORD)
        given = {"decision_timeout_ms": 250, "decision_timeout_max_ms": 60_000, "breaker_failures": 1_000}
        agent = await quiet_agent(world, store_url=url, **given)
        switch.delay_s = 0.2
        answers = [(await agent.check(OPEN)).json()["degraded"] for _ in range(20)]
        assert answers[-5:] == [None] * 5, "with the set time-out each call would fail"
        assert await metric(agent, "leasehold_store_decision_timeout_seconds") > 0.25
        latency = (await agent.http.get("/v1/status")).json()["store_latency"]
        assert latency["timeout_us"] > 250_000
        assert latency["p99_us"] > 250_000
        switch.delay_s = 0
        await world.agents.aclose()


@pytest.mark.extended
async def test_a_store_that_refuses_connections_is_found_again_when_it_is_back(world: World, tmp_path: Path) -> None:
    port = free_port()
    with a_store(tmp_path, port) as store:
        agent = await quiet_agent(world, store_url=store.url, breaker_pause_ms=FOR_EVER_MS)
    await until(lambda: not agent.region.store.connected)
    await fails(agent, FAILURES)
    await is_left_alone(agent)
    with a_store(tmp_path, port):
        await decides(agent)  # during the pause, because an incarnation was established
        assert agent.region.breaker.state is BreakerState.CLOSED
        await world.agents.aclose()


async def test_a_store_without_memory_opens_the_circuit_breaker(world: World, its_store: Store) -> None:
    agent = await quiet_agent(world, store_url=its_store.url, breaker_pause_ms=50)
    its_store.told("CONFIG SET maxmemory 1")
    await fails(agent, FAILURES)
    assert await metric(agent, "leasehold_store_circuit_breaker_opened_total") == 1
    its_store.told("CONFIG SET maxmemory 0")
    await decides(agent)
    assert (await agent.check(SEARCH)).status_code == 200


@pytest.mark.extended
async def test_a_store_with_a_full_disk_opens_the_circuit_breaker(world: World, tmp_path: Path) -> None:
    """The store is on a real file system of a few megabytes, filled by another file."""
    with a_small_disk(tmp_path / "disk") as disk, a_store(disk, free_port()) as store:
        agent = await quiet_agent(world, store_url=store.url, breaker_pause_ms=50)
        fill(disk / "others")
        for number in range(1_000):
            await agent.check(SEARCH | {"tenant": f"t{number}"})
            if agent.region.breaker.state is not BreakerState.CLOSED:
                break
        assert (await agent.check(SEARCH)).status_code == 503
        assert await metric(agent, "leasehold_store_circuit_breaker_opened_total") >= 1
        (disk / "others").unlink()
        await decides(agent)
        assert (await agent.check(SEARCH)).status_code == 200
        await world.agents.aclose()


async def test_a_script_that_fails_on_one_key_does_not_affect_other_keys(world: World, its_store: Store) -> None:
    agent = await quiet_agent(world, store_url=its_store.url, breaker_pause_ms=FOR_EVER_MS)
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    spoilt = quota_key("api", [("tenant", "spoilt")])
    its_store.told(f"LPUSH {keys.rate(lane_of(spoilt, incarnation.lanes), spoilt).decode()} 1")
    its_store.told("FUNCTION FLUSH")
    for _ in range(2 * FAILURES):
        assert (await agent.check(OPEN | {"tenant": "spoilt"})).json()["degraded"] == "open"
    assert (await agent.check(OPEN)).json()["degraded"] is None
    assert agent.region.breaker.state is BreakerState.CLOSED


async def test_a_local_policy_admits_its_fraction_and_a_closed_one_nothing(world: World, its_store: Store) -> None:
    """Thirty at once for three regions are ten for this one, of which half is five. Nothing refills within the test."""
    agent = await quiet_agent(world, store_url=its_store.url, breaker_pause_ms=FOR_EVER_MS)
    its_store.stall()
    await fails(agent, FAILURES)
    shut = await agent.check({"tenant": "acme", "route": "/v1/local/shut"})
    assert (shut.status_code, shut.json()["degraded"], shut.json()["denied_by"]) == (503, "closed", "shut")
    local = {"tenant": "acme", "route": "/v1/local"}
    answers = [await agent.check(local) for _ in range(7)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
    assert {answer.json()["degraded"] for answer in answers} == {"local"}
    assert answers[-1].json()["retry_after_ms"] > 1_000_000, "half of one unit an hour, exactly"
    assert (await agent.check(local | {"tenant": "other"})).status_code == 200
    assert await metric(agent, 'leasehold_outage_fallback_checks_total{mode="local",policy="local"}') == 9
    its_store.go_on()
    await world.agents.aclose()


async def test_two_local_policies_on_one_key_count_each_others_units(world: World, its_store: Store) -> None:
    """One policy admits five of the region's ten units at once and the other two, from one bucket: a request on both
    takes two.
    """
    agent = await quiet_agent(world, store_url=its_store.url, breaker_pause_ms=FOR_EVER_MS)
    its_store.stall()
    await fails(agent, FAILURES)
    both, one = ({"tenant": "acme", "route": route} for route in ("/v1/local/two", "/v1/local"))
    first, second = [(await agent.check(both)).json() for _ in range(2)]
    assert [(each["policy"], each["share"]) for each in first["policies"]] == [("local", 5), ("wider", 2)]
    assert (first["allowed"], second["allowed"], second["denied_by"]) == (True, False, "wider")
    assert second["retry_after_ms"] > 1_000_000
    assert [(await agent.check(one)).status_code for _ in range(2)] == [200, 429], "the denied one took nothing"
    its_store.go_on()
    await world.agents.aclose()
