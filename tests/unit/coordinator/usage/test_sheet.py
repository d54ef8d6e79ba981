"""No cell of a spreadsheet is a formula, and each text can be restored."""

import csv
import io
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.usage.rules.sheet import Cell, Sheet, csv_of, html_of, restored, xlsx_of
from coordinator.usage.rules.statement import StatementId, parse_statement_id

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.sampled_from(
    ["=1+1", "'", "''=", "-1", "@A1"]
)


@given(TEXTS)
def test_no_text_is_a_formula_and_each_can_be_restored(text: str) -> None:
    ((cell,),) = csv.reader(io.StringIO(csv_of([[text or "x"]]), newline=""))
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    assert restored(cell) == (text or "x")


@pytest.mark.parametrize(
    "text",
    [
        "007",
        "1e5",
        "2026-11-05",
        "2026-11",
        "1,000.00",
        "10:30",
        "9489729697506728",
        "1 Nov 2026",
        "MAR1",
        "true",
        "50 %",
    ],
)
def test_a_text_that_a_spreadsheet_takes_for_a_value_stays_a_text(text: str) -> None:
    assert csv_of([[text]]).strip().strip('"') == f"'{text}"


@pytest.mark.parametrize("text", ["acme", "k_5585574065970e78", "mayor", "eu-west", "2026-11-19T13_Asia:Kolkata_330"])
def test_other_texts_are_left_alone(text: str) -> None:
    assert csv_of([[text]]).strip() == text


def test_rows_of_a_sheet_say_what_they_belong_to() -> None:
    sheet = Sheet("", {}, ["n"], [[1]], Sheet("", {}, ["m"], [[2]]), {"tenant": "acme"})
    assert sheet.in_one_table() == [["tenant", "n", "m"], ["acme", 1, None], ["acme", None, 2]]


def test_an_excel_file_is_the_same_bytes_each_time() -> None:
    table: list[tuple[str, list[list[Cell]]]] = [
        ("Sheet", [["007", 7, 10**17, datetime(2026, 11, 18, 9, tzinfo=UTC), None, "=1+1"]])
    ]
    assert xlsx_of(table) == xlsx_of(table)


def test_numbers_are_numbers_and_what_is_missing_is_empty() -> None:
    assert csv_of([["a", -5, None], ["b,c", 2**62, "-5"]]) == 'a,-5,\r\n"b,c",4611686018427387904,\'-5\r\n'


@given(TEXTS)
def test_no_text_is_markup(text: str) -> None:
    page = html_of(Sheet(text, {text: text}, [text], [[text]]))
    assert "<" not in page.partition("<h1>")[2].partition("</h1>")[0]
    assert page.count("<td>") == 1


@given(st.sampled_from(["2026-11", "2026-11-18T09"]), TEXTS)
def test_an_id_names_one_statement(period: str, tenant: str) -> None:
    assert parse_statement_id(str(StatementId(period, tenant))) == StatementId(period, tenant)
    assert parse_statement_id(f"{StatementId(period, tenant)}=") is None
