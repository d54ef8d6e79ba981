"""People reset keys of rates, and agents wait for the next reset."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest

from coordinator.resets import operations, read_resets
from protocol import messages
from tests.integration.coordinator.admin_harness import AdminHarness, problem

pytestmark = pytest.mark.anyio

DOCUMENT: dict[str, Any] = {
    "plans": {"free": {}},
    "default_plan": "free",
    "quotas": [
        {"name": "logins", "kind": "rate", "limit": "10/hour", "algorithm": "fixed_window"},
        {"name": "exports", "kind": "allowance", "limit": 100, "period": "month"},
        {"name": "reports", "kind": "concurrency", "limit": 6},
    ],
    "policies": [
        {"name": "login", "match": {"route": "/login"}, "by": ["tenant", "user"], "quota": "logins"},
        {"name": "again", "match": {"route": "/again"}, "by": ["user", "tenant"], "quota": "logins"},
        {"name": "address", "match": {"route": "/login"}, "by": ["ip"], "quota": "logins"},
        {"name": "export", "match": {"route": "/exports"}, "by": ["tenant"], "quota": "exports"},
        {"name": "report", "match": {"route": "/reports"}, "by": ["tenant"], "quota": "reports"},
    ],
}
JANE = {"quota": "logins", "subject": {"tenant": "acme", "user": "jane"}, "reason": "called"}


@pytest.fixture
async def limited(admin: httpx.AsyncClient) -> httpx.AsyncClient:
    assert (await admin.put("/v1/limits", json=DOCUMENT)).is_success
    return admin


async def test_a_reset_names_every_key_of_its_subject_and_is_in_the_audit(limited: httpx.AsyncClient) -> None:
    made = await limited.post("/v1/resets", json=JANE)
    keys = ["logins:tenant=acme,user=jane", "logins:user=jane,tenant=acme"]
    assert (made.status_code, made.json()["keys"]) == (201, keys), "each policy has its own order of fields"
    [listed] = (await limited.get("/v1/resets")).json()["data"]
    assert listed == made.json()
    for key in keys:
        [entry] = (await limited.get("/v1/audit", params={"object": key})).json()["data"]
        assert (entry["action"], entry["details"]["reason"]) == ("reset.added", "called")
    spelt = JANE | {"subject": {"ip": "::ffff:203.0.113.9"}}
    assert (await limited.post("/v1/resets", json=spelt)).json()["keys"] == ["logins:ip=203.0.113.9"]


async def test_the_same_request_again_is_the_same_reset(limited: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "once"}
    first, again = [await limited.post("/v1/resets", json=JANE, headers=headers) for _ in range(2)]
    assert (first.json(), again.headers["Idempotency-Replayed"]) == (again.json(), "true")
    assert len((await limited.get("/v1/resets")).json()["data"]) == 1


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({"quota": "loggins"}, "quota", "There is no quota"),
        ({"quota": "exports", "subject": {"tenant": "acme"}}, "quota", "POST /v1/adjustments"),
        ({"quota": "reports", "subject": {"tenant": "acme"}}, "quota", "slot_ttl"),
        ({"subject": {"user": "jane"}}, "subject", "tenant, user; or user, tenant; or ip"),
        ({"subject": {}}, "subject", "counted by"),
        ({"subject": {"tenant": "acme", "user": "a\nb"}}, "subject", "printable"),
        ({"reason": ""}, "reason", ""),
        ({"for": "ever"}, "for", ""),
    ],
)
async def test_what_cannot_be_reset_is_refused_by_name(
    limited: httpx.AsyncClient, changed: dict[str, Any], field: str, words: str
) -> None:
    refused = await limited.post("/v1/resets", json=JANE | changed)
    status, [(named, _)] = problem(refused)
    assert (status, named) == (422, field)
    assert words in refused.json()["invalid_parameters"][0]["reason"]
    assert (await limited.get("/v1/resets")).json()["data"] == []


async def test_numbers_grow_also_if_the_clock_goes_back(
    admin_harness: AdminHarness, limited: httpx.AsyncClient
) -> None:
    numbers = [(await limited.post("/v1/resets", json=JANE)).json()["number"]]
    admin_harness.clock.time -= timedelta(seconds=1)
    numbers += [(await limited.post("/v1/resets", json=JANE)).json()["number"] for _ in range(2)]
    assert numbers == sorted(set(numbers))


async def test_old_resets_make_room(
    admin_harness: AdminHarness, limited: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MOST_KEPT", 1)
    assert (await limited.post("/v1/resets", json=JANE)).status_code == 201
    assert (await limited.post("/v1/resets", json=JANE)).json()["type"] == "/problems/full"
    admin_harness.clock.time += operations.KEPT
    assert (await limited.post("/v1/resets", json=JANE)).status_code == 201
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM reset") == 1


async def test_pages_have_all_resets_in_order(limited: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_resets, "MAX_RESETS", 2)
    made = [(await limited.post("/v1/resets", json=JANE)).json()["number"] for _ in range(5)]
    found: list[int] = []
    since = 0
    while len(found) < 5:
        page = (await limited.get("/v1/resets", params={"since": since} if since else {})).json()
        found += [each["number"] for each in page["data"]]
        since = page["version"]
    assert (found, since) == (made, made[-1])
    assert messages.MAX_RESETS > 2


async def test_an_agent_waits_for_the_next_reset(admin_harness: AdminHarness, limited: httpx.AsyncClient) -> None:
    region = await admin_harness.caller("region:eu-west")
    first = (await limited.post("/v1/resets", json=JANE)).json()["number"]
    waiting = asyncio.create_task(region.get(f"/v1/resets?since={first}", timeout=30))
    await asyncio.sleep(0)
    second = (await limited.post("/v1/resets", json=JANE)).json()["number"]
    async with asyncio.timeout(60):
        found = (await waiting).json()
    assert (found["version"], [each["number"] for each in found["data"]]) == (second, [second])


async def test_scopes_of_resets(admin_harness: AdminHarness) -> None:
    for scopes, status in ((("quota:read",), 200), (("region:eu-west",), 200), (("usage:read",), 403), ((), 401)):
        assert (await (await admin_harness.caller(*scopes)).get("/v1/resets")).status_code == status
    for scopes, status in ((("quota:read",), 403), (("region:eu-west",), 403), ((), 401)):
        assert (await (await admin_harness.caller(*scopes)).post("/v1/resets", json=JANE)).status_code == status
