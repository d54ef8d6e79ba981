"""The fast path answers exactly as FastAPI does, and handles the details of HTTP correctly by itself.

Every check is sent three ways, for three tenants with the same history: through the fast path, through FastAPI alone,
and in a batch.
"""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from regional_agent.admission.rules import certain_denials
from regional_agent.http.batch import CHECKS_A_TURN
from regional_agent.http.fast_path import FastPath, fast_protocol
from regional_agent.main import create_app
from regional_agent.settings import AgentSettings
from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.integration.web.conftest import Answer, Raw, connected, serving
from tests.waiting import until

pytestmark = pytest.mark.anyio

HEAD = b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ROUTES = ("/v1/exports", "/v1/search", "/v1/search/images", "/v1/open", "/v1/reports", "/v1/nowhere")
TENANTS = {"fast": "tenant-a", "slow": "tenant-b", "many": "tenant-c"}
HOUR_MS = 3_600_000
TIMES = {"reset_ms", "retry_after_ms"}


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the event loop of the services, whose transports are not asyncio's."""
    return "asyncio", {"use_uvloop": True}


@dataclass
class Doors:
    """An agent behind a socket with the fast path (`fast`), and behind FastAPI alone (`slow`)."""

    address: str
    agent: Agent
    door: FastPath
    fast: httpx.AsyncClient

    @property
    def slow(self) -> httpx.AsyncClient:
        return self.agent.http

    async def post(
        self, client: httpx.AsyncClient, body: Any, path: str = "/v1/check", **headers: str
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers={"Content-Type": "application/json", **headers})


@contextlib.asynccontextmanager
async def opened(world: World | AgentSettings, **settings: Any) -> AsyncIterator[Doors]:
    app = create_app(world if isinstance(world, AgentSettings) else world.settings("us-east", **settings))
    door: FastPath = app.state.fast_path
    async with serving(app, protocol=fast_protocol(door)) as address:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            httpx.AsyncClient(base_url=address, timeout=30) as fast,
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as slow,
        ):
            agent = Agent(app.state.region, slow)
            await agent.ready()
            yield Doors(address, agent, door, fast)


@pytest.fixture
async def doors(world: World) -> AsyncIterator[Doors]:
    async with opened(world) as doors:
        yield doors


@pytest.fixture
async def raw(doors: Doors) -> AsyncIterator[Raw]:
    async with connected(doors.address) as connection:
        yield connection


# --- the same answers ------------------------------------------------------------------------------------------------


def told(answer: Any) -> Any:
    """Return the answer without tenant, times and ids. Times are near, not equal, because a moment lies between."""
    if isinstance(answer, list):
        return [told(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    kept = {name: told(value) for name, value in answer.items() if name not in ("request_id", "instance")}
    kept |= {name: answer[name] and answer[name] > 0 for name in TIMES & answer.keys()}
    if "detail" in kept:
        kept["detail"] = re.sub(r"in \d+ s$", "in so many s", kept["detail"])
    return kept


def headers(answer: httpx.Response) -> dict[str, Any]:
    """Return the headers that matter. Those that count seconds are only compared by presence."""
    kept = {
        name: value
        for name, value in answer.headers.items()
        if name in ("content-type", "www-authenticate", "allow", "ratelimit-policy", "x-ratelimit-limit")
    }
    present = {
        name: name in answer.headers for name in ("retry-after", "ratelimit", "x-ratelimit-reset", "x-request-id")
    }
    return kept | present | {"left": answer.headers.get("x-ratelimit-remaining")}


def random_check(chance: random.Random, tenant: str, number: int) -> dict[str, Any]:
    subject = {"tenant": tenant, "route": chance.choice(ROUTES), "method": chance.choice(["GET", "POST"])}
    check: dict[str, Any] = {"subject": subject, "mode": chance.choice(["enforce"] * 6 + ["peek", "adjust"])}
    if chance.random() < 0.7:
        check["cost"] = chance.choice([1, 1, 2, 3, 200])
    if chance.random() < 0.2:
        check["operation_id"] = f"operation-{number // 2}"  # some are sent twice, with the same body or another
    if chance.random() < 0.1:
        del subject["tenant"]  # what some policies count by
    if chance.random() < 0.05:
        subject["shoe"] = "44"
    return check


async def test_fast_path_fastapi_and_batch_answer_alike(
    doors: Doors, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated denial shows shadow policies as they were: it must not end after one door and before another."""
    monkeypatch.setattr(certain_denials, "MAX_AGE_MS", HOUR_MS)
    before = doors.agent.region.admission.policies
    await world.try_out()
    await until(lambda: doors.agent.region.admission.policies is not before)
    for tenant in TENANTS.values():  # all of it here, so that the remaining units depend on no other region
        whole = {"subject": EXPORT | {"tenant": tenant}, "cost": 100, "mode": "peek"}
        assert (await doors.post(doors.slow, whole)).status_code == 200
    statuses, would_deny = set(), set[str]()
    for number in range(150):
        checks = {name: random_check(random.Random(number), tenant, number) for name, tenant in TENANTS.items()}
        fast = await doors.post(doors.fast, checks["fast"])
        slow = await doors.post(doors.slow, checks["slow"])
        assert (fast.status_code, told(fast.json())) == (slow.status_code, told(slow.json())), checks["fast"]
        assert headers(fast) == headers(slow)
        retry_ms = [answer.json().get("retry_after_ms", 0) for answer in (fast, slow)]
        assert retry_ms == [None, None] or abs(retry_ms[0] - retry_ms[1]) < 60_000
        await compare_batches(doors, checks["many"], slow)
        statuses.add(fast.status_code)
        shadows = [policy for policy in fast.json().get("policies", []) if policy["shadow"]]
        would_deny |= {policy["policy"] for policy in shadows if not policy["allowed"] and fast.status_code == 200}
    assert statuses >= {200, 422, 429}
    assert would_deny == {"trial", "trial-slot"}


async def compare_batches(doors: Doors, check: dict[str, Any], alone: httpx.Response) -> None:
    batch = await doors.post(doors.fast, {"checks": [check]}, "/v1/check:batch")
    [item] = batch.json()["items"]
    said = item.get("answer") or item["problem"]
    assert item["status"] == alone.status_code
    assert told(said).items() <= told(alone.json()).items()


@pytest.mark.parametrize("client", ["fast", "slow"])
async def test_a_batch_is_decided_in_order(doors: Doors, client: str) -> None:
    search = {"tenant": TENANTS[client], "route": "/v1/search"}
    checks = [{"subject": search, "cost": cost} for cost in (4, 4, 4, 2, 1)]
    answer = await doors.post(getattr(doors, client), {"checks": checks}, "/v1/check:batch")
    assert [item["status"] for item in answer.json()["items"]] == [200, 200, 429, 200, 429]  # of ten


@pytest.mark.parametrize("client", ["fast", "slow"])
async def test_the_same_check_many_times_in_a_row_is_decided_each_time(doors: Doors, client: str) -> None:
    """The check is sent more often than one call to the store may hold, and with another between."""
    subject = {"tenant": TENANTS[client], "route": "/v1/search"}
    one, two = {"subject": subject}, {"subject": subject, "cost": 2}
    answer = await doors.post(getattr(doors, client), {"checks": [one] * 3 + [two] + [one] * 100}, "/v1/check:batch")
    items = answer.json()["items"]
    left = [item["answer"]["policies"][0]["remaining"] for item in items if item["status"] == 200]
    assert left == [9, 8, 7, 5, 4, 3, 2, 1, 0]  # of ten
    assert [item["status"] for item in items[len(left) :]] == [429] * 95


BROKEN = {
    "no JSON": (b'{"subject"', {}),
    "no UTF-8": (b'{"subject": {"tenant": "\xff"}}', {}),
    "nothing": (b"", {}),
    "a name twice": (b'{"subject": {"tenant": "a", "tenant": "b"}}', {}),
    "NUL": (b'{"subject": {"tenant": "a\\u0000"}}', {}),
    "deep": (b"[" * 100_000, {}),
    "an unknown field": (b'{"subject": {"tenant": "a"}, "cots": 1}', {}),
    "no type": (b"{}", {"Content-Type": ""}),
    "another type": (b"{}", {"Content-Type": "text/plain"}),
    "another charset": (b"{}", {"Content-Type": "application/json; charset=latin-1"}),
    "compressed": (b"{}", {"Content-Encoding": "gzip"}),
    "too large": (b'{"subject": {"tenant": "a"}}' + b" " * 2_000_000, {}),
    "a dangerous id": (b'{"subject": {"tenant": "a"}}', {"X-Request-Id": "a<b"}),
}


@pytest.mark.parametrize("path", ["/v1/check", "/v1/check:batch"])
async def test_invalid_requests_are_refused_alike(doors: Doors, path: str) -> None:
    for what, (body, sent) in BROKEN.items():
        fast, slow = [await doors.post(client, body, path, **sent) for client in (doors.fast, doors.slow)]
        assert (fast.status_code, told(fast.json())) == (slow.status_code, told(slow.json())), what
        assert headers(fast) == headers(slow), what


TWO_THINGS = (
    b'{"checks": [], "checks": [{"subject": {"tenant": "a"}}]}',
    b'{"\\u0063hecks": [], "checks": [{"subject": {"tenant": "a"}}]}',
    b'{"checks": []}',
)


async def test_a_contradictory_batch_is_refused_alike(doors: Doors) -> None:
    for checks in TWO_THINGS:
        fast, slow = [await doors.post(client, checks, "/v1/check:batch") for client in (doors.fast, doors.slow)]
        assert fast.status_code == slow.status_code == 422
        assert told(fast.json()) == told(slow.json())


async def test_a_batch_that_is_not_utf8_far_behind_decides_nothing(doors: Doors) -> None:
    """A batch is decided in parts, so it is validated as a whole before the first one."""
    check = json.dumps({"subject": {"tenant": "acme", "route": "/v1/search"}}).encode()
    batch = b'{"checks": [%b]}' % b", ".join([check] * CHECKS_A_TURN + [b'{"subject": {"tenant": "\xff"}}'])
    fast, slow = [await doors.post(client, batch, "/v1/check:batch") for client in (doors.fast, doors.slow)]
    assert (fast.status_code, told(fast.json())) == (slow.status_code, told(slow.json()))
    assert fast.status_code == 400
    peek = await doors.post(doors.fast, {"subject": {"tenant": "acme", "route": "/v1/search"}, "mode": "peek"})
    assert peek.json()["policies"][0]["remaining"] == 10


async def test_a_token_is_required_on_every_path(world: World) -> None:
    token = "0123456789abcdef"
    async with opened(world, host="0.0.0.0", service_token=token) as doors:
        for authorization in ("", f"Bearer {token.upper()}", f"Basic {token}", f"Bearer {token}x"):
            sent = {"Authorization": authorization} if authorization else {}
            fast, slow = [await doors.post(each, {"subject": EXPORT}, **sent) for each in (doors.fast, doors.slow)]
            assert fast.status_code == slow.status_code == 401
            assert headers(fast) == headers(slow)
        assert (await doors.post(doors.fast, {"subject": EXPORT}, Authorization=f"bearer {token}")).status_code == 200


async def test_every_path_answers_during_a_store_outage(doors: Doors) -> None:
    await doors.agent.whole.store.close()
    for route, status in (("/v1/open", 200), ("/v1/exports", 503)):
        check = {"subject": {"tenant": "acme", "route": route}}
        fast, slow = [await doors.post(client, check) for client in (doors.fast, doors.slow)]
        assert fast.status_code == slow.status_code == status
        assert told(fast.json()) == told(slow.json())
        assert headers(fast) == headers(slow)


async def test_both_paths_count_alike(doors: Doors) -> None:
    async def counted() -> str:
        lines = (await doors.slow.get("/metrics")).text.splitlines()
        return next(line for line in lines if 'route="/v1/check",status="200"' in line and "_total" in line)

    for number, client in enumerate((doors.fast, doors.slow, doors.fast), start=1):
        await doors.post(client, {"subject": EXPORT})
        assert (await counted()).endswith(f" {number}.0")


async def test_new_policies_apply_to_cached_bodies(doors: Doors, world: World) -> None:
    check = {"subject": {"tenant": "acme", "route": "/v1/new"}}
    assert (await doors.post(doors.fast, check)).json()["policies"] == []
    document = (await world.admin.get("/v1/limits")).json()["document"]
    document["policies"].append({"name": "new", "match": {"route": "/v1/new"}, "by": ["tenant"], "quota": "api"})
    before = doors.agent.region.admission.policies
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    await until(lambda: doors.agent.region.admission.policies is not before)
    assert len((await doors.post(doors.fast, check)).json()["policies"]) == 1


# --- details of HTTP -------------------------------------------------------------------------------------------------


def request(check: dict[str, Any], request_id: str = "") -> bytes:
    body = json.dumps(check).encode()
    brought = b"X-Request-Id: %b\r\n" % request_id.encode() if request_id else b""
    return HEAD + brought + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def asking(tenant: str = "acme", **fields: Any) -> dict[str, Any]:
    return {"subject": {"tenant": tenant, "route": "/v1/search"}, **fields}


def left(answer: Answer) -> int:
    units: int = json.loads(answer.body)["policies"][0]["remaining"]
    return units


async def test_pipelined_requests_are_answered_in_order_on_either_path(raw: Raw) -> None:
    slow = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    await raw.send(request(asking(), "1") + slow + request(asking(), "2") + request(asking(), "3") + slow)
    await raw.send(request(asking(), "4"))
    answers = [await raw.answer() for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [ids[0], *ids[2:4], ids[5]] == ["1", "2", "3", "4"]
    assert [left(answers[place]) for place in (0, 2, 3, 5)] == [9, 8, 7, 6]


@pytest.mark.extended
async def test_a_thousand_pipelined_requests_are_a_loop_and_not_a_recursion(raw: Raw) -> None:
    nowhere = {"subject": {"route": "/v1/nowhere"}}  # matches no policy, so it is answered at once
    sending = asyncio.create_task(raw.send(request(nowhere) * 3_000))
    for _ in range(3_000):
        assert (await raw.answer()).status == 200
    await sending


async def test_a_request_may_come_byte_by_byte(raw: Raw) -> None:
    for at in range(len(whole := request(asking()))):
        await raw.send(whole[at : at + 1])
        await asyncio.sleep(0)
    assert left(await raw.answer()) == 9
    head, _, body = whole.partition(b"\r\n\r\n")
    for piece in (head + b"\r\n\r\n", body[:5], body[5:]):
        await raw.send(piece)
        await asyncio.sleep(0.01)
    assert left(await raw.answer()) == 8


async def under_way(doors: Doors, raw: Raw) -> None:
    """Send a check that waits for a lease."""
    before = doors.agent.region.quotas.grant_request("exports:tenant=acme").waiting
    await raw.send(request({"subject": EXPORT, "cost": 7}))
    await until(lambda: doors.agent.region.quotas.grant_request("exports:tenant=acme").waiting > before)


async def test_a_client_that_hangs_up_affects_no_other(doors: Doors, world: World) -> None:
    world.weather.swallows_requests = True
    async with connected(doors.address) as gone, connected(doors.address) as stays:
        await under_way(doors, gone)
        await under_way(doors, stays)
        await gone.close()
        world.weather.swallows_requests = False
        assert (await stays.answer()).status == 200
        await stays.send(request(asking()))
        assert left(await stays.answer()) == 9


@pytest.mark.extended
async def test_answers_to_a_client_that_does_not_read_are_bounded(doors: Doors) -> None:
    """Its further requests wait too, because the pending answers are bounded."""
    nowhere = request({"subject": {"route": "/v1/nowhere"}})
    sent = 0

    async def flood(raw: Raw) -> None:
        nonlocal sent
        while True:
            await raw.send(nowhere * 1_000)
            sent += 1_000

    async with connected(doors.address) as raw:
        flooding = asyncio.create_task(flood(raw))
        await until(lambda: sent > 0)
        await stuck(lambda: sent)
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        for _ in range(10):
            assert (await raw.answer()).status == 200
        raw.abort()


async def stuck(count: Callable[[], int], turns: int = 20) -> None:
    """Wait until it has not grown for so many turns."""
    before, unchanged = count(), 0
    for _ in range(3_000):
        await asyncio.sleep(0.01)
        unchanged = unchanged + 1 if count() == before else 0
        before = count()
        if unchanged == turns:
            return
    raise AssertionError("it grows and grows")


async def test_a_stopping_server_answers_requests_in_progress(world: World) -> None:
    stack = contextlib.AsyncExitStack()
    doors = await stack.enter_async_context(opened(world))
    async with connected(doors.address) as raw, connected(doors.address) as idle:
        await idle.send(request(asking()))
        await idle.answer()
        world.weather.swallows_requests = True
        await under_way(doors, raw)
        stopping = asyncio.create_task(stack.aclose())
        assert await idle.rest() == b"", "an idle connection is closed at once"
        world.weather.swallows_requests = False
        answer = await raw.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await raw.rest() == b""
        await stopping


@pytest.mark.extended
async def test_heads_of_different_traces_are_one_cached_head(doors: Doors) -> None:
    for number in range(5):
        traceparent = f"00-{number + 1:032x}-{number + 1:016x}-00"
        name = "Traceparent" if number % 2 else "traceparent"
        answer = await doors.post(doors.fast, {"subject": EXPORT}, **{name: traceparent})
        assert answer.status_code == 200
    assert len(doors.door.heads) == 1
    odd = await doors.post(doors.fast, {"subject": EXPORT}, traceparent="00-1-2-01")
    assert odd.status_code == 200
    assert len(doors.door.heads) == 2, "what is no trace context stays in the head"
