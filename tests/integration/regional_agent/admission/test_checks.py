"""POST /v1/check and related operations answer with everything real behind them."""

import asyncio

import httpx
import pytest

from tests.integration.regional_agent.world import EXPORT, Agent, World, running

pytestmark = pytest.mark.anyio

SEARCH = {"tenant": "acme", "route": "/v1/search", "method": "GET"}


def problem(answer: httpx.Response) -> tuple[int, str, list[str]]:
    assert answer.headers["Content-Type"] == "application/problem+json"
    body = answer.json()
    return answer.status_code, body["type"], [each["field"] for each in body.get("invalid_parameters", [])]


async def test_an_admission_has_the_remaining_units(world: World) -> None:
    agent = await world.agent()
    answer = await agent.check(cost=7)
    assert answer.status_code == 200
    body = answer.json()
    assert (body["allowed"], body["degraded"], body["denied_by"], body["retry_after_ms"]) == (True, None, None, 0)
    [policy] = body["policies"]
    assert (policy["policy"], policy["quota"], policy["kind"]) == ("export", "exports", "allowance")
    assert (policy["limit"], policy["remaining"]) == (100, 93)
    assert answer.headers["RateLimit-Policy"] == '"export";q=100;w=2592000'
    assert answer.headers["X-RateLimit-Remaining"] == "93"
    assert "Retry-After" not in answer.headers


async def test_a_denial_names_the_policy_and_when_to_retry(world: World) -> None:
    agent = await world.agent()
    for _ in range(2):
        answer = await agent.check(cost=60)
    assert problem(answer)[0] == 429
    body = answer.json()
    assert (body["allowed"], body["denied_by"]) == (False, "export")
    assert "'export'" in body["detail"]
    assert 0 < body["retry_after_ms"] <= int(answer.headers["Retry-After"]) * 1000
    assert answer.headers["X-RateLimit-Limit"] == "100"


async def test_a_request_without_a_matching_policy_is_allowed_without_figures(world: World) -> None:
    answer = await (await world.agent()).check({"tenant": "acme", "route": "/v1/other"})
    assert (answer.status_code, answer.json()["policies"]) == (200, [])
    assert "RateLimit" not in answer.headers


async def test_a_rate_admits_its_regions_share_of_the_burst(world: World) -> None:
    agent = await world.agent()
    answers = await asyncio.gather(*(agent.check(SEARCH) for _ in range(25)))
    assert [answer.status_code for answer in answers].count(200) == 10  # a third of 30
    denied = next(answer for answer in answers if answer.status_code == 429).json()
    assert denied["policies"][0]["retry_after_ms"] > 1_000_000
    assert await world.usage() == 0, "a rate is not money: the ledger does not know it"


async def test_a_check_of_concurrency_is_refused_except_as_a_peek(world: World) -> None:
    """A slot that a check took would never be released."""
    agent = await world.agent()
    report = {"tenant": "acme", "route": "/v1/reports"}
    for mode in ("enforce", "adjust"):
        answer = await agent.check(report, mode=mode)
        assert problem(answer) == (422, "/problems/hold-needed", [])
        assert "'report'" in answer.json()["detail"]
    peek = await agent.check(report, mode="peek")
    [policy] = peek.json()["policies"]
    assert (policy["kind"], policy["limit"]) == ("concurrency", 6)
    assert (policy["share"], policy["remaining"]) == (2, 2), "a third of six"
    assert peek.headers["RateLimit-Policy"] == '"report";q=6;qu="concurrent-requests"'


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b'{"subject": {"tenant": "acme"}, "cots": 1}', 422, "cots"),
        (b'{"subject": {"tenant": "acme", "shoe": "44"}}', 422, "subject.shoe"),
        (b'{"subject": {"tenant": "acme"}, "cost": -1}', 422, "cost"),
        (b'{"subject": {"tenant": "acme"}, "cost": 0}', 422, "cost"),
        (b'{"subject": {"tenant": "acme"}, "cost": 1.5}', 422, "cost"),
        (b'{"subject": {"tenant": "acme"}, "cost": "1"}', 422, "cost"),
        (b'{"subject": {"tenant": "acme"}, "cost": 9007199254740993}', 422, "cost"),
        (b'{"subject": {"tenant": "acme"}, "mode": "maybe"}', 422, "mode"),
        (b'{"subject": {"route": "/v1/exports"}}', 422, "subject.tenant"),
        (b"{}", 422, "subject"),
        (b'{"subject"', 400, None),
        (b'{"subject": {"tenant": "\xff"}}', 400, None),
        (b"[" * 100_000, 422, "body"),
        (b'{"subject": ' * 50_000, 422, "subject.subject"),
        (b"", 400, None),
    ],
)
async def test_bad_input_names_the_field_and_changes_nothing(
    world: World, body: bytes, status: int, field: str | None
) -> None:
    agent = await world.agent()
    answer = await agent.http.post("/v1/check", content=body, headers={"Content-Type": "application/json"})
    found, _, fields = problem(answer)
    assert (found, fields) == (status, [] if field is None else [field])
    assert (await agent.check(mode="peek")).json()["policies"][0]["remaining"] == 100


async def test_too_much_and_the_wrong_kind_are_refused(world: World) -> None:
    agent = await world.agent()
    json = {"Content-Type": "application/json"}
    assert problem(await agent.http.post("/v1/check", content=b" " * 10_000_000, headers=json))[0] == 413
    assert problem(await agent.http.post("/v1/check", content=b"{}", headers={"Content-Type": "text/plain"}))[0] == 415
    assert problem(await agent.http.get("/v1/check"))[0] == 405
    assert problem(await agent.http.get("/v1/chess"))[0] == 404


async def test_one_operation_sent_ten_times_at_once_is_charged_once(world: World) -> None:
    agent = await world.agent()
    answers = await asyncio.gather(*(agent.check(cost=5, operation_id="op-1") for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert (await agent.check(mode="peek")).json()["policies"][0]["remaining"] == 95
    assert problem(await agent.check(cost=6, operation_id="op-1")) == (
        422,
        "/problems/operation-conflict",
        ["operation_id"],
    )
    other = await agent.check(EXPORT | {"tenant": "globex"}, cost=6, operation_id="op-1")
    assert other.status_code == 200, "another tenant's ids are its own"


async def test_a_batch_answers_each_check_as_if_alone(world: World) -> None:
    agent = await world.agent()
    checks = [
        {"subject": EXPORT, "cost": 60},
        {"subject": EXPORT, "cost": 60},
        {"subject": {"route": "/v1/exports"}},
        {"subject": EXPORT, "cost": 40},
    ]
    items = (await agent.http.post("/v1/check:batch", json={"checks": checks})).json()["items"]
    assert [item["status"] for item in items] == [200, 429, 422, 200]
    assert items[1]["answer"]["denied_by"] == "export"
    assert items[2]["problem"]["type"] == "/problems/invalid-request"
    for wrong in ([], checks[:1] * 1001):
        assert problem(await agent.http.post("/v1/check:batch", json={"checks": wrong}))[0] == 422


async def test_status_shows_the_lease_with_its_totals(world: World) -> None:
    agent = await world.agent()
    await agent.check(cost=5)
    status = (await agent.http.get("/v1/status")).json()
    assert (status["region"], status["faults"], status["stopped_lanes"]) == ("us-east", [], {})
    [lease] = status["leases"]
    assert (lease["quota"], lease["consumed"]) == ("exports:tenant=acme", 5)
    assert lease["granted"] - lease["consumed"] - lease["returned"] == lease["available"]
    assert 0 < lease["expires_in_ms"] <= 120_000


async def test_readiness_and_metrics_show_the_state(world: World) -> None:
    agent = await world.agent()
    assert (await agent.http.get("/readyz")).status_code == 200
    await agent.check(cost=5)
    await agent.check(cost=500)
    text = (await agent.http.get("/metrics")).text
    assert 'leasehold_checks_total{answer="allowed",policy="export",reason=""} 1.0' in text
    assert 'leasehold_checks_total{answer="denied",policy="export",reason="never"} 1.0' in text
    assert "leasehold_policy_version 0.0" not in text


async def test_an_agent_reachable_by_others_requires_its_token(world: World) -> None:
    settings = world.settings("us-east", host="0.0.0.0", service_token="0123456789abcdef")
    async with running(settings) as agent:
        await agent.ready()
        for header in ({}, {"Authorization": "Bearer 0123456789abcdeF"}):
            answer = await agent.http.post("/v1/check", json={"subject": EXPORT}, headers=header)
            assert problem(answer)[0] == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        good = {"Authorization": "Bearer 0123456789abcdef"}
        assert (await agent.http.post("/v1/check", json={"subject": EXPORT}, headers=good)).status_code == 200
        assert (await agent.http.get("/healthz")).status_code == 200


async def test_an_agent_without_policies_is_not_ready(world: World) -> None:
    world.weather.swallows_requests = True
    async with running(world.settings("us-east")) as agent:
        assert problem(await agent.check())[0] == 503
        assert (await agent.http.get("/readyz")).status_code == 503


def remaining(answer: httpx.Response) -> int:
    units: int = answer.json()["policies"][0]["remaining"]
    return units


async def test_two_agents_of_a_region_share_everything(world: World) -> None:
    agents: list[Agent] = [await world.agent() for _ in range(2)]
    answers = await asyncio.gather(*(agents[i % 2].check() for i in range(120)))
    assert [answer.status_code for answer in answers].count(200) == 100
    for agent in agents:
        assert (await agent.check(mode="peek")).status_code == 429
