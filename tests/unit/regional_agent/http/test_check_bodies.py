"""A plain check is decoded in a shorter way, which accepts what `web.bodies.decode` accepts, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.check import Check
from regional_agent.http.batch import decode_check
from web.bodies import decode
from web.problems import Problem


def outcome(decoder: Any, raw: bytes) -> Any:
    try:
        return decoder(raw)
    except Problem as problem:
        return problem.kind, problem.detail


def alike(raw: bytes) -> None:
    assert outcome(decode_check, raw) == outcome(lambda body: decode(body, Check), raw)


NAMES = ["tenant", "user", "route", "cost", "mode", "subject", "operation_id", "other"]
TEXTS = ['"a"', '"\\u0061"', '"\\u0000"', '"é"', '"enforce"', '"peek"', '""', "1", "null", "1e3", '"\\""']
PAIRS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(TEXTS)), max_size=5)


def written(pairs: list[tuple[str, str]], space: str) -> str:
    return "{" + f",{space}".join(f'"{name}":{space}{value}' for name, value in pairs) + "}"


@given(PAIRS, PAIRS, st.sampled_from(["", " "]), st.booleans())
def test_both_ways_accept_and_refuse_the_same(
    subject: list[tuple[str, str]], rest: list[tuple[str, str]], space: str, twice: bool
) -> None:
    pairs = [("subject", written(subject, space)), *rest] + [("subject", written(subject, space))] * twice
    alike(written(pairs, space).encode())


@pytest.mark.parametrize(
    "body",
    [
        '{"subject":{"tenant":"a","tenant":"a"}}',
        '{"subject":{"tenant":"a"},"cost":null,"cost":5}',
        '{"subject":{"tenant":"a"},"mode":"peek","mode":"enforce"}',
        '{"subject":{"tenant":"a"},"mode":"enforce"}',
        '{"subject":{"tenant":null,"user":"b"}}',
        '{"subject":{"tenant":"a"}} {}',
        "",
        "[]",
        "{" * 10_000,
    ],
)
def test_repeated_names_and_broken_json_are_refused(body: str) -> None:
    alike(body.encode())


def test_a_plain_check_is_read() -> None:
    body = {"subject": {"tenant": "acme", "route": "/v1/x"}, "cost": 3, "operation_id": "o", "mode": "peek"}
    check = decode_check(json.dumps(body).encode())
    assert (check.subject.tenant, check.cost, check.operation_id, check.mode) == ("acme", 3, "o", "peek")
