"""Query strings and cursors: nothing is guessed, everything that is wrong is said."""

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.queries import Cursor, Query, a_flag, a_page_size, a_text, read_cursor, write_cursor
from web.problems import Problem


def query(text: str) -> Query:
    return Query(Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": text.encode()}))


def faults(asked: Query) -> list[tuple[str, str]]:
    with pytest.raises(Problem) as refused:
        asked.checked()
    assert refused.value.kind == "invalid-request"
    return [(fault.field, fault.rule) for fault in refused.value.invalid_parameters]


def test_what_is_given_is_read_and_what_is_not_is_the_default() -> None:
    asked = query("dry_run=true&tenant=b&tenant=a&tenant=b")
    assert asked.one("dry_run", a_flag, default=False) is True
    assert asked.one("page_size", a_page_size, 7) == 7
    assert asked.many("tenant", a_text) == ["b", "a"]
    asked.checked()


def test_every_fault_is_named_at_once() -> None:
    asked = query("dry_run=yes&page_size=1&page_size=2&limit=5&tenant=%00&Tenant=x")
    asked.one("dry_run", a_flag, default=False)
    asked.one("page_size", a_page_size, 7)
    asked.many("tenant", a_text)
    assert faults(asked) == [
        ("Tenant", "unknown"),
        ("dry_run", "format"),
        ("limit", "unknown"),
        ("page_size", "once"),
        ("tenant", "format"),
    ]


def test_so_many_values_are_refused() -> None:
    asked = query("&".join(f"tenant=t{number}" for number in range(101)))
    asked.many("tenant", a_text)
    assert faults(asked) == [("tenant", "length")]


@pytest.mark.parametrize("text", ["", "0", "-1", "10001", "1.0", "1e3", " 1", "٣", "9" * 5000])
def test_page_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        a_page_size(text)


@given(st.builds(Cursor, question=st.text(), after=st.text("abc/é \u4e2d"), skip=st.integers(0, 2**53 - 1)))
def test_a_cursor_is_read_as_it_was_written(cursor: Cursor) -> None:
    assert read_cursor(write_cursor(cursor)) == cursor


@given(st.text() | st.text("abcdef0123456789-_=", max_size=60))
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="next"):
        read_cursor(text)


@pytest.mark.parametrize(
    "cursor", [Cursor("q", "a\0b"), Cursor("q", skip=-1), Cursor("q", skip=2**53), Cursor("q", as_of=-1)]
)
def test_a_forged_cursor_reaches_no_database(cursor: Cursor) -> None:
    with pytest.raises(ValueError, match="next"):
        read_cursor(write_cursor(cursor))


def test_a_cursor_leads_on_in_its_own_list_only() -> None:
    cursor = query("").page("regions").next(after="eu-west")
    following = query(f"page_after={cursor}")
    assert following.page("regions").cursor.after == "eu-west"
    following.checked()
    elsewhere = query(f"page_after={cursor}")
    elsewhere.page("subscriptions")
    assert faults(elsewhere) == [("page_after", "question")]
