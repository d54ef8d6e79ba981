"""If-Match and If-None-Match follow RFC 9110."""

import pytest
from fastapi import Request, Response

from coordinator.http.conditions import expectation, strong_tag, unless_known


def request(if_none_match: str | None) -> Request:
    headers = [] if if_none_match is None else [(b"if-none-match", if_none_match.encode())]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": headers})


def test_equal_bodies_have_equal_tags() -> None:
    assert strong_tag(b"a") == strong_tag(b"a") != strong_tag(b"b")


@pytest.mark.parametrize("known", ['"7"', 'W/"7"', '"1", "7"', '"1",W/"7"', "*"])
def test_a_matching_tag_answers_not_modified(known: str) -> None:
    response = unless_known(request(known), Response(b"body"), '"7"')
    assert (response.status_code, bytes(response.body), response.headers["ETag"]) == (304, b"", '"7"')


@pytest.mark.parametrize("known", [None, "", "7", '"77"', '"8", "9"', "garbage"])
def test_another_tag_answers_with_the_body(known: str | None) -> None:
    response = unless_known(request(known), Response(b"body"), '"7"')
    assert (response.status_code, response.headers["ETag"]) == (200, '"7"')


@pytest.mark.parametrize(
    ("if_match", "expected"),
    [
        *((known, True) for known in (None, "*", '"7"', '"7.yaml"', '"6", "7"')),
        *((other, False) for other in ('W/"7"', '"6"', "", "7")),
    ],
)
def test_a_replacement_must_name_the_current_version(if_match: str | None, expected: bool) -> None:
    assert expectation(if_match, lambda version: [f'"{version}"', f'"{version}.yaml"'])(7) is expected
