"""The decision log on a real Postgres: what agents send is stored once, found, summed up and dropped."""

import gzip
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest

from coordinator.decision_log.store import keep_days
from protocol.decision_log.messages import DecisionBatch, DecisionsLost, LoggedDecision, LoggedPolicy
from protocol.identifiers import operation_digest
from tests.integration.coordinator.admin_harness import AdminHarness
from tests.integration.coordinator.fixtures import NOON
from tests.integration.regional_agent.world import another_coordinator

pytestmark = pytest.mark.anyio

EU = "/v1/regions/eu-west/decisions"


def decision(seconds: float = 0.0, *, tenant: str = "acme", policy: str = "export", **fields: Any) -> LoggedDecision:
    """Return a denial so many seconds after noon, unless the fields say otherwise."""
    answered = LoggedPolicy(
        policy=policy, quota=f"{policy}s:tenant={tenant}", cost=2, limit=10, share=4, remaining=1, reason="limit"
    )
    given: dict[str, Any] = {"outcome": "denied", "mode": "enforce", "reason": "limit", "policy": policy}
    given |= {"subject": {"tenant": tenant, "route": "/v1/x"}, "policies": [answered]} | fields
    return LoggedDecision(at_ms=ms(NOON + timedelta(seconds=seconds)), **given)


def ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def batch(*decisions: LoggedDecision, number: int = 1, lost: int = 0) -> bytes:
    losses = [DecisionsLost(ms(NOON), lost)] if lost else []
    return msgspec.json.encode(DecisionBatch(f"{number:024x}", "agent-1", list(decisions), losses))


async def send(region: httpx.AsyncClient, body: bytes, **headers: str) -> httpx.Response:
    return await region.post(EU, content=body, headers={"Content-Type": "application/json", **headers})


@pytest.fixture
async def eu_west(admin_harness: AdminHarness) -> httpx.AsyncClient:
    return await admin_harness.caller("region:eu-west")


@pytest.fixture
async def auditor(admin_harness: AdminHarness) -> httpx.AsyncClient:
    return await admin_harness.caller("audit:read")


async def found(auditor: httpx.AsyncClient, **only: Any) -> Any:
    window = {"from": "2026-11-18T11:00:00Z", "to": "2026-11-18T13:00:00Z"}
    answer = await auditor.get("/v1/decisions", params=window | only)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_why_was_acme_denied(eu_west: httpx.AsyncClient, auditor: httpx.AsyncClient) -> None:
    denials = [
        decision(1, count=7, last_ms=ms(NOON + timedelta(seconds=1.5)), epoch=3, latency_us=250, retry_after_ms=900),
        decision(2, policy="search", reason="no_lease"),
        decision(3, outcome="admitted", reason=None, weight=100.0, policy="search"),
        decision(4, tenant="bcme"),
    ]
    sent = await send(eu_west, gzip.compress(batch(*denials, lost=5)), **{"Content-Encoding": "gzip"})
    assert (sent.status_code, sent.json()) == (200, {"stored": 5, "refused": 0})
    answer = await found(auditor, tenant="acme")
    assert [(each["outcome"], each["policy"]) for each in answer["data"]] == [
        ("admitted", "search"),
        ("denied", "search"),
        ("denied", "export"),
    ]
    [first] = (each for each in answer["data"] if each["policy"] == "export")
    assert {
        name: first[name] for name in ("count", "reason", "key", "quota", "limit", "share", "remaining", "cost")
    } == {
        "count": 7,
        "reason": "limit",
        "key": "exports:tenant=acme",
        "quota": "exports",
        "limit": 10,
        "share": 4,
        "remaining": 1,
        "cost": 2,
    }
    assert (first["at"], first["last_at"]) == ("2026-11-18T12:00:01Z", "2026-11-18T12:00:01.500000Z")
    assert (first["region"], first["agent"], first["epoch"], first["latency_us"]) == ("eu-west", "agent-1", 3, 250)
    assert first["subject"] == {"route": "/v1/x"}
    summary = answer["summary"]
    assert (summary["denied"], summary["admitted"], summary["lost"]) == (8, 100, 5)
    assert summary["admitted_plus_minus"] == 196
    assert [(each["policy"], each["reason"], each["decisions"]) for each in summary["groups"]] == [
        ("search", None, 100),
        ("export", "limit", 7),
        ("search", "no_lease", 1),
    ]


async def test_each_filter_leaves_out_the_others(
    eu_west: httpx.AsyncClient, auditor: httpx.AsyncClient, admin_harness: AdminHarness
) -> None:
    keyed = LoggedPolicy(policy="key", quota="api:api_key=ak_7", cost=1, limit=1, share=1, remaining=0)
    one = decision(1, tenant="t", policy="key", reason="store", policies=[keyed], operation=operation_digest("t", "op"))
    assert (await send(eu_west, batch(one, *(decision(n) for n in (2, 3))))).status_code == 200
    for only in (
        {"tenant": "t"},
        {"policy": "key"},
        {"quota": "api"},
        {"reason": "store"},
        {"key": "api:api_key=ak_7"},
        {"tenant": "t", "operation_id": "op"},
        {"to": "2026-11-18T12:00:02Z"},
    ):
        answer = await found(auditor, **only)
        assert [each["tenant"] for each in answer["data"]] == ["t"], only
        assert answer["summary"]["denied"] == 1, only
    assert (await (await admin_harness.caller("alloc:write")).put("/v1/regions/us-east", json={})).is_success
    assert not (await found(auditor, region="us-east"))["data"]
    assert not (await found(auditor, outcome="admitted"))["data"]
    assert len((await found(auditor, reason=["store", "limit"]))["data"]) == 3
    [row] = (await found(auditor, tenant="t"))["data"]
    assert "ak_7" not in str(row)


async def test_pages_follow_one_another_without_a_gap(eu_west: httpx.AsyncClient, auditor: httpx.AsyncClient) -> None:
    yesterday = -24 * 3600.0
    times = [yesterday, *([0.25] * 3), 1.0, 2.0]
    assert (await send(eu_west, batch(*map(decision, times)))).json()["stored"] == len(times)
    params: dict[str, Any] = {"tenant": "acme", "from": "2026-11-17", "to": "2026-11-19", "page_size": 2}
    ids, summaries = [], []
    while True:
        answer = (await auditor.get("/v1/decisions", params=params)).json()
        ids += [each["id"] for each in answer["data"]]
        summaries.append(answer["summary"])
        if answer["page"]["next"] is None:
            break
        params["page_after"] = answer["page"]["next"]
    assert (len(ids), len(set(ids))) == (len(times), len(times))
    assert summaries[0]["denied"] == len(times)
    assert set(map(str, summaries[1:])) == {"None"}


async def test_a_batch_that_comes_again_is_stored_once(eu_west: httpx.AsyncClient, auditor: httpx.AsyncClient) -> None:
    for _ in range(2):
        sent = await send(eu_west, batch(decision(1), decision(2), lost=3))
        assert (sent.status_code, sent.json()["stored"]) == (200, 3)
    assert (await send(eu_west, batch(decision(1), number=2))).json()["stored"] == 1
    answer = await found(auditor, tenant="acme")
    assert (len(answer["data"]), answer["summary"]["lost"]) == (3, 3)


async def test_a_malformed_decision_is_refused_by_itself(
    eu_west: httpx.AsyncClient, auditor: httpx.AsyncClient
) -> None:
    body = msgspec.json.decode(batch(decision(1), decision(2), decision(3), decision(4)))
    body["decisions"][1]["weight"] = 0
    body["decisions"][2]["subject"] = {"user": "a\0b"}
    sent = await send(eu_west, msgspec.json.encode(body | {"later": "field"}))
    assert (sent.status_code, sent.json()) == (200, {"stored": 2, "refused": 2})
    assert len((await found(auditor))["data"]) == 2


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{}", {}, 422),
        (b"not json", {}, 400),
        (b"not gzip", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(batch(decision()))[:-4], {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(b" " * 5_000_000), {"Content-Encoding": "gzip"}, 413),
        (batch(decision()), {"Content-Encoding": "br"}, 415),
    ],
    ids=["no batch", "no json", "no gzip", "cut gzip", "too large", "other encoding"],
)
async def test_what_is_no_batch_is_refused(
    eu_west: httpx.AsyncClient, body: bytes, headers: dict[str, str], status: int
) -> None:
    assert (await send(eu_west, body, **headers)).status_code == status


async def test_a_region_sends_for_itself_only_and_people_need_a_scope(admin_harness: AdminHarness) -> None:
    us_east = await admin_harness.caller("region:us-east")
    assert (await send(us_east, batch(decision()))).status_code == 403
    assert (await send(await admin_harness.caller("admin"), batch(decision()))).status_code == 403
    assert (await (await admin_harness.caller("usage:read")).get("/v1/decisions")).status_code == 403
    assert (await us_east.get("/v1/decisions")).status_code == 403


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"operation_id": "one"}, "tenant"),
        ({"from": "2026-11-18", "to": "2026-11-18"}, "to"),
        ({"reason": "because"}, "reason"),
        ({"outcome": "lost"}, "outcome"),
        ({"key": "no key"}, "key"),
        ({"region": "mars"}, "region"),
        ({"quota": "nowhere"}, "quota"),
        ({"policy": "nowhere"}, "policy"),
    ],
)
async def test_a_bad_question_names_its_field(auditor: httpx.AsyncClient, query: dict[str, str], field: str) -> None:
    answer = await auditor.get("/v1/decisions", params=query)
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["invalid_parameters"]] == [field]


async def test_a_region_over_its_budget_waits(admin_harness: AdminHarness, database: str) -> None:
    token = (await admin_harness.caller("region:eu-west")).headers["Authorization"]
    async with (
        another_coordinator(database, decisions_per_minute=2) as url,
        httpx.AsyncClient(base_url=url, headers={"Authorization": token}, timeout=30) as eu_west,
    ):
        sent = await send(eu_west, batch(*map(decision, (1, 2, 3))))
        assert (sent.status_code, sent.json()["stored"]) == (200, 3)
        refused = await send(eu_west, batch(decision(4), number=2))
        assert (refused.status_code, int(refused.headers["Retry-After"]) >= 1) == (429, True)


async def test_days_are_dropped_when_their_time_is_over(
    eu_west: httpx.AsyncClient, auditor: httpx.AsyncClient, admin_harness: AdminHarness
) -> None:
    days = [-7 * 24 * 3600.0, -24 * 3600.0, 0.0]
    sent = await send(eu_west, batch(*map(decision, [*days, -8 * 24 * 3600.0])))
    assert sent.json() == {"stored": 3, "refused": 1}
    owner, now = admin_harness.owner, NOON + timedelta(days=1)
    async with owner.transaction():
        await keep_days(owner, now, now, 7)
    window = {"tenant": "acme", "from": "2026-11-01", "to": "2026-12-01"}
    answer = (await auditor.get("/v1/decisions", params=window)).json()
    assert len(answer["data"]) == 2
    assert answer["summary"]["kept_from"] == "2026-11-12T00:00:00Z"
    partitions = await owner.fetchval("SELECT count(*) FROM pg_inherits WHERE inhparent = 'decision'::regclass")
    assert partitions == 10  # seven days, the current one, and two ahead: made as they were needed


async def test_no_coordinator_drops_the_decisions_of_today(admin_harness: AdminHarness) -> None:
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    with pytest.raises(Exception, match="never dropped"):
        await admin_harness.owner.execute("SELECT keep_decisions($1, $1, $1)", tomorrow)


async def test_keys_are_kept_as_they_are_where_the_document_says_so(
    eu_west: httpx.AsyncClient, auditor: httpx.AsyncClient, admin_harness: AdminHarness
) -> None:
    admin = await admin_harness.caller("admin")
    assert (await admin.put("/v1/limits", json={"decisions": {"keys": "plain"}})).is_success
    keyed = LoggedPolicy(policy="key", quota="api:api_key=ak_7", cost=1, limit=1, share=1, remaining=0)
    subject = {"tenant": "acme", "api_key": "ak_7"}
    assert (await send(eu_west, batch(decision(policy="key", policies=[keyed], subject=subject)))).is_success
    [row] = (await found(auditor, key="api:api_key=ak_7"))["data"]
    assert (row["key"], row["subject"]) == ("api:api_key=ak_7", {"api_key": "ak_7"})
