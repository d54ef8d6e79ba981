"""A statement lists which limits were in force, from when to when and why, and keeps that list once it is final."""

import csv
import io
from typing import Any

import httpx
import pytest

from coordinator.limits.read_limit_history import _OVERRIDES, _PLANS, _VERSIONS
from protocol.periods import minute_of
from tests.integration.coordinator.adjustments.test_adjustments import People, people
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, sealed
from tests.integration.coordinator.usage.test_statements import DAY, MAILS, at, close, region, statement

__all__ = ["people", "region"]
pytestmark = pytest.mark.anyio


def limits(found: dict[str, Any]) -> list[tuple[object, ...]]:
    return [(each["kind"], each["units"], each["from"][11:16], each["to"][8:16]) for each in found["limits"]]


async def overridden(admin: httpx.AsyncClient, limit: int, since: str, until: str, **subject: str) -> dict[str, Any]:
    body = {"quota": "mails", "subject": subject, "limit": limit, "reason": "a launch"}
    times = {"valid_from": f"{DAY}T{since}:00Z", "valid_until": f"{until if 'T' in until else f'{DAY}T{until}'}:00Z"}
    answer = await admin.post("/v1/overrides", json=body | times)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_each_limit_is_listed_with_its_time_and_its_reason(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region, people: People
) -> None:
    began = admin_harness.clock.now()
    assert limits(await statement(finance, DAY)) == [("plan", 100, f"{began:%H:%M}", "19T00:00")]
    admin_harness.clock.time = at("18T13:00")
    await admin.put("/v1/subscriptions/acme", json={"plan": "pro"})
    burst = await overridden(admin, 900, "14:00", "15:00", tenant="acme")
    await overridden(admin, 1, "14:00", "15:00", tenant="other")
    early = await overridden(admin, 800, "16:00", "20:00", tenant="acme")
    admin_harness.clock.time = at("18T17:00")
    await admin.delete(f"/v1/overrides/{early['id']}")
    document = DOCUMENT | {"quotas": [each | {"limit": 600} for each in DOCUMENT["quotas"][:2]]}
    admin_harness.clock.time = at("18T18:00")
    assert await admin.put("/v1/limits", json={**DOCUMENT, "quotas": document["quotas"] + DOCUMENT["quotas"][2:]})
    credit = await people.adjusted(kind="credit", units=50, quota=MAILS, period=DAY)
    await region.exchange(MAILS)
    await sealed(admin_harness)
    found = await statement(finance, DAY)
    expected = [
        ("plan", 100, f"{began:%H:%M}", "18T13:00"),
        ("plan", 500, "13:00", "18T14:00"),
        ("override", 900, "14:00", "18T15:00"),
        ("plan", 500, "15:00", "18T16:00"),
        ("override", 800, "16:00", "18T17:00"),
        ("plan", 500, "17:00", "18T18:00"),
        ("credit", 50, "18:00", "19T00:00"),
        ("plan", 600, "18:00", "19T00:00"),
    ]
    assert sorted(limits(found)) == sorted(expected)
    by_kind = {each["kind"]: each for each in found["limits"]}
    assert (by_kind["override"]["reason"], found["limits"][2]["id"]) == ("a launch", burst["id"])
    assert (by_kind["credit"]["id"], by_kind["credit"]["document"]) == (credit["id"], credit["document"])
    assert [(each["plan"], each["version"]) for each in found["limits"] if each["kind"] == "plan"][:2] == [
        ("free", 1),
        ("pro", 1),
    ]

    # As rows of a spreadsheet, whose sum of units is what is billed; and as a table on paper.
    text = (await finance.get(f"/v1/periods/{DAY}/statement?tenant=acme&format=csv")).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert sum(int(row["units"] or 0) for row in rows) == found["billed"]
    assert [(row["limit"], row["reason"]) for row in rows if row["kind"] == "limit"][2] == ("900", "override: a launch")
    page = (await finance.get(f"/v1/periods/{DAY}/statement?tenant=acme&format=html")).text
    assert "<h2>Limits</h2>" in page
    assert page.count(">a launch<") == 2


async def test_later_changes_of_limits_change_no_issued_statement(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region
) -> None:
    as_of = (await statement(finance, DAY))["as_of"]
    asked = f"/v1/periods/{DAY}/statement?tenant=acme&as_of={as_of}"
    first = await finance.get(asked)
    await overridden(admin, 900, "00:00", "23:59", tenant="acme")
    admin_harness.clock.time = at("18T18:00")
    await admin.put("/v1/subscriptions/acme", json={"plan": "pro"})
    await region.exchange(MAILS, frozen=[region.leases[MAILS, DAY] | {"returned": 7}])
    await sealed(admin_harness)
    again = await finance.get(asked)
    assert (again.content, again.headers["ETag"]) == (first.content, first.headers["ETag"])
    assert [row[0] for row in limits(await statement(finance, DAY))] == ["plan", "override", "plan"]

    await close(admin_harness)
    final = await statement(finance, DAY)
    assert [row[1] for row in limits(final)] == [100, 900, 500]
    await overridden(admin, 5, "00:00", "2026-12-24T00:00", tenant="acme")
    await admin.put("/v1/limits", json=DOCUMENT | {"default_plan": "pro"})
    await admin.delete("/v1/subscriptions/acme")
    await sealed(admin_harness)
    assert await statement(finance, DAY) == final


QUOTAS = DOCUMENT["quotas"]


async def test_owner_and_soft_cap_of_a_limit_are_listed(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region
) -> None:
    mails = QUOTAS[1]
    for hour, changed in (
        (13, {"mode": "regional"}),
        (14, {"cap": {"overage": 500, "overdraft": 50}}),
        (15, {"cap": "soft"}),
    ):
        admin_harness.clock.time = at(f"18T{hour}:00")
        quotas = [QUOTAS[0], mails | changed, QUOTAS[2]]
        assert (await admin.put("/v1/limits", json=DOCUMENT | {"quotas": quotas})).status_code == 200
    await overridden(admin, 900, "16:00", "23:00", tenant="acme")
    await region.exchange(MAILS)
    await sealed(admin_harness)
    told = [
        ("leased", "hard", "all regions together", "nothing"),
        ("regional", "hard", "each region for itself", "nothing"),
        (
            *("leased", {"overage": 500, "overdraft": 50}),
            *("all regions together", "500 billed as overage, 50 in regions that are cut off"),
        ),
        ("leased", "soft", "all regions together", "any number, billed as overage"),
        ("leased", "soft", "all regions together", "any number, billed as overage"),
        ("leased", "soft", "all regions together", "any number, billed as overage"),
    ]
    found = (await statement(finance, DAY))["limits"]
    assert [each["kind"] for each in found] == ["plan"] * 4 + ["override", "plan"]
    assert [(each["mode"], each["cap"]) for each in found] == [row[:2] for row in told]
    text = (await finance.get(f"/v1/periods/{DAY}/statement?tenant=acme&format=csv")).text
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["kind"] == "limit"]
    assert [(row["of"], row["beyond it"]) for row in rows] == [row[2:] for row in told]


async def test_a_shared_limit_is_listed_for_tenants_that_used_it(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, finance: httpx.AsyncClient, region: Region
) -> None:
    document = DOCUMENT | {"quotas": [*QUOTAS, {"name": "seats", "kind": "allowance", "limit": 40, "period": "day"}]}
    assert (await admin.put("/v1/limits", json=document)).status_code == 200
    await region.exchange("seats:", demands=[{"quota": "seats:", "waiting": 6}])
    lease = region.leases["seats:", DAY]
    lines = [
        {"minute": minute_of(at("18T11:00")), "dimensions": {"tenant": tenant, "policy": "seat"}, "units": units}
        for tenant, units in (("acme", 4), ("globex", 2))
    ]
    await region.exchange("seats:", frozen=[lease | {"consumed": 6, "lines": lines}])
    await region.use("mails:tenant=initech", DAY, [Used(at("18T09:05"), 1, "mail")])
    await sealed(admin_harness)
    found = await statement(finance, DAY)
    assert [(line["quota"], line["units"]) for line in found["lines"]] == [("mails", 10), ("seats", 4)]
    assert [(each["quota_key"], each["units"]) for each in found["limits"]] == [(MAILS, 100), ("seats:", 40)]
    text = (await finance.get(f"/v1/periods/{DAY}/statement?tenant=acme&format=csv")).text
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["kind"] == "limit"]
    assert [row["of"] for row in rows] == ["all regions together", "all tenants together, all regions together"]
    others = (await finance.get(f"/v1/periods/{DAY}/statement?tenant=initech")).json()
    assert [each["quota_key"] for each in others["limits"]] == ["mails:tenant=initech"]


async def test_the_history_is_read_by_index(admin_harness: AdminHarness) -> None:
    """A year of audit is long, and few entries are about one tenant's limits."""
    await admin_harness.owner.execute(MUCH)
    for sql, index, values in (
        (_VERSIONS, "audit_of_limits", (LAST, at("18T00:00"), at("19T00:00"), ["mails"])),
        (_PLANS, "audit_of_subscriptions", (LAST, "acme")),
        (_OVERRIDES, "audit_of_overrides", (LAST, "acme", ["mails"])),
    ):
        plan = [row[0] for row in await admin_harness.owner.fetch(f"EXPLAIN {sql}", *values)]
        assert any(index in line for line in plan), plan


LAST = 2**63 - 1
MUCH = """
INSERT INTO audit (recorded_at, actor, action, object, details)
SELECT now(), 'x', action, 't' || n, jsonb_build_object('subject', jsonb_build_object('tenant', 't' || n), 'version', n)
FROM generate_series(1, 3000) AS n,
    unnest(ARRAY['subscription.put', 'override.added', 'region.put', 'token.issued', 'block.put']) AS action;
ANALYZE audit;
"""
