"""An Idempotency-Key makes a change happen once and be answered alike each time."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest

from coordinator.access.idempotency_records import ABANDONED_AFTER, KEPT_FOR, Attempt, claim, delete_expired
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, problem

pytestmark = pytest.mark.anyio

LAUNCH: dict[str, Any] = {"quota": "exports", "subject": {"tenant": "acme"}, "limit": 5000, "reason": "a launch"}


@pytest.fixture(autouse=True)
async def limits(admin: httpx.AsyncClient) -> None:
    assert (await admin.put("/v1/limits", json=DOCUMENT)).status_code == 200


async def post(client: httpx.AsyncClient, key: str, **changed: Any) -> httpx.Response:
    return await client.post("/v1/overrides", json=LAUNCH | changed, headers={"Idempotency-Key": key})


async def overrides(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/v1/overrides")).json()["data"]
    return found


async def test_a_repeated_request_is_answered_alike_and_executed_once(admin: httpx.AsyncClient) -> None:
    first, again = await post(admin, "k1"), await post(admin, "k1")
    assert (first.status_code, again.status_code, first.json()) == (201, 201, again.json())
    assert (first.headers["Location"], first.headers.get("Idempotency-Replayed")) == (again.headers["Location"], None)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert len(await overrides(admin)) == 1
    await post(admin, "k2")
    assert len(await overrides(admin)) == 2


async def test_another_request_with_the_key_is_refused(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    await post(admin, "k1")
    answer = await post(admin, "k1", limit=6000)
    assert (problem(answer), answer.json()["type"]) == ((422, []), "/problems/idempotency-key-reused")
    elsewhere = await admin.post("/v1/blocks", json=LAUNCH, headers={"Idempotency-Key": "k1"})
    assert elsewhere.json()["type"] == "/problems/idempotency-key-reused"
    # A key belongs to its caller: the same text of another caller is another key.
    assert (await post(await admin_harness.caller("quota:write"), "k1", limit=6000)).status_code == 201


async def test_a_refusal_is_stored_too(admin: httpx.AsyncClient) -> None:
    """This holds even if the reason is gone: a caller that wants another answer uses another key."""
    put = {"json": {"plan": "gold"}, "headers": {"Idempotency-Key": "k1"}}
    first = await admin.put("/v1/subscriptions/acme", **put)  # type: ignore[arg-type]
    quotas = [quota | {"limit": quota["limit"] | {"*": 100}} if isinstance(quota["limit"], dict) else quota
              for quota in DOCUMENT["quotas"]]  # fmt: skip
    gold = {**DOCUMENT, "plans": {**DOCUMENT["plans"], "gold": {}}, "quotas": quotas}
    assert (await admin.put("/v1/limits", json=gold)).status_code == 200
    again = await admin.put("/v1/subscriptions/acme", **put)  # type: ignore[arg-type]
    assert problem(first) == problem(again) == (422, [("plan", "known")])


async def test_every_operation_that_changes_something_takes_a_key(admin: httpx.AsyncClient) -> None:
    changes: list[tuple[str, str, Any]] = [
        ("PUT", "/v1/limits", DOCUMENT),
        ("PUT", "/v1/subscriptions/acme", {"plan": "pro"}),
        ("DELETE", "/v1/subscriptions/acme", None),
        ("POST", "/v1/regions", {"name": "eu-west"}),
        ("POST", "/v1/blocks", {"field": "user", "value": "u", "reason": "x"}),
        ("DELETE", "/v1/blocks/user/u", None),
        ("POST", "/v1/verifications", None),
    ]
    for number, (method, path, body) in enumerate(changes):
        headers = {"Idempotency-Key": f"k{number}"}
        first, again = [await admin.request(method, path, json=body, headers=headers) for _ in range(2)]
        assert (first.status_code, first.content) == (again.status_code, again.content), path
        assert first.is_success
        assert again.headers["Idempotency-Replayed"] == "true", path


async def test_many_parallel_repetitions_are_executed_once(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    answers = await asyncio.gather(*(post(admin, "k1") for _ in range(12)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    told = {answer.json()["id"] for answer in answers if answer.status_code == 201}
    assert len(told) == len(await overrides(admin)) == 1
    for answer in answers:
        if answer.status_code == 409:
            assert answer.json()["type"] == "/problems/idempotency-key-in-flight"
            assert answer.headers["Retry-After"] == "1"


@pytest.mark.extended
async def test_failed_responses_are_not_stored(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    await admin_harness.owner.execute("ALTER TABLE limit_override RENAME TO set_aside")
    assert (await post(admin, "k1")).status_code == 500
    await admin_harness.owner.execute("ALTER TABLE set_aside RENAME TO limit_override")
    assert (await post(admin, "k1")).status_code == 201


async def test_an_unauthorized_request_uses_no_key(admin_harness: AdminHarness) -> None:
    reader = await admin_harness.caller("quota:read")
    assert problem(await post(reader, "k1")) == (403, [])
    assert problem(await post(await admin_harness.caller(), "k1")) == (401, [])
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM idempotency_record") == 0


async def test_another_coordinator_finishes_the_request_of_one_that_died(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    """The override was created and its response not stored, as if a coordinator had died in between."""
    made = (await post(admin, "k1")).json()
    await admin_harness.owner.execute("UPDATE idempotency_record SET status = NULL, headers = NULL, body = NULL")
    assert (await post(admin, "k1")).json()["type"] == "/problems/idempotency-key-in-flight"
    admin_harness.clock.time += ABANDONED_AFTER + timedelta(seconds=1)
    again = await post(admin, "k1")
    assert (again.status_code, again.json()) == (201, made)
    assert len(await overrides(admin)) == 1


async def test_a_claim_whose_commit_was_not_acknowledged_is_recognized(admin_harness: AdminHarness) -> None:
    """The transaction is repeated where only the acknowledgement of its commit was lost."""
    attempt = Attempt(uuid4(), "k", b"asked", uuid4())
    now = admin_harness.clock.now()
    assert [await claim(admin_harness.owner, attempt, now) for _ in range(2)] == [None, None]


async def test_after_a_day_a_key_is_new(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    await post(admin, "k1")
    assert await delete_expired(admin_harness.owner, admin_harness.clock.now() + KEPT_FOR) == 0
    admin_harness.clock.time += KEPT_FOR + timedelta(seconds=1)
    assert (await post(admin, "k1", limit=6000)).status_code == 201
    admin_harness.clock.time += KEPT_FOR + timedelta(seconds=1)
    assert await delete_expired(admin_harness.owner, admin_harness.clock.now()) == 1


async def test_a_key_is_a_short_text(admin: httpx.AsyncClient) -> None:
    for key in ("", "x" * 256, "a\tb"):
        assert problem(await post(admin, key)) == (422, [("Idempotency-Key", "format")])


async def test_a_secret_is_neither_stored_nor_shown_again(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    headers = {"Idempotency-Key": "k1"}
    body = {"url": "https://example.org/hook", "events": ["period.closed"]}
    first = await admin.post("/v1/webhooks", json=body, headers=headers)
    again = await admin.post("/v1/webhooks", json=body, headers=headers)
    assert first.json()["secret"].startswith("whsec_")
    assert (again.status_code, again.json()) == (201, {**first.json(), "secret": None})
    rotated = await admin.post(f"/v1/webhooks/{first.json()['id']}:rotate", headers={"Idempotency-Key": "k2"})
    assert rotated.json()["secret"].startswith("whsec_")
    kept = [row["body"] for row in await admin_harness.owner.fetch("SELECT body FROM idempotency_record")]
    assert len(kept) == 2
    assert not any(b"whsec_" in each for each in kept)
