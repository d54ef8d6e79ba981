"""Tenants are registered with names and ids in other systems, and shown with them; no unit depends on it."""

import httpx
import pytest

from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, problem

pytestmark = pytest.mark.anyio

ACME = {
    "name": "Acme Müller GmbH",
    "external_ids": {"stripe": "cus_7", "lago": "007"},
    "address": ["Hafenstr. 1", "20457 Hamburg"],
    "time_zone": "Europe/Berlin",
}


async def test_a_tenant_is_registered_replaced_and_removed(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient
) -> None:
    writer = await admin_harness.caller("tenant:write")
    first = await writer.put("/v1/tenants/acme%2Feu", json=ACME)
    assert (first.status_code, first.json()) == (
        201,
        ACME | {"tenant": "acme/eu", "changed_at": "2026-11-18T12:00:00Z"},
    )
    admin_harness.clock.move(minutes=1)
    assert (await writer.put("/v1/tenants/acme%2Feu", json=ACME)).json() == first.json()  # it is registered already
    changed = await writer.put("/v1/tenants/acme%2Feu", json={"name": "Acme"})
    assert (changed.status_code, changed.json()["external_ids"], changed.json()["time_zone"]) == (200, {}, "UTC")
    assert (await finance.get("/v1/tenants/acme/eu")).json() == changed.json()
    await writer.put("/v1/tenants/b", json=ACME)
    listed = (await finance.get("/v1/tenants?page_size=1")).json()
    assert [each["tenant"] for each in listed["data"]] == ["acme/eu"]
    rest = (await finance.get(f"/v1/tenants?page_size=1&page_after={listed['page']['next']}")).json()
    assert ([each["tenant"] for each in rest["data"]], rest["page"]["next"]) == (["b"], None)
    for status in (204, 404):
        assert (await writer.delete("/v1/tenants/b")).status_code == status
    entries = (await admin.get("/v1/audit?action=tenant.put&action=tenant.deleted")).json()["data"]
    assert [(each["action"], each["object"]) for each in reversed(entries)] == [
        ("tenant.put", "acme/eu"),
        ("tenant.put", "acme/eu"),
        ("tenant.put", "b"),
        ("tenant.deleted", "b"),
    ]
    assert entries[-1]["details"] == ACME


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": ""}, "name"),
        ({"external_ids": {"Stripe": "x"}}, "external_ids.Stripe"),
        ({"external_ids": {f"s{n}": "x" for n in range(17)}}, "external_ids"),
        ({"address": ["x"] * 9}, "address"),
        ({"time_zone": "Berlin"}, "time_zone"),
        ({"vat": "DE1"}, "vat"),
    ],
)
async def test_what_cannot_be_registered_is_refused_and_changes_nothing(
    admin: httpx.AsyncClient, finance: httpx.AsyncClient, wrong: dict[str, object], field: str
) -> None:
    status, faults = problem(await admin.put("/v1/tenants/acme", json=ACME | wrong))
    assert (status, [name[: len(field)] for name, _ in faults]) == (422, [field])
    assert problem(await finance.get("/v1/tenants/acme")) == (404, [])


async def test_people_are_shown_by_the_names_of_their_tokens(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    """Callers of these tests have tokens with the note `a test`."""
    await admin.put("/v1/limits", json=DOCUMENT)
    one, other = await admin_harness.caller("adjust:propose"), await admin_harness.caller("adjust:approve")
    body = {"quota": "mails:tenant=acme", "period": "2026-11-18", "kind": "credit", "units": 5}
    proposed = await one.post("/v1/adjustments", json=body | {"reason": "r", "document": "d"})
    assert proposed.json()["proposed_by_name"] == "a test"
    assert "approved_by_name" not in proposed.json()
    approved = (await other.post(f"/v1/adjustments/{proposed.json()['id']}:approve")).json()
    assert (approved["proposed_by_name"], approved["approved_by_name"]) == ("a test", "a test")
    assert (await admin.get("/v1/adjustments")).json()["data"] == [approved]
    put = {"quota": "mails", "subject": {"tenant": "acme"}, "limit": 7, "reason": "r"}
    await admin.post("/v1/overrides", json=put)
    assert (await admin.get("/v1/overrides")).json()["data"][0]["created_by_name"] == "a test"
    entries = (await admin.get("/v1/audit?action=override.added&action=token.issued")).json()["data"]
    assert (entries[0]["actor_name"], "actor_name" in entries[-1]) == ("a test", False)  # it was issued in the database
