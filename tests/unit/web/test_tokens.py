"""Tokens have a fixed shape, are stored as hashes, and are read from the header."""

import re

import pytest
from starlette.requests import Request

from web.tokens import bearer_token, is_one_of, new_token, token_hash


def _request(*values: bytes) -> Request:
    return Request({"type": "http", "headers": [(b"authorization", value) for value in values]})


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(re.fullmatch(r"lh_[A-Za-z0-9_-]{43}", token) for token in tokens)


def test_the_hash_is_one_of_the_whole_token() -> None:
    token = new_token()
    assert len(token_hash(token)) == 32
    assert token_hash(token) == token_hash(token)
    assert token_hash(token) != token_hash(token[:-1])


@pytest.mark.parametrize("value", [b"Bearer lh_abc", b"bearer lh_abc", b"BEARER   lh_abc"])
def test_a_bearer_token_is_read(value: bytes) -> None:
    assert bearer_token(_request(value)) == "lh_abc"


@pytest.mark.parametrize(
    "values",
    [
        (),
        (b"",),
        (b"Bearer",),
        (b"Bearer ",),
        (b"lh_abc",),
        (b"Basic bGg6YQ==",),
        (b"Bearer lh_abc x",),
        (b"Bearer lh_\xff",),
        (b"Bearer " + b"a" * 8_193,),
        (b"Bearer lh_abc", b"Bearer lh_abc"),
    ],
)
def test_anything_else_is_no_token(values: tuple[bytes, ...]) -> None:
    assert bearer_token(_request(*values)) is None


def test_only_equal_tokens_are_the_same() -> None:
    token = new_token()
    hashes = [token_hash(token), token_hash("another")]
    assert is_one_of(token, hashes)
    assert is_one_of("another", hashes)
    assert not is_one_of(token, [])
    assert not any(is_one_of(other, hashes) for other in (token + "x", "ü", "", None))
