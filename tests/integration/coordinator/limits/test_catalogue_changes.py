"""Each change of subscriptions and regions is announced to agents once, and requests without effect are not."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx
import msgspec
import pytest

from coordinator.limits.policy_bundle import policy_bundle
from coordinator.notice import Notice
from protocol.messages import Signal
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, problem
from tests.integration.coordinator.fixtures import NOON, connected

pytestmark = pytest.mark.anyio

THE_END = msgspec.json.encode(Notice(Signal(kind="end"))).decode()


@pytest.fixture
async def notices(database: str) -> AsyncIterator[asyncio.Queue[str]]:
    """Yield the notices that coordinators receive from now on."""
    told: asyncio.Queue[str] = asyncio.Queue()
    async with connected(database) as connection:
        await connection.add_listener("leasehold_signals", lambda *notice: told.put_nowait(str(notice[-1])))
        yield told


async def heard(admin_harness: AdminHarness, notices: asyncio.Queue[str]) -> list[tuple[object, object]]:
    """Return (kind, region) of all notices up to now. They arrive in the order of their commits: ours is the last."""
    await admin_harness.owner.execute("SELECT pg_notify('leasehold_signals', $1)", THE_END)
    found = []
    async with asyncio.timeout(60):
        while (notice := await notices.get()) != THE_END:
            found.append(msgspec.json.decode(notice))
    return [(each["signal"]["kind"], each.get("region")) for each in found]


async def test_a_tenant_is_put_on_a_plan_moved_and_taken_off(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    put = await admin.put("/v1/subscriptions/acme", json={"plan": "free"})
    noon = "2026-11-18T12:00:00Z"
    subscription = {"tenant": "acme", "plan": "free", "changed_at": noon, "began_at": noon}
    assert (put.status_code, put.json()) == (201, subscription | {"effects": []})
    moved = await admin.put("/v1/subscriptions/acme", json={"plan": "pro"})
    assert (moved.status_code, moved.json()["plan"]) == (200, "pro")
    assert (await admin.get("/v1/subscriptions/acme")).json() | {"effects": []} == moved.json()
    assert (await policy_bundle(admin_harness.owner, "eu-west", NOON)).subscriptions == {"acme": "pro"}
    assert (await admin.delete("/v1/subscriptions/acme")).status_code == 204
    for gone in (await admin.delete("/v1/subscriptions/acme"), await admin.get("/v1/subscriptions/acme")):
        assert problem(gone) == (404, [])


async def test_only_changes_are_announced(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, notices: asyncio.Queue[str]
) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    for plan in ("free", "free", "pro", "none"):
        await admin.put("/v1/subscriptions/acme", json={"plan": plan})
    await admin.delete("/v1/subscriptions/nobody")
    await admin.put("/v1/limits", json=DOCUMENT)
    assert await heard(admin_harness, notices) == [("policies", None) for version in (1, 2, 3)]


async def test_a_plan_must_be_known(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    assert problem(await admin.put("/v1/subscriptions/acme", json={"plan": "gold"})) == (422, [("plan", "known")])
    assert problem(await admin.put("/v1/subscriptions/acme", json={})) == (422, [("plan", "required")])
    answer = await admin.put("/v1/subscriptions/acme", json={"plan": "pro", "until": 1})
    assert problem(answer) == (422, [("until", "unknown")])
    assert problem(await admin.get("/v1/subscriptions/acme")) == (404, [])


async def test_names_of_tenants_are_kept_exactly(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    for tenant in ("a/b", "a b", "é", "a%2Fb", "..", "x" * 256):
        path = "/v1/subscriptions/" + quote(tenant, safe="").replace("..", "%2E%2E")
        assert (await admin.put(path, json={"plan": "pro"})).json()["tenant"] == tenant
        assert (await admin.get(path)).json()["tenant"] == tenant


async def test_invalid_names_are_refused(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    for path, rule in (("a%00b", "text"), ("a%01b", "text"), ("x" * 257, "max_length")):
        for answer in (
            await admin.put(f"/v1/subscriptions/{path}", json={"plan": "pro"}),
            await admin.get(f"/v1/subscriptions/{path}"),
            await admin.delete(f"/v1/subscriptions/{path}"),
        ):
            assert problem(answer) == (422, [("tenant", rule)])


async def test_a_list_is_read_page_by_page(admin: httpx.AsyncClient) -> None:
    await admin.put("/v1/limits", json=DOCUMENT)
    tenants = ["acme", "globex", "initech", "umbrella", "zorg"]
    for tenant in tenants:
        await admin.put(f"/v1/subscriptions/{tenant}", json={"plan": "pro"})
    pages: list[list[str]] = []
    after = ""
    while not pages or after:
        page = (await admin.get(f"/v1/subscriptions?page_size=2{after}")).json()
        pages.append([row["tenant"] for row in page["data"]])
        after = f"&page_after={page['page']['next']}" if page["page"]["next"] else ""
    assert pages == [tenants[:2], tenants[2:4], tenants[4:]]
    whole = (await admin.get("/v1/subscriptions?page_size=5")).json()
    assert (len(whole["data"]), whole["page"]["next"]) == (5, None)


async def test_a_cursor_of_another_list_and_none_at_all_are_refused(admin: httpx.AsyncClient) -> None:
    for name in ("eu-west", "us-east"):
        await admin.put(f"/v1/regions/{name}", json={})
    cursor = (await admin.get("/v1/regions?page_size=1")).json()["page"]["next"]
    answer = await admin.get(f"/v1/subscriptions?page_after={cursor}")
    assert problem(answer) == (422, [("page_after", "question")])
    assert problem(await admin.get("/v1/regions?page_after=x&size=1")) == (
        422,
        [("page_after", "format"), ("size", "unknown")],
    )


async def test_a_region_is_added_changed_and_read(admin_harness: AdminHarness, admin: httpx.AsyncClient) -> None:
    added = await admin.post("/v1/regions", json={"name": "eu-west", "weight": 3})
    region: dict[str, object] = {"name": "eu-west", "weight": 3, "status": "active", "epoch": None}
    region |= {"created_at": "2026-11-18T12:00:00Z", "split_brain": False, "last_seen_at": None, "regressed_lanes": 0}
    region |= {"agents": [], "identities": []}
    assert (added.status_code, added.json(), added.headers["Location"]) == (201, region, "/v1/regions/eu-west")
    assert (await admin.post("/v1/regions", json={"name": "eu-west", "weight": 3})).status_code == 200
    changed = await admin.put("/v1/regions/eu-west", json={"status": "draining"})
    assert (changed.status_code, changed.json()) == (200, region | {"status": "draining"})
    assert (await admin.get("/v1/regions/eu-west")).json() == changed.json()
    assert (await admin.get("/v1/regions")).json() == {"data": [changed.json()], "page": {"next": None}}
    assert problem(await admin.get("/v1/regions/us-east")) == (404, [])


async def test_agents_divide_rates_by_the_weights_of_active_regions(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    for name, weight in (("eu-west", 3), ("us-east", 1), ("ap-south", 4)):
        await admin.put(f"/v1/regions/{name}", json={"weight": weight})
    await admin.put("/v1/regions/ap-south", json={"status": "down"})
    bundles = [
        await policy_bundle(admin_harness.owner, name, NOON) for name in ("eu-west", "us-east", "ap-south", "unknown")
    ]
    assert [(bundle.weight, bundle.total_weight) for bundle in bundles] == [(3, 4), (1, 4), (0, 4), (0, 4)]
    assert {bundle.version for bundle in bundles} == {4}


async def test_a_weight_is_announced_to_all_and_draining_to_the_region_itself(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, notices: asyncio.Queue[str]
) -> None:
    await admin.put("/v1/regions/eu-west", json={"weight": 2})
    await admin.put("/v1/regions/eu-west", json={"weight": 2})
    await admin.put("/v1/regions/eu-west", json={"status": "draining"})
    await admin.put("/v1/regions/eu-west", json={"status": "draining"})
    assert await heard(admin_harness, notices) == [("policies", None), ("policies", None), ("drain", "eu-west")]


async def test_invalid_regions_are_refused(admin: httpx.AsyncClient) -> None:
    impossible: list[tuple[dict[str, object], str]] = [
        ({"name": "EU"}, "name"),
        ({"name": "eu\n"}, "name"),
        ({"name": "eu", "weight": -1}, "weight"),
        ({"name": "eu", "weight": 1_000_001}, "weight"),
        ({"name": "eu", "weight": 1.5}, "weight"),
        ({"name": "eu", "status": "gone"}, "status"),
        ({"name": "eu", "store": "x"}, "store"),
        ({}, "name"),
    ]
    for body, field in impossible:
        status, faults = problem(await admin.post("/v1/regions", json=body))
        assert (status, [name for name, _ in faults]) == (422, [field])
    assert (await admin.get("/v1/regions")).json()["data"] == []


async def test_a_region_with_an_impossible_name_is_refused_in_the_path_too(admin: httpx.AsyncClient) -> None:
    for path in ("EU", "eu%0A", "a%00b"):
        assert problem(await admin.put(f"/v1/regions/{path}", json={})) == (422, [("region", "pattern")])
        assert problem(await admin.get(f"/v1/regions/{path}")) == (422, [("region", "pattern")])
