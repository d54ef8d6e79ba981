"""Who may speak for a region, and what is no exchange at all: refused by its field, with nothing booked."""

from typing import Any

import httpx
import pytest

from coordinator.api.agents import ExchangesAhead
from tests.integration.coordinator.agents.conftest import MAILS, Agent, Stand, exchange, lease, want

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"fingerprint": "f", "versions": {}, "exchanges": []}


@pytest.mark.parametrize("path", ["epochs", "exchanges", "signals"])
async def test_only_the_regions_own_token_speaks_for_it(stand: Stand, agent: Agent, path: str) -> None:
    """Whether the region exists makes no difference, nor what the body is."""
    method = "GET" if path == "signals" else "POST"
    for scopes, status in (((), 401), (("region:eu-west",), 403), (("admin", "quota:write"), 403)):
        client = await stand.client(*scopes)
        answers = [await client.request(method, f"/v1/regions/{name}/{path}") for name in ("us-east", "nowhere")]
        assert [answer.status_code for answer in answers] == [status, status]
        documents = [_without_ids(answer) for answer in answers]
        assert documents[0] == documents[1]
    unknown = {"Authorization": "Bearer lh_" + "x" * 43}
    answer = await agent.client.request(method, f"/v1/regions/us-east/{path}", headers=unknown)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


def _without_ids(answer: httpx.Response) -> dict[str, Any]:
    document: dict[str, Any] = answer.json()
    return {name: value for name, value in document.items() if name not in ("instance", "request_id")}


async def test_a_revoked_token_is_refused_at_once(stand: Stand, agent: Agent) -> None:
    assert (await agent.post(exchange(agent.frozen(1)))).status_code == 200
    await stand.owner.execute("UPDATE token SET revoked_at = now()")
    assert (await agent.post(exchange(agent.frozen(2)))).status_code == 401


MALFORMED: list[tuple[list[Any], dict[str, Any], dict[str, Any], str]] = [
    ([lease(granted=-1)], {}, {}, "frozen.leases[0].granted"),
    ([lease(granted=2**53)], {}, {}, "frozen.leases[0].granted"),
    ([lease(granted=2**53 - 1, overage=1)], {}, {}, "frozen.leases[0].overage"),
    ([lease(consumed=2**53 - 1, returned=1)], {}, {}, "frozen.leases[0].returned"),
    ([lease(consumed=1.5, units=1)], {}, {}, "frozen.leases[0].consumed"),
    ([lease(consumed=1, units=-1)], {}, {}, "frozen.leases[0].lines[0].units"),
    ([lease("exports")], {}, {}, "frozen.leases[0].quota"),
    ([lease(period="2026-13")], {}, {}, "frozen.leases[0].period"),
    ([lease(), lease()], {}, {}, "frozen.leases[1].quota"),
    ([], {"seq": 0}, {}, "frozen.seq"),
    ([], {"lane": 64}, {}, "frozen.lane"),
    ([], {"epoch": "1"}, {}, "frozen.epoch"),
    ([], {}, {"wants": [want(waiting=-1)]}, "live.wants[0].waiting"),
    ([], {}, {"wants": [want("Exports:")]}, "live.wants[0].quota"),
    ([], {}, {"wants": [want(), want()]}, "live.wants[1].quota"),
    ([lease(MAILS)], {}, {}, "frozen.lane"),  # another quota's lane
    ([], {}, {"wants": [want(MAILS)]}, "frozen.lane"),
]


async def test_what_is_malformed_is_named(stand: Stand, agent: Agent) -> None:
    for leases, other, live, field in MALFORMED:
        answer = await agent.post({"frozen": agent.frozen(1, *leases, other=other), "live": live})
        assert answer.status_code == 422, answer.text
        assert answer.json()["invalid_parameters"][0]["field"] == f"exchanges[0].{field}"
    assert await stand.one("SELECT count(*) FROM report") == 0


async def test_frozen_bytes_that_are_no_batch(agent: Agent) -> None:
    for frozen in ("{", "[]", '{"epoch":1,"epoch":1}', "[" * 5000, "null"):
        answer = await agent.post({"frozen": frozen})
        assert answer.status_code == 422
        assert answer.json()["invalid_parameters"][0]["field"].startswith("exchanges[0].frozen")


async def test_a_lane_speaks_once_in_a_call(stand: Stand, agent: Agent) -> None:
    answer = await agent.post(exchange(agent.frozen(1)), exchange(agent.frozen(2)))
    assert answer.status_code == 422
    assert answer.json()["invalid_parameters"] == [
        {"field": "exchanges[1].frozen.lane", "rule": "unique", "reason": "a lane speaks once in a call"}
    ]
    assert await stand.one("SELECT count(*) FROM report") == 0


async def test_a_call_without_exchanges_is_none(agent: Agent) -> None:
    answer = await agent.client.post("/v1/regions/us-east/exchanges", json=BODY)
    assert answer.json()["invalid_parameters"][0]["field"] == "exchanges"


async def test_what_is_ahead_of_the_framework_says_what_the_framework_says(stand: Stand, agent: Agent) -> None:
    *others, ahead = stand.app.user_middleware
    assert isinstance(ahead.cls, type)
    assert issubclass(ahead.cls, ExchangesAhead)
    path = f"/v1/regions/{agent.region}/exchanges"
    good = {"fingerprint": agent.fingerprint, "versions": {}, "exchanges": [exchange(agent.frozen(1))]}
    wrong_lane = {**good, "exchanges": [exchange(agent.frozen(2, lease(MAILS)))]}
    assert (await agent.client.post(path, json=good)).status_code == 200  # from here on it is a replay, both times
    questions: list[dict[str, Any]] = [
        {"json": good},
        {"json": wrong_lane},
        {"json": {**good, "exchanges": []}},
        {"content": b"{", "headers": {"Content-Type": "application/json"}},
        {"content": b"{}", "headers": {"Content-Type": "text/plain"}},
        {"json": good, "headers": {"Authorization": "Bearer no"}},
        {"json": good, "url": "/v1/regions/eu-west/exchanges"},
        {"json": good, "url": path + "/"},
        {"json": good, "method": "PUT"},
        {"method": "GET"},
    ]
    for question in questions:
        asked = {"method": "POST", "url": path} | question
        answers = []
        for middleware in ([*others, ahead], others):
            stand.app.user_middleware[:], stand.app.middleware_stack = middleware, None  # it is built anew
            answers.append(await agent.client.request(**asked))
        assert [_told(each) for each in answers[:1]] == [_told(each) for each in answers[1:]], question


def _told(answer: httpx.Response) -> tuple[int, dict[str, str], dict[str, Any]]:
    headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
    return answer.status_code, headers, {name: v for name, v in answer.json().items() if name != "request_id"}
