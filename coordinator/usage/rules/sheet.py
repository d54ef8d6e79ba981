"""Tables for finance: as a spreadsheet (CSV or XLSX) or for print (HTML).

A spreadsheet takes a text of CSV that begins with one of `=+-@`, a tab or a line break for a formula, and a text like
`007`, `1e5` or `2026-11` for a number or a date; a tenant's name may be such a text. So these texts get a leading
apostrophe, and so do texts that begin with an apostrophe. Removing one leading apostrophe restores any text
(`restored`). Numbers are written as numbers. XLSX needs none of this: its cells have types.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple

import xlsxwriter

Cell = str | int | None | datetime

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
# Numbers, dates and times of any form, and words that are values.
_LOOKS_LIKE_A_VALUE = re.compile(
    rf"\s*([\d.,:;/+\-\s%€$£¥()etz]*\d[\d.,:;/+\-\s%€$£¥()etz]*([ap]m?)?|true|false|"
    rf"\d+[\s./-]*({_MONTHS})[a-z]*[\s.,/\d-]*|({_MONTHS})[a-z]*[\s.,/-]*\d[\s.,/\d-]*)\s*",
    re.IGNORECASE,
)
BOM = "\ufeff"  # without it Excel and LibreOffice take UTF-8 for something else
LARGEST_EXACT = 10**15  # spreadsheets keep 15 digits


class Sheet(NamedTuple):
    title: str
    facts: Mapping[str, Cell]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    also: "Sheet | None" = None  # a second table in print, more rows in a spreadsheet
    of: Mapping[
        str, Cell
    ] = {}  # what all rows belong to: columns of a spreadsheet, so that rows of several can be joined

    def in_one_table(self) -> list[Sequence[Cell]]:
        """Return all rows under one heading. Columns with the same name are merged, and missing values are empty."""
        tables = [self] if self.also is None else [self, self.also]
        names = list(dict.fromkeys((*self.of, *(name for table in tables for name in table.columns))))
        rows = ({**self.of, **dict(zip(each.columns, row, strict=True))} for each in tables for row in each.rows)
        return [names, *([cells.get(name) for name in names] for cells in rows)]


def defused(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULAS) or _LOOKS_LIKE_A_VALUE.fullmatch(text) else text


def restored(text: str) -> str:
    return text.removeprefix("'")


def csv_file(rows: Iterable[Sequence[Cell]]) -> bytes:
    """Return the table as a file that a spreadsheet opens rightly by a double click."""
    return (BOM + csv_of(rows)).encode()


def xlsx_of(tables: Iterable[tuple[str, Sequence[Sequence[Cell]]]]) -> bytes:
    """Return named tables as an Excel file, the same bytes for the same tables. Times are in UTC.

    An integer of more digits than a spreadsheet keeps is written as a text.
    """
    file = io.BytesIO()
    book = xlsxwriter.Workbook(file, {"in_memory": True, "strings_to_urls": False, "default_date_format": _TIME})
    book.set_properties({"created": _CREATED})
    for name, rows in tables:
        sheet = book.add_worksheet(name)
        sheet.freeze_panes(1, 0)
        for number, row in enumerate(rows):
            for column, cell in enumerate(row):
                _write_cell(sheet, number, column, cell)
        sheet.autofit()
    book.close()
    return file.getvalue()


_TIME = "yyyy-mm-dd hh:mm:ss"
_CREATED = datetime(2000, 1, 1)  # noqa: DTZ001 - the same in each file


def _write_cell(sheet: Any, row: int, column: int, cell: Cell) -> None:
    if isinstance(cell, datetime):
        sheet.write_datetime(row, column, cell.astimezone(UTC).replace(tzinfo=None))
    elif isinstance(cell, int) and abs(cell) < LARGEST_EXACT:
        sheet.write_number(row, column, cell)
    elif cell is not None:
        sheet.write_string(row, column, str(cell))


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
th, td { text-align: left; padding: 2pt 6pt; border-bottom: 0.5pt solid #999; overflow-wrap: break-word; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
@media print { body { margin: 0; max-width: none; } }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>
<dl>{facts}</dl>
{tables}</body></html>
"""
