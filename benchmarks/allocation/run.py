"""The allocation benchmark: the product's rules under the demand of many regions, on virtual time, beside others."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar

from benchmarks.allocation import proxies, rates
from benchmarks.allocation.leased import Leased
from benchmarks.allocation.network import Network
from benchmarks.allocation.others import Chunks, Loans, StaticSplit
from benchmarks.allocation.score import Measured, Score, measured
from benchmarks.allocation.traces import HORIZON_SHAPES, SHAPES, TICK_MS, Trace, trace
from benchmarks.frame import FEWEST_TURNS, Case, Lines, figure
from benchmarks.picture import picture, save

DRAWN = {"Zipf over 10 regions": "zipf", "flash crowd, 10 regions": "flash", "a region of 10 is lost": "lost"}
MOST_LINES = 4  # regions in a picture, besides all together and the limit


class Limits(Protocol):
    @property
    def network(self) -> Network: ...
    @property
    def messages(self) -> int: ...
    @property
    def asking(self) -> int: ...
    def arrive(self, region: int, units: int, tick: int) -> None: ...
    def turn(self) -> None: ...


Makes = Callable[[Trace, Score], Limits]
OURS = "Leasehold"
LIMITERS: Mapping[str, Makes] = {
    "static split": StaticSplit,
    "chunks of 5,000": Chunks,
    "token loans": Loans,
    OURS: Leased,
}
Results = Mapping[str, Mapping[str, Sequence[Measured]]]  # by trace and limiter, one for each seed


async def run(repeats: int, _seconds: float, _port: int) -> dict[str, Lines]:
    seeds = range(1, max(repeats, FEWEST_TURNS) + 1)
    results = {name: _compared(name, seeds) for name in SHAPES}
    for name, file in DRAWN.items():
        _draw(name, file, results[name][OURS][0])
    tables: dict[str, Lines] = {name: [_case(*each) for each in by_name.items()] for name, by_name in results.items()}
    of_rates = rates.compared(seeds)
    reached = [*goals(results, GOALS), *goals(of_rates, RATE_GOALS)]
    about = {"goals": reached, "the horizon of a quota": horizons(seeds)}
    return {**tables, **rates.tables(of_rates), **proxies.compared(seeds), **about}


def _compared(name: str, seeds: Sequence[int]) -> Mapping[str, Sequence[Measured]]:
    found: dict[str, list[Measured]] = {limiter: [] for limiter in LIMITERS}
    for seed in seeds:
        made = trace(name, SHAPES[name], seed)
        for limiter, makes in LIMITERS.items():
            found[limiter].append(play(made, makes))
    return found


def play(made: Trace, makes: Makes) -> Measured:
    score = Score(made)
    limiter = makes(made, score)
    play_on(made, score, limiter)
    return measured(score, limiter.messages, limiter.asking)


def play_on(made: Trace, score: Score, limiter: Limits) -> None:
    for tick, arrivals in enumerate(made.ticks):
        score.now_ms = tick * TICK_MS
        limiter.network.run_until(score.now_ms)
        for region, units in arrivals:
            limiter.arrive(region, units, tick)
        limiter.turn()
    limiter.network.run_until(made.length_ms)


# --- tables -----------------------------------------------------------------------------------------------------------


def _case(name: str, runs: Sequence[Measured]) -> Case:
    columns = {
        "admitted ÷ omniscient": figure([each.utilisation for each in runs], 4),
        "wrongly denied per 1,000": figure([each.wrong_per_1000 for each in runs], 2),
        "longest run of them, ms": figure([each.longest_ms for each in runs], 0),
        "Jain": figure([each.jain for each in runs], 4),
        "over-admitted": figure([each.over for each in runs], 0),
        "messages about units": figure([each.asking for each in runs], 0),
        "of the bound": figure([each.asking / each.bound for each in runs], 2),
        "all messages": figure([each.messages for each in runs], 0),
    }
    return Case(name, columns)


R = TypeVar("R")


@dataclass(frozen=True)
class Goal(Generic[R]):
    """Medians, but of what must never be: there the worst counts."""

    name: str
    traces: Sequence[str]
    of: Callable[[R], float]
    limit: float
    is_least: bool = False
    is_always: bool = False
    limiter: str = OURS

    def found(self, results: Mapping[str, Mapping[str, Sequence[R]]]) -> float:
        worst = min if self.is_least else max
        typical = worst if self.is_always else statistics.median
        return worst(typical([self.of(each) for each in results[name][self.limiter]]) for name in self.traces)

    def is_reached(self, found: float) -> bool:
        return found >= self.limit if self.is_least else found <= self.limit


_ALL = list(SHAPES)
_LOST = [name for name, shape in SHAPES.items() if shape.is_lost]
_REACHABLE = [name for name, shape in SHAPES.items() if shape.cut_s is None]
_CALM = [name for name in SHAPES if name.startswith(("Zipf", "flash"))]
GOALS: Sequence[Goal[Measured]] = [
    Goal("over-admission", _ALL, lambda each: each.over, 0, is_always=True),
    Goal("utilisation, all regions reachable", _REACHABLE, lambda each: each.utilisation, 0.999, is_least=True),
    Goal("utilisation, a region lost", _LOST, lambda each: each.before_settlement, 0.995, is_least=True),
    Goal("utilisation after its settlement", _LOST, lambda each: each.utilisation, 0.9999, is_least=True),
    Goal("wrongly denied per 1,000, Zipf and flash", _CALM, lambda each: each.wrong_per_1000, 0.2),
    Goal("messages about units ÷ (admitted/1000 + 80·N)", _REACHABLE, lambda each: each.asking / each.bound, 1),
    Goal("longest run of wrong denials, ms", _REACHABLE, lambda each: each.longest_ms, 500),
    Goal("Jain", _REACHABLE, lambda each: each.jain, 0.999, is_least=True),
]


_STRICT, _ADAPTIVE = "Leasehold, strict", "Leasehold, adaptive"


def _utilisation(name: str, least: float) -> Goal[rates.Measured]:
    about = f"rate: utilisation, {name}"
    return Goal(about, [name], lambda each: each.conforming, least, is_least=True, limiter=_ADAPTIVE)


def _overshoot(about: str, most_s: float, limiter: str) -> Goal[rates.Measured]:
    return Goal(about, list(rates.SHAPES), lambda each: each.overshoot_s, most_s, is_always=True, limiter=limiter)


RATE_GOALS: Sequence[Goal[rates.Measured]] = [
    *(_utilisation(name, 0.98) for name in ("Zipf, steady", "diurnal", "flash crowd")),
    _utilisation("on/off", 0.90),
    _utilisation("rotating", 0.85),
    _overshoot("rate: overshoot beyond the bucket, s of the limit", 0.25, _ADAPTIVE),
    _overshoot("rate: the same, strict", 0, _STRICT),
    Goal("rate: reaction, ms", ["flash crowd"], lambda each: each.reaction_ms or 0, 1500, limiter=_ADAPTIVE),
    Goal("rate: Jain, steady", ["Zipf, steady"], lambda each: each.jain, 0.99, is_least=True, limiter=_ADAPTIVE),
]


def goals(results: Mapping[str, Mapping[str, Sequence[R]]], wanted: Sequence[Goal[R]]) -> Sequence[Case]:
    """Return the trace with the worst result among those that the figure is about."""
    return [_goal(goal, goal.found(results)) for goal in wanted]


def _goal(goal: Goal[R], found: float) -> Case:
    columns = {
        "goal": f"{'≥' if goal.is_least else '≤'} {goal.limit:g}",
        "worst median": f"{found:.4g}",
        "reached": "yes" if goal.is_reached(found) else "no",
    }
    return Case(goal.name, columns)


def horizons(seeds: Sequence[int]) -> Sequence[Case]:
    """Compare horizons: what a longer lease costs, and what it gives a region that is disconnected for a minute."""
    cases = []
    for name, shape in HORIZON_SHAPES.items():
        made = [trace(name, shape, seed) for seed in seeds]
        for period in ("hour", "day", "month"):
            runs = [_cut_off(each, period) for each in made]
            columns = {
                "stranded with the region, % of the limit": figure([each.stranded for each in runs], 3),
                "that lasts, s": figure([each.lasts_s for each in runs], 1),
                "denied there, % of the requests while it is cut off": figure([each.denied for each in runs], 1),
            }
            cases.append(Case(f"{name}, by the {period}", columns))
    return cases


class PartitionState(NamedTuple):
    stranded: float
    lasts_s: float
    denied: float


def _cut_off(made: Trace, period: str) -> PartitionState:
    score, cut = Score(made), made.cut
    assert cut is not None
    ours = Leased(made, score, period)
    play_on(made, score, ours)
    ticks = range(cut.from_ms // TICK_MS, cut.to_ms // TICK_MS)
    asked = sum(units for tick in ticks for region, units in made.ticks[tick] if region == cut.region)
    denied = sum(score.wrong_by_second[cut.region][cut.from_ms // 1000 : cut.to_ms // 1000])
    asked_per_second = asked * 1000 / (cut.to_ms - cut.from_ms)
    return PartitionState(100 * ours.stranded / made.limit, ours.stranded / asked_per_second, 100 * denied / asked)


# --- pictures ---------------------------------------------------------------------------------------------------------


def _draw(name: str, file: str, run: Measured) -> None:
    """Plot the units admitted in each region and in all, against the limit."""
    so_far = [list(accumulate(each)) for each in run.by_second]
    busiest = sorted(range(len(so_far)), key=lambda region: -so_far[region][-1])
    seconds = range(len(so_far[0]))
    total = [sum(each[second] for each in so_far) for second in seconds]
    lines: dict[str, Sequence[int]] = {"the limit": [SHAPES[name].limit] * len(total), "all regions": total}
    lines |= {f"region {region}": so_far[region] for region in busiest[:MOST_LINES]}
    points = {each: [(float(second), units[second]) for second in seconds] for each, units in lines.items()}
    save(f"allocation-{file}", picture(f"Units admitted so far: {name}", "seconds", "units", points))
