"""People call the coordinator with JWTs of their company's issuer, beside callers with tokens of ours."""

from collections.abc import AsyncIterator
from secrets import token_hex
from typing import Any

import httpx
import pytest

from coordinator.access.jwt_callers import identity_id
from coordinator.proof.verify import verify
from tests.integration.coordinator.admin_harness import (
    DOCUMENT,
    FINGERPRINT,
    AdminHarness,
    Region,
    Used,
    admin_harness_on,
    problem,
    sealed,
)
from tests.issuer import AUDIENCE, Issuer

pytestmark = pytest.mark.anyio

NOVEMBER = "2026-11"
CREDIT = {
    "quota": "exports:tenant=acme",
    "period": NOVEMBER,
    "kind": "credit",
    "units": 9,
    "reason": "an outage",
    "document": "T-1",
}


@pytest.fixture
async def harness(database: str, issuer: Issuer) -> AsyncIterator[AdminHarness]:
    async with admin_harness_on(database, jwt_issuer=issuer.url, jwt_audience=AUDIENCE) as harness:
        yield harness


def person(harness: AdminHarness, issuer: Issuer, *scopes: str, **claims: Any) -> httpx.AsyncClient:
    """Return a caller with a JWT of its own; a second one of the same subject is the same person."""
    token = issuer.token("ec", scope=list(scopes), jti=token_hex(8), **claims)
    return harness.caller_with({"Authorization": f"Bearer {token}"})


async def test_scopes_of_a_jwt_permit_and_forbid_as_those_of_tokens_do(harness: AdminHarness, issuer: Issuer) -> None:
    writer = person(harness, issuer, "quota:write")
    assert (await writer.put("/v1/limits", json=DOCUMENT)).status_code == 200
    for path in ("/v1/limits", "/v1/periods/none"):
        assert problem(await writer.get(path))[0] == 403
    admin = person(harness, issuer, "admin", sub="root")
    assert (await admin.get("/v1/limits")).status_code == 200
    assert problem(await admin.get("/v1/regions/eu-west/signals"))[0] == 403  # admins are no region
    assert (await (await harness.caller("quota:read")).get("/v1/limits")).status_code == 200


async def test_a_jwt_that_is_refused_is_answered_401_without_the_reason(harness: AdminHarness, issuer: Issuer) -> None:
    for claims in ({"aud": "another"}, {"exp": 1_700_000_000}, {"iss": "https://else.example"}, {"exp": None}):
        answer = await person(harness, issuer, "admin", **claims).get("/v1/limits")
        assert problem(answer)[0] == 401
        assert answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
        assert answer.json()["detail"] == "The JWT is not valid here, or not valid any more."
    metrics = (await harness.caller_with({}).get("/metrics")).text
    for reason in ("audience", "expired", "issuer", "no_exp"):
        assert f'leasehold_jwt_refused_total{{reason="{reason}"}} 1.0' in metrics


async def test_without_an_issuer_a_jwt_is_an_unknown_token(admin_harness: AdminHarness, issuer: Issuer) -> None:
    answer = await person(admin_harness, issuer, "admin").get("/v1/limits")
    assert (problem(answer)[0], answer.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_the_audit_shows_issuer_subject_and_name(harness: AdminHarness, issuer: Issuer) -> None:
    ada = person(harness, issuer, "quota:write")
    await ada.put("/v1/limits", json=DOCUMENT, headers={"X-Request-Id": "change-7"})
    await ada.put("/v1/subscriptions/acme", json={"plan": "pro"})
    await person(harness, issuer, "quota:write", sub="grace", email=None).delete("/v1/subscriptions/acme")
    id_ = str(identity_id(issuer.url, "ada"))
    found = (await person(harness, issuer, "audit:read", email="Ada L").get("/v1/audit")).json()["data"]
    who = [tuple(each[f"actor_{name}"] for name in ("issuer", "subject", "name")) for each in found]
    ada_now, grace = (issuer.url, "ada", "Ada L"), (issuer.url, "grace", "grace")
    assert list(zip((each["action"] for each in found), who, strict=True)) == [
        ("identity.seen", ada_now),
        ("subscription.deleted", grace),
        ("identity.seen", grace),
        ("subscription.put", ada_now),
        ("limits.applied", ada_now),
        ("identity.seen", ada_now),
    ]
    assert found[-1]["object"] == found[-1]["actor"] == id_
    assert found[-1]["details"] == {"issuer": issuer.url, "subject": "ada", "name": "ada@example.com"}
    assert found[-2]["request_id"] == "change-7"


async def test_two_jwts_of_one_subject_are_one_person(harness: AdminHarness, issuer: Issuer) -> None:
    await person(harness, issuer, "quota:write").put("/v1/limits", json=DOCUMENT)
    region = await opened_region(harness, issuer)
    await region.use("exports:tenant=acme", NOVEMBER, [Used(harness.clock.now(), 60)])
    made = (await person(harness, issuer, "adjust:propose").post("/v1/adjustments", json=CREDIT)).json()
    approving = f"/v1/adjustments/{made['id']}:approve"
    refused = await person(harness, issuer, "adjust:approve", email="another@example.com").post(approving)
    assert (refused.status_code, refused.json()["refusal"]) == (409, "same_person")
    approved = await person(harness, issuer, "adjust:approve", sub="grace", email="grace@example.com").post(approving)
    assert approved.status_code == 200, approved.text
    names = approved.json()["proposed_by_name"], approved.json()["approved_by_name"]
    assert names == ("another@example.com", "grace@example.com")
    await sealed(harness)
    async with harness.owner.transaction(isolation="repeatable_read"):
        assert (await verify(harness.owner, harness.clock.now())).fault is None


async def test_an_idempotency_key_belongs_to_the_subject(harness: AdminHarness, issuer: Issuer) -> None:
    key, body = {"Idempotency-Key": "once"}, {"name": "eu-west"}
    first = await person(harness, issuer, "alloc:write").post("/v1/regions", json=body, headers=key)
    again = await person(harness, issuer, "alloc:write").post("/v1/regions", json=body, headers=key)
    other = await person(harness, issuer, "alloc:write", sub="grace").post("/v1/regions", json=body, headers=key)
    assert [each.status_code for each in (first, again, other)] == [201, 201, 200]


async def opened_region(harness: AdminHarness, issuer: Issuer) -> Region:
    """Open an epoch with a JWT as the region's token."""
    await person(harness, issuer, "admin", sub="root").post("/v1/regions", json={"name": "eu-west"})
    client = person(harness, issuer, "region:eu-west", sub="agents-of-eu-west")
    opened = await client.post("/v1/regions/eu-west/epochs", json={"nonce": token_hex(16), "fingerprint": FINGERPRINT})
    assert opened.status_code in (200, 201), opened.text
    return Region(client, "eu-west", opened.json()["epoch"], opened.json()["lanes"])


async def test_a_region_may_have_jwts_and_is_refused_when_they_expire(harness: AdminHarness, issuer: Issuer) -> None:
    await person(harness, issuer, "quota:write").put("/v1/limits", json=DOCUMENT)
    region = await opened_region(harness, issuer)
    await region.use("exports:tenant=acme", NOVEMBER, [Used(harness.clock.now(), 60)])
    [line] = (await person(harness, issuer, "usage:read").get("/v1/usage?from=2026-11-01")).json()["data"]
    assert line["units"] == 60
    for other in ({"exp": 1_700_000_000}, {"scope": "region:us-east"}):
        token = issuer.token("ec", **{"scope": "region:eu-west", "sub": "agents-of-eu-west"} | other)
        unknown = harness.caller_with({"Authorization": f"Bearer {token}"})
        answer = await unknown.post("/v1/regions/eu-west/exchanges", json={"fingerprint": FINGERPRINT, "exchanges": []})
        assert problem(answer)[0] == (401 if "exp" in other else 403)


async def test_an_issuer_that_is_away_degrades_health_and_leaves_tokens_in_use(
    harness: AdminHarness, issuer: Issuer
) -> None:
    known = person(harness, issuer, "quota:read")
    assert (await known.get("/v1/limits")).status_code == 200
    issuer.stop()
    answer = await person(harness, issuer, "quota:read", iat=None).get("/v1/limits")
    assert answer.status_code == 200  # its key is known
    issuer.publish("next")
    token = issuer.token("next", scope="quota:read")
    assert (await harness.caller_with({"Authorization": f"Bearer {token}"}).get("/v1/limits")).status_code == 401
    health = (await known.get("/readyz")).json()
    assert (health["status"], [each["code"] for each in health["reasons"]]) == ("degraded", ["jwt_keys_stale"])
    assert (await (await harness.caller("quota:read")).get("/v1/limits")).status_code == 200
    issuer.start()
