"""Overrides set another limit for some of a quota's keys, for a while, by the coordinator's clock."""

from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from coordinator.limits.policy_bundle import policy_bundle
from coordinator.overrides import operations
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region, problem
from tests.integration.coordinator.fixtures import NOON

pytestmark = pytest.mark.anyio

ACME = {"tenant": "acme"}
EXPORTS = "exports:tenant=acme"


@pytest.fixture(autouse=True)
async def limits(admin: httpx.AsyncClient) -> None:
    assert (await admin.put("/v1/limits", json=DOCUMENT)).status_code == 200


def override(**changed: Any) -> dict[str, Any]:
    return {"quota": "exports", "subject": ACME, "limit": 5000, "reason": "a launch"} | changed


def at(**after: float) -> str:
    return (NOON + timedelta(**after)).isoformat()


async def added(admin: httpx.AsyncClient, **changed: Any) -> dict[str, Any]:
    answer = await admin.post("/v1/overrides", json=override(**changed))
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_an_override_from_its_beginning_to_its_end(admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/v1/overrides", json=override(valid_until=at(hours=1)))
    made = answer.json()
    assert (answer.status_code, answer.headers["Location"]) == (201, f"/v1/overrides/{made['id']}")
    validity = {"valid_from": "2026-11-18T12:00:00Z", "valid_until": "2026-11-18T13:00:00Z"}
    assert {name: made[name] for name in validity} == validity
    assert (await admin.get(f"/v1/overrides/{made['id']}")).json() == made
    assert (await admin.get("/v1/overrides")).json() == {"data": [made], "page": {"next": None}}
    assert (await admin.delete(f"/v1/overrides/{made['id']}")).status_code == 204
    for gone in (await admin.delete(f"/v1/overrides/{made['id']}"), await admin.get(f"/v1/overrides/{made['id']}")):
        assert problem(gone) == (404, [])
    entries = (await admin.get(f"/v1/audit?object={EXPORTS}")).json()["data"]
    assert [entry["action"] for entry in entries] == ["override.deleted", "override.added"]
    assert entries[1]["details"] == made
    assert entries[0]["details"]["was"] == made


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"quota": "nothing"}, ("quota", "known")),
        ({"quota": "Exports"}, ("quota", "pattern")),
        ({"subject": {"user": "ann"}}, ("subject", "counted")),
        ({"subject": {"tenant": ""}}, ("subject", "format")),
        ({"subject": {"ip": "1.2.3"}}, ("subject", "format")),
        ({"limit": "10/second"}, ("limit", "units")),
        ({"limit": -1}, ("limit", "units")),
        ({"quota": "api", "limit": 10}, ("limit", "rate")),
        ({"reason": ""}, ("reason", "length")),
        ({"valid_until": at(hours=-1)}, ("valid_until", "future")),
        ({"valid_from": at(hours=2), "valid_until": at(hours=1)}, ("valid_until", "future")),
        ({"valid_from": "2026-11-18T12:00:00"}, ("valid_from", "type")),
        ({"until": at(hours=1)}, ("until", "unknown")),
    ],
)
async def test_invalid_overrides_are_refused_by_name(
    admin: httpx.AsyncClient, changed: dict[str, Any], fault: tuple[str, str]
) -> None:
    status, [(field, rule)] = problem(await admin.post("/v1/overrides", json=override(**changed)))
    assert (status, field) == (422, fault[0])
    assert rule == fault[1] or fault[1] in ("length", "type", "pattern")  # the decoder's text
    assert (await admin.get("/v1/overrides?over=true")).json()["data"] == []


async def funded(admin: httpx.AsyncClient, region: Region, now: datetime) -> int:
    """Return the funded units after the region has requested one more."""
    await region.use(EXPORTS, "2026-11", [Used(now, 1)])
    [quota] = (await admin.get("/v1/periods/2026-11/reconciliation")).json()["quotas"]
    return int(quota["funded"])


async def test_an_override_changes_the_funded_units_while_it_is_in_force(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    region = await open_region(admin_harness, admin, "eu-west")
    await added(admin, valid_from=at(hours=1), valid_until=at(hours=2))
    seen = []
    for moment in (timedelta(minutes=59, seconds=59), timedelta(hours=1), timedelta(hours=2)):
        admin_harness.clock.time = NOON + moment
        seen.append(await funded(admin, region, admin_harness.clock.time))
    assert seen == [1000, 5000, 1000]


async def test_the_newest_of_the_narrowest_overrides_counts(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    region = await open_region(admin_harness, admin, "eu-west")
    everybody = await added(admin, subject={}, limit=2000)
    older = await added(admin, limit=3000)
    admin_harness.clock.time += timedelta(seconds=1)
    newer = await added(admin, limit=4000)
    seen = []
    for made in (newer, older, everybody):
        seen.append(await funded(admin, region, admin_harness.clock.time))
        await admin.delete(f"/v1/overrides/{made['id']}")
    assert [*seen, await funded(admin, region, admin_harness.clock.time)] == [4000, 3000, 2000, 1000]


async def test_agents_get_durations_of_future_overrides_too(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    await added(admin, valid_from=at(minutes=1), valid_until=at(minutes=2))
    await added(admin, quota="api", limit="5/second")
    admin_harness.clock.time = NOON + timedelta(minutes=1.5)
    bundle = await policy_bundle(admin_harness.owner, "eu-west", admin_harness.clock.time)
    assert {(each.key, each.limit, each.starts_in_ms, each.ends_in_ms) for each in bundle.overrides} == {
        (EXPORTS, 5000, 0, 30_000),
        ("api:tenant=acme", "5/second", 0, None),
    }
    assert bundle.version == 3
    admin_harness.clock.time = NOON + timedelta(minutes=2)
    bundle = await policy_bundle(admin_harness.owner, "eu-west", admin_harness.clock.time)
    assert [each.key for each in bundle.overrides] == ["api:tenant=acme"]


async def test_overrides_are_listed_page_by_page(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    for tenant in ("a", "b", "c"):
        await added(admin, subject={"tenant": tenant}, valid_until=at(minutes=5))
    await added(admin, quota="mails", limit=7)
    pages: list[list[dict[str, str]]] = []
    after = ""
    while not pages or after:
        page = (await admin.get(f"/v1/overrides?page_size=2{after}")).json()
        pages.append([row["subject"] for row in page["data"]])
        after = f"&page_after={page['page']['next']}" if page["page"]["next"] else ""
    assert pages == [[{"tenant": "a"}, {"tenant": "b"}], [{"tenant": "c"}, ACME]]
    admin_harness.clock.time += timedelta(minutes=5)
    quotas = [
        [row["quota"] for row in (await admin.get(f"/v1/overrides{q}")).json()["data"]] for q in ("", "?over=true")
    ]
    assert quotas == [["mails"], ["exports", "exports", "exports", "mails"]]
    assert len((await admin.get("/v1/overrides?over=true&quota=mails")).json()["data"]) == 1


async def test_a_new_document_does_not_invalidate_overrides(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    await added(admin, valid_until=at(minutes=5))
    exports, mails, api = DOCUMENT["quotas"]
    without = DOCUMENT | {"quotas": [mails, api], "policies": DOCUMENT["policies"][1:]}
    as_rate = DOCUMENT | {"quotas": [{"name": "exports", "kind": "rate", "limit": "1/second"}, mails, api]}
    assert problem(await admin.put("/v1/limits", json=without)) == (422, [("quotas", "in_use")])
    refused = await admin.put("/v1/limits", json=as_rate)
    assert problem(refused) == (422, [("quotas[0].kind", "in_use")])
    assert EXPORTS in refused.json()["invalid_parameters"][0]["reason"]
    admin_harness.clock.time += timedelta(minutes=5)
    assert (await admin.put("/v1/limits", json=without)).status_code == 200
    assert exports["name"] == "exports"


async def test_the_number_of_overrides_is_bounded(admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_OVERRIDES", 1)
    await added(admin)
    assert (await admin.post("/v1/overrides", json=override())).json()["type"] == "/problems/full"
