"""Runs of the same traces side by side, on virtual time and on real processes; and what the ledger has of these."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from benchmarks.allocation import rates
from benchmarks.allocation.playing import Played
from benchmarks.allocation.score import Measured
from benchmarks.frame import Case, Figure, Lines, figure

POINTS = 2.0
MOST_OVERSHOOT_S = 0.25  # of the limit, beyond the bucket: as on virtual time


class Books(NamedTuple):
    """The ledger's totals of one allowance, beside the answers that the generator got."""

    limit: int
    admitted: int
    no_answer: int  # admitted or not, nobody knows
    consumed: int
    suspense: int
    outstanding: int
    status: str  # of the whole period's reconciliation

    @property
    def is_exact(self) -> bool:
        missing = self.admitted - self.consumed - self.suspense
        return -self.no_answer <= missing <= 0 and self.consumed <= self.limit and self.status == "balanced"


R = TypeVar("R")


@dataclass(frozen=True)
class Both(Generic[R]):
    """Runs of one trace."""

    simulated: Sequence[R]
    slower: Sequence[R]  # simulated, with exchanges that take as long as they did on this machine
    real: Sequence[R]
    played: Sequence[Played]
    books: Sequence[Books] = ()  # of an allowance


Units: TypeAlias = Mapping[str, Both[Measured]]
Shared: TypeAlias = Mapping[str, Both[rates.Measured]]


class Column(NamedTuple, Generic[R]):
    of: Callable[[R], float]
    digits: int
    points: float | None = None  # so many points is one of it; None: it is not compared by points


COLUMNS: Mapping[str, Column[Measured]] = {
    "admitted ÷ omniscient": Column(lambda each: each.utilisation, 4, 100),
    "wrongly denied per 1,000": Column(lambda each: each.wrong_per_1000, 2, 0.1),
    "longest run of them, ms": Column(lambda each: each.longest_ms, 0),
    "Jain": Column(lambda each: each.jain, 4, 100),
    "over-admitted": Column(lambda each: each.over, 0),
}
RATE_COLUMNS: Mapping[str, Column[rates.Measured]] = {
    "conforming ÷ omniscient": Column(lambda each: each.conforming, 4, 100),
    "overshoot, s of the limit": Column(lambda each: each.overshoot_s, 3),
    "Jain against max-min": Column(lambda each: each.jain, 4, 100),
}


def tables(units: Units, shared: Shared) -> dict[str, Lines]:
    return {
        **{name: _beside(COLUMNS, both) for name, both in units.items()},
        **{name: _beside(RATE_COLUMNS, both) for name, both in shared.items()},
        "the ledger, when all was reported": [_booked(name, both.books) for name, both in units.items()],
        "the requests": [
            *(_sent(name, both.played) for name, both in units.items()),
            *(_sent(name, both.played) for name, both in shared.items()),
        ],
        "goals": goals(units, shared),
    }


def _beside(columns: Mapping[str, Column[R]], both: Both[R]) -> Sequence[Case]:
    def figures(runs: Sequence[R]) -> dict[str, Figure | str]:
        return {name: figure([each.of(run) for run in runs], each.digits) for name, each in columns.items()}

    apart: dict[str, Figure | str] = {
        name: "" if each.points is None else f"{points_apart(each, both.real, both.simulated):+.2f}"
        for name, each in columns.items()
    }
    return [
        Case("simulated", figures(both.simulated)),
        Case("the same, exchanges as slow as here", figures(both.slower)),
        Case("real", figures(both.real)),
        Case("points apart", apart),
    ]


def points_apart(column: Column[R], real: Sequence[R], simulated: Sequence[R]) -> float:
    assert column.points is not None
    here, there = (statistics.median([column.of(run) for run in runs]) for runs in (real, simulated))
    return column.points * (here - there)


def _booked(name: str, books: Sequence[Books]) -> Case:
    columns: dict[str, Figure | str] = {
        each: f"{sum(getattr(one, each) for one in books):,}"
        for each in ("limit", "admitted", "consumed", "suspense", "outstanding")
    }
    missing = sum(each.admitted - each.consumed - each.suspense for each in books)
    is_exact = all(each.is_exact for each in books)
    return Case(name, columns | {"difference": f"{missing:,}", "reconciled": books[-1].status, "exact": _yes(is_exact)})


def _sent(name: str, played: Sequence[Played]) -> Case:
    admitted_ms = [ms for each in played for ms in each.admitted_after_ms]
    late_ms = [ms for each in played for ms in each.late_ms]
    columns: dict[str, Figure | str] = {
        "requests": f"{sum(each.answers.total() for each in played):,}",
        "neither admitted nor denied": f"{sum(each.others for each in played):,}",
        "ms until admitted, p50": f"{_percentile(admitted_ms, 50):.1f}",
        "p99": f"{_percentile(admitted_ms, 99):.1f}",
        "ms the generator was late, p99": f"{_percentile(late_ms, 99):.1f}",
        "at most": f"{max(late_ms):.1f}",
        "an exchange, ms beyond the distance": ", ".join(f"{ms:.0f}" for ms in beyond_ms(played)),
    }
    return Case(name, columns)


def beyond_ms(played: Sequence[Played]) -> list[float]:
    """For each region: what the machine itself took. Of a rate there are few exchanges; of none it is nothing."""
    by_region = zip(*(each.beyond_ms for each in played), strict=True)
    return [statistics.mean(each) for each in by_region]


def _percentile(samples: Sequence[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100)[percent - 1] if len(samples) > 1 else 0.0


def goals(units: Units, shared: Shared) -> Sequence[Case]:
    over = {name: sum(each.over for each in both.real) for name, both in units.items()}
    inexact = {name: sum(not each.is_exact for each in both.books) for name, both in units.items()}
    overshoot_s = {name: max(each.overshoot_s for each in both.real) for name, both in shared.items()}
    return [
        _goal("over-admission, units", over, 0),
        _goal("runs of which the ledger differs from what was admitted", inexact, 0),
        *_within(COLUMNS, units),
        *_within(RATE_COLUMNS, shared),
        _goal("overshoot beyond the bucket, s of the limit", overshoot_s, MOST_OVERSHOOT_S),
    ]


def _within(columns: Mapping[str, Column[R]], runs: Mapping[str, Both[R]]) -> Iterator[Case]:
    for name, column in columns.items():
        if column.points is not None:
            apart = {about: points_apart(column, both.real, both.simulated) for about, both in runs.items()}
            yield _goal(f"{name}, points apart", apart, POINTS)
            slower = {about: points_apart(column, both.real, both.slower) for about, both in runs.items()}
            yield _goal("of exchanges as slow as here", slower, POINTS)


def _goal(name: str, found: Mapping[str, float], most: float) -> Case:
    """Return the trace with the worst result."""
    where = max(found, key=lambda about: abs(found[about]))
    columns = {
        "goal": f"≤ {most:g}",
        "worst": f"{found[where]:.2f}",
        "where": where if found[where] else "",
        "beyond the goal": "; ".join(name for name, each in found.items() if abs(each) > most),
        "reached": _yes(abs(found[where]) <= most),
    }
    return Case(name, columns)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
