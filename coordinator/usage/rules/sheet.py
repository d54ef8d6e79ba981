"""Tables for finance: as a spreadsheet (CSV) or for print (HTML).

A spreadsheet takes a text that begins with one of `=+-@`, a tab or a line break for a formula, and a tenant's name may
be such a text. So these texts get a leading apostrophe, and so do texts that begin with an apostrophe. Removing one
leading apostrophe restores any text (`restored`). Numbers are written as numbers.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import NamedTuple

Cell = str | int | None | datetime

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "'")


class Sheet(NamedTuple):
    title: str
    facts: Mapping[str, Cell]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    also: "Sheet | None" = None  # a second table in print, more rows in a spreadsheet

    def in_one_table(self) -> list[Sequence[Cell]]:
        """Return all rows under one heading. Columns with the same name are merged, and missing values are empty."""
        if self.also is None:
            return [self.columns, *self.rows]
        names = list(dict.fromkeys((*self.columns, *self.also.columns)))
        tables = ((self.columns, self.rows), (self.also.columns, self.also.rows))
        named = [dict(zip(columns, row, strict=True)) for columns, rows in tables for row in rows]
        return [names, *([cells.get(name) for name in names] for cells in named)]


def defused(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULAS) else text


def restored(text: str) -> str:
    return text.removeprefix("'")


def csv_of(rows: Iterable[Sequence[Cell]]) -> str:
    """Return the table as CSV (RFC 4180). Missing values are empty."""
    text = io.StringIO()
    csv.writer(text).writerows([_written(cell) for cell in row] for row in rows)
    return text.getvalue()


def _written(cell: Cell) -> str | int:
    if isinstance(cell, str):
        return defused(cell)
    return cell if isinstance(cell, int) else _text(cell)


def _text(cell: Cell) -> str:
    if isinstance(cell, datetime):
        return cell.isoformat().replace("+00:00", "Z")
    return "" if cell is None else str(cell)


def html_of(sheet: Sheet) -> str:
    """Return the table as a page without scripts or external resources. Each printed sheet repeats the heading."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd>" for name, value in sheet.facts.items())
    tables = _table(sheet)
    if sheet.also is not None:
        tables += f"<h2>{escape(sheet.also.title)}</h2>\n{_table(sheet.also)}"
    return _PAGE.format(title=escape(sheet.title), style=_STYLE, facts=facts, tables=tables)


def _table(sheet: Sheet) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in sheet.rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table>\n"


def _cell(cell: Cell) -> str:
    kind = ' class="number"' if isinstance(cell, int) else ""
    return f"<td{kind}>{escape(_text(cell))}</td>"


_STYLE = """
@page { size: A4; margin: 18mm 15mm; }
body { font: 10pt/1.4 Georgia, serif; color: #000; max-width: 180mm; margin: 2em auto; }
h1 { font-size: 15pt; margin: 0 0 1em; }
h2 { font-size: 12pt; margin: 1.5em 0 0.5em; break-after: avoid; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1.5em; margin: 0 0 1.5em; }
dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
thead { display: table-header-group; }
tr { break-inside: avoid; }
th, td { text-align: left; padding: 2pt 6pt; border-bottom: 0.5pt solid #999; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
@media print { body { margin: 0; max-width: none; } }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>
<dl>{facts}</dl>
{tables}</body></html>
"""
