"""The table of real faults, as it is published."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.chaos.network.alerts import names_of_alerts
from tests.chaos.network.stack import OTHER, TARGET
from tests.chaos.network.trial import Record

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "faults.md"
BEGIN, END = "<!-- written by ./dev chaos --network -->\n", "<!-- end -->\n"
HEAD = [
    "fault", "lasted", "checks there: admitted, refused", "reasons", "agents' `/readyz`", "coordinator's `/readyz`",
    "other region: refused", "recovered after", "admitted = booked", "alerts",
]  # fmt: skip
NEVER_FIRED = "No fault here fires these alerts; their unit tests do (`compose/prometheus/alerts_test.yaml`): "


def publish(records: Iterable[Record], kind: str) -> None:
    """Write the table into its page, between the marks."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    found = list(records)
    others = sorted(names_of_alerts() - {name for record in found for name in record.alerts})
    never = NEVER_FIRED + ", ".join(map(_linked, others)) + "."
    PAGE.write_text(f"{before}{BEGIN}\nThe places were {kind}.\n\n{table(found)}\n\n{never}\n\n{END}{after}")


def table(records: Iterable[Record]) -> str:
    return "\n".join([_shown(HEAD), _shown(["---"] * len(HEAD)), *map(row, records)])


def _shown(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def row(record: Record) -> str:
    return _shown(_cells(record))


def _cells(record: Record) -> list[str]:
    here, there = record.answers[TARGET], record.answers[OTHER]
    return [
        record.fault.title,
        f"{record.lasted_s:.0f} s",
        f"{here.statuses[200]:,}, {here.refused:,}",
        _names(here.reasons),
        _names(record.agents),
        _names(record.coordinators),
        f"{there.refused:,}",
        "not in time" if record.recovered_s is None else f"{record.recovered_s:.1f} s",
        _books(record),
        ", ".join(map(_linked, sorted(record.alerts))) or f"none: {record.fault.no_alert}",
    ]


def _linked(alert: str) -> str:
    """Return the name of an alert, which leads to its entry in the runbook."""
    return f"[{alert}](../guides/runbook.md#{alert.lower()})"


def _names(found: Counter[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(found)) or "none"


def _books(record: Record) -> str:
    line = record.line
    text = f"{line.admitted:,} = {line.consumed:,}" if line.admitted == line.consumed else (
        f"{line.admitted:,} answered, {line.consumed:,} booked"
    )  # fmt: skip
    parts = [
        f"{line.unsure:,} sent again" if line.unsure else "",
        f"{line.suspense:,} in suspense" if line.suspense else "",
    ]
    return "; ".join([text, *filter(None, parts)])
