"""What it costs that each request asks the coordinator (`mode: central`), beside the way there and back.

One region of `leasehold up --wan`, and the load beside it. The reference is a call that decides nothing, through the
relay that the agent's calls take: no decision far away can take less. What is leased is decided next to the load.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.frame import FEWEST_TURNS, Lines, facts
from benchmarks.load import Server, get, http_is_whole, load, post
from benchmarks.stack import PLANS, REGION, Stack, host_and_port, local_stack, put_limits
from leasehold.local_stack.plan import StackPlan

MODES = ("central", "leased")
CROWD = 64
PLENTY = 10**9
RESTS_S = 2.0  # until all is told
_COUNTERS = [
    re.compile(rf"^leasehold_coordinator_{name}_total(?:{{[^}}]*}})? ([\d.e+]+)$", re.MULTILINE)
    for name in ("exchanges", "units_consumed")
]


class Turn(NamedTuple):
    p50_ms: float
    exchanges: float  # for a thousand units that were booked: each decision is one


def limits() -> dict[str, object]:
    return {
        "plans": PLANS,
        "quotas": [
            {"name": mode, "kind": "allowance", "limit": PLENTY, "period": "month", "mode": mode} for mode in MODES
        ],
        "policies": [
            {"name": mode, "match": {"route": f"/{mode}"}, "by": ["tenant"], "quota": mode, "wait": "10s"}
            for mode in MODES
        ],
    }


def check(mode: str) -> dict[str, object]:
    return {"subject": {"tenant": "acme", "route": f"/{mode}", "method": "GET"}}


async def run(repeats: int, seconds: float, port: int) -> dict[str, Lines]:
    async with local_stack(port, "--wan") as stack, httpx.AsyncClient(timeout=30) as client:
        await put_limits(stack, limits(), check("central"))
        relay = Server(*host_and_port(StackPlan(Path(), port, wan=True).coordinator_url_for(REGION)), http_is_whole)
        agent = Server(*host_and_port(stack["agents"][REGION]), http_is_whole)
        turn = partial(_turn, client, stack, seconds)

        def decided(mode: str, connections: int) -> Callable[[], Awaitable[Turn]]:
            return partial(turn, agent, post("/v1/check", json.dumps(check(mode)).encode()), connections)

        turns: dict[str, Callable[[], Awaitable[Turn]]] = {
            "there and back, nothing decided": partial(turn, relay, get("/healthz"), 1),
            "central, one at once": decided("central", 1),
            f"central, {CROWD} at once of one key": decided("central", CROWD),
            "leased, one at once": decided("leased", 1),
        }
        taken = await _taken(turns, max(repeats, FEWEST_TURNS))
    of_decisions = {name: each for name, each in taken.items() if name != next(iter(turns))}
    return {
        f"ms until the answer, the median of a turn, in {REGION}": facts(
            {name: [turn.p50_ms for turn in each] for name, each in taken.items()}
        ),
        "exchanges with the coordinator for 1,000 decisions": facts(
            {name: [turn.exchanges for turn in each] for name, each in of_decisions.items()}
        ),
    }


async def _taken(turns: Mapping[str, Callable[[], Awaitable[Turn]]], repeats: int) -> dict[str, list[Turn]]:
    """Run one round more than is counted, to warm up."""
    taken: dict[str, list[Turn]] = {name: [] for name in turns}
    for round_ in range(repeats + 1):
        for name, turn in turns.items():
            found = await turn()
            if round_ > 0:
                taken[name].append(found)
    return taken


async def _turn(
    client: httpx.AsyncClient, stack: Stack, seconds: float, server: Server, request: bytes, connections: int
) -> Turn:
    before = await _counted(client, stack)
    found = await load(server, request, accepted=b"HTTP/1.1 200", connections=connections, seconds=seconds)
    await asyncio.sleep(RESTS_S)
    exchanges, units = (now - then for now, then in zip(await _counted(client, stack), before, strict=True))
    return Turn(found.p50_us / 1000, 1000 * exchanges / max(1, units))


async def _counted(client: httpx.AsyncClient, stack: Stack) -> list[float]:
    """Return what the coordinator granted and booked, for all regions."""
    said = (await client.get(f"{stack['coordinator']}/metrics")).text
    return [sum(map(float, counter.findall(said))) for counter in _COUNTERS]
