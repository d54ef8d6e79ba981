"""Every operation requires a scope, and no refusal reveals whether an object exists."""

import pytest

from coordinator.access.list_tokens import list_tokens
from coordinator.access.revoke_token import revoke_token
from coordinator.access.rules.scopes import SCOPES
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, problem

pytestmark = pytest.mark.anyio

THOSE_WHO_DECIDE = "usage:read or adjust:propose or adjust:approve"
DOORS = [
    ("GET", "/v1/limits", "quota:read"),
    ("PUT", "/v1/limits", "quota:write"),
    ("GET", "/v1/subscriptions", "quota:read"),
    ("GET", "/v1/subscriptions/acme", "quota:read"),
    ("PUT", "/v1/subscriptions/acme", "quota:write"),
    ("DELETE", "/v1/subscriptions/acme", "quota:write"),
    ("GET", "/v1/overrides", "quota:read"),
    ("GET", "/v1/overrides/00000000-0000-0000-0000-000000000000", "quota:read"),
    ("POST", "/v1/overrides", "quota:write"),
    ("DELETE", "/v1/overrides/00000000-0000-0000-0000-000000000000", "quota:write"),
    ("POST", "/v1/blocks", "quota:write"),
    ("POST", "/v1/resets", "quota:write"),
    ("DELETE", "/v1/blocks/tenant/acme", "quota:write"),
    ("GET", "/v1/regions", "quota:read"),
    ("GET", "/v1/regions/eu-west", "quota:read"),
    ("POST", "/v1/regions", "alloc:write"),
    ("PUT", "/v1/regions/eu-west", "alloc:write"),
    ("GET", "/v1/audit", "audit:read"),
    ("GET", "/v1/usage", "usage:read"),
    ("GET", "/v1/seals", "audit:read"),
    ("GET", "/v1/seals/latest", "usage:read"),
    ("GET", "/v1/usage/changes?since=0", "usage:read"),
    ("POST", "/v1/verifications", "audit:read"),
    ("GET", "/v1/verifications/00000000-0000-0000-0000-000000000000", "audit:read"),
    ("GET", "/v1/periods", "usage:read"),
    ("GET", "/v1/periods/2026-11", "usage:read"),
    ("GET", "/v1/periods/2026-11/reconciliation", "usage:read"),
    ("GET", "/v1/periods/2026-11/trial-balance", "usage:read"),
    ("GET", "/v1/periods/2026-11/statement", "usage:read"),
    ("GET", "/v1/periods/2026-11/statements", "usage:read"),
    ("GET", "/v1/tenants", "usage:read"),
    ("GET", "/v1/tenants/acme/statements/2026-11", "usage:read"),
    ("GET", "/v1/tenants/acme", "usage:read"),
    ("PUT", "/v1/tenants/acme", "tenant:write"),
    ("DELETE", "/v1/tenants/acme", "tenant:write"),
    ("GET", "/v1/statements/2026-11.YWNtZQ", "usage:read"),
    ("GET", "/v1/statements/2026-11.YWNtZQ/lines/1/reports", "usage:read"),
    ("GET", "/v1/statements/2026-11.YWNtZQ/lines/1/proof", "audit:read"),
    ("POST", "/v1/exports", "usage:read"),
    ("GET", "/v1/exports/00000000-0000-0000-0000-000000000000", "usage:read"),
    ("GET", "/v1/exports/00000000-0000-0000-0000-000000000000/data", "usage:read"),
    ("POST", "/v1/exports/00000000-0000-0000-0000-000000000000:cancel", "usage:read"),
    ("POST", "/v1/epochs/1:retire", "alloc:write"),
    ("GET", "/v1/suspense", THOSE_WHO_DECIDE),
    ("POST", "/v1/suspense:propose", "adjust:propose"),
    ("POST", "/v1/suspense/00000000-0000-0000-0000-000000000000:approve", "adjust:approve"),
    ("GET", "/v1/quarantine", THOSE_WHO_DECIDE),
    ("GET", "/v1/installation", "admin"),
    ("POST", "/v1/installation:confirm", "admin"),
    ("GET", "/v1/webhooks", "admin"),
    ("POST", "/v1/webhooks", "admin"),
    ("GET", "/v1/webhooks/00000000-0000-0000-0000-000000000000", "admin"),
    ("DELETE", "/v1/webhooks/00000000-0000-0000-0000-000000000000", "admin"),
    ("GET", "/v1/webhooks/00000000-0000-0000-0000-000000000000/deliveries", "admin"),
    *(
        ("POST", f"/v1/webhooks/00000000-0000-0000-0000-000000000000:{deed}", "admin")
        for deed in ("rotate", "pause", "resume", "replay")
    ),
    ("GET", "/v1/adjustments", THOSE_WHO_DECIDE),
    ("GET", "/v1/adjustments/00000000-0000-0000-0000-000000000000", THOSE_WHO_DECIDE),
    ("POST", "/v1/adjustments", "adjust:propose"),
    ("POST", "/v1/adjustments/00000000-0000-0000-0000-000000000000:approve", "adjust:approve"),
    ("POST", "/v1/adjustments/00000000-0000-0000-0000-000000000000:withdraw", "adjust:propose"),
]


async def test_each_operation_requires_its_scope(admin_harness: AdminHarness) -> None:
    for method, path, scopes in DOORS:
        await opens_to_its_scopes_alone(admin_harness, method, path, scopes.split(" or "))


async def opens_to_its_scopes_alone(admin_harness: AdminHarness, method: str, path: str, scopes: list[str]) -> None:
    nobody = await admin_harness.caller()
    anonymous = await nobody.request(method, path)
    unknown = await nobody.request(method, path, headers={"Authorization": "Bearer lh_" + "x" * 43})
    for refused in (anonymous, unknown):
        assert problem(refused) == (401, [])
        assert refused.headers["WWW-Authenticate"].startswith("Bearer")
    others = await admin_harness.caller(*(each for each in SCOPES if each not in (*scopes, "admin")), "region:eu-west")
    assert problem(await others.request(method, path)) == (403, []), (method, path)
    for allowed in [await admin_harness.caller(scope) for scope in (*scopes, "admin")]:
        assert (await allowed.request(method, path)).status_code not in (401, 403, 500), (method, path)


async def test_a_refusal_does_not_reveal_what_exists(admin_harness: AdminHarness) -> None:
    admin = await admin_harness.caller("admin")
    await admin.put("/v1/limits", json=DOCUMENT)
    await admin.put("/v1/subscriptions/acme", json={"plan": "pro"})
    reader = await admin_harness.caller("usage:read")
    there, not_there = [await reader.get(f"/v1/subscriptions/{tenant}") for tenant in ("acme", "nobody")]
    different = {"instance", "request_id"}
    assert {k: v for k, v in there.json().items() if k not in different} == {
        k: v for k, v in not_there.json().items() if k not in different
    }


async def test_a_revoked_token_is_refused_at_once(admin_harness: AdminHarness) -> None:
    reader = await admin_harness.caller("quota:read")
    assert (await reader.get("/v1/limits")).status_code == 200
    (known,) = await list_tokens(admin_harness.owner)
    assert known.scopes == ["quota:read"]
    assert await revoke_token(admin_harness.owner, known.id, admin_harness.clock.now())
    assert problem(await reader.get("/v1/limits")) == (401, [])
    assert await revoke_token(admin_harness.owner, known.id, admin_harness.clock.now())
