"""The limits document is stored, returned, tried, guarded, and announced to every agent."""

import asyncio
from typing import Any

import httpx
import pytest
import yaml

from coordinator.limits.policy_bundle import policy_bundle
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Used, open_region, problem

pytestmark = pytest.mark.anyio

YAML = {"Content-Type": "application/yaml"}
RULES = {"trailing_slash": "ignore", "case": "keep", "query": "drop", "merge_slashes": True} | {
    "percent": "decode_unreserved"
}
AS_YAML = {"Accept": "application/yaml"}


def with_limit(units: int) -> dict[str, Any]:
    exports, *others = DOCUMENT["quotas"]
    return DOCUMENT | {"quotas": [exports | {"limit": units}, *others]}


async def test_the_first_document_is_empty(admin: httpx.AsyncClient) -> None:
    answer = (await admin.get("/v1/limits")).json()
    assert answer == {
        "version": 0,
        "applied_at": None,
        "applied_by": None,
        "document": {"quotas": [], "policies": [], "plans": {}, "default_plan": None}
        | {"route_classes": {}, "cost_tables": {}, "routes": RULES, "unmatched": "allow", "examples": []},
    }


async def test_json_is_returned_with_its_defaults(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    put = await admin.put("/v1/limits", json=DOCUMENT)
    assert (put.status_code, put.json()["version"]) == (200, 1)
    got = await admin.get("/v1/limits")
    assert got.headers["ETag"] == put.headers["ETag"] == '"1"'
    document = got.json()["document"]
    assert document == put.json()["document"]
    assert document["policies"][0]["on_store_failure"] == "closed"
    assert got.json()["applied_at"] == "2026-11-18T12:00:00Z"
    (token_id,) = [row["id"] for row in await admin_harness.owner.fetch("SELECT id FROM token")]
    assert got.json()["applied_by"] == str(token_id)
    again = await admin.put("/v1/limits", json=document)
    assert (again.json()["version"], again.json()["changes"]) == (1, [])


async def test_yaml_survives_a_round_trip(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", content=yaml.safe_dump(DOCUMENT), headers=YAML)
    got = await admin.get("/v1/limits", headers=AS_YAML)
    assert got.headers["Content-Type"].startswith("application/yaml")
    assert yaml.safe_load(got.text) == (await admin.get("/v1/limits")).json()["document"]
    again = await admin.put("/v1/limits", content=got.content, headers=YAML | {"If-Match": got.headers["ETag"]})
    assert (again.status_code, again.json()["changes"]) == (200, [])


async def test_an_unchanged_document_is_not_sent_again(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    for headers in ({}, AS_YAML):
        tag = (await admin.get("/v1/limits", headers=headers)).headers["ETag"]
        assert (await admin.get("/v1/limits", headers=headers | {"If-None-Match": tag})).status_code == 304
    await admin.put("/v1/limits", json=with_limit(5))
    assert (await admin.get("/v1/limits", headers={"If-None-Match": '"1"'})).status_code == 200


async def test_a_dry_run_reports_changes_and_makes_none(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    before = (await admin.get("/v1/limits")).content
    tried = await admin.put("/v1/limits?dry_run=true", json=with_limit(5))
    assert (tried.json()["version"], tried.json()["dry_run"]) == (1, True)
    change = {"path": "quotas.exports.limit", "change": "changed", "before": 1000, "after": 5}
    assert tried.json()["changes"] == [change]
    assert (await admin.get("/v1/limits")).content == before
    assert await admin_harness.owner.fetchval("SELECT version FROM policy_version") == 1
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM limits_version") == 1
    applied = await admin.put("/v1/limits?dry_run=false", json=with_limit(5))
    assert (applied.json()["version"], applied.json()["changes"]) == (2, [change])


async def test_a_lost_update_is_refused(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    seen = {"If-Match": (await admin.get("/v1/limits")).headers["ETag"]}
    assert (await admin.put("/v1/limits", json=with_limit(5), headers=seen)).status_code == 200
    for path in ("/v1/limits", "/v1/limits?dry_run=true"):
        assert problem(await admin.put(path, json=with_limit(6), headers=seen)) == (412, [])
    assert (await admin.get("/v1/limits")).json()["document"]["quotas"][0]["limit"] == 5


async def test_one_of_many_parallel_updates_of_a_version_succeeds(admin: httpx.AsyncClient) -> None:
    seen = {"If-Match": '"0"'}
    puts = [admin.put("/v1/limits", json=with_limit(units), headers=seen) for units in range(1, 7)]
    assert sorted(put.status_code for put in await asyncio.gather(*puts)) == [200, 412, 412, 412, 412, 412]


async def test_all_faults_are_named_and_nothing_is_applied(admin: httpx.AsyncClient) -> None:
    wrong = with_limit(-1) | {"default_plan": "gold", "policies": [DOCUMENT["policies"][0] | {"quota": "none"}]}
    faults = [("default_plan", "known"), ("quotas[0].limit", "units"), ("policies[0].quota", "known")]
    assert problem(await admin.put("/v1/limits", json=wrong)) == (422, faults)
    assert problem(await admin.put("/v1/limits", content=yaml.safe_dump(wrong), headers=YAML)) == (422, faults)
    assert (await admin.get("/v1/limits")).json()["version"] == 0


async def test_contradictions_are_refused_with_an_explanation(admin: httpx.AsyncClient) -> None:
    exports, *others = DOCUMENT["quotas"]
    both = exports | {"mode": "regional", "carry_over": "all"}
    answer = await admin.put("/v1/limits", json=DOCUMENT | {"quotas": [both, *others]})
    assert problem(answer) == (422, [("quotas[0].mode", "carry_over")])
    assert "left of one region's limit would go to all regions" in answer.json()["invalid_parameters"][0]["reason"]
    assert (await admin.get("/v1/limits")).json()["version"] == 0


async def test_an_unparseable_document_is_refused(admin: httpx.AsyncClient) -> None:
    for content, media_type, expected in (
        ("{}", "text/plain", (415, [])),
        ("{}", "", (415, [])),
        ("{", "application/json", (400, [])),
        ("a: *b", "application/yaml", (422, [("body", "yaml")])),
        ("# " + "x" * 2**22, "application/yaml", (413, [])),
    ):
        answer = await admin.put("/v1/limits", content=content, headers={"Content-Type": media_type})
        assert problem(answer) == expected


async def test_an_unknown_parameter_is_refused(admin: httpx.AsyncClient) -> None:
    assert problem(await admin.put("/v1/limits?dryrun=true", json=DOCUMENT)) == (422, [("dryrun", "unknown")])
    assert problem(await admin.put("/v1/limits?dry_run=1", json=DOCUMENT)) == (422, [("dry_run", "format")])
    assert problem(await admin.get("/v1/limits?version=3")) == (422, [("version", "unknown")])
    assert (await admin.get("/v1/limits")).json()["version"] == 0


async def test_a_plan_is_not_dropped_under_a_tenant(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    await admin.put("/v1/subscriptions/acme", json={"plan": "pro"})
    exports, _, api = DOCUMENT["quotas"]
    without = {"plans": {"free": {}}, "quotas": [exports, api], "policies": [DOCUMENT["policies"][0]]}
    answer = await admin.put("/v1/limits", json=without)
    assert problem(answer) == (422, [("plans.pro", "in_use")])
    assert "'acme'" in answer.json()["invalid_parameters"][0]["reason"]
    await admin.delete("/v1/subscriptions/acme")
    assert (await admin.put("/v1/limits", json=without)).status_code == 200


async def test_agents_get_every_changed_limit(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/regions/eu-west", json={"weight": 2})
    seen = []
    for units in (1000, 2000, 500):
        await admin.put("/v1/limits", json=with_limit(units))
        bundle = await policy_bundle(admin_harness.owner, "eu-west", admin_harness.clock.now())
        seen.append((bundle.version, bundle.document.quotas[0].limit))
    assert seen == [(2, 1000), (3, 2000), (4, 500)]


async def test_the_next_exchange_funds_a_changed_limit(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    """A raised limit applies at once; a lowered one removes only free units."""
    await admin.put("/v1/limits", json=DOCUMENT)
    region = await open_region(admin_harness, admin, "eu-west")
    quota, at = "exports:tenant=acme", admin_harness.clock.now()
    funded = []
    for limit, units in ((1000, 600), (2000, 900), (500, 1), (1600, 1)):
        await admin.put("/v1/limits", json=with_limit(limit))
        await region.use(quota, "2026-11", [Used(at, units)])
        found = (await admin.get("/v1/periods/2026-11/reconciliation")).json()
        assert found["status"] == "balanced"
        funded.append(found["quotas"][0]["funded"])
    # 1,500 were spent when the limit fell to 500; usage beyond it is overage.
    assert funded == [1000, 2000, 1500, 1600]


async def test_a_plan_is_never_dropped_while_a_tenant_is_subscribed_to_it(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    exports, _, api = DOCUMENT["quotas"]
    without = {"plans": {"free": {}}, "quotas": [exports, api], "policies": [DOCUMENT["policies"][0]]}
    changes = [admin.put(f"/v1/subscriptions/t{number}", json={"plan": "pro"}) for number in range(6)]
    changes.insert(3, admin.put("/v1/limits", json=without))
    answers = await asyncio.gather(*changes)
    assert {answer.status_code for answer in answers} <= {200, 201, 422}
    plans = set((await admin.get("/v1/limits")).json()["document"]["plans"])
    on = {row["plan"] for row in (await admin.get("/v1/subscriptions")).json()["data"]}
    assert on <= plans


async def test_a_dry_run_explains_the_examples_of_the_document(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    tenants = [("acme", "/v1/exports/"), ("new", "/v1/exports"), ("acme", "/v1/nowhere")]
    examples = [{"subject": {"tenant": tenant, "route": route, "method": "post"}} for tenant, route in tenants]
    policy = {"name": "by-plan", "by": ["plan"], "quota": "exports", "match": {"route": "/v1/exports"}}
    document = DOCUMENT | {"policies": [policy], "examples": examples, "unmatched": "warn"}
    assert (await admin.put("/v1/subscriptions/acme", json={"plan": "pro"})).is_success
    tried = (await admin.put("/v1/limits", params={"dry_run": "true"}, json=document)).json()
    explained = [each["explanation"] for each in tried["examples"]]
    assert [[(found["policy"], found["key"]) for found in each["policies"]] for each in explained] == [
        [("by-plan", "exports:plan=pro")],
        [("by-plan", "exports:plan=free")],
        [],
    ]
    assert [each["unmatched"] for each in explained] == [None, None, "warn"]
    put = (await admin.put("/v1/limits", json=document)).json()
    assert (put["examples"], put["document"]["examples"]) == ([], examples)


async def test_agents_get_no_examples(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    document = DOCUMENT | {"examples": [{"subject": {"tenant": "acme"}}]}
    assert (await admin.put("/v1/limits", json=document)).is_success
    bundle = await policy_bundle(admin_harness.owner, "us-east", admin_harness.clock.now())
    assert bundle.document.examples == []
