"""Sums of units are `numeric`: a statement that casts one back to BIGINT fails for good once the sum passes 2^63."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[4] / "coordinator"
CAST = re.compile(r"\)\s*::\s*(?:big)?int\w*|\bCAST\s*\(", re.IGNORECASE)


def narrowed_sums(sql: str) -> Iterator[str]:
    """Find each expression with a sum in it that is cast to an integer type."""
    for cast in CAST.finditer(sql):
        begins, ends = _argument(sql, cast)
        expression = sql[begins:ends]
        if re.search(r"\bsum\s*\(", expression, re.IGNORECASE):
            yield expression


def _argument(sql: str, cast: re.Match[str]) -> tuple[int, int]:
    """Return the bounds of the expression that is cast, with the function's name before its parenthesis."""
    if not cast[0].startswith(")"):
        return cast.end(), sql.find(" AS ", cast.end())
    depth, place = 0, cast.start()
    while place >= 0:
        depth += {")": 1, "(": -1}.get(sql[place], 0)
        if depth == 0:
            break
        place -= 1
    return place - len(re.split(r"\W", sql[:place])[-1]), cast.start() + 1


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_no_statement_narrows_a_sum(path: Path) -> None:
    assert list(narrowed_sums(path.read_text())) == []


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sum(units)::bigint FROM transfer",
        "SELECT coalesce(sum(units), 0)::bigint",
        "SELECT (SELECT sum(a) FROM t - coalesce((SELECT sum(b)), 0))::int8",
        "SELECT sum(CASE kind WHEN 'debit' THEN -units ELSE units END) :: integer",
        "SELECT CAST(sum(units) AS bigint)",
    ],
)
def test_a_narrowed_sum_is_found(sql: str) -> None:
    assert len(list(narrowed_sums(sql))) == 1


@pytest.mark.parametrize("sql", ["SELECT sum(units), $1::bigint", "f(sum(x)), g(y)::bigint", "unnest($1::bigint[])"])
def test_other_casts_are_left_alone(sql: str) -> None:
    assert list(narrowed_sums(sql)) == []
