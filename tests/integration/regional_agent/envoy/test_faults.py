"""What callers of real Envoys see by both protocols while something is broken, against the published bound.

A short run tries the quick ones. A full one tries all, and prints the table of docs/guides/envoy-quota.md (with `-s`).
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import pytest

from regional_agent.envoy.quota.rules import NANO_UNITS, bound_nano
from tests.budget import size
from tests.integration.regional_agent.envoy.fault_stack import BURST, FALLBACK, SHARE, FaultStack, fault_stack
from tests.integration.regional_agent.world import World
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("envoy")]

TRIED = size("LEASEHOLD_ENVOY_FAULTS", "all", short="quick")
LAST_S = 3.0  # of a fault: what callers see when it has lasted


class Fault(NamedTuple):
    title: str
    break_it: Callable[[FaultStack], Awaitable[None]]
    mend: Callable[[FaultStack], Awaitable[None]]
    lasts_s: float = 6.0
    is_quick: bool = False
    has_agents: bool = True  # that proxies reach, and that reach their store
    deaths: int = 0  # of agents


async def nothing(_: FaultStack) -> None:
    return


async def reset(stack: FaultStack) -> None:
    for door in stack.doors:
        door.reset()


async def kill_proxy(stack: FaultStack) -> None:
    stack.proxies[1].kill()


async def start_proxy(stack: FaultStack) -> None:
    stack.start_proxy(stack.proxies[1])


async def silence_doors(stack: FaultStack) -> None:
    for door in stack.doors:
        door.silence()


async def mend_doors(stack: FaultStack) -> None:
    for door in stack.doors:
        await door.mend()


def end_agents(number: signal.Signals, count: int) -> Callable[[FaultStack], Awaitable[None]]:
    async def end(stack: FaultStack) -> None:
        for agent in stack.agents[:count]:
            agent.end(number)

    return end


async def start_agents(stack: FaultStack) -> None:
    for agent in stack.agents:
        if agent.is_ending:
            await until(agent.has_ended)
            agent.start()


async def refuse_coordinator(stack: FaultStack) -> None:
    stack.coordinator.refuse()


async def silence_coordinator(stack: FaultStack) -> None:
    stack.coordinator.silence()


async def mend_coordinator(stack: FaultStack) -> None:
    await stack.coordinator.mend()


async def silence_store(stack: FaultStack) -> None:
    stack.store.silence()


async def mend_store(stack: FaultStack) -> None:
    await stack.store.mend()


FAULTS = [
    Fault("nothing", nothing, nothing),
    Fault("all connections to the agents are reset", reset, nothing),
    Fault("one of two proxies is killed", kill_proxy, start_proxy, is_quick=True),
    Fault("links to the agents lose everything", silence_doors, mend_doors, is_quick=True, has_agents=False),
    Fault("one of two agents is rolled", end_agents(signal.SIGTERM, 1), start_agents, 12.0),
    Fault("one of two agents is killed", end_agents(signal.SIGKILL, 1), start_agents, 12.0, deaths=1),
    Fault("both agents are killed", end_agents(signal.SIGKILL, 2), start_agents, 12.0, has_agents=False, deaths=2),
    Fault("the store does not answer", silence_store, mend_store, 12.0, has_agents=False),
    Fault("the coordinator is gone", refuse_coordinator, mend_coordinator, 12.0),
    Fault("the region is cut off", silence_coordinator, mend_coordinator, 12.0),
]


class Seen(NamedTuple):
    """Counts what the callers of one protocol saw during a fault."""

    counts: Counter[str]
    lasted_s: float
    at_last: float  # admitted a second, when the fault had lasted
    bound: float


async def try_out(stack: FaultStack, fault: Fault) -> dict[str, Seen]:
    before = {name: stack.total(name) for name in ("rls", "rlqs")}
    began_s = monotonic()
    await fault.break_it(stack)
    await asyncio.sleep(fault.lasts_s - LAST_S)
    last, last_s = {name: stack.total(name) for name in before}, monotonic()
    await asyncio.sleep(LAST_S)
    ended_s = monotonic()
    after = {name: stack.total(name) for name in before}
    await fault.mend(stack)
    await stack.settled()
    return {
        name: Seen(
            after[name] - before[name],
            ended_s - began_s,
            (after[name] - last[name])["admitted"] / (ended_s - last_s),
            bound_of(name, fault, len(stack.proxies), ended_s - began_s),
        )
        for name in before
    }


def bound_of(protocol: str, fault: Fault, proxies: int, lasted_s: float) -> float:
    """Return the most that the region's share and the published bound let callers be admitted in so long."""
    bound = BURST + SHARE * lasted_s
    if protocol == "rlqs":
        bound += (1 + fault.deaths) * bound_nano(SHARE * 1_000_000, BURST, proxies) / NANO_UNITS
        if not fault.has_agents:
            bound += proxies * FALLBACK * (1 + lasted_s)
    return bound


def row(fault: Fault, seen: dict[str, Seen]) -> str:
    cells = [fault.title, f"{fault.lasts_s:.0f} s"]
    for name, each in seen.items():
        counts = each.counts
        cells += [f"{counts['admitted']} of {each.bound:.0f}", f"{each.at_last:.0f}/s"]
        cells += [str(counts["passed"])] if name == "rls" else []
        cells += [str(counts["error"])]
    return f"| {' | '.join(cells)} |"


@pytest.mark.extended
async def test_callers_see_what_is_published(world: World, tmp_path: Path) -> None:
    rows, faults = [], list[str]()
    async with fault_stack(world, tmp_path) as stack:
        for fault in FAULTS:
            if fault.is_quick or TRIED == "all":
                seen = await try_out(stack, fault)
                rows.append(row(fault, seen))
                faults += wrong(fault, seen)
    print("", *rows, sep="\n")  # noqa: T201 - the table
    assert not faults, "\n".join([*faults, *rows])


def wrong(fault: Fault, seen: dict[str, Seen]) -> list[str]:
    """Return what differs from what the documentation says."""
    rls, rlqs = seen["rls"], seen["rlqs"]
    found = []
    if rlqs.counts["admitted"] > rlqs.bound:
        found.append("RLQS admits more than its bound")
    if rls.counts["admitted"] > rls.bound and fault.has_agents:
        found.append("RLS admits more than its bound")
    if not rls.counts["admitted"] + rls.counts["passed"] or not rlqs.counts["admitted"]:
        found.append("nothing is admitted")
    if (
        rls.counts["passed"] > rls.counts["admitted"]
        and fault.has_agents
        and not fault.deaths
        and fault.break_it is not reset
    ):
        found.append("most requests pass without a decision")
    if (rls.counts["error"] or rlqs.counts["error"]) and fault.break_it is not kill_proxy:
        found.append("callers see errors")
    return [f"{fault.title}: {each}" for each in found]
