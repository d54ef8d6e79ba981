"""Traces: the requests of each region over time. A seed makes the same requests for every limiter."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TICK_MS = 20
PER_SECOND = 5_000  # of all regions together
LIMIT = 1_000_000
LENGTH_S = 240  # a fifth more is asked for than there is

Arrivals = Sequence[tuple[int, int]]  # regions and their units
Demand = Callable[[float], Sequence[float]]  # units a second of each region, at that second
Makes = Callable[[random.Random, int], Demand]  # for so many regions


class Cut(NamedTuple):
    """A region that nothing reaches meanwhile, and that reaches nobody."""

    region: int
    from_ms: int
    to_ms: int


@dataclass(frozen=True)
class Trace:
    name: str
    seed: int
    regions: int
    limit: int
    ticks: Sequence[Arrivals]
    cut: Cut | None = None
    settled_at_ms: int | None = None  # a region was lost: from then on it gives back what it had
    round_trips_ms: Sequence[float] | None = None  # of each region, and no message is lost; otherwise by chance

    @property
    def length_ms(self) -> int:
        return len(self.ticks) * TICK_MS


class Shape(NamedTuple):
    """The expected demand of a trace, before chance."""

    regions: int
    demand: Makes
    limit: int = LIMIT
    length_s: float = LENGTH_S
    cut_s: tuple[float, float] | None = None
    is_lost: bool = False  # who is cut off; then its customers are served elsewhere
    cut_region: int | None = None  # by chance
    speed: float = 1.0  # so many times as much is asked for as the demand says
    round_trips_ms: Sequence[float] | None = None


def trace(name: str, shape: Shape, seed: int) -> Trace:
    chance = random.Random(f"{name}/{seed}")  # noqa: S311
    demand = shape.demand(chance, shape.regions)
    cut = None
    if shape.cut_s:
        from_s, to_s = shape.cut_s
        region = chance.randrange(shape.regions) if shape.cut_region is None else shape.cut_region
        cut = Cut(region, round(from_s * 1000), round(to_s * 1000))
        demand = without(demand, region, from_s) if shape.is_lost else demand
    ticks = list(_ticks(demand, shape, chance))
    settled_at_ms = cut.to_ms if cut and shape.is_lost else None
    return Trace(name, seed, shape.regions, shape.limit, ticks, cut, settled_at_ms, shape.round_trips_ms)


def _ticks(demand: Demand, shape: Shape, chance: random.Random) -> Iterator[Arrivals]:
    mean_s = shape.speed * TICK_MS / 1000
    for tick in range(round(shape.length_s * 1000 / TICK_MS)):
        rates = demand(tick * TICK_MS / 1000)
        drawn = ((region, _poisson(rate * mean_s, chance)) for region, rate in enumerate(rates) if rate)
        yield [(region, units) for region, units in drawn if units]


def _poisson(mean: float, chance: random.Random) -> int:
    if mean > 30:
        return max(0, round(chance.gauss(mean, math.sqrt(mean))))
    left, count = math.exp(-mean), 0
    product = chance.random()
    while product > left:
        product *= chance.random()
        count += 1
    return count


def without(demand: Demand, lost: int, from_s: float) -> Demand:
    """A region fails; from then on the others have its customers."""

    def left(second: float) -> Sequence[float]:
        rates = demand(second)
        if second < from_s:
            return rates
        total = sum(rates)
        return [0.0 if region == lost else rate * total / (total - rates[lost]) for region, rate in enumerate(rates)]

    return left


# --- shapes -----------------------------------------------------------------------------------------------------------


def _scaled(weights: Sequence[float], per_second: float = PER_SECOND) -> list[float]:
    total = sum(weights)
    return [per_second * weight / total for weight in weights]


def zipf(_: random.Random, regions: int) -> Demand:
    rates = _scaled([1 / rank for rank in range(1, regions + 1)])
    return lambda _: rates


def diurnal(day_s: float) -> Makes:
    """A short day, around the globe."""

    def shape(_: random.Random, regions: int) -> Demand:
        def rates(second: float) -> Sequence[float]:
            phases = (second / day_s - region / regions for region in range(regions))
            return _scaled([1 + 0.9 * math.cos(2 * math.pi * phase) for phase in phases])

        return rates

    return shape


def flash(from_s: float, to_s: float) -> Makes:
    """The smallest region is asked for ten times as much as all others are."""

    def shape(_: random.Random, regions: int) -> Demand:
        usual = _scaled([1 / rank for rank in range(1, regions + 1)], PER_SECOND / 2)
        crowded = [*usual[:-1], 5.0 * PER_SECOND]
        return lambda second: crowded if from_s <= second < to_s else usual

    return shape


def surge(from_s: float, to_s: float) -> Makes:
    """Everywhere at once, from half of what is usual here to four times as much."""

    def shape(_: random.Random, regions: int) -> Demand:
        few, many = _scaled([1.0] * regions, PER_SECOND / 2), _scaled([1.0] * regions, 2 * PER_SECOND)
        return lambda second: many if from_s <= second < to_s else few

    return shape


def on_off(chance: random.Random, regions: int) -> Demand:
    """Each region has bursts of its own, ten seconds each on average."""
    switches = [_switches(chance) for _ in range(regions)]

    def rates(second: float) -> Sequence[float]:
        return [2.0 * PER_SECOND / regions * _is_on(each, second) for each in switches]

    return rates


def _switches(chance: random.Random) -> list[float]:
    moments = [chance.uniform(-10, 0)]
    while moments[-1] < LENGTH_S:
        moments.append(moments[-1] + chance.expovariate(0.1))
    return moments


def _is_on(switches: Sequence[float], second: float) -> bool:
    return sum(1 for each in switches if each <= second) % 2 == 1


def rotating(every_s: float) -> Makes:
    """All demand is in one region, and then in the next one."""

    def shape(chance: random.Random, regions: int) -> Demand:
        order = chance.sample(range(regions), regions)

        def rates(second: float) -> Sequence[float]:
            hot = order[int(second / every_s) % regions]
            return [float(PER_SECOND) if region == hot else 0.0 for region in range(regions)]

        return rates

    return shape


SHAPES: Mapping[str, Shape] = {
    "Zipf over 3 regions": Shape(3, zipf),
    "Zipf over 10 regions": Shape(10, zipf),
    "Zipf over 50 regions": Shape(50, zipf),
    "diurnal, 10 regions": Shape(10, diurnal(120)),
    "flash crowd, 10 regions": Shape(10, flash(60, 75), length_s=360),
    "on/off, 10 regions": Shape(10, on_off),
    "rotating over 10 regions": Shape(10, rotating(10)),
    "a region of 10 is lost": Shape(10, zipf, cut_s=(80, 225), is_lost=True),
    "a region of 10 cut off for 60 s": Shape(10, zipf, cut_s=(80, 140)),
    "20,000 units, rotating over 50 regions": Shape(50, rotating(0.2), limit=20_000, length_s=5),
}
# The region with the most customers, and two limits: one is spent in minutes, one lasts for half a day.
HORIZON_SHAPES: Mapping[str, Shape] = {
    f"a limit of {limit:,}": Shape(10, zipf, limit=limit, length_s=150, cut_s=(80, 140), cut_region=0)
    for limit in (LIMIT, 200 * LIMIT)
}
