"""Bodies are parsed, and each mistake in them is named."""

import httpx
import pytest

from protocol.check import Check
from tests.unit.web.conftest import Order, assert_problem
from web.bodies import decode
from web.problems import InvalidParameter, Problem

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
GOOD = b'{"subject":{"tenant":"acme"}'  # left open, for more fields


async def _post(client: httpx.AsyncClient, body: bytes, content_type: str = "application/json") -> httpx.Response:
    return await client.post("/orders", content=body, headers={"content-type": content_type})


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "application/json ; profile=x",
    ],
)
async def test_json_is_read(client: httpx.AsyncClient, content_type: str) -> None:
    answer = await _post(client, GOOD + b',"cost":3}', content_type)
    assert (answer.status_code, answer.json()) == (201, {"tenant": "acme", "cost": 3})
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/jsonp"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_other_media_are_refused(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert_problem(await client.post("/orders", content=GOOD + b"}", headers=headers), 415, "unsupported-media-type")


NOT_JSON = {
    "empty": b"",
    "blank": b" \n",
    "open": b"{",
    "two": GOOD + b"} {}",
    "NaN": GOOD + b',"note":NaN}',
    "Infinity": GOOD + b',"note":-Infinity}',
    "leading zero": GOOD + b',"cost":01}',
    "comma": GOOD + b",}",
    "single quotes": b"{'subject':{}}",
    "not UTF-8 in a value": b'{"subject":{"tenant":"\xff"}}',
    "not UTF-8 in a name": GOOD + b',"\xff":1}',
    "overlong UTF-8": b'{"subject":{"tenant":"\xc0\xaf"}}',
    "surrogate in UTF-8": b'{"subject":{"tenant":"\xed\xa0\x80"}}',
    "half a pair": b'{"subject":{"tenant":"\\ud800"}}',
    "pair the wrong way round": b'{"subject":{"tenant":"\\udc00\\ud800"}}',
    "byte order mark": b"\xef\xbb\xbf" + GOOD + b"}",
    "UTF-16": (GOOD + b"}").decode().encode("utf-16"),
    "raw NUL": b'{"subject":{"tenant":"\x00"}}',
    "brackets": GOOD + b',"note":' + b"[" * 100_000,
    "closed brackets": GOOD + b',"note":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects": GOOD + b',"note":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_a_body_that_is_not_json_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    assert_problem(await _post(client, body), 400, "invalid-json")


BROKEN_RULES = {
    "array": (b"[]", "body", "type"),
    "brackets at the top": (b"[" * 100_000, "body", "type"),
    "null": (b"null", "body", "type"),
    "missing": (b"{}", "subject", "required"),
    "missing within": (b'{"subject":{}}', "subject.tenant", "required"),
    "type": (b'{"subject":{"tenant":5}}', "subject.tenant", "type"),
    "short": (b'{"subject":{"tenant":""}}', "subject.tenant", "min_length"),
    "long": (b'{"subject":{"tenant":"%s"}}' % (b"a" * 65), "subject.tenant", "max_length"),
    "unknown": (GOOD + b',"csot":1}', "csot", "unknown"),
    "unknown within": (b'{"subject":{"tenant":"a","x":1}}', "subject.x", "unknown"),
    "unknown and deep": (GOOD + b',"x":' + b"[" * 100_000, "x", "unknown"),
    "zero": (GOOD + b',"cost":0}', "cost", "minimum"),
    "negative": (GOOD + b',"cost":-1}', "cost", "minimum"),
    "2^53": (GOOD + b',"cost":9007199254740992}', "cost", "maximum"),
    "2^64": (GOOD + b',"cost":18446744073709551616}', "cost", "maximum"),
    "5000 digits": (GOOD + b',"cost":%s}' % (b"9" * 5000), "cost", "maximum"),
    "5000 digits in anything": (GOOD + b',"note":%s}' % (b"9" * 5000), "note", "maximum"),
    "1e400": (GOOD + b',"cost":1e400}', "cost", "maximum"),
    "fraction": (GOOD + b',"cost":1.5}', "cost", "type"),
    "whole float": (GOOD + b',"cost":1.0}', "cost", "type"),
    "boolean": (GOOD + b',"cost":true}', "cost", "type"),
    "in a list": (GOOD + b',"items":[{"tenant":"a"},{"tenant":1}]}', "items[1].tenant", "type"),
    "long list": (GOOD + b',"items":[%s]}' % b",".join([b'{"tenant":"a"}'] * 11), "items", "max_length"),
    "in a map": (GOOD + b',"labels":{"a":"12345"}}', "labels.a", "max_length"),
    "in the second entry of a map": (GOOD + b',"labels":{"a":"b","c":"12345"}}', "labels.c", "max_length"),
    "in an entry named as an index": (GOOD + b',"labels":{"[1]":"12345"}}', "labels.[1]", "max_length"),
    "in a deep entry of a map": (GOOD + b',"labels":{"a":%s}}' % (b"[" * 1500 + b"]" * 1500), "labels[...]", "type"),
    "beside 5000 digits": (GOOD + b',"labels":{"a":"12345"},"note":%s}' % (b"9" * 5000), "labels[...]", "max_length"),
    "in a map of a long body": (GOOD + b',"labels":{"a":"12345"}}' + b" " * 20_000, "labels[...]", "max_length"),
    "twice": (GOOD + b',"cost":1,"cost":2}', "cost", "duplicate"),
    "twice, escaped": (GOOD + b',"cost":1,"c\\u006fst":2}', "cost", "duplicate"),
    "twice within": (b'{"subject":{"tenant":"a","tenant":"b"}}', "tenant", "duplicate"),
    "twice in anything": (GOOD + b',"note":[{"a":1,"a":1}]}', "a", "duplicate"),
    "NUL": (b'{"subject":{"tenant":"\\u0000"}}', "body", "characters"),
    "NUL behind a backslash": (b'{"subject":{"tenant":"\\\\\\u0000"}}', "body", "characters"),
}


@pytest.mark.parametrize(("body", "field", "rule"), BROKEN_RULES.values(), ids=BROKEN_RULES.keys())
async def test_a_broken_rule_names_field_and_rule(
    client: httpx.AsyncClient, body: bytes, field: str, rule: str
) -> None:
    document = assert_problem(await _post(client, body), 422, "invalid-request")
    (invalid,) = document["invalid_parameters"]
    assert (invalid["field"], invalid["rule"]) == (field, rule)
    assert 0 < len(invalid["reason"]) <= 256


def test_a_broken_enumeration_names_its_values() -> None:
    raw = b'{"checks":[{"subject":{"tenant":"a"},"mode":"enfroce"}]}'
    with pytest.raises(Problem) as caught:
        decode(raw, dict[str, list[Check]])
    [fault] = caught.value.invalid_parameters
    assert fault == ("checks[0].mode", "enum", "Invalid enum value 'enfroce': write enforce, peek, adjust, refund")


async def test_an_escaped_backslash_before_u0000_is_text(client: httpx.AsyncClient) -> None:
    assert (await _post(client, b'{"subject":{"tenant":"\\\\u0000"}}')).status_code == 201


async def test_numbers_of_any_length_are_not_converted(client: httpx.AsyncClient) -> None:
    assert (await _post(client, GOOD + b',"note":%s}' % (b"9" * 4000))).status_code == 201


def _refusal(raw: bytes, within: str) -> tuple[str, list[InvalidParameter]]:
    with pytest.raises(Problem) as caught:
        decode(raw, Order, within)
    return caught.value.kind, list(caught.value.invalid_parameters)


@pytest.mark.parametrize(
    ("raw", "field", "rule"),
    [
        (b'{"subject":{"tenant":5}}', "exchanges[0].frozen.subject.tenant", "type"),
        (b"[]", "exchanges[0].frozen", "type"),
        (b"{}", "exchanges[0].frozen.subject", "required"),
        (b"{", "exchanges[0].frozen", "json"),
        (b"", "exchanges[0].frozen", "json"),
        (b"\xff", "exchanges[0].frozen", "json"),
        (GOOD + b',"cost":1,"cost":1}', "exchanges[0].frozen.cost", "duplicate"),
    ],
)
def test_json_within_json_is_a_field_of_the_outer(raw: bytes, field: str, rule: str) -> None:
    kind, (invalid,) = _refusal(raw, "exchanges[0].frozen")
    assert (kind, invalid.field, invalid.rule) == ("invalid-request", field, rule)
