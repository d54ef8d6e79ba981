"""Holds reserve units and bill what was used, with everything real behind them."""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from regional_agent.admission.rules.hold_ids import HoldSeal
from regional_agent.store import keys
from tests.integration.regional_agent.world import DOCUMENT, EXPORT, Agent, World
from tests.waiting import attempts, until

pytestmark = pytest.mark.anyio

POLICIES: list[dict[str, Any]] = [
    {"name": "charged", "match": {"route": "/v1/renders"}, "by": ["tenant"], "quota": "exports"}
    | {"on_hold_expiry": "charge"},
    {"name": "calls", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "api", "cost": 2},
]
RENDER = EXPORT | {"route": "/v1/renders"}


@pytest.fixture
async def agent(world: World) -> Agent:
    document = DOCUMENT | {"policies": [*DOCUMENT["policies"], *POLICIES]}
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    agent = await world.agent()
    await until(lambda: agent.region.admission.policies is not None and agent.region.admission.policies.version >= 2)
    return agent


async def hold(agent: Agent, units: int = 7, **changed: Any) -> httpx.Response:
    body = {"subject": EXPORT, "units": units, "ttl_ms": 60_000, "operation_id": "once"} | changed
    return await agent.http.post("/v1/holds", json=body)


async def held(agent: Agent, units: int = 7, **changed: Any) -> str:
    answer = await hold(agent, units, **changed)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["hold_id"])


async def say(agent: Agent, hold_id: str, action: str, **body: int) -> httpx.Response:
    return await agent.http.post(f"/v1/holds/{hold_id}:{action}", json=body)


async def becomes(look: Callable[[], Awaitable[object]], wanted: object) -> None:
    async for _ in attempts():
        if await look() == wanted:
            return
    assert await look() == wanted


async def pass_ms(agent: Agent, ms: int) -> None:
    """Let time pass on the store's clock."""
    await agent.region.store.call("HINCRBY", keys.FENCE, "mono", ms * 1000)


async def test_a_hold_is_billed_for_its_commit(world: World, agent: Agent) -> None:
    answer = await hold(agent, 40)
    body = answer.json()
    assert (answer.status_code, body["units"], body["expires_in_ms"], body["degraded"]) == (201, 40, 60_000, None)
    assert [(each["policy"], each["remaining"]) for each in body["policies"]] == [("export", 60), ("calls", 8)]
    assert answer.headers["X-RateLimit-Remaining"] == "8"
    [lease] = (await agent.http.get("/v1/status")).json()["leases"]
    assert (lease["held"], lease["consumed"]) == (40, 0)
    assert (await agent.check(cost=61)).status_code == 429
    look = await agent.http.get(f"/v1/holds/{body['hold_id']}")
    assert (look.json()["state"], look.json()["units"]) == ("open", 40)
    told = await say(agent, body["hold_id"], "commit", units=25)
    assert (told.status_code, told.json()["state"], told.json()["committed"]) == (200, "committed", 25)
    await becomes(world.usage, 25)
    [lease] = (await agent.http.get("/v1/status")).json()["leases"]
    assert (lease["held"], lease["consumed"]) == (0, 25)


async def test_the_same_operation_holds_once_and_another_body_is_refused(agent: Agent) -> None:
    first, again = await held(agent), await held(agent)
    assert first == again
    [lease] = (await agent.http.get("/v1/status")).json()["leases"]
    assert lease["held"] == 7
    for changed in ({"units": 8}, {"ttl_ms": 5}, {"subject": RENDER}):
        refused = await hold(agent, **changed)
        assert (refused.status_code, refused.json()["type"]) == (422, "/problems/operation-conflict")
    check = await agent.check(operation_id="once")
    assert check.json()["type"] == "/problems/operation-conflict", "a check is another operation"


async def test_a_hold_ends_once(world: World, agent: Agent) -> None:
    hold_id = await held(agent)
    assert (await say(agent, hold_id, "extend", ttl_ms=90_000)).json()["expires_in_ms"] == 90_000
    for _ in range(2):
        assert (await say(agent, hold_id, "commit", units=9)).status_code == 200
    for action, body in (("commit", {"units": 8}), ("release", {}), ("extend", {"ttl_ms": 5})):
        refused = await say(agent, hold_id, action, **body)
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/hold-ended")
        assert (refused.json()["state"], refused.json()["committed"]) == ("committed", 9)
    await becomes(world.usage, 9)
    other = await held(agent, operation_id="other")
    for _ in range(2):
        assert (await agent.http.post(f"/v1/holds/{other}:release")).json()["state"] == "released"
    assert (await say(agent, other, "commit", units=1)).status_code == 409


async def test_usage_beyond_the_limit_is_overage(world: World, agent: Agent) -> None:
    hold_id = await held(agent, 40)
    assert (await say(agent, hold_id, "commit", units=130)).status_code == 200
    await becomes(world.usage, 130)
    quota = await world.quota()
    assert (quota["funded"], quota["overage"], quota["consumed"]) == (100, 30, 130)


async def test_a_denied_hold_answers_like_a_denied_check(agent: Agent) -> None:
    denied, check = (await hold(agent, 101)).json(), (await agent.check(cost=101)).json()
    assert denied["type"] == check["type"] == "/problems/cost-above-limit"
    assert denied["denied_by"] == "export"
    assert {*denied} == {*check}
    assert [each["allowed"] for each in denied["policies"]] == [False, True]


async def test_slots_are_taken_and_given_back_with_holds(agent: Agent) -> None:
    report = EXPORT | {"route": "/v1/reports"}
    first = await hold(agent, 500, subject=report)
    slots = first.json()["policies"][0]["share"]  # the region's part of five
    for number in range(1, slots):
        await held(agent, 500, subject=report, operation_id=f"hold {number}")
    denied = await hold(agent, 500, subject=report, operation_id="last")
    assert (denied.status_code, denied.json()["denied_by"]) == (429, "report")
    assert (await say(agent, first.json()["hold_id"], "commit", units=500)).json()["state"] == "committed"
    assert (await hold(agent, 500, subject=report, operation_id="last")).status_code == 201


async def test_a_blocked_hold_answers_like_a_blocked_check(world: World, agent: Agent) -> None:
    block = {"field": "tenant", "value": "acme", "reason": "test"}
    headers = {"Idempotency-Key": "block"}
    assert (await world.admin.post("/v1/blocks", json=block, headers=headers)).is_success

    async def type_of_hold() -> str:
        return str((await hold(agent)).json().get("type"))

    await becomes(type_of_hold, "/problems/blocked")


@pytest.mark.parametrize(
    ("changed", "field", "rule"),
    [
        ({"units": 0}, "units", "minimum"),
        ({"units": 2**53}, "units", "maximum"),
        ({"units": "7"}, "units", "type"),
        ({"ttl_ms": 0}, "ttl_ms", "minimum"),
        ({"ttl_ms": 86_400_001}, "ttl_ms", "maximum"),
        ({"operation_id": ""}, "operation_id", "min_length"),
        ({"operation_id": None}, "operation_id", "type"),
        ({"cost": 3}, "cost", "unknown"),
        ({"subject": {"route": "/v1/exports"}}, "subject.tenant", "required"),
    ],
)
async def test_bad_input_is_named(agent: Agent, changed: dict[str, Any], field: str, rule: str) -> None:
    answer = await hold(agent, **changed)
    [fault] = answer.json()["invalid_parameters"]
    assert (answer.status_code, fault["field"], fault["rule"]) == (422, field, rule)
    assert (await agent.http.get("/v1/status")).json()["leases"] == []


@pytest.mark.parametrize(
    ("action", "body", "field"),
    [
        ("commit", {}, "units"),
        ("commit", {"units": -1}, "units"),
        ("commit", {"units": 2**53 - 1}, "units"),
        ("extend", {"ttl_ms": 86_400_001}, "ttl_ms"),
        ("release", {"units": 1}, "units"),
    ],
)
async def test_bad_changes_of_a_hold_are_named(agent: Agent, action: str, body: dict[str, int], field: str) -> None:
    hold_id = await held(agent)
    answer = await say(agent, hold_id, action, **body)
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["invalid_parameters"]] == [field]
    assert (await agent.http.get(f"/v1/holds/{hold_id}")).json()["state"] == "open"


@pytest.mark.parametrize("strange", ["none", "a.b.c.d", "AAAAAAAAAAAAAAAAAAAAAA.1.1.!", "A" * 9_000])
async def test_an_invalid_id_of_a_hold_is_unknown(agent: Agent, strange: str) -> None:
    hold_id = await held(agent)
    inner = agent.whole.holds.seal.open(hold_id)
    elsewhere = HoldSeal()
    elsewhere.use(b"another region's key" + bytes(12))
    for text in (strange, str(inner), hold_id[:-1], f"{hold_id}A", elsewhere.seal(inner)):
        answer = await say(agent, text, "commit", units=1)
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/hold-unknown")


async def test_an_id_reveals_nothing_and_cannot_be_changed(agent: Agent) -> None:
    hold_id = await held(agent)
    inner = agent.whole.holds.seal.open(hold_id)
    assert any("tenant=acme" in part.quota for part in inner.parts)
    raw = urlsafe_b64decode(hold_id + "=" * (-len(hold_id) % 4))
    assert b"acme" not in raw
    for index in range(0, len(raw), 7):
        changed = raw[:index] + bytes([raw[index] ^ 1]) + raw[index + 1 :]
        text = urlsafe_b64encode(changed).decode().rstrip("=")
        assert (await say(agent, text, "extend", ttl_ms=90_000)).status_code == 404
    assert (await agent.http.get(f"/v1/holds/{hold_id}")).json()["state"] == "open"


async def test_nothing_is_held_while_no_id_can_be_sealed(agent: Agent) -> None:
    hold_id = await held(agent, 5)
    seal, agent.whole.holds.seal = agent.whole.holds.seal, HoldSeal()
    assert (await hold(agent)).status_code == 503
    assert (await say(agent, hold_id, "commit", units=1)).status_code == 503
    agent.whole.holds.seal = seal
    [lease] = (await agent.http.get("/v1/status")).json()["leases"]
    assert lease["held"] == 5


async def test_a_hold_without_limits_holds_nothing_and_its_id_encodes_that(agent: Agent) -> None:
    answer = await hold(agent, subject={"tenant": "acme", "route": "/v1/other"})
    assert (answer.status_code, answer.json()["policies"]) == (201, [])
    for action, body in (("extend", {"ttl_ms": 5}), ("commit", {"units": 5}), ("release", {})):
        told = await say(agent, answer.json()["hold_id"], action, **body)
        assert (told.status_code, told.json()["state"]) == (200, "nothing_held")


async def test_an_expired_hold_is_freed_or_charged_without_a_request(world: World, agent: Agent) -> None:
    agent.region.quotas.check_held_ms = 20
    await held(agent, 30)
    charged = await held(agent, 20, subject=RENDER, operation_id="charged")
    await pass_ms(agent, 60_000)
    await becomes(world.usage, 20)

    async def of_the_lease() -> tuple[int, int]:
        [lease] = (await agent.http.get("/v1/status")).json()["leases"]
        return lease["held"], lease["consumed"]

    assert await of_the_lease() == (0, 20)
    assert (await say(agent, charged, "commit", units=25)).json()["state"] == "committed"
    await becomes(world.usage, 25)


async def test_a_commit_finds_its_epoch_when_the_region_has_another(world: World, agent: Agent) -> None:
    hold_id = await held(agent, 30)
    older = agent.region.epochs.current
    assert older is not None
    agent.region.epochs.on_epoch_closed(older)
    await until(lambda: agent.region.epochs.current not in (None, older))
    await becomes(lambda: left_of(world, older.epoch), (30, 0, 0))
    assert (await say(agent, hold_id, "commit", units=12)).status_code == 200
    await becomes(lambda: left_of(world, older.epoch), (0, 12, 18))
    assert await world.usage() == 12


async def left_of(world: World, epoch: int) -> tuple[int, int, int]:
    [lease] = await world.leases(epoch)
    return lease["outstanding"], lease["consumed"], lease["returned"]


async def test_any_agent_of_the_region_ends_a_hold(world: World, agent: Agent) -> None:
    hold_id = await held(agent)
    other = await world.agent()
    assert (await say(other, hold_id, "commit", units=5)).status_code == 200
    elsewhere = await world.agent("eu-west")
    assert (await say(elsewhere, hold_id, "commit", units=5)).status_code == 404


async def test_without_the_store_nothing_is_held_and_nothing_is_lost(agent: Agent) -> None:
    hold_id = await held(agent)
    agent.region.epochs.current = None
    assert (await hold(agent, operation_id="other")).status_code == 503
    answer = await say(agent, hold_id, "commit", units=5)
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/store-unavailable")
    assert answer.headers["Retry-After"] == "1"
    agent.region.epochs.invalidate()
    await agent.ready()
    assert (await say(agent, hold_id, "commit", units=5)).status_code == 200


async def test_a_draining_region_returns_held_units_when_their_hold_has_ended(world: World, agent: Agent) -> None:
    agent.region.exchange_loop.offer_again_ms = 20
    hold_id = await held(agent, 30)
    epoch = agent.region.epochs.current.epoch if agent.region.epochs.current else 0
    assert (await world.admin.put("/v1/regions/us-east", json={"status": "draining"})).is_success
    await agent.check(mode="peek")
    await becomes(lambda: outstanding(world, epoch), 30)
    await say(agent, hold_id, "release")
    await becomes(lambda: outstanding(world, epoch), 0)


async def outstanding(world: World, epoch: int) -> int:
    return sum(lease["outstanding"] for lease in await world.leases(epoch))


async def test_a_shutdown_that_returns_leases_waits_for_holds(world: World, agent: Agent) -> None:
    hold_id = await held(agent, 30)
    epoch = agent.region.epochs.current.epoch if agent.region.epochs.current else 0
    leaving = asyncio.create_task(agent.region.leave(return_unspent=True))
    await becomes(lambda: outstanding(world, epoch), 30)
    assert not leaving.done()
    await say(agent, hold_id, "commit", units=30)
    await leaving
    await becomes(world.usage, 30)
    assert await outstanding(world, epoch) == 0


async def test_a_shutdown_waits_until_a_hold_expires(world: World, agent: Agent) -> None:
    await held(agent, 30, ttl_ms=3_600_000)
    incarnation = agent.region.epochs.current
    assert incarnation is not None
    agent.region.shutdown.timeout_s, clock = 2.0, asyncio.get_running_loop()
    said_by_s = clock.time() + 2 * agent.region.shutdown.timeout_s
    leaving = asyncio.create_task(agent.region.leave(return_unspent=True))
    await until(lambda: leaving.done() or clock.time() > said_by_s)
    assert not leaving.done()
    assert await outstanding(world, incarnation.epoch) == 30
    await pass_ms(agent, 3_600_000)
    await leaving
    assert await outstanding(world, incarnation.epoch) == 0


async def test_a_shutdown_that_keeps_leases_waits_for_no_hold(world: World, agent: Agent) -> None:
    await held(agent, 30, ttl_ms=3_600_000)
    async with asyncio.timeout(60):
        await agent.region.leave(return_unspent=False)
