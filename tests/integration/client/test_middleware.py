"""The middleware answers as an agent does, with an engine or a client behind it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Scope
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from leasehold import AsyncClient, Decision, Denied, RequestRejected
from leasehold.client.agent_protocol import Subject
from leasehold.engine import Engine
from leasehold.middleware import AsyncCheckFunction, LimitMiddleware
from tests.integration.client.test_clients import served_agent
from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.waiting import until

pytestmark = pytest.mark.anyio
ROUTES = ("/v1/exports", "/v1/search", "/v1/open", "/v1/nowhere")
HEADERS = ("ratelimit-policy", "x-ratelimit-limit", "x-ratelimit-remaining")


async def work(request: Request) -> Response:
    return PlainTextResponse(f"worked for {request.headers['x-tenant']}")


def subject_of(scope: Scope) -> Subject | None:
    if scope["path"] == "/free":
        return None
    tenant = dict(scope["headers"])[b"x-tenant"].decode()
    return {"tenant": tenant, "route": scope["path"], "method": scope.get("method", "GET")}


def service(check: AsyncCheckFunction) -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/{path:path}", work, methods=["GET", "POST"])])
    limited = LimitMiddleware(app, check=check, subject=subject_of, show_policies=True)
    transport = httpx.ASGITransport(limited, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://service", timeout=30)


@asynccontextmanager
async def engine_of(world: World, **settings: Any) -> AsyncIterator[Engine]:
    engine = Engine(world.settings("us-east", **settings))
    async with engine.running():
        yield engine


def decision_in(answer: httpx.Response) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return what a response says about the decision, without times and ids."""
    body = answer.json() if answer.status_code != 200 else {}
    kept = {name: body.get(name) for name in ("type", "title", "status", "allowed", "degraded", "denied_by")}
    policies = [
        (each["policy"], each["limit"], each["remaining"], each["shadow"], each["allowed"])
        for each in body.get("policies", [])
    ]
    said = {name: answer.headers[name] for name in HEADERS if name in answer.headers}
    return answer.status_code, said | {"again": str("retry-after" in answer.headers)}, kept | {"policies": policies}


async def compare(agent: Agent, http: httpx.AsyncClient) -> set[int]:
    for tenant in ("a", "b"):
        assert (await agent.check(EXPORT | {"tenant": tenant}, cost=100, mode="peek")).status_code == 200
    chance, statuses = random.Random(7), set()
    for _ in range(60):
        route, method = chance.choice(ROUTES), chance.choice(["GET", "POST"])
        alone = await agent.check({"tenant": "a", "route": route, "method": method})
        asked = await http.request(method, route, headers={"X-Tenant": "b"})
        assert decision_in(asked) == decision_in(alone), (route, method)
        statuses.add(asked.status_code)
    return statuses


async def test_the_engine_answers_as_an_agent_does(world: World) -> None:
    await world.try_out()
    agent = await world.agent()
    async with engine_of(world) as engine, service(engine.check) as http:
        assert await compare(agent, http) == {200, 429}


async def test_a_client_answers_as_the_engine_does(world: World) -> None:
    await world.try_out()
    agent = await world.agent()
    async with served_agent(world) as url, AsyncClient(url) as client, service(client.check) as http:
        assert await compare(agent, http) == {200, 429}


async def test_only_admitted_requests_reach_the_service(world: World) -> None:
    async with engine_of(world) as engine:

        async def check(subject: Subject) -> Any:
            return await engine.check(subject, cost=60)

        async with service(check) as http:
            first, second = [await http.post("/v1/exports", headers={"X-Tenant": "acme"}) for _ in range(2)]
            assert (first.text, first.headers["x-ratelimit-remaining"]) == ("worked for acme", "40")
            assert (second.status_code, second.json()["instance"]) == (429, "/v1/exports")
            assert (await http.get("/free", headers={"X-Tenant": "acme"})).text == "worked for acme"


def result_in(result: Decision | RequestRejected) -> tuple[bool, int | str | None]:
    """Return what a result of a batch says, without times and ids."""
    if isinstance(result, RequestRejected):
        return False, result.status
    return result.allowed, result.denied_by or result.policies[0].remaining


@pytest.mark.extended
async def test_an_engine_decides_batches_as_a_client_does(world: World) -> None:
    subject = EXPORT | {"tenant": "globex"}
    checks: list[dict[str, Any]] = [{"subject": subject, "cost": cost} for cost in (60, 60, -1, 20, 20, 1)]
    checks += [{"subject": {"route": "/v1/exports"}}, {"subject": subject, "shoe": 44}]
    expected = [(True, 40), (False, "export"), (False, 422), (True, 20), (True, 0), (False, "export")]
    async with engine_of(world) as engine:
        found = await engine.check_batch(checks)
        for wrong in ([], checks * 200):
            with pytest.raises(RequestRejected, match="must be 1 to 1000"):
                await engine.check_batch(wrong)
    assert [result_in(each) for each in found] == [*expected, (False, 422), (False, 422)]
    again = [check | {"subject": check["subject"] | {"tenant": "initech"}} for check in checks[:6]]
    async with served_agent(world) as url, AsyncClient(url) as client:
        assert [result_in(each) for each in await client.check_batch(again)] == expected


@pytest.mark.extended
async def test_an_engine_waits_no_longer_than_a_denial_can_last(world: World) -> None:
    async with engine_of(world) as engine:
        assert (await engine.wait(EXPORT, timeout_s=60)).allowed
        assert (await engine.wait(EXPORT, cost=101, timeout_s=3_600)).reason == "never"


async def test_usage_that_an_engine_admitted_is_booked(world: World) -> None:
    async with engine_of(world) as engine:
        assert (await engine.check(EXPORT, cost=7, operation_id="a")).allowed
        assert (await engine.check(EXPORT, cost=7, operation_id="a")).allowed
        with pytest.raises(RequestRejected) as refused:
            await engine.check(EXPORT, cost=8, operation_id="a")
        assert refused.value.status == 422
        with pytest.raises(RequestRejected, match="shoe"):
            await engine.check(EXPORT | {"shoe": "44"})
    assert await world.usage() == 7, "its last exchange reports what it admitted"


async def test_each_policys_failure_mode_answers_while_the_store_is_away(world: World) -> None:
    async with engine_of(world) as engine, service(engine.check) as http:
        await engine.region.store.close()
        closed = await http.post("/v1/exports", headers={"X-Tenant": "acme"})
        assert (closed.status_code, closed.json()["degraded"]) == (503, "closed")
        assert (await http.get("/v1/open", headers={"X-Tenant": "acme"})).text == "worked for acme"


async def test_an_engine_without_policies_answers_503(world: World) -> None:
    engine = Engine(world.settings("us-east"))  # it does not run
    async with service(engine.check) as http:
        answer = await http.post("/v1/exports", headers={"X-Tenant": "acme"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (answer.json()["type"], answer.json()["instance"]) == ("/problems/not-ready", "/v1/exports")


async def test_an_invalid_subject_raises_in_the_service(world: World) -> None:
    async def check(subject: Subject) -> Any:
        raise RequestRejected(422, {"title": "Invalid request"})

    async with service(check) as http:
        assert (await http.post("/v1/exports", headers={"X-Tenant": "acme"})).status_code == 500


# --- what the service's code and its customers see --------------------------------------------------------------------


async def test_customers_see_no_names_of_policies_and_quotas(world: World) -> None:
    app = Starlette(routes=[Route("/{path:path}", work, methods=["POST"])])
    async with engine_of(world) as engine:
        limited = LimitMiddleware(app, check=lambda subject: engine.check(subject, cost=60), subject=subject_of)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://service") as http:
            admitted, denied = [await http.post("/v1/exports", headers={"X-Tenant": "acme"}) for _ in range(2)]
    assert admitted.headers["ratelimit"].startswith('"limit-1";r=40')
    assert denied.json().keys() == {"type", "title", "status", "detail", "instance", "request_id", "retry_after_ms"}
    assert (denied.status_code, denied.headers["content-type"]) == (429, "application/problem+json")
    assert int(denied.headers["retry-after"]) > 0
    for answer in (admitted, denied):
        assert "export" not in f"{answer.headers}{answer.text}".replace("/v1/exports", "")


async def test_the_service_finds_the_decision_in_the_state_of_the_request(world: World) -> None:
    async def show(request: Request) -> Response:
        decision: Decision = request.state.limit_decision
        return PlainTextResponse(f"{decision.policies[0].policy} {decision.policies[0].remaining}")

    app = Starlette(routes=[Route("/v1/exports", show, methods=["POST"])])
    async with engine_of(world) as engine:
        limited = LimitMiddleware(app, check=engine.check, subject=subject_of)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://service") as http:
            assert (await http.post("/v1/exports", headers={"X-Tenant": "acme"})).text == "export 99"


async def test_a_raised_denial_is_answered_unless_the_response_has_begun(world: World) -> None:
    async with engine_of(world) as engine:

        async def hold(request: Request) -> Response:
            async with engine.holding(EXPORT, units=101):
                raise AssertionError("there are 100 units")

        async def begin_and_hold(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await hold(Request(scope))

        app = Starlette(routes=[Route("/v1/exports", hold, methods=["POST"])])
        app.add_middleware(LimitMiddleware)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
            denied = await http.post("/v1/exports")
        assert (denied.status_code, denied.json()["type"]) == (429, "/problems/cost-above-limit")
        late = httpx.AsyncClient(transport=httpx.ASGITransport(LimitMiddleware(begin_and_hold)), base_url="http://a")
        async with late as http:
            with pytest.raises(Denied):
                await http.post("/v1/exports")


# --- WebSockets ------------------------------------------------------------------------------------------------------


async def greet(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("hello")
    await websocket.close()


def greeting(check: AsyncCheckFunction) -> LimitMiddleware:
    """Return the middleware in front of a WebSocket route."""
    return LimitMiddleware(Starlette(routes=[WebSocketRoute("/{path:path}", greet)]), check=check, subject=subject_of)


@asynccontextmanager
async def served(app: LimitMiddleware) -> AsyncIterator[str]:
    """Run a real server on a loopback port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws="websockets-sansio", log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.mark.extended
async def test_a_websocket_is_checked_when_it_is_opened(world: World) -> None:
    async with engine_of(world) as engine:

        async def check(subject: Subject) -> Any:
            return await engine.check(subject, cost=60)

        headers = {"X-Tenant": "acme"}
        async with served(greeting(check)) as url:
            async with connect(f"{url}/v1/exports", additional_headers=headers) as websocket:
                assert await websocket.recv() == "hello"
                assert websocket.response is not None
                assert websocket.response.headers["x-ratelimit-remaining"] == "40"
            with pytest.raises(InvalidStatus) as denied:
                await connect(f"{url}/v1/exports", additional_headers=headers)
            assert denied.value.response.status_code == 429
            document = json.loads(denied.value.response.body or b"")
            assert (document["type"], "denied_by" in document) == ("/problems/quota-exceeded", False)
            async with connect(f"{url}/free", additional_headers=headers) as websocket:
                assert await websocket.recv() == "hello"


@pytest.mark.extended
async def test_a_server_that_cannot_answer_a_handshake_closes_it(world: World) -> None:
    async with engine_of(world) as engine:

        async def check(subject: Subject) -> Any:
            return await engine.check(subject, cost=101)

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        scope = {"type": "websocket", "path": "/v1/exports", "headers": [], "client": ("127.0.0.1", 1)}
        await LimitMiddleware(_never, check=check, subject=lambda _: EXPORT)(scope, receive, send)
        assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.extended
async def test_a_denial_that_a_websocket_route_raises_closes_the_handshake(world: World) -> None:
    async with engine_of(world) as engine:

        async def route(websocket: WebSocket) -> None:
            async with engine.holding(EXPORT, units=101):
                await websocket.accept()

        app = LimitMiddleware(Starlette(routes=[WebSocketRoute("/v1/exports", route)]))
        async with served(app) as url:
            with pytest.raises(InvalidStatus) as denied:
                await connect(f"{url}/v1/exports")
        assert denied.value.response.status_code == 429


async def _never(*_: Any) -> None:
    raise AssertionError("a denied handshake reached the service")
