"""No cell of a spreadsheet is a formula, and each text can be restored."""

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from coordinator.usage.rules.sheet import Sheet, csv_of, html_of, restored
from coordinator.usage.rules.statement import StatementId, parse_statement_id

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.sampled_from(
    ["=1+1", "'", "''=", "-1", "@A1"]
)


@given(TEXTS)
def test_no_text_is_a_formula_and_each_can_be_restored(text: str) -> None:
    ((cell,),) = csv.reader(io.StringIO(csv_of([[text or "x"]]), newline=""))
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    assert restored(cell) == (text or "x")


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
