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
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import httpx

from benchmarks.allocation import rates
from benchmarks.allocation import run as virtual
from benchmarks.allocation.leased import Leased
from benchmarks.allocation.playing import Played, play
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
from benchmarks.frame import FEWEST_TURNS, Case, Figure, Lines, figure
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
POINTS = 2.0
GOES_ON_S = 0.05
REPORTED_WITHIN_S = 30.0

Slow = partial(Shape, len(REGIONS), speed=SPEED, round_trips_ms=ROUND_TRIPS_MS, cut_region=CUT_REGION)


def allowances(part: float) -> Mapping[str, Shape]:
    """As they are in virtual time over more regions; how fast demand rotates or switches is not scaled."""
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
    "Zipf, steady": Slow(zipf, rates.LIMIT // 10, rates.LENGTH_S),
    "diurnal": Slow(diurnal(60), rates.LIMIT // 10, rates.LENGTH_S),
    "flash crowd": Slow(flash(20, 35), rates.LIMIT // 10, rates.LENGTH_S),
    "on/off": Slow(on_off, rates.LIMIT // 10, rates.LENGTH_S),
    "rotating": Slow(rotating(10), rates.LIMIT // 10, rates.LENGTH_S),
    "surge, everywhere at once": Slow(surge(20, 35), rates.LIMIT // 10, rates.LENGTH_S),
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


class Books(NamedTuple):
    """What the ledger has of one allowance, and what the generator was told."""

    limit: int
    admitted: int
    no_answer: int  # admitted or not, nobody knows
    consumed: int
    suspense: int
    outstanding: int
    word: str  # of the whole period's reconciliation

    @property
    def is_exact(self) -> bool:
        missing = self.admitted - self.consumed - self.suspense
        return -self.no_answer <= missing <= 0 and self.consumed <= self.limit and self.word == "balanced"


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
        played = await play(made, _agents(stack), _request(subject), decided, list(_cuts(stack, made)))
    return Real(measured(score, 0, 0), played, await _settled(stack, made.limit, played, subject))


class RealRate(NamedTuple):
    measured: rates.Measured
    played: Played


async def play_rate(stack: Stack, made: Trace, subject: Subject) -> RealRate:
    passed, last_tick = rates.Passed(made), len(made.ticks) - 1

    def decided(region: int, _tick: int, now_ms: int, is_admitted: bool) -> None:
        passed.admit(region, int(is_admitted), min(now_ms // TICK_MS, last_tick))

    played = await play(made, _agents(stack), _request(subject), decided)
    return RealRate(rates.measured(passed, None, 0), played)


def _agents(stack: Stack) -> list[Server]:
    return [Server(*host_and_port(stack["agents"][region]), http_is_whole) for region in REGIONS]


def _request(subject: Subject) -> bytes:
    return post("/v1/check", json.dumps(subject.check).encode())


def _cuts(stack: Stack, made: Trace) -> Iterator[Moment]:
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
    """Once all that was admitted is reported, or after a while in which it was not."""
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
    (period,) = (await _read(coordinator, "/v1/periods"))["data"]
    found = await _read(coordinator, f"/v1/periods/{period['id']}/reconciliation")
    (its,) = (each for each in found["quotas"] if each["quota_key"] == subject.key)
    without_answer = played.others
    return Books(
        limit, played.admitted, without_answer, its["consumed"], its["suspense"], its["outstanding"], found["word"]
    )


async def _read(coordinator: httpx.AsyncClient, path: str) -> Any:
    answer = await coordinator.get(path)
    answer.raise_for_status()
    return answer.json()


# --- the whole --------------------------------------------------------------------------------------------------------

R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True)
class Both(Generic[S, R]):
    """Runs of one trace: on virtual time, and on real processes."""

    simulated: Sequence[S]
    real: Sequence[R]


async def run(repeats: int, _seconds: float, port: int) -> dict[str, Lines]:
    turns = max(repeats, FEWEST_TURNS)
    shapes = allowances(PART)
    quotas = [allowance(_quota_of("units", name), shape.limit) for name, shape in shapes.items()]
    quotas += [rate(_quota_of("rate", name), shape.limit) for name, shape in SHARED.items()]
    progress = _Progress(
        [
            *(shape.length_s * len(_seeds(name, turns)) for name, shape in shapes.items()),
            *(shape.length_s for shape in SHARED.values()),
        ]
    )
    async with local_stack(port, "--wan") as stack:
        await put_limits(stack, limits(quotas), HEARD.check, REGIONS)
        units = {name: await _both(stack, name, shape, turns, progress) for name, shape in shapes.items()}
        shared = {name: await _both_of_rate(stack, name, shape, turns, progress) for name, shape in SHARED.items()}
    for name, file in DRAWN.items():
        _draw(name, file, shapes[name], units[name])
    return {**_tables(units), **_rate_tables(shared), **_evidence(units, shared), "goals": _goals(units, shared)}


async def _both(stack: Stack, name: str, shape: Shape, turns: int, progress: "_Progress") -> Both[Measured, Real]:
    seeds = _seeds(name, turns)
    made = [trace(name, shape, seed) for seed in seeds]
    progress.begins(name, shape.length_s * len(made))
    real = [await play_allowance(stack, each, Subject(_quota_of("units", name), f"seed-{each.seed}")) for each in made]
    simulated = [virtual.play(each, Leased) for each in _winds(made, turns)]
    return Both(simulated, real)


async def _both_of_rate(
    stack: Stack, name: str, shape: Shape, turns: int, progress: "_Progress"
) -> Both[rates.Measured, RealRate]:
    made = trace(name, shape, 1)
    progress.begins(f"a rate, {name}", shape.length_s)
    real = await play_rate(stack, made, Subject(_quota_of("rate", name), "seed-1"))
    simulated = [rates.play_on(each, rates.MAKES["Leasehold, adaptive"]) for each in _winds([made], turns)]
    return Both(simulated, [real])


def _seeds(name: str, turns: int) -> Sequence[int]:
    """The short one hangs by a few messages: one run of it says little."""
    return range(1, turns + 1) if name == END_GAME else [1]


def _winds(made: Sequence[Trace], turns: int) -> list[Trace]:
    """The same requests, with messages that are a little quicker or slower each time."""
    if len(made) > 1:
        return list(made)
    return [replace(made[0], name=f"{made[0].name}, {turn}") for turn in range(turns)]


def _quota_of(kind: str, name: str) -> str:
    words = "".join(each if each.isalnum() else " " for each in name.lower()).split()
    return "-".join([kind, *words])


class _Progress:
    """A line for each trace: how much there is still to come."""

    def __init__(self, lengths_s: Sequence[float]) -> None:
        self._left_s = sum(lengths_s)

    def begins(self, name: str, length_s: float) -> None:
        print(f"{name}: {length_s:.0f} s; {self._left_s / 60:.0f} min to come", flush=True)
        self._left_s -= length_s


# --- tables -----------------------------------------------------------------------------------------------------------


class Column(NamedTuple, Generic[R]):
    of: Callable[[R], float]
    digits: int
    points: float | None  # so many points is one of it; None: it is not compared by points


COLUMNS: Mapping[str, Column[Measured]] = {
    "admitted ÷ omniscient": Column(lambda each: each.utilisation, 4, 100),
    "wrongly denied per 1,000": Column(lambda each: each.wrong_per_1000, 2, 0.1),
    "longest run of them, ms": Column(lambda each: each.longest_ms, 0, None),
    "Jain": Column(lambda each: each.jain, 4, 100),
    "over-admitted": Column(lambda each: each.over, 0, None),
}
RATE_COLUMNS: Mapping[str, Column[rates.Measured]] = {
    "conforming ÷ omniscient": Column(lambda each: each.conforming, 4, 100),
    "overshoot, s of the limit": Column(lambda each: each.overshoot_s, 3, 100),
    "Jain against max-min": Column(lambda each: each.jain, 4, 100),
}


def _tables(units: Mapping[str, Both[Measured, Real]]) -> dict[str, Lines]:
    return {
        name: _beside(COLUMNS, both.simulated, [each.measured for each in both.real]) for name, both in units.items()
    }


def _rate_tables(shared: Mapping[str, Both[rates.Measured, RealRate]]) -> dict[str, Lines]:
    return {
        f"a rate: {name}": _beside(RATE_COLUMNS, both.simulated, [each.measured for each in both.real])
        for name, both in shared.items()
    }


def _beside(columns: Mapping[str, Column[R]], simulated: Sequence[R], real: Sequence[R]) -> Sequence[Case]:
    def figures(runs: Sequence[R]) -> dict[str, Figure | str]:
        return {name: figure([each.of(run) for run in runs], each.digits) for name, each in columns.items()}

    apart: dict[str, Figure | str] = {
        name: "" if each.points is None else f"{points_apart(each, simulated, real):+.2f}"
        for name, each in columns.items()
    }
    return [Case("simulated", figures(simulated)), Case("real", figures(real)), Case("points apart", apart)]


def points_apart(column: Column[R], simulated: Sequence[R], real: Sequence[R]) -> float:
    assert column.points is not None
    here, there = (statistics.median([column.of(run) for run in runs]) for runs in (real, simulated))
    return column.points * (here - there)


def _evidence(
    units: Mapping[str, Both[Measured, Real]], shared: Mapping[str, Both[rates.Measured, RealRate]]
) -> dict[str, Lines]:
    books = {name: [each.books for each in both.real] for name, both in units.items()}
    played = {name: [each.played for each in both.real] for name, both in units.items()}
    played |= {f"a rate: {name}": [each.played for each in both.real] for name, both in shared.items()}
    return {
        "the ledger, when all was reported": [_booked(*each) for each in books.items()],
        "the requests": [_sent(*each) for each in played.items()],
    }


def _booked(name: str, books: Sequence[Books]) -> Case:
    columns: dict[str, Figure | str] = {
        each.replace("_", " "): f"{sum(getattr(one, each) for one in books):,}"
        for each in ("limit", "admitted", "consumed", "suspense", "outstanding")
    }
    missing = sum(each.admitted - each.consumed - each.suspense for each in books)
    is_exact = all(each.is_exact for each in books)
    return Case(name, columns | {"difference": f"{missing:,}", "reconciled": books[-1].word, "exact": _yes(is_exact)})


def _sent(name: str, played: Sequence[Played]) -> Case:
    answers = sum(each.answers.total() for each in played)
    admitted_ms = [ms for each in played for ms in each.admitted_after_ms]
    late_ms = [ms for each in played for ms in each.late_ms]
    return Case(
        name,
        {
            "requests": f"{answers:,}",
            "neither admitted nor denied": f"{sum(each.others for each in played):,}",
            "ms until admitted, p50": f"{_percentile(admitted_ms, 50):.1f}",
            "p99": f"{_percentile(admitted_ms, 99):.1f}",
            "ms the generator was late, p99": f"{_percentile(late_ms, 99):.1f}",
            "at most": f"{max(late_ms):.1f}",
        },
    )


def _percentile(samples: Sequence[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100)[percent - 1] if len(samples) > 1 else 0.0


def _goals(
    units: Mapping[str, Both[Measured, Real]], shared: Mapping[str, Both[rates.Measured, RealRate]]
) -> Sequence[Case]:
    over = sum(each.measured.over for both in units.values() for each in both.real)
    inexact = sum(not each.books.is_exact for both in units.values() for each in both.real)
    return [
        *_within(
            COLUMNS, {name: (both.simulated, [each.measured for each in both.real]) for name, both in units.items()}
        ),
        *_within(
            RATE_COLUMNS,
            {
                f"a rate: {name}": (both.simulated, [each.measured for each in both.real])
                for name, both in shared.items()
            },
        ),
        Case("over-admission, units", {"goal": "0", "worst": f"{over:,}", "where": "", "reached": _yes(over == 0)}),
        Case(
            "traces of which the ledger differs",
            {"goal": "0", "worst": str(inexact), "where": "", "reached": _yes(inexact == 0)},
        ),
    ]


def _within(columns: Mapping[str, Column[R]], runs: Mapping[str, tuple[Sequence[R], Sequence[R]]]) -> Iterator[Case]:
    for name, column in columns.items():
        if column.points is None:
            continue
        apart = {about: points_apart(column, *each) for about, each in runs.items()}
        where = max(apart, key=lambda about: abs(apart[about]))
        yield Case(
            f"{name}, points apart",
            {
                "goal": f"≤ {POINTS:g}",
                "worst": f"{apart[where]:+.2f}",
                "where": where,
                "reached": _yes(abs(apart[where]) <= POINTS),
            },
        )


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


# --- pictures ---------------------------------------------------------------------------------------------------------


def _draw(name: str, file: str, shape: Shape, both: Both[Measured, Real]) -> None:
    """What was admitted so far in all regions and in the one that may be cut off, simulated and real."""
    lines: dict[str, list[float]] = {}
    for what, run in (("simulated", both.simulated[0]), ("real", both.real[0].measured)):
        lines[f"all, {what}"] = [*accumulate(sum(each) for each in zip(*run.by_second, strict=True))]
        lines[f"{REGIONS[CUT_REGION]}, {what}"] = [*accumulate(run.by_second[CUT_REGION])]
    lines["the limit"] = [shape.limit] * len(lines["all, real"])
    points = {each: list(enumerate(map(float, values))) for each, values in lines.items()}
    save(f"allocation-wan-{file}", picture(f"Units admitted so far: {name}", "seconds", "units", points))
