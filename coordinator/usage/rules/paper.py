"""Statements as paper: a page that can be sent to a customer, shown in a browser or made into a PDF.

It has the seller and the customer, the period in its own time zone, a line for each thing that is billed with totals,
and the limits that mattered. Kinds of lines are sentences, and a number is never broken over two lines. What only an
auditor needs is small print at the end.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, tzinfo
from html import escape
from itertools import groupby
from typing import NamedTuple

from coordinator.limits.rules.history import LimitInForce, LimitKind
from coordinator.usage.rules.statement import LineAdjustment, LineKind, MonthStatement, Statement
from protocol.counting import counted

SHORTEST_LIMIT = timedelta(minutes=1)  # a limit that was in force for less mattered to no invoice


class Party(NamedTuple):
    """A seller or a customer: its name and the lines of its address."""

    lines: Sequence[str]
    ids: Sequence[str] = ()


class PaperLine(NamedTuple):
    """A billed line. Lines of one quota stand together."""

    quota: str
    text: str
    units: int


class Paper(NamedTuple):
    title: str
    facts: Sequence[tuple[str, str]]
    seller: Party
    customer: Party
    lines: Sequence[PaperLine]
    limits: Sequence[Sequence[str]]
    small_print: Sequence[tuple[str, str]]


_KINDS = {
    LineKind.USAGE: "Usage",
    LineKind.OVERAGE: "Usage beyond the limit",
    LineKind.LATE_USAGE: "Late usage of {period}",
    LineKind.LATE_OVERAGE: "Late usage beyond the limit of {period}",
    LineKind.ESTIMATED: "Estimate in place of missing reports",
    LineKind.REPLACED: "Earlier estimate, replaced by reports",
    LineKind.CREDIT: "Credit of {units} units",
    LineKind.DEBIT: "Debit of {units} units",
    LineKind.WRITE_OFF: "Not billed: {units} units",
}


def paper_of_statement(statement: Statement, customer: Party, seller: Party, zone: tzinfo) -> Paper:
    lines = [
        PaperLine(each.quota, _text(each.kind, each.charge_period, each.adjustment, each.region), each.units)
        for each in statement.lines
    ]
    limits = [each for each in statement.limits if each.ends_at - each.starts_at >= SHORTEST_LIMIT]
    return Paper(
        title="Usage statement",
        facts=[
            ("Period", _span(statement.starts_at, statement.ends_at, zone)),
            ("Time zone", str(zone)),
            ("Status", _status(is_final=statement.is_final)),
        ],
        seller=seller,
        customer=customer,
        lines=_sorted(lines),
        limits=[_limit_row(each, zone) for each in limits],
        small_print=[
            ("Statement", statement.id),
            ("Ledger position", str(statement.as_of)),
            *([("Root of the period", statement.root)] if statement.root else []),
        ],
    )


def paper_of_month(statement: MonthStatement, customer: Party, seller: Party, zone: tzinfo) -> Paper:
    """Return the paper of a month: what is alike in all its periods is one line."""
    first, last = statement.periods[0], statement.periods[-1]
    lines = [
        PaperLine(each.quota, _text(each.kind, "an earlier period", each.adjustment), each.units)
        for each in statement.lines
    ]
    return Paper(
        title="Usage statement",
        facts=[
            ("Month", datetime.strptime(statement.month, "%Y-%m").strftime("%B %Y")),  # noqa: DTZ007 - no time
            (counted(len(statement.periods), "period"), _span(first.starts_at, last.ends_at, zone)),
            ("Time zone", str(zone)),
            ("Status", _status(is_final=statement.is_final)),
        ],
        seller=seller,
        customer=customer,
        lines=_sorted(lines),
        limits=[],
        small_print=[("Tenant", statement.tenant), ("Ledger position", str(statement.as_of))],
    )


def _sorted(lines: Iterable[PaperLine]) -> list[PaperLine]:
    return sorted(lines, key=lambda line: line.quota)  # lines of a quota keep their order


def _status(*, is_final: bool) -> str:
    return "Final" if is_final else "Preliminary: usage that is reported later is not included"


def _text(kind: LineKind, period: str, adjustment: LineAdjustment | None, region: str | None = None) -> str:
    units = f"{abs(adjustment.units):,}" if adjustment else ""
    text = _KINDS[kind].format(period=period, units=units)
    if adjustment:
        return f"{text}: {adjustment.reason} ({adjustment.document})"
    return f"{text}, {region}" if region else text


_LIMITS = {LimitKind.CREDIT: "credit", LimitKind.DEBIT: "debit", LimitKind.CARRY_OVER: "carried over"}


def _limit_row(limit: LimitInForce, zone: tzinfo) -> list[str]:
    why = _LIMITS.get(limit.kind) or (f"plan {limit.plan}" if limit.plan else "all plans")
    reason = limit.reason if limit.kind is LimitKind.OVERRIDE else None
    quota = _readable(limit.quota_key.partition(":")[0])
    return [quota, reason or why, _span(limit.starts_at, limit.ends_at, zone), f"{limit.units:,}"]


def _readable(quota: str) -> str:
    return quota.replace("_", " ").replace("-", " ").capitalize()


def _span(start: datetime, end: datetime, zone: tzinfo) -> str:
    """Return an interval as people write it: whole days without times, the last day included."""
    start, end = start.astimezone(zone), end.astimezone(zone)
    if start.time() == end.time() == datetime.min.time():
        last = end - timedelta(days=1)
        return _date(start) if start.date() == last.date() else f"{_date(start)} to {_date(last)}"
    until = f"{end:%H:%M}" if end.date() == start.date() else f"{_date(end)} {end:%H:%M}"
    return f"{_date(start)} {start:%H:%M} to {until}"


def _date(moment: datetime) -> str:
    return f"{moment.day} {moment:%b %Y}"


# --- the page ---------------------------------------------------------------------------------------------------------


def page_of(paper: Paper) -> str:
    """Return the paper as HTML, without scripts or external resources."""
    return _PAGE.format(
        style=_STYLE,
        title=escape(f"{paper.title}: {next(iter(paper.customer.lines), '')}"),
        heading=escape(paper.title),
        seller=_address(paper.seller),
        customer=_address(paper.customer),
        facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in paper.facts),
        lines=_lines(paper.lines),
        limits=_limits(paper.limits) if paper.limits else "",
        small="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in paper.small_print),
    )


def _address(party: Party) -> str:
    first, *rest = party.lines or ("",)
    lines = [
        f"<strong>{escape(first)}</strong>",
        *map(escape, rest),
        *(f"<small>{escape(each)}</small>" for each in party.ids),
    ]
    return "<br>".join(lines)


def _lines(lines: Sequence[PaperLine]) -> str:
    """Return the table of billed lines, with a total of each quota: units of several quotas are not added up."""
    quotas = [(quota, list(its)) for quota, its in groupby(lines, key=lambda line: line.quota)]
    rows = []
    for quota, (first, *others) in quotas:
        rows += [
            _row((_readable(quota), first.text), first.units),
            *(_row(("", each.text), each.units) for each in others),
        ]
        if others and len(quotas) > 1:
            total = sum(line.units for line in [first, *others])
            rows.append(_row(("", f"Total of {_readable(quota)}"), total, "subtotal"))
    if len(quotas) <= 1:
        rows.append(_row(("Total", ""), sum(line.units for line in lines), "total"))
    return _table(("Service", "Description"), "Units", rows)


def _limits(limits: Sequence[Sequence[str]]) -> str:
    rows = [f"<tr>{''.join(map(_cell, texts))}{_number(units)}</tr>" for *texts, units in limits]
    return "<h2>Limits</h2>" + _table(("Service", "Limit of", "Period"), "Units", rows)


def _table(texts: Sequence[str], number: str, rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in texts) + f'<th scope="col" class="number">{number}</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table>"


def _row(texts: Sequence[str], units: int, kind: str = "") -> str:
    return f"<tr{f' class={kind}' if kind else ''}>{''.join(map(_cell, texts))}{_number(f'{units:,}')}</tr>"


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _number(text: str) -> str:
    return f'<td class="number">{text}</td>'


_STYLE = """
@page { size: A4; margin: 18mm; @bottom-right { content: counter(page) " / " counter(pages); font-size: 8pt } }
body { font: 10pt/1.45 "DejaVu Sans", "Liberation Sans", Arial, sans-serif; color: #111 }
body { max-width: 174mm; margin: 2em auto }
header { display: flex; justify-content: space-between; gap: 2em; margin-bottom: 2.5em }
header div { max-width: 48%; overflow-wrap: break-word }
.seller { text-align: right }
small { color: #555 }
h1 { font-size: 16pt; margin: 0 0 0.8em }
h2 { font-size: 11pt; margin: 2em 0 0.5em; break-after: avoid }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.1em 1.5em; margin: 0 0 2em }
dt { color: #555 }
dd { margin: 0 }
table { border-collapse: collapse; width: 100% }
thead { display: table-header-group }
tr { break-inside: avoid }
th, td { text-align: left; vertical-align: top; padding: 3pt 6pt 3pt 0; border-bottom: 0.5pt solid #ccc }
td { overflow-wrap: break-word }
.number { text-align: right; padding-right: 0; white-space: nowrap; font-variant-numeric: tabular-nums }
.subtotal td { font-weight: bold }
.total td { font-weight: bold; border-top: 1pt solid #111; border-bottom: 1pt solid #111 }
footer { margin-top: 3em; font-size: 7.5pt; color: #555 }
footer dl { margin: 0 }
footer dd { overflow-wrap: anywhere }
@media print { body { margin: 0; max-width: none } }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body><header><div class="customer">{customer}</div><div class="seller">{seller}</div></header>
<h1>{heading}</h1>
<dl>{facts}</dl>
{lines}
{limits}
<footer><dl>{small}</dl></footer></body></html>
"""
