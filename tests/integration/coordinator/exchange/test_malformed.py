"""Only a region's token may report for it, and each malformed item of a call is refused alone and by name."""

import json
from typing import Any

import httpx
import pytest

from coordinator.exchange.routes import ExchangesAhead
from protocol.identifiers import lane_of
from protocol.messages import MAX_FROZEN_BYTES
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from tests.integration.coordinator.agent_harness import (
    EXPORTS,
    MAILS,
    Agent,
    AgentHarness,
    exchange,
    lease,
    leased,
    want,
)

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"fingerprint": "f", "exchanges": []}


@pytest.mark.parametrize("path", ["epochs", "exchanges", "signals"])
async def test_only_the_regions_own_token_may_report_for_it(
    agent_harness: AgentHarness, agent: Agent, path: str
) -> None:
    """The refusal depends neither on whether the region exists nor on the body."""
    method = "GET" if path == "signals" else "POST"
    for scopes, status in (((), 401), (("region:eu-west",), 403), (("admin", "quota:write"), 403)):
        client = await agent_harness.client(*scopes)
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


async def test_a_revoked_token_is_refused_at_once(agent_harness: AgentHarness, agent: Agent) -> None:
    assert (await agent.post(exchange(agent.frozen(1)))).status_code == 200
    await agent_harness.owner.execute("UPDATE token SET revoked_at = now()")
    assert (await agent.post(exchange(agent.frozen(2)))).status_code == 401


SEVEN_LONGEST = {f"{number}".zfill(64): "v" * 256 for number in range(7)}


def with_dimensions(dimensions: dict[str, str]) -> dict[str, Any]:
    reported = lease(consumed=1)
    return reported | {"lines": [reported["lines"][0] | {"dimensions": dimensions}]}


# Other fields of the batch, its leases, and the field that the refusal names.
MALFORMED: list[tuple[dict[str, Any], list[Any], str, str]] = [
    ({}, [lease(granted=-1)], "frozen.leases[0].granted", "minimum"),
    ({}, [lease(granted=2**53)], "frozen.leases[0].granted", "maximum"),
    ({}, [lease(granted=2**53 - 1, overage=1)], "frozen.leases[0].overage", "sum"),
    ({}, [lease(consumed=2**53 - 1, returned=1)], "frozen.leases[0].returned", "sum"),
    ({}, [lease(consumed=1.5, units=1)], "frozen.leases[0].consumed", "type"),
    ({}, [lease(consumed=1, units=-1)], "frozen.leases[0].lines[0].units", "minimum"),
    ({}, [with_dimensions({"n" * 65: "v"})], "frozen.leases[0].lines[0].dimensions." + "n" * 65, "max_length"),
    ({}, [with_dimensions(SEVEN_LONGEST)], "frozen.leases[0].lines[0].dimensions", "max_length"),
    ({}, [lease("exports")], "frozen.leases[0].quota", "quota_key"),
    ({}, [lease("exports:tenant=" + "a" * 512)], "frozen.leases[0].quota", "max_length"),
    ({}, [lease(period="2026-13")], "frozen.leases[0].period", "period"),
    ({}, [lease(period="2026-10_Foo:Bar_120_60", consumed=1)], "frozen.leases[0].period", "period"),
    ({}, [lease(period="2026-11_America:Argentina:ComodRivadavia_-180")], "frozen.leases[0].period", "period"),
    ({}, [lease(), lease()], "frozen.leases[1].quota", "unique"),
    ({}, [lease(MAILS)], "frozen.leases[0].quota", "lane"),
    ({"seq": 0}, [], "frozen.seq", "minimum"),
    ({"lane": 64}, [], "frozen.lane", "maximum"),
    ({"epoch": "1"}, [], "frozen.epoch", "type"),
]


@pytest.mark.parametrize(("other", "leases", "field", "rule"), MALFORMED)
async def test_a_malformed_batch_is_refused_alone(
    agent_harness: AgentHarness, agent: Agent, other: dict[str, Any], leases: list[Any], field: str, rule: str
) -> None:
    bad = exchange(agent.frozen(1, *leases, other=other), [want(waiting=1)])
    good = exchange(agent.frozen(1, quota=MAILS), [])
    refused, applied = (await agent.call(bad, good)).replies
    assert (refused.outcome, applied.outcome) == (ExchangeOutcome.REFUSED, ExchangeOutcome.APPLIED)
    assert refused.fault is not None
    assert (refused.fault.field, refused.fault.rule, refused.fault.again_in_ms) == (field, rule, None)
    assert (refused.receipt, refused.leases, refused.refused) == (None, [], [])
    assert await agent_harness.one("SELECT count(*) FROM report") == 1
    assert (await agent.say(1, demands=[want(waiting=1)])).outcome is ExchangeOutcome.APPLIED, (
        "its number was not taken"
    )


@pytest.mark.parametrize("frozen", ["{", "[]", '{"epoch":1,"epoch":1}', "[" * 5000, "null", "", 5, None])
async def test_invalid_frozen_bytes_are_refused_in_their_place(agent: Agent, frozen: Any) -> None:
    good = [exchange(agent.frozen(1)), exchange(agent.frozen(1, quota=MAILS))]
    replies = (await agent.call(good[0], {"frozen": frozen}, good[1])).replies
    assert [reply.outcome.value for reply in replies] == ["applied", "refused", "applied"]
    refused = replies[1]
    assert refused.fault is not None
    assert refused.fault.field.startswith("frozen")
    assert (refused.lane, refused.seq) == (None, None)


async def test_exchanges_that_are_not_objects_are_refused_in_their_places(agent: Agent) -> None:
    replies = (await agent.call(7, exchange(agent.frozen(1)), None, [], "x")).replies
    assert [reply.outcome.value for reply in replies] == ["refused", "applied", "refused", "refused", "refused"]


async def test_a_refused_batch_that_can_be_read_in_part_names_its_lane_and_number(agent: Agent) -> None:
    (reply,) = (await agent.call(exchange(agent.frozen(7, lease(granted=-1))))).replies
    assert (reply.lane, reply.seq) == (lane_of(EXPORTS, agent.lanes), 7)


async def test_a_batch_that_is_too_large_is_refused_alone(agent: Agent) -> None:
    large = exchange(" " * MAX_FROZEN_BYTES + agent.frozen(1))
    refused, applied = (await agent.call(large, exchange(agent.frozen(1, quota=MAILS)))).replies
    assert refused.fault is not None
    assert (refused.fault.field, refused.fault.rule) == ("frozen", "max_length")
    assert applied.outcome is ExchangeOutcome.APPLIED


# A malformed want, and its refusal.
BAD_WANTS: list[tuple[Any, str, str]] = [
    (want("exports:tenant=" + "%2F" * 170), "exports:tenant=" + "%2F" * 170, "live.demands[1].quota"),
    (want(demand_milli=9 * 10**17), EXPORTS, "live.demands[1].demand_milli"),
    (want(waiting=-1), EXPORTS, "live.demands[1].waiting"),
    (want("Exports:"), "Exports:", "live.demands[1].quota"),
    (want("exports:tenant=\0"), "exports:tenant=\0", "live.demands[1]"),
    (want(), EXPORTS, "live.demands[1].quota"),  # a second time
    (want(MAILS), MAILS, "belongs to lane"),
    ({"quota": 7}, "", "live.demands[1].quota"),
    ("exports", "", "live.demands[1]"),
    (None, "", "live.demands[1]"),
]


@pytest.mark.parametrize(("bad", "named", "reason"), BAD_WANTS)
async def test_a_malformed_want_is_refused_alone(agent: Agent, bad: Any, named: str, reason: str) -> None:
    third = _in_the_lane_of(EXPORTS, agent)
    reply = await agent.say(1, demands=[want(waiting=3), bad, want(third, waiting=2)])
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert [(each.quota, each.granted) for each in reply.leases] == [(EXPORTS, 3), (third, 2)]
    (refused,) = reply.refused
    assert (refused.quota, refused.refusal) == (named, GrantRefusal.INVALID)
    assert reason in (refused.reason or "")
    counted = f'exchange_items_refused_total{{kind="demand",reason="{refused.rule}",region="us-east"}} 1.0'
    assert counted in (await agent.client.get("/metrics")).text


def _in_the_lane_of(quota: str, agent: Agent) -> str:
    names = (f"exports:tenant=other{number}" for number in range(1000))
    return next(name for name in names if lane_of(name, agent.lanes) == lane_of(quota, agent.lanes))


@pytest.mark.parametrize("live", [7, [], {"demands": 7}, {"demands": None}])
async def test_reports_are_booked_whatever_the_wants_are(agent: Agent, live: Any) -> None:
    await agent.say(1, demands=[want(waiting=10)])
    batch = agent.frozen(2, lease(granted=10, consumed=7))
    (reply,) = (await agent.call({"frozen": batch, "live": live})).replies
    assert reply.outcome is ExchangeOutcome.APPLIED
    assert [(each.quota, each.refusal) for each in reply.refused] == [("", GrantRefusal.INVALID)]


async def test_wants_beyond_the_bound_are_refused_and_the_others_served(agent: Agent) -> None:
    key = _in_the_lane_of(EXPORTS, agent)
    reply = await agent.say(1, demands=[want(waiting=3), *[want("x")] * 499, want(key)])
    assert leased(reply).granted == 3
    assert len(reply.refused) == 500
    assert (reply.refused[-1].quota, reply.refused[-1].refusal) == (key, GrantRefusal.INVALID)


async def test_the_second_exchange_of_a_lane_in_a_call_is_refused(agent_harness: AgentHarness, agent: Agent) -> None:
    first, second = (await agent.call(exchange(agent.frozen(1)), exchange(agent.frozen(2)))).replies
    assert first.outcome is ExchangeOutcome.APPLIED
    assert second.fault is not None
    assert (second.fault.field, second.fault.rule) == ("frozen.lane", "unique")
    assert await agent_harness.one("SELECT count(*) FROM report") == 1


async def test_a_fully_refused_call_still_gets_versions_and_drain(agent_harness: AgentHarness, agent: Agent) -> None:
    await agent_harness.drain()
    response = await agent.call({"frozen": "{"})
    assert response.drain
    assert response.versions.policies > 0


async def test_repeated_names_within_one_exchange_refuse_only_that_one(agent: Agent) -> None:
    frozen, other = (json.dumps(agent.frozen(1, quota=quota)) for quota in (EXPORTS, MAILS))
    body = (
        '{"fingerprint":"one life","exchanges":[' + f'{{"frozen":{frozen},"frozen":{frozen}}},{{"frozen":{other}}}]}}'
    )
    headers = {"Content-Type": "application/json"}
    answer = await agent.client.post("/v1/regions/us-east/exchanges", content=body, headers=headers)
    assert [reply["outcome"] for reply in answer.json()["replies"]] == ["refused", "applied"]


async def test_a_call_without_exchanges_is_refused(agent: Agent) -> None:
    answer = await agent.client.post("/v1/regions/us-east/exchanges", json=BODY)
    assert answer.json()["invalid_parameters"][0]["field"] == "exchanges"


async def test_the_check_before_the_framework_answers_like_the_framework(
    agent_harness: AgentHarness, agent: Agent
) -> None:
    *others, ahead = agent_harness.app.user_middleware
    assert isinstance(ahead.cls, type)
    assert issubclass(ahead.cls, ExchangesAhead)
    path = f"/v1/regions/{agent.region}/exchanges"
    good = {"fingerprint": agent.fingerprint, "exchanges": [exchange(agent.frozen(1))]}
    wrong_lane = {**good, "exchanges": [exchange(agent.frozen(2, lease(MAILS)))]}
    twice = b'{"fingerprint":"f","fingerprint":"g","exchanges":[{"frozen":"{}"}]}'
    assert (await agent.client.post(path, json=good)).status_code == 200  # from here on it is a replay, both times
    questions: list[dict[str, Any]] = [
        {"json": good},
        {"json": wrong_lane},
        {"json": {**good, "exchanges": []}},
        {"content": b"{", "headers": {"Content-Type": "application/json"}},
        {"content": twice, "headers": {"Content-Type": "application/json"}},
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
            agent_harness.app.user_middleware[:], agent_harness.app.middleware_stack = (
                middleware,
                None,
            )  # it is built again
            answers.append(await agent.client.request(**asked))
        assert [_told(each) for each in answers[:1]] == [_told(each) for each in answers[1:]], question


def _told(answer: httpx.Response) -> tuple[int, dict[str, str], dict[str, Any]]:
    headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
    return answer.status_code, headers, {name: v for name, v in answer.json().items() if name != "request_id"}
