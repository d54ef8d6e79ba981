"""The main promise of Leasehold, checked from outside through stack.json and HTTP alone."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from leasehold.local_stack.calls import call
from leasehold.local_stack.processes import wait_until
from tests.end_to_end.launching import PATIENCE_S, SHARED, STOP_S, Launcher, running

pytestmark = pytest.mark.anyio

EXPORT = {"tenant": "acme", "route": "/v1/exports", "method": "POST"}
REFUSED = EXPORT | {"tenant": "refused"}
EACH = 500
AT_ONCE = 32


@pytest.mark.extended
async def test_1500_checks_in_three_regions_admit_1000(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, "--json") as first:
        answers = await _check_everywhere(first.stack["agents"])
        assert Counter(answer.status_code for answer in answers) == {200: 1000, 429: 500}
        _denials_are_as_promised([answer for answer in answers if answer.status_code == 429])
        await _finance_sees_it_all(first)
        await _agents_deny_at_once(first)
        first.process.terminate()
        assert first.ended(STOP_S) == 0

    with running(data, "--json") as second:
        await _finance_sees_it_all(second)
        assert second.check("eu-west").status == 429


async def _check_everywhere(agents: dict[str, str]) -> list[httpx.Response]:
    """Check in every region at once, with as many requests in parallel as a busy service has."""
    by_region = await asyncio.gather(*(_check(url) for url in agents.values()))
    return [answer for answers in by_region for answer in answers]


async def _check(url: str) -> list[httpx.Response]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:

        async def one() -> httpx.Response:
            async with gate:
                return await http.post("/v1/check", json={"subject": EXPORT, "cost": 1})

        return await asyncio.gather(*(one() for _ in range(EACH)))


def _denials_are_as_promised(denials: list[httpx.Response]) -> None:
    for denial in denials:
        body = denial.json()
        assert denial.headers["Content-Type"] == "application/problem+json"
        # Near the end one region may have no units while another still has some.
        assert body["type"] in ("/problems/quota-exceeded", "/problems/no-lease")
        assert body["status"] == 429
        assert (body["allowed"], body["denied_by"], body["degraded"]) == (False, "export", None)
        assert body["policies"][0]["limit"] == 1000
        assert int(denial.headers["Retry-After"]) >= 1
        assert denial.headers["X-RateLimit-Limit"] == "1000"
        assert denial.headers["RateLimit-Policy"].startswith('"export";q=1000')
        assert denial.headers["X-Request-Id"] == body["request_id"]


async def _finance_sees_it_all(launcher: Launcher) -> None:
    def by_region() -> dict[str, int]:
        lines = launcher.read("/v1/usage?group_by=region&tenant=acme")["data"]
        return {line["dimensions"]["region"]: line["units"] for line in lines}

    assert wait_until(lambda: sum(by_region().values()) == 1000, PATIENCE_S), by_region()
    assert set(by_region()) == set(launcher.stack["agents"])
    [period] = launcher.read("/v1/periods")["data"]
    reconciliation = launcher.read(f"/v1/periods/{period['id']}/reconciliation")
    assert (reconciliation["status"], reconciliation["drift"], reconciliation["findings"]) == ("balanced", 0, [])
    [quota] = reconciliation["quotas"]
    assert (quota["funded"], quota["consumed"], quota["outstanding"], quota["overage"]) == (1000, 1000, 0, 0)
    assert sum(region["consumed"] for region in quota["regions"]) == 1000
    assert {(region["drift"], region["chain"]) for region in quota["regions"]} == {(0, "intact")}


async def _agents_deny_at_once(launcher: Launcher) -> None:
    """Check that no request waits for more once nothing is left."""
    url = launcher.stack["agents"]["us-east"]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        assert (await http.post("/v1/check", json={"subject": EXPORT})).status_code == 429
        waits = _counter((await http.get("/metrics")).text, "leasehold_lease_waits_total")
        for _ in range(20):
            assert (await http.post("/v1/check", json={"subject": EXPORT})).status_code == 429
        # The agent requests more by itself after half a second or more, and one request may have waited for that.
        assert _counter((await http.get("/metrics")).text, "leasehold_lease_waits_total") <= waits + 2


def _counter(text: str, name: str) -> float:
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


@pytest.mark.xdist_group(SHARED)
async def test_bad_calls_get_the_right_refusal_and_book_nothing(stack: Launcher) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
        for expected, method, url, options in _bad_calls(stack.stack):
            answer = await http.request(method, url, **options)
            found = (answer.status_code, answer.headers["Content-Type"])
            assert found == (expected, "application/problem+json"), f"{method} {url} {str(options)[:200]}"
            assert answer.json()["status"] == expected
    url = stack.stack["agents"]["us-east"]
    assert call("POST", f"{url}/v1/check", body={"subject": REFUSED}).status == 200
    assert wait_until(lambda: _units(stack, REFUSED["tenant"]) > 0, PATIENCE_S)
    assert _units(stack, REFUSED["tenant"]) == 1, "the good call"


def _bad_calls(stack: dict[str, Any]) -> list[tuple[int, str, str, dict[str, Any]]]:
    agent, coordinator, tokens = stack["agents"]["us-east"], stack["coordinator"], stack["tokens"]
    check, usage, exchanges = f"{agent}/v1/check", f"{coordinator}/v1/usage", "/v1/regions/us-east/exchanges"

    def bearing(scope: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {tokens[scope]}"}

    def body(content: bytes) -> dict[str, Any]:
        return {"content": content, "headers": {"Content-Type": "application/json"}}

    exchange = {"fingerprint": "f", "exchanges": [{"frozen": '{"epoch":1,"lane":0,"seq":1}'}]}
    return [
        (401, "GET", usage, {}),
        (401, "GET", usage, {"headers": {"Authorization": "Bearer lh_wrong"}}),
        (403, "GET", usage, {"headers": bearing("quota:read")}),
        (403, "PUT", f"{coordinator}/v1/limits", {"headers": bearing("quota:read"), "json": {}}),
        (403, "POST", coordinator + exchanges, {"headers": bearing("region:eu-west"), "json": exchange}),
        (403, "POST", coordinator + exchanges, {"headers": bearing("admin"), "json": exchange}),
        (403, "POST", f"{coordinator}/v1/regions/mars/exchanges", {"headers": bearing("region:eu-west"), "json": {}}),
        (422, "POST", coordinator + exchanges, {"headers": bearing("region:us-east"), "json": {"fingerprint": "f"}}),
        (422, "POST", check, {"json": {"subject": REFUSED, "price": 1}}),
        (422, "POST", check, {"json": {"subject": REFUSED, "cost": -1}}),
        (422, "POST", check, {"json": {"subject": REFUSED, "cost": 2**53 + 1}}),
        (413, "POST", check, body(b" " * 10_000_000)),
        (400, "POST", check, body(b'{"subject": ')),
        (400, "POST", check, body(b'{"subject": {"tenant": "\xff\xfe"}}')),
        (415, "POST", check, {"content": b"tenant=acme", "headers": {"Content-Type": "text/plain"}}),
        (431, "POST", check, {"json": {"subject": REFUSED}, "headers": {"X-Long": "x" * 20_000}}),
        (404, "GET", f"{agent}/v1/nothing", {}),
        (405, "DELETE", check, {}),
        (422, "POST", check, {"json": {"subject": REFUSED | {"route": "/v1/reports"}}}),
    ]


@pytest.mark.xdist_group(SHARED)
async def test_one_operation_sent_ten_times_at_once_is_charged_once(stack: Launcher) -> None:
    body = {"subject": EXPORT | {"tenant": "repeats"}, "cost": 7, "operation_id": "order-17"}
    url = stack.stack["agents"]["ap-south"]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        answers = await asyncio.gather(*(http.post("/v1/check", json=body) for _ in range(10)))
    assert {(answer.status_code, json.dumps(answer.json())) for answer in answers} == {
        (200, json.dumps(answers[0].json()))
    }
    assert call("POST", f"{url}/v1/check", body=body | {"operation_id": "order-18", "cost": 1}).status == 200
    assert wait_until(lambda: _units(stack, "repeats") == 7 + 1, PATIENCE_S)


def _units(launcher: Launcher, tenant: str) -> int:
    return sum(line["units"] for line in launcher.read(f"/v1/usage?tenant={tenant}")["data"])
