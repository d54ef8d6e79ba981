"""The middleware answers as an agent does, with an engine or a client behind it."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
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

from leasehold import AsyncClient, RequestRejected
from leasehold.client.agent_protocol import Subject
from leasehold.engine import Engine
from leasehold.middleware import CheckFunction, LimitMiddleware
from regional_agent.settings import AgentSettings
from tests.integration.client.test_clients import served_agent
from tests.integration.regional_agent.world import EXPORT, Agent, World
from tests.waiting import until
from web.settings import variable_of

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
ROUTES = ("/v1/exports", "/v1/search", "/v1/open", "/v1/nowhere")
HEADERS = ("ratelimit-policy", "x-ratelimit-limit", "x-ratelimit-remaining")


async def work(request: Request) -> Response:
    return PlainTextResponse(f"worked for {request.headers['x-tenant']}")


def subject_of(scope: Scope) -> Subject | None:
    if scope["path"] == "/free":
        return None
    tenant = dict(scope["headers"])[b"x-tenant"].decode()
    return {"tenant": tenant, "route": scope["path"], "method": scope.get("method", "GET")}


def service(check: CheckFunction) -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/{path:path}", work, methods=["GET", "POST"])])
    transport = httpx.ASGITransport(LimitMiddleware(app, check=check, subject=subject_of), raise_app_exceptions=False)
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


# --- WebSockets ------------------------------------------------------------------------------------------------------


async def greet(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("hello")
    await websocket.close()


@asynccontextmanager
async def served_websockets(check: CheckFunction) -> AsyncIterator[str]:
    """A real server on a loopback port, with the middleware in front of a WebSocket route."""
    app = LimitMiddleware(Starlette(routes=[WebSocketRoute("/{path:path}", greet)]), check=check, subject=subject_of)
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws="websockets-sansio", log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def test_a_websocket_is_checked_when_it_is_opened(world: World) -> None:
    async with engine_of(world) as engine:

        async def check(subject: Subject) -> Any:
            return await engine.check(subject, cost=60)

        headers = {"X-Tenant": "acme"}
        async with served_websockets(check) as url:
            async with connect(f"{url}/v1/exports", additional_headers=headers) as websocket:
                assert await websocket.recv() == "hello"
                assert websocket.response is not None
                assert websocket.response.headers["x-ratelimit-remaining"] == "40"
            with pytest.raises(InvalidStatus) as denied:
                await connect(f"{url}/v1/exports", additional_headers=headers)
            assert denied.value.response.status_code == 429
            document = json.loads(denied.value.response.body or b"")
            assert (document["type"], document["denied_by"]) == ("/problems/quota-exceeded", "export")
            async with connect(f"{url}/free", additional_headers=headers) as websocket:
                assert await websocket.recv() == "hello"


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


async def _never(*_: Any) -> None:
    raise AssertionError("a denied handshake reached the service")


# --- the examples -----------------------------------------------------------------------------------------------------


async def test_the_worker_of_the_examples_works(world: World) -> None:
    async with served_agent(world) as url:
        command = [sys.executable, str(ROOT / "examples" / "worker.py"), url]
        done = await anyio.run_process(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    reported = "reported for acme, as one of few at once"
    assert done.stdout.decode().splitlines()[1:] == ["exported for acme", reported, "after waiting: allowed"]


async def test_the_service_of_the_examples_works(world: World) -> None:
    settings = world.settings("us-east", return_on_stop=True)
    said = {variable_of(AgentSettings, name): _text(value) for name, value in settings if value is not None}
    script = (
        "from fastapi.testclient import TestClient\n"
        "from examples.exports import app\n"
        "with TestClient(app) as client:\n"
        "    print(client.get('/healthz').status_code, client.post('/v1/exports', headers={'X-Tenant': 'a'}).json())\n"
    )
    environment = os.environ | said | {"PYTHONPATH": str(ROOT)}
    done = await anyio.run_process([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE)
    assert "200 {'export': 'made'}" in done.stdout.decode()


def _text(value: Any) -> str:
    return str(value.get_secret_value() if hasattr(value, "get_secret_value") else value)
