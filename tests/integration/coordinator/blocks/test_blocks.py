"""People change the block list, and agents wait for its next version."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest

from coordinator.blocks import operations
from tests.integration.coordinator.admin_harness import AdminHarness, open_region, problem
from tests.integration.coordinator.fixtures import NOON

pytestmark = pytest.mark.anyio

KEY = {"field": "api_key", "value": "ak_7", "reason": "leaked"}


async def listed(client: httpx.AsyncClient) -> tuple[int, list[tuple[str, str]]]:
    found = (await client.get("/v1/blocks")).json()
    return found["version"], [(each["field"], each["value"]) for each in found["data"]]


async def test_a_block_from_its_beginning_to_its_end(admin: httpx.AsyncClient) -> None:
    put = await admin.post("/v1/blocks", json=KEY)
    assert (put.status_code, put.json()["valid_until"], put.json()["ends_in_ms"]) == (201, None, None)
    assert await listed(admin) == (1, [("api_key", "ak_7")])
    same = await admin.post("/v1/blocks", json=KEY)
    assert (same.status_code, same.json()) == (200, put.json())
    until = (NOON + timedelta(hours=1)).isoformat()
    changed = await admin.post("/v1/blocks", json=KEY | {"valid_until": until})
    assert (changed.status_code, changed.json()["ends_in_ms"]) == (200, 3_600_000)
    assert (await admin.delete("/v1/blocks/api_key/ak_7")).status_code == 204
    assert problem(await admin.delete("/v1/blocks/api_key/ak_7")) == (404, [])
    assert await listed(admin) == (3, [])
    deeds = (await admin.get("/v1/audit?object=api_key:ak_7")).json()["data"]
    assert [deed["action"] for deed in deeds] == ["block.deleted", "block.put", "block.put"]


async def test_spellings_of_one_address_are_one_block(admin: httpx.AsyncClient) -> None:
    for value, spelt in (
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("203.0.113.9/32", "203.0.113.9"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("2001:db8::/32", "2001:db8::/32"),
    ):
        answer = await admin.post("/v1/blocks", json={"field": "ip", "value": value, "reason": "x"})
        assert answer.json()["value"] == spelt
    assert (await admin.delete("/v1/blocks/ip/::ffff:10.0.0.0/104")).status_code == 204
    assert ("ip", "10.0.0.0/8") not in (await listed(admin))[1]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"field": "route"}, "field"),
        ({"value": ""}, "value"),
        ({"value": "a\nb"}, "value"),
        ({"field": "ip", "value": "10.0.0.1/8"}, "value"),
        ({"field": "ip", "value": "here"}, "value"),
        ({"reason": ""}, "reason"),
        ({"reason": "\u001b[2J"}, "reason"),
        ({"valid_until": NOON.isoformat()}, "valid_until"),
        ({"for": "ever"}, "for"),
    ],
)
async def test_invalid_blocks_are_refused_by_name(
    admin: httpx.AsyncClient, changed: dict[str, Any], field: str
) -> None:
    status, [(named, _)] = problem(await admin.post("/v1/blocks", json=KEY | changed))
    assert (status, named) == (422, field)
    assert await listed(admin) == (0, [])


async def test_ended_blocks_are_not_listed_and_make_room(
    admin_harness: AdminHarness, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MAX_BLOCKS", 1)
    await admin.post("/v1/blocks", json=KEY | {"valid_until": (NOON + timedelta(minutes=1)).isoformat()})
    other = {"field": "tenant", "value": "acme", "reason": "x"}
    assert (await admin.post("/v1/blocks", json=other)).json()["type"] == "/problems/full"
    admin_harness.clock.time += timedelta(minutes=1)
    assert await listed(admin) == (1, [])
    assert (await admin.post("/v1/blocks", json=other)).status_code == 201
    assert await admin_harness.owner.fetchval("SELECT count(*) FROM block") == 1


async def test_scopes_of_the_block_list(admin_harness: AdminHarness) -> None:
    for scopes, status in ((("quota:read",), 200), (("region:eu-west",), 200), (("usage:read",), 403), ((), 401)):
        assert (await (await admin_harness.caller(*scopes)).get("/v1/blocks")).status_code == status


async def test_an_agent_waits_for_the_next_version_and_every_reply_names_it(
    admin_harness: AdminHarness, admin: httpx.AsyncClient
) -> None:
    region = await open_region(admin_harness, admin, "eu-west")
    waiting = asyncio.create_task(region.client.get("/v1/blocks?since=0", timeout=30))
    await asyncio.sleep(0)
    assert not waiting.done()
    await admin.post("/v1/blocks", json=KEY)
    async with asyncio.timeout(60):
        news = (await waiting).json()
    assert (news["version"], len(news["data"])) == (1, 1)
    held = 'leasehold_http_held_request_duration_seconds_count{route="/v1/blocks"} 1.0'
    assert held in (await admin.get("/metrics")).text
    body = {"nonce": "0" * 32, "fingerprint": "one life"}
    epoch = (await region.client.post("/v1/regions/eu-west/epochs", json=body)).json()["epoch"]
    frozen = f'{{"epoch": {epoch}, "lane": 0, "seq": 1, "leases": []}}'
    call = {"fingerprint": "one life", "exchanges": [{"frozen": frozen}]}
    answer = (await region.client.post("/v1/regions/eu-west/exchanges", json=call)).json()
    assert answer["versions"]["blocks"] == 1
    tag = (await admin.get("/v1/blocks")).headers["ETag"]
    assert (await admin.get("/v1/blocks", headers={"If-None-Match": tag})).status_code == 304
