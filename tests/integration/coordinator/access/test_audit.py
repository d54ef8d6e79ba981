"""The audit records who changed what, when, and by which request, and records nothing else."""

from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import pytest

from coordinator.access.audit import record
from coordinator.access.authenticate import authenticate
from coordinator.access.issue_token import issue_token
from coordinator.access.revoke_token import revoke_token
from coordinator.access.rules.audit import Action
from coordinator.regions.routes import AuditQuery
from tests.conftest import restricted
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, problem
from tests.integration.coordinator.fixtures import NOON, connected
from web.tokens import token_hash

pytestmark = pytest.mark.anyio


@pytest.fixture
async def auditor(admin_harness: AdminHarness) -> httpx.AsyncClient:
    return await admin_harness.caller("audit:read")


async def deeds(auditor: httpx.AsyncClient, query: str = "") -> list[dict[str, Any]]:
    answer = await auditor.get(f"/v1/audit?{query}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


async def token_of(admin_harness: AdminHarness, client: httpx.AsyncClient) -> str:
    shown = token_hash(client.headers["Authorization"].removeprefix("Bearer "))
    return str((await authenticate(admin_harness.owner, [shown]))[shown].token_id)


async def test_every_change_is_recorded_with_its_request(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, auditor: httpx.AsyncClient
) -> None:
    me = {"X-Request-Id": "change-7"}
    await admin.put("/v1/limits", json=DOCUMENT, headers=me)
    await admin.put("/v1/subscriptions/acme", json={"plan": "free"}, headers=me)
    await admin.put("/v1/subscriptions/acme", json={"plan": "pro"}, headers=me)
    await admin.delete("/v1/subscriptions/acme", headers=me)
    await admin.post("/v1/regions", json={"name": "eu-west"}, headers=me)
    await admin.put("/v1/regions/eu-west", json={"weight": 3, "status": "draining"}, headers=me)
    told = await deeds(auditor, f"actor={await token_of(admin_harness, admin)}")
    assert {(deed["request_id"], deed["recorded_at"]) for deed in told} == {("change-7", "2026-11-18T12:00:00Z")}
    assert [(deed["action"], deed["object"]) for deed in reversed(told)] == [
        ("limits.applied", "limits"),
        ("subscription.put", "acme"),
        ("subscription.put", "acme"),
        ("subscription.deleted", "acme"),
        ("region.put", "eu-west"),
        ("region.put", "eu-west"),
    ]
    weighed, added, deleted, second, first, limits = (deed["details"] for deed in told)
    assert limits["version"] == 1
    assert limits["changes"]
    assert (first, second, deleted) == (
        {"plan": "free", "was": None, "began_at": "2026-11-18T12:00:00Z", "effects": []},
        {"plan": "pro", "was": "free", "began_at": "2026-11-18T12:00:00Z", "effects": []},
        {"was": "pro", "effects": []},
    )
    assert added == {"weight": 1, "status": "active", "was": None}
    assert weighed == {"weight": 3, "status": "draining", "was": {"weight": 1, "status": "active"}}


async def test_requests_without_effect_are_not_recorded(admin: httpx.AsyncClient, auditor: httpx.AsyncClient) -> None:
    async def ask() -> None:
        await admin.put("/v1/limits", json=DOCUMENT)
        await admin.put("/v1/subscriptions/acme", json={"plan": "pro"})
        await admin.put("/v1/regions/eu-west", json={"weight": 3})

    await ask()
    before = await deeds(auditor)
    await ask()
    await admin.put("/v1/limits?dry_run=true", json=DOCUMENT | {"quotas": []})
    await admin.delete("/v1/subscriptions/nobody")
    await admin.put("/v1/subscriptions/acme", json={"plan": "no such plan"})
    assert await deeds(auditor) == before


async def test_changes_of_tokens_are_recorded_by_id_and_database_user(
    admin_harness: AdminHarness, auditor: httpx.AsyncClient
) -> None:
    id_, token = await issue_token(admin_harness.owner, ["usage:read"], "finance", NOON)
    await issue_token(admin_harness.owner, ["usage:read"], "finance", NOON, token)
    for _ in range(2):
        assert await revoke_token(admin_harness.owner, id_, NOON)
    revoked, issued = await deeds(auditor, f"object={id_}")
    assert (issued["action"], issued["details"]) == ("token.issued", {"scopes": ["usage:read"], "note": "finance"})
    assert (revoked["action"], revoked["details"]) == ("token.revoked", {})
    assert {deed["actor"] for deed in (issued, revoked)} == {"database:leasehold"}
    assert token not in str(await deeds(auditor))


async def test_a_change_is_recorded_if_and_only_if_it_was_committed(
    admin_harness: AdminHarness, auditor: httpx.AsyncClient
) -> None:
    before = await deeds(auditor)
    transaction = admin_harness.owner.transaction()
    await transaction.start()
    await issue_token(admin_harness.owner, ["usage:read"], "", NOON)
    await transaction.rollback()
    assert await deeds(auditor) == before


async def test_the_audit_is_read_in_pages_and_filtered(admin_harness: AdminHarness, auditor: httpx.AsyncClient) -> None:
    for number in range(7):
        action = Action.REGION_PUT if number % 2 else Action.SUBSCRIPTION_PUT
        await record(admin_harness.owner, None, action, f"thing {number}", {}, NOON + timedelta(hours=number))
    found = (await auditor.get("/v1/audit?action=region.put&action=subscription.put&page_size=3")).json()
    objects = [deed["object"] for deed in found["data"]]
    while after := found["page"]["next"]:
        await record(admin_harness.owner, None, Action.REGION_PUT, "meanwhile", {}, NOON)
        path = f"/v1/audit?action=region.put&action=subscription.put&page_size=3&page_after={after}"
        found = (await auditor.get(path)).json()
        objects += [deed["object"] for deed in found["data"]]
    assert objects == [f"thing {number}" for number in reversed(range(7))]
    narrowed = await deeds(auditor, "from=2026-11-18T13:00:00Z&to=2026-11-18T16:00:00Z&action=region.put")
    assert [deed["object"] for deed in narrowed] == ["thing 3", "thing 1"]
    assert await deeds(auditor, "actor=nobody") == []


async def test_faulty_queries_are_refused_by_name(auditor: httpx.AsyncClient) -> None:
    for query, fault in {
        "action=nonsense": ("action", "enum"),
        "from=yesterday": ("from", "format"),
        "who=me": ("who", "unknown"),
        f"page_after={forged('x')}": ("page_after", "format"),
        f"page_after={forged(2**63)}": ("page_after", "format"),
    }.items():
        assert problem(await auditor.get(f"/v1/audit?{query}")) == (422, [fault])


def forged(after: object) -> str:
    return AuditQuery().page().next(after=after)


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'nobody'", "DELETE FROM audit", "TRUNCATE audit"])
async def test_the_audit_cannot_be_changed(admin_harness: AdminHarness, database: str, statement: str) -> None:
    await issue_token(admin_harness.owner, ["usage:read"], "", NOON)
    with pytest.raises(asyncpg.RaiseError, match="append-only"):
        await admin_harness.owner.execute(statement)
    async with connected(restricted(database)) as coordinator:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await coordinator.execute(statement)
