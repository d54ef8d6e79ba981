"""Replays of a document on a real Postgres: what is read, what is refused, and who may ask."""

from typing import Any

import httpx
import pytest

from coordinator.replays import read_traffic, replay_traffic
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness
from tests.integration.coordinator.decision_log.test_decision_log import EU, decision
from tests.integration.coordinator.decision_log.test_decision_log import batch as batch_of

pytestmark = pytest.mark.anyio

WINDOW = {"from": "2026-11-18T11:00:00Z", "to": "2026-11-18T13:00:00Z"}
TIGHT: dict[str, Any] = {
    "quotas": [{"name": "exports", "kind": "rate", "limit": "1 per 1 hour, burst 10"}],
    "policies": [{"name": "export", "by": ["tenant"], "quota": "exports", "match": {"route": "/v1/x"}}],
}


@pytest.fixture
async def admin(admin_harness: AdminHarness) -> httpx.AsyncClient:
    return await admin_harness.caller("admin")


async def log(admin_harness: AdminHarness, *decisions: Any, lost: int = 0) -> None:
    region = await admin_harness.caller("region:eu-west")
    headers = {"Content-Type": "application/json"}
    sent = await region.post(EU, content=batch_of(*decisions, lost=lost), headers=headers)
    assert sent.is_success, sent.text
    admin_harness.clock.move(minutes=5)


async def replayed(admin: httpx.AsyncClient, **query: str) -> Any:
    answer = await admin.post("/v1/limits:replay", json=TIGHT, params=WINDOW | query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_logged_costs_count_and_what_a_sample_stands_for(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    assert (await admin.put("/v1/limits", json=DOCUMENT)).is_success
    admin_harness.clock.move(seconds=1)
    denials = [decision(2 + n, count=4) for n in range(5)]  # each of them stated the cost 2
    sampled = [decision(2, tenant="bcme", outcome="admitted", weight=10.0, policies=[])]
    await log(admin_harness, *denials, *sampled, decision(60, reason="blocked", policies=[]), lost=3)
    found = await replayed(admin)
    assert (found["rows"], found["lost"], found["more_tenants"]) == (6, 3, 0)
    acme, bcme = found["tenants"]
    assert (acme["tenant"], acme["checks"], acme["denied"], acme["plus_minus"]) == ("acme", 20, 20, 0)
    assert (acme["would_deny"]["checks"], acme["would_deny"]["share"]) == (15, pytest.approx(0.75, abs=1e-3))
    assert (bcme["checks"], bcme["plus_minus"]) == (10, 19)
    [of_policy] = bcme["policies"]
    assert of_policy["unknown"] == [{"reason": "too_few_samples", "checks": 10}]
    assert [each["tenant"] for each in (await replayed(admin, tenant="bcme"))["tenants"]] == ["bcme"]
    before = await replayed(admin, to="2026-11-18T12:00:00Z")
    assert (before["rows"], before["tenants"], before["kept_from"]) == (0, [], "2026-11-18T00:00:00Z")
    assert (await replayed(admin, **{"from": "2026-11-01", "to": "2026-11-02"}))["tenants"] == []


async def test_a_version_is_replayed_and_changes_nothing(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    assert (await admin.put("/v1/limits", json=TIGHT)).is_success
    before = (await admin.get("/v1/limits")).json()["version"]
    await log(admin_harness, *(decision(n) for n in range(9)))
    answer = await admin.post(f"/v1/limits/{before}:replay", params=WINDOW)
    assert answer.json()["tenants"][0]["would_deny"]["checks"] == 4
    assert (await admin.post("/v1/limits/999:replay", params=WINDOW)).status_code == 404
    assert (await admin.get("/v1/limits")).json()["version"] == before


async def test_no_more_rows_are_read_than_one_replay_may(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_traffic, "MOST_ROWS", 5)
    await log(admin_harness, *(decision(-600 + n) for n in range(4)), *(decision(n) for n in range(4)))
    found = await replayed(admin, to="2026-11-18T12:04:00Z")
    assert (found["rows"], found["tenants"][0]["checks"]) == (4, 4)
    assert found["start"] < found["covered_from"] < "2026-11-18T12:00:00Z"
    monkeypatch.setattr(replay_traffic, "MOST_ROWS", 3)
    monkeypatch.setattr(read_traffic, "SLICES", 1)
    answer = await admin.post("/v1/limits:replay", json=TIGHT, params=WINDOW)
    assert (answer.status_code, answer.json()["invalid_parameters"][0]["field"]) == (422, "tenant")


async def test_admissions_that_are_not_logged_are_named(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    unlogged = DOCUMENT | {"decisions": {"admissions": "0%", "by_policy": {"search": "5%", "mail": "0%"}}}
    assert (await admin.put("/v1/limits", json=unlogged)).is_success
    await log(admin_harness, decision(1))
    assert (await replayed(admin))["not_logged"] == ["*", "mail"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"from": "2026-11-18", "to": "2026-11-18"}, "to"),
        ({"from": "2026-12-01", "to": "2026-12-02"}, "to"),
        ({"tenant": ""}, "tenant"),
    ],
)
async def test_a_bad_question_names_its_field(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, query: dict[str, str], field: str
) -> None:
    await log(admin_harness, decision(1))
    answer = await admin.post("/v1/limits:replay", json=TIGHT, params=query)
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["invalid_parameters"]] == [field]


async def test_a_document_with_faults_and_a_reader_are_refused(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    broken = {"policies": [{"name": "a", "by": [], "quota": "none"}]}
    assert (await admin.post("/v1/limits:replay", json=broken, params=WINDOW)).status_code == 422
    assert (await replayed(admin))["kept_from"] is None
    reader = await admin_harness.caller("quota:read")
    assert (await reader.post("/v1/limits:replay", json=TIGHT, params=WINDOW)).status_code == 403
