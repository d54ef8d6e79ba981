"""A real coordinator behind a real socket, with agents and a faulty network between them.

The coordinator runs in the test's own loop on a real Postgres; agents run on databases of a real store, one for each
region. `Weather` stands in for the network: it can drop a request, or drop the reply after it was processed.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg
import httpx
import msgspec
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.access.issue_token import issue_token
from coordinator.limits.put_limits import put_limits
from coordinator.main import create_app as create_coordinator
from coordinator.regions.put_region import put_region
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from protocol.limits.document import LimitsDocument
from regional_agent.agent import RegionalAgent
from regional_agent.cluster.cell import Cell
from regional_agent.main import create_app as create_agent
from regional_agent.settings import AgentSettings
from tests.conftest import restricted
from tests.integration.coordinator.fixtures import connected
from tests.waiting import until
from web.serving import serve

REGIONS = ("us-east", "eu-west", "ap-south")
EXPORT = {"tenant": "acme", "route": "/v1/exports", "method": "POST"}
DOCUMENT: dict[str, Any] = {
    "plans": {"free": {}},
    "default_plan": "free",
    "quotas": [
        # A short horizon, so that tests can count what is granted; and reports that do not wait.
        {"name": "exports", "kind": "allowance", "limit": 100, "period": "month"}
        | {"horizon": "10s", "report_within": "100ms"},
        {"name": "api", "kind": "rate", "limit": "3/hour, burst 30", "sharing": "regional"},
        {"name": "reports", "kind": "concurrency", "limit": 6, "slot_ttl": "5m"},
    ],
    "policies": [
        {"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports", "wait": "5s"},
        {"name": "search", "match": {"route": "/v1/search*"}, "by": ["tenant"], "quota": "api"},
        {
            "name": "open",
            "match": {"route": "/v1/open"},
            "by": ["tenant"],
            "quota": "api",
            "on_store_failure": "open",
        },
        {
            "name": "local",
            "match": {"route": "/v1/local*"},
            "by": ["tenant"],
            "quota": "api",
            "on_store_failure": "local",
            "local_fraction": 0.5,
        },
        {
            "name": "wider",
            "match": {"route": "/v1/*/two"},
            "by": ["tenant"],
            "quota": "api",
            "on_store_failure": "local",
        },
        {"name": "shut", "match": {"route": "/v1/local/shut"}, "by": ["tenant"], "quota": "api"},
        {"name": "report", "match": {"route": "/v1/reports"}, "by": ["tenant"], "quota": "reports"},
    ],
}

# Shadow policies for every request, of which a region has five units and two slots.
IN_SHADOW: dict[str, list[dict[str, Any]]] = {
    "quotas": [
        {"name": "trial", "kind": "rate", "limit": "3/hour, burst 15", "sharing": "regional"},
        {"name": "trial-slots", "kind": "concurrency", "limit": 6, "slot_ttl": "1m"},
    ],
    "policies": [
        {"name": "trial", "by": ["tenant"], "quota": "trial", "shadow": True},
        {"name": "trial-slot", "by": ["tenant"], "quota": "trial-slots", "shadow": True},
    ],
}


class Weather:
    """The faults of calls on their way to the coordinator and back."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.swallows_requests = False
        self.swallows_replies_to: set[str] = set()
        self.swallowed = 0
        self.before_replies_to: dict[str, Callable[[], Awaitable[None]]] = {}
        # Answers in place of the coordinator: takes a path and a body, and returns a status and a body, or None.
        self.answers_for_it: Callable[[str, bytes], tuple[int, bytes] | None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self.swallows_requests:
            await _answer_nothing_of_use(send)
        elif self.answers_for_it is not None and scope["method"] == "POST":
            await self._answer_or_pass_on(self.answers_for_it, scope, receive, send)
        elif hook := self._hook(scope["path"]):
            await self.app(scope, receive, _after(hook, send))
        elif any(scope["path"].endswith(end) for end in self.swallows_replies_to):
            await self.app(scope, receive, _nowhere)
            self.swallowed += 1
            await _answer_nothing_of_use(send)
        else:
            await self.app(scope, receive, send)

    async def _answer_or_pass_on(
        self, answer_of: Callable[[str, bytes], tuple[int, bytes] | None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        answer = answer_of(scope["path"], body)
        if answer is not None:
            await send({"type": "http.response.start", "status": answer[0], "headers": []})
            await send({"type": "http.response.body", "body": answer[1]})
            return
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        await self.app(scope, again, send)

    def _hook(self, path: str) -> Callable[[], Awaitable[None]] | None:
        """Each fault happens once."""
        return next((self.before_replies_to.pop(end) for end in self.before_replies_to if path.endswith(end)), None)


def _after(hook: Callable[[], Awaitable[None]], send: Send) -> Send:
    async def late(message: Message) -> None:
        if message["type"] == "http.response.start":
            await hook()
        await send(message)

    return late


async def _nowhere(_: Any) -> None:
    return


async def _answer_nothing_of_use(send: Send) -> None:
    await send({"type": "http.response.start", "status": 502, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@dataclass
class Agent:
    whole: RegionalAgent
    http: httpx.AsyncClient

    @property
    def region(self) -> Cell:
        """Return the only cell of a single store."""
        return self.whole.cells[0]

    async def check(self, subject: Mapping[str, Any] | None = None, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/check", json={"subject": subject or EXPORT, **fields})

    async def lease(self, units: int) -> None:
        """Lease so many units here, by a peek, which requests what it would need and consumes nothing."""
        assert (await self.check(cost=units, mode="peek")).status_code == 200

    async def ready(self) -> None:
        await until(lambda: self.whole.has_epochs and self.whole.admission.policies is not None)


@dataclass
class World:
    """Everything that surrounds the agents."""

    url: str
    store: str
    weather: Weather
    admin: httpx.AsyncClient
    tokens: dict[str, str]
    database: str
    agents: AsyncExitStack = field(default_factory=AsyncExitStack)
    cells: list[Cell] = field(default_factory=list)

    def settings(self, region: str, **changed: Any) -> AgentSettings:
        """Return the agent of a region; each region has a database of the store's."""
        given: dict[str, Any] = {
            "region": region,
            "coordinator_url": self.url,
            "coordinator_token": self.tokens[region],
            "store_url": SecretStr(f"{self.store.rpartition('/')[0]}/{REGIONS.index(region)}"),
            "report_interval_ms": 20,
            "store_timeout_ms": 5_000,
            "decision_timeout_ms": 5_000,
            "lame_duck_ms": 0,
        }
        return AgentSettings(**(given | changed))

    async def agent(self, region: str = "us-east", **changed: Any) -> Agent:
        """Start an agent that lives as long as the test."""
        agent = await self.agents.enter_async_context(running(self.settings(region, **changed)))
        self.cells += agent.whole.cells
        await agent.ready()
        return agent

    async def try_out(self, more: dict[str, list[dict[str, Any]]] = IN_SHADOW) -> None:
        """Add policies to those in force."""
        document = DOCUMENT | {name: [*DOCUMENT[name], *each] for name, each in more.items()}
        assert (await self.admin.put("/v1/limits", json=document)).is_success

    async def usage(self, **filters: str) -> int:
        answer = await self.admin.get("/v1/usage", params=filters)
        return sum(line["units"] for line in answer.json()["data"])

    async def epochs(self) -> list[tuple[int, str, bool]]:
        """Return all epochs: their state, and whether data of them is believed lost."""
        return [
            tuple(row) for row in await self._rows("SELECT epoch, state, lost_data FROM region_epoch ORDER BY epoch")
        ]

    async def leases(self, epoch: int) -> list[dict[str, Any]]:
        return [dict(row) for row in await self._rows("SELECT * FROM lease WHERE epoch = $1", epoch)]

    async def _rows(self, sql: str, *arguments: object) -> list[Any]:
        connection = await asyncpg.connect(self.database)
        try:
            return await connection.fetch(sql, *arguments)
        finally:
            await connection.close()

    async def quota(self, key: str = "exports:tenant=acme") -> dict[str, Any]:
        """Return one quota of the reconciliation of the only period."""
        [period] = (await self.admin.get("/v1/periods")).json()["data"]
        reconciliation = (await self.admin.get(f"/v1/periods/{period['id']}/reconciliation")).json()
        assert (reconciliation["status"], reconciliation["drift"]) == ("balanced", 0)
        return next(quota for quota in reconciliation["quotas"] if quota["quota_key"] == key)


@asynccontextmanager
async def running(settings: AgentSettings) -> AsyncIterator[Agent]:
    app = create_agent(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
            yield Agent(app.state.region, http)


@asynccontextmanager
async def serving(app: ASGIApp, hub: SignalHub, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Start a coordinator behind a socket, in the test's own loop, and return its URL."""
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def end_streams() -> None:
        hub.close()

    server = asyncio.create_task(
        serve(app, host="127.0.0.1", port=0, before_shutdown=end_streams, on_listening=listening.set_result, tls=tls)
    )
    try:
        yield await listening
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


@asynccontextmanager
async def another_coordinator(database: str, **settings: Any) -> AsyncIterator[str]:
    """Start a coordinator on the same Postgres, without network faults on the way to it."""
    hub = SignalHub()
    app = create_coordinator(CoordinatorSettings(database_url=SecretStr(restricted(database)), **settings), hub=hub)
    async with serving(app, hub, app.state.tls) as url:
        yield url


@dataclass
class Template:
    """Yield a database with regions, limits and tokens, which each world copies."""

    name: str
    tokens: dict[str, str]


async def prepare_world(url: str) -> dict[str, str]:
    """Put regions and limits, and issue a token for each region and for an admin."""
    now = datetime.now(UTC)
    async with connected(url) as owner, owner.transaction():
        for region in REGIONS:
            await put_region(owner, region, None, None, None, now)
        await put_limits(owner, msgspec.convert(DOCUMENT, LimitsDocument), lambda _: True, None, now)
        issued = {region: await issue_token(owner, [f"region:{region}"], "test", now) for region in REGIONS}
        issued["admin"] = await issue_token(owner, ["admin"], "test", now)
    return {name: each.token for name, each in issued.items()}


@asynccontextmanager
async def world_on(database: str, tokens: dict[str, str], store: str) -> AsyncIterator[World]:
    """Serve a coordinator on a copy of the template; its agents live as long as the block."""
    hub = SignalHub()
    settings = CoordinatorSettings(database_url=SecretStr(restricted(database)))
    weather = Weather(create_coordinator(settings, hub=hub))
    headers = {"Authorization": f"Bearer {tokens['admin']}"}
    async with (
        serving(weather, hub) as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as admin,
    ):
        world = World(url, store, weather, admin, dict(tokens), database)
        async with world.agents:
            yield world
            for cell in world.cells:  # last exchanges have no use after the test, and many stores have ended by now
                cell.shutdown.timeout_s = 0.2
