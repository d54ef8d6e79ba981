"""The same traces on real processes: `leasehold up --wan`, at a tenth of the speed, beside what virtual time says.

Coordinator, Postgres, and in each of three regions an agent, a store and a relay that makes every byte late. A trace is
played at the agents' doors, one request a unit, and its answers are judged by the same score as the simulated ones. A
region is cut off by stopping its relay: what is sent then goes nowhere, and arrives late once the relay goes on, as
what a network sends again. Traces follow each other, for two at once would share the conversations of their regions.

In the end the books are asked: what the generator was told it may is what the ledger has, to the unit.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import httpx

from benchmarks.allocation import rates
from benchmarks.allocation import run as virtual
from benchmarks.allocation.beside import Books, Both, beyond_ms, tables
from benchmarks.allocation.leased import Leased
from benchmarks.allocation.playing import Decided, Played, play
from benchmarks.allocation.score import Measured, Score, measured
from benchmarks.allocation.traces import (
    LENGTH_S,
    LIMIT,
    TICK_MS,
    Shape,
    Trace,
    diurnal,
    flash,
    on_off,
    rotating,
    surge,
    trace,
    zipf,
)
from benchmarks.frame import FEWEST_TURNS, Lines
from benchmarks.load import Server, http_is_whole, post
from benchmarks.open_loop import Moment
from benchmarks.picture import picture, save
from benchmarks.stack import PATIENCE_S, PLANS, Stack, host_and_port, local_stack, put_limits
from leasehold.local_stack.plan import DELAY_MS, REGIONS

SPEED = 0.1
ROUND_TRIPS_MS = [2 * DELAY_MS[region] for region in REGIONS]
# Of the length of the traces of allowances (240 s), with all moments in them; 1 plays them whole, in 40 minutes.
PART = float(os.environ.get("LEASEHOLD_BENCH_TRACE_PART", "0.4"))
CUT_REGION = 1
WAIT = "400ms"
GOES_ON_S = 0.05
REPORTED_WITHIN_S = 30.0

Slow = partial(Shape, len(REGIONS), speed=SPEED, round_trips_ms=ROUND_TRIPS_MS, cut_region=CUT_REGION)


def allowances(part: float) -> Mapping[str, Shape]:
    """Return the traces, scaled to three regions; the speed at which demand rotates or switches is not scaled."""
    limit, length_s = round(SPEED * LIMIT * part), LENGTH_S * part
    usual = partial(Slow, limit=limit, length_s=length_s)
    return {
        "Zipf": usual(zipf),
        "diurnal": usual(diurnal(120 * part)),
        "flash crowd": Slow(flash(60 * part, 75 * part), limit=limit, length_s=1.5 * length_s),
        "on/off": usual(on_off),
        "rotating": usual(rotating(10)),
        "a region is lost": usual(zipf, cut_s=(80 * part, 225 * part), is_lost=True),
        f"a region cut off for {60 * part:g} s": usual(zipf, cut_s=(80 * part, 140 * part)),
        END_GAME: Slow(rotating(0.2), limit=2_000, length_s=5),
    }


END_GAME = "2,000 units, rotating"
SHARED: Mapping[str, Shape] = {
    "a rate: Zipf, steady": Slow(zipf, rates.LIMIT // 10, rates.LENGTH_S),
    "a rate: diurnal": Slow(diurnal(60), rates.LIMIT // 10, rates.LENGTH_S),
    "a rate: flash crowd": Slow(flash(20, 35), rates.LIMIT // 10, rates.LENGTH_S),
    "a rate: on/off": Slow(on_off, rates.LIMIT // 10, rates.LENGTH_S),
    "a rate: rotating": Slow(rotating(10), rates.LIMIT // 10, rates.LENGTH_S),
    "a rate: surge, everywhere at once": Slow(surge(20, 35), rates.LIMIT // 10, rates.LENGTH_S),
}
DRAWN = {"Zipf": "zipf", "a region is lost": "lost"}


# --- what is limited --------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """Whose requests they are: a quota for each shape, and a tenant for each seed."""

    quota: str
    tenant: str

    @property
    def key(self) -> str:
        return f"{self.quota}:tenant={self.tenant}"

    @property
    def check(self) -> dict[str, object]:
        return {"subject": {"tenant": self.tenant, "route": f"/{self.quota}", "method": "GET"}}


HEARD = Subject("heard", "nobody")  # of whom it is asked whether the limits are in force


def limits(quotas: Sequence[Mapping[str, object]]) -> dict[str, object]:
    everything: list[Mapping[str, object]] = [allowance(HEARD.quota, 1_000), *quotas]
    policies = [
        {"name": each["name"], "match": {"route": f"/{each['name']}"}, "by": ["tenant"], "quota": each["name"]}
        | ({"wait": WAIT} if each["kind"] == "allowance" else {})
        for each in everything
    ]
    return {"plans": PLANS, "quotas": everything, "policies": policies}


def allowance(name: str, limit: int) -> dict[str, object]:
    return {"name": name, "kind": "allowance", "limit": limit, "period": "month"}


def rate(name: str, limit: int) -> dict[str, object]:
    return {"name": name, "kind": "rate", "limit": f"{limit}/second, burst {limit}"}


# --- one trace --------------------------------------------------------------------------------------------------------


class Real(NamedTuple):
    measured: Measured
    played: Played
    books: Books


async def play_allowance(stack: Stack, made: Trace, subject: Subject) -> Real:
    score = Score(made)

    def decided(region: int, tick: int, now_ms: int, is_admitted: bool) -> None:
        score.now_ms = min(now_ms, made.length_ms)
        if is_admitted:
            score.admit(region, 1)
        else:
            score.deny(region, 1, tick)

    async with _relays_go_on(stack):
        played = await _play(stack, made, subject, decided)
    return Real(measured(score, 0, 0), played, await _settled(stack, made.limit, played, subject))


class RealRate(NamedTuple):
    measured: rates.Measured
    played: Played


async def play_rate(stack: Stack, made: Trace, subject: Subject) -> RealRate:
    passed, last_tick = rates.Passed(made), len(made.ticks) - 1

    def decided(region: int, _tick: int, now_ms: int, is_admitted: bool) -> None:
        passed.admit(region, int(is_admitted), min(now_ms // TICK_MS, last_tick))

    played = await _play(stack, made, subject, decided)
    return RealRate(rates.measured(passed, None, 0), played)


async def _play(stack: Stack, made: Trace, subject: Subject, decided: Decided) -> Played:
    agents = [Server(*host_and_port(stack["agents"][region]), http_is_whole) for region in REGIONS]
    request = post("/v1/check", json.dumps(subject.check).encode())
    before = await _exchanges(stack)
    played = await play(made, agents, request, decided, list(cuts(stack, made)))
    pairs = zip(ROUND_TRIPS_MS, before, await _exchanges(stack), strict=True)
    played.beyond_ms = [now.beyond_ms(then, round_trip_ms) for round_trip_ms, then, now in pairs]
    return played


class Exchanges(NamedTuple):
    """Return the exchanges as an agent counts them."""

    calls: float
    seconds: float

    def beyond_ms(self, then: "Exchanges", round_trip_ms: int) -> float:
        """Return the average of the exchanges since then."""
        calls = self.calls - then.calls
        return max(0.0, 1000 * (self.seconds - then.seconds) / calls - round_trip_ms) if calls else 0.0


async def _exchanges(stack: Stack) -> list[Exchanges]:
    parts = [await _counted(stack, f"leasehold_exchange_duration_seconds_{part}") for part in ("count", "sum")]
    return [Exchanges(*each) for each in zip(*parts, strict=True)]


async def _counted(stack: Stack, name: str) -> list[float]:
    """Return the wrong denials by the metrics of each region's agent."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        texts = [(await client.get(f"{stack['agents'][region]}/metrics")).text for region in REGIONS]
    lines = ((line for line in text.splitlines() if line.startswith(f"{name} ")) for text in texts)
    return [float(next(each).split()[1]) for each in lines]


def cuts(stack: Stack, made: Trace) -> Iterator[Moment]:
    if made.cut:
        relay = stack["pids"][f"relay-{REGIONS[made.cut.region]}"]
        yield Moment(made.cut.from_ms / 1000, partial(os.kill, relay, signal.SIGSTOP))
        yield Moment(made.cut.to_ms / 1000, partial(os.kill, relay, signal.SIGCONT))


@asynccontextmanager
async def _relays_go_on(stack: Stack) -> AsyncIterator[None]:
    """Whatever happens: one that is stopped could not even be ended."""
    try:
        yield
    finally:
        for region in REGIONS:
            os.kill(stack["pids"][f"relay-{region}"], signal.SIGCONT)


async def _settled(stack: Stack, limit: int, played: Played, subject: Subject) -> Books:
    """Wait until everything admitted is reported, or until nothing changes for a while."""
    authorisation = {"Authorization": f"Bearer {stack['tokens']['usage:read']}"}
    async with httpx.AsyncClient(
        timeout=PATIENCE_S, base_url=stack["coordinator"], headers=authorisation
    ) as coordinator:
        for _ in range(round(REPORTED_WITHIN_S / GOES_ON_S)):
            books = await _books(coordinator, limit, played, subject)
            if books.is_exact:
                break
            await asyncio.sleep(GOES_ON_S)
        return books


async def _books(coordinator: httpx.AsyncClient, limit: int, played: Played, subject: Subject) -> Books:
    """Return usage of all periods: near the end of a month there are two."""
    periods = (await _read(coordinator, "/v1/periods"))["data"]
    found = [await _read(coordinator, f"/v1/periods/{period['id']}/reconciliation") for period in periods]
    its = [each for one in found for each in one["quotas"] if each["quota_key"] == subject.key]
    consumed, suspense, outstanding = (
        sum(each[name] for each in its) for name in ("consumed", "suspense", "outstanding")
    )
    status = next((one["status"] for one in found if one["status"] != "balanced"), "balanced")
    return Books(limit, played.admitted, played.others, consumed, suspense, outstanding, status)


async def _read(coordinator: httpx.AsyncClient, path: str) -> Any:
    answer = await coordinator.get(path)
    answer.raise_for_status()
    return answer.json()


# --- the whole --------------------------------------------------------------------------------------------------------


async def run(repeats: int, _seconds: float, port: int) -> dict[str, Lines]:
    turns = max(repeats, FEWEST_TURNS)
    shapes = allowances(PART)
    lengths_s = {name: shape.length_s * len(_seeds(name, turns)) for name, shape in {**shapes, **SHARED}.items()}
    async with local_stack(port, "--wan") as stack:
        await put_limits(stack, limits(_quotas(shapes)), HEARD.check, REGIONS)
        progress = _Progress(lengths_s)
        units = {name: await _both(stack, progress.begins(name), shape, turns) for name, shape in shapes.items()}
        shared = {
            name: await _both_of_rate(stack, progress.begins(name), shape, turns) for name, shape in SHARED.items()
        }
    for name, file in DRAWN.items():
        _draw(name, file, shapes[name], units[name])
    return tables(units, shared)


def _quotas(shapes: Mapping[str, Shape]) -> list[dict[str, object]]:
    units = [allowance(_quota_of(f"units: {name}"), shape.limit) for name, shape in shapes.items()]
    return units + [rate(_quota_of(name), shape.limit) for name, shape in SHARED.items()]


async def _both(stack: Stack, name: str, shape: Shape, turns: int) -> Both[Measured]:
    quota = _quota_of(f"units: {name}")
    made = [trace(name, shape, seed) for seed in _seeds(name, turns)]
    real = [await play_allowance(stack, each, Subject(quota, f"seed-{each.seed}")) for each in made]
    figures, played, books = (list(each) for each in zip(*real, strict=True))
    winds = _winds(made, turns)
    simulated, slower = ([virtual.play(each, Leased) for each in runs] for runs in (winds, _slower(winds, played)))
    return Both(simulated, slower, figures, played, books)


async def _both_of_rate(stack: Stack, name: str, shape: Shape, turns: int) -> Both[rates.Measured]:
    made = trace(name, shape, 1)
    real = await play_rate(stack, made, Subject(_quota_of(name), "seed-1"))
    winds, ours = _winds([made], turns), rates.MAKES["Leasehold, adaptive"]
    runs = (winds, _slower(winds, [real.played]))
    simulated, slower = ([rates.play_on(each, ours) for each in simulated] for simulated in runs)
    return Both(simulated, slower, [real.measured], [real.played])


def _seeds(name: str, turns: int) -> Sequence[int]:
    """The short one hangs by a few messages: one run of it says little."""
    return range(1, turns + 1) if name == END_GAME else [1]


def _winds(made: Sequence[Trace], turns: int) -> list[Trace]:
    """Play the same requests, with a little jitter in the delay of messages each time."""
    if len(made) > 1:
        return list(made)
    return [replace(made[0], name=f"{made[0].name}, {turn}") for turn in range(turns)]


def _slower(made: Sequence[Trace], played: Sequence[Played]) -> list[Trace]:
    took_ms = [distance + beyond for distance, beyond in zip(ROUND_TRIPS_MS, beyond_ms(played), strict=True)]
    return [replace(each, round_trips_ms=took_ms) for each in made]


def _quota_of(name: str) -> str:
    return "-".join("".join(each if each.isalnum() else " " for each in name.lower()).split())


class _Progress:
    """A line for each trace: how much there is still to come."""

    def __init__(self, lengths_s: Mapping[str, float]) -> None:
        self._lengths_s = lengths_s
        self._left_s = sum(lengths_s.values())

    def begins(self, name: str) -> str:
        length_s = self._lengths_s[name]
        print(f"{name}: {length_s:.0f} s; {self._left_s / 60:.0f} min to come", flush=True)
        self._left_s -= length_s
        return name


# --- pictures ---------------------------------------------------------------------------------------------------------


def _draw(name: str, file: str, shape: Shape, both: Both[Measured]) -> None:
    """Plot units admitted in all regions and in the disconnected one, simulated and real."""
    lines: dict[str, list[float]] = {}
    for what, run in (("simulated", both.simulated[0]), ("real", both.real[0])):
        lines[f"all, {what}"] = [*accumulate(sum(each) for each in zip(*run.by_second, strict=True))]
        lines[f"{REGIONS[CUT_REGION]}, {what}"] = [*accumulate(run.by_second[CUT_REGION])]
    lines["the limit"] = [shape.limit] * len(lines["all, real"])
    points = {each: list(enumerate(map(float, values))) for each, values in lines.items()}
    save(f"allocation-wan-{file}", picture(f"Units admitted so far: {name}", "seconds", "units", points))
