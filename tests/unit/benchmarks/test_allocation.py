"""Small traces of each kind over the rules that ship: what must hold of them, and about how well they do.

The network of the benchmark loses, delays and doubles messages, so this is also where the rules meet each other.
"""

from collections.abc import Mapping

import pytest

from benchmarks.allocation import rates
from benchmarks.allocation.leased import Leased
from benchmarks.allocation.others import Chunks, StaticSplit
from benchmarks.allocation.run import play, play_on
from benchmarks.allocation.score import Score, jain, omniscient
from benchmarks.allocation.traces import SHAPES, Shape, diurnal, flash, on_off, rotating, trace, zipf
from protocol.limits.document import DEFAULT_HORIZON
from tests.budget import cases

LIMIT = 40_000  # for eight seconds
SMALL: Mapping[str, Shape] = {
    "Zipf": Shape(5, zipf, LIMIT, 10),
    "diurnal": Shape(5, diurnal(6), LIMIT, 10),
    "flash": Shape(5, flash(3, 4), LIMIT, 10),
    "on/off": Shape(5, on_off, LIMIT, 24),
    "rotating": Shape(5, rotating(2), LIMIT, 11),
    "lost": Shape(5, zipf, LIMIT, 18, cut_s=(4, 10), is_lost=True),
    "cut off": Shape(5, zipf, LIMIT, 12, cut_s=(3, 6)),
    "short": Shape(20, rotating(0.2), 10_000, 4),
}


# Rough: without recalls, or without grants that shrink at the end, they are several times as many.
MOST_WRONG_PER_1000 = {"Zipf": 8, "flash": 15, "on/off": 10, "rotating": 20, "short": 25}
LEAST_ADMITTED = {"lost": 0.985, "flash": 0.99, "diurnal": 0.995}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", cases([1, 2], short=1))
def test_nothing_is_admitted_beyond_the_limit_and_hardly_anything_is_left(name: str, seed: int) -> None:
    run = play(trace(name, SMALL[name], seed), Leased)
    assert run.over == 0
    assert run.utilisation >= LEAST_ADMITTED.get(name, 0.999)
    assert run.wrong_per_1000 <= MOST_WRONG_PER_1000.get(name, 1000)
    assert run.asking <= run.bound


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_says_all(name: str) -> None:
    made = trace(name, SMALL[name], 1)
    assert made == trace(name, SMALL[name], 1)
    assert play(made, Leased) == play(made, Leased)


OUTAGE = Shape(3, zipf, 10_000_000, 170, cut_s=(100, 160), cut_region=0, speed=0.02)


OUTAGES = [(1, "month"), (1, "hour"), (1, "day"), *((seed, "month") for seed in range(2, 6))]


@pytest.mark.parametrize(("seed", "period"), cases(OUTAGES, short=1))
def test_a_minute_without_the_coordinator_is_survived(seed: int, period: str) -> None:
    """All regions but one are reached; that one is asked for as much as before, and 99 % of the limit are free."""
    score, most = play_outage(seed, period)
    assert sum(score.wrong_by_second[0]) == 0
    assert most <= 9 * OUTAGE.limit // 100


def test_a_short_horizon_does_not_strand_as_much() -> None:
    score, stranded = play_outage(1, "hour", "10s")
    assert sum(score.wrong_by_second[0]) > 0
    assert 4 * stranded < play_outage(1, "month")[1]


def play_outage(seed: int, period: str, horizon: str = DEFAULT_HORIZON) -> tuple[Score, int]:
    """Return what was denied, and the units that were in the region when it was cut off."""
    made = trace("outage", OUTAGE, seed)
    score = Score(made)
    limiter = Leased(made, score, period, horizon)
    play_on(made, score, limiter)
    return score, limiter.stranded


def test_what_others_do_is_worse_where_it_should_be() -> None:
    made = trace("Zipf", SMALL["Zipf"], 1)
    static, chunks, ours = (play(made, makes) for makes in (StaticSplit, Chunks, Leased))
    assert static.utilisation < 0.9 < chunks.utilisation < ours.utilisation
    assert static.wrong_per_1000 > chunks.wrong_per_1000 > ours.wrong_per_1000
    assert static.messages == 0


def test_who_knows_all_at_once_spends_all_in_the_order_in_which_it_is_asked_for() -> None:
    made = trace("Zipf", SMALL["Zipf"], 1)
    assert sum(omniscient(made)) == made.limit
    assert omniscient(made) == sorted(omniscient(made), reverse=True)


def test_jain_is_one_where_all_have_the_same_part() -> None:
    assert jain([0.5, 0.5]) == 1
    assert jain([1.0, 0.0]) == 0.5


def test_the_traces_of_the_benchmark_ask_for_more_than_there_is() -> None:
    for name in ("Zipf over 3 regions", "20,000 units, rotating over 50 regions"):
        made = trace(name, SHAPES[name], 1)
        assert sum(units for tick in made.ticks for _, units in tick) > made.limit


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least"),
    [("Zipf, steady", 0.98), ("diurnal", 0.98), ("flash crowd", 0.975), ("on/off", 0.92), ("rotating", 0.87)],
)
def test_a_shared_rate_goes_where_it_is_asked_for(name: str, least: float) -> None:
    run = rates.play(name, 1, rates.MAKES["Leasehold, adaptive"])
    assert run.conforming >= least
    assert run.conforming > rates.play(name, 1, rates.MAKES["static split"]).conforming
    assert run.overshoot_s <= 0.25
    assert (run.reaction_ms or 0) <= 1500


@pytest.mark.parametrize("name", ["surge, everywhere at once", "rotating"])
def test_a_strict_one_is_never_more_than_it_is_and_a_seed_says_all(name: str) -> None:
    strict = rates.MAKES["Leasehold, strict"]
    run = rates.play(name, 1, strict)
    assert run == rates.play(name, 1, strict)
    assert run.overshoot_s == 0
