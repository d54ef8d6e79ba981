"""A coordinator on a real Postgres, called as by agents; after every test its ledger must equal its transfers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from pydantic import SecretStr

from coordinator.access.issue_token import issue_token
from coordinator.database.connection import Connection
from coordinator.health.figures import measure
from coordinator.limits.put_limits import put_limits
from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from protocol.identifiers import lane_of
from protocol.limits.document import LimitsDocument
from protocol.messages import ExchangeReply, ExchangeResponse, LeaseReply, Receipt
from protocol.periods import minute_of
from tests.conftest import restricted
from tests.integration.coordinator.fixtures import NOON, StandingClock, connected, served

PERIOD = "2026-11"
NEVER_MS = 86_400_000
LEASE_MS = 60_000
# A job that had no work stays due, and would expire leases whenever a test moves the clock. Tests expire them instead.
EXPIRE_LATER = """
INSERT INTO job (name, due_at) VALUES ('expire_leases', clock_timestamp() + interval '1 day')
ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at
"""
EXPORTS = "exports:tenant=acme"
MAILS = "mails:tenant=acme"
API = "api:tenant=acme"
DOCUMENT: dict[str, Any] = {
    "plans": {"free": {}, "pro": {}},
    "default_plan": "free",
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": 1000, "period": "month", "horizon": "10s"},
        {"name": "mails", "kind": "allowance", "limit": {"pro": 50}, "period": "month"},
        {"name": "api", "kind": "rate", "limit": "100/second, burst 200"},
    ],
    "policies": [],
}


def lease(quota: str = EXPORTS, *, units: int | None = None, **totals: Any) -> dict[str, Any]:
    """Return a frozen lease. `units` is of one line; by default all that are consumed."""
    frozen: dict[str, Any] = {
        "quota": quota,
        "period": PERIOD,
        "granted": 0,
        "overage": 0,
        "consumed": 0,
        "returned": 0,
    } | totals
    units = frozen["consumed"] if units is None else units
    line = {"minute": minute_of(NOON), "dimensions": {"tenant": "acme", "policy": "export"}, "units": units}
    return frozen | {"lines": [line] if units else []}


def want(quota: str = EXPORTS, *, waiting: int = 0, demand_milli: int = 0) -> dict[str, Any]:
    return {"quota": quota, "waiting": waiting, "demand_milli": demand_milli}


def exchange(frozen: str, demands: Sequence[Any] = ()) -> dict[str, Any]:
    return {"frozen": frozen, "live": {"demands": list(demands)}}


@dataclass
class Agent:
    """One region's agent, under one incarnation of its store."""

    client: httpx.AsyncClient
    region: str
    fingerprint: str = "one life"
    epoch: int = 0
    lanes: int = 4

    def frozen(
        self, seq: int, *leases: Any, quota: str = EXPORTS, other: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """Return the bytes of a batch of the quota's lane."""
        batch: dict[str, Any] = {"epoch": self.epoch, "lane": lane_of(quota, self.lanes), "seq": seq, "leases": leases}
        return msgspec.json.encode(batch | dict(other)).decode()

    async def post(self, *exchanges: Any) -> httpx.Response:
        body = {"fingerprint": self.fingerprint, "exchanges": exchanges}
        return await self.client.post(f"/v1/regions/{self.region}/exchanges", json=body)

    async def call(self, *exchanges: Any) -> ExchangeResponse:
        answer = await self.post(*exchanges)
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=ExchangeResponse)

    async def say(self, seq: int, *leases: Any, demands: Sequence[Any] = (), quota: str = EXPORTS) -> ExchangeReply:
        """Return one exchange of one lane."""
        response = await self.call(exchange(self.frozen(seq, *leases, quota=quota), demands))
        return response.replies[0]

    async def open(self, nonce: str | None = None, **more: Any) -> httpx.Response:
        body = {"nonce": nonce or token_hex(16), "fingerprint": self.fingerprint, **more}
        answer = await self.client.post(f"/v1/regions/{self.region}/epochs", json=body)
        if answer.status_code == 200:
            self.epoch, self.lanes = answer.json()["epoch"], answer.json()["lanes"]
        return answer


def leased(reply: ExchangeReply, quota: str = EXPORTS) -> LeaseReply:
    (found,) = [each for each in reply.leases if each.quota == quota]
    return found


def receipt(reply: ExchangeReply) -> Receipt:
    assert reply.receipt is not None
    return reply.receipt


@dataclass
class AgentHarness:
    url: str
    app: FastAPI
    hub: SignalHub
    clock: StandingClock
    owner: Connection
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    async def client(self, *scopes: str, base_url: str = "") -> httpx.AsyncClient:
        headers = {}
        if scopes:
            headers["Authorization"] = f"Bearer {(await issue_token(self.owner, scopes, '', NOON)).token}"
        transport = None if base_url else httpx.ASGITransport(self.app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url=base_url or "http://coordinator", headers=headers)
        self.clients.append(client)
        return client

    async def add_region(self, name: str, weight: int = 1) -> None:
        """Change regions as an operator does; the version shows that they have changed."""
        await self.owner.execute(
            "INSERT INTO region (name, weight, created_at) VALUES ($1, $2, $3)", name, weight, NOON
        )
        await self.owner.execute("UPDATE policy_version SET version = version + 1")

    async def drain(self, name: str = "us-east") -> None:
        await self.owner.execute("UPDATE region SET status = 'draining' WHERE name = $1", name)
        await self.owner.execute("UPDATE policy_version SET version = version + 1")

    async def agent(self, name: str = "us-east", base_url: str = "") -> Agent:
        await self.add_region(name)
        agent = Agent(await self.client(f"region:{name}", base_url=base_url), name)
        assert (await agent.open()).status_code == 200
        return agent

    async def limit(self, quotas: Sequence[Any]) -> None:
        document = msgspec.convert(DOCUMENT | {"quotas": quotas}, LimitsDocument)
        async with self.owner.transaction():
            await put_limits(self.owner, document, lambda _: True, None, NOON)

    async def metrics(self) -> str:
        """Return /metrics after this coordinator has measured and read its figures."""
        async with self.owner.transaction():
            await measure(self.owner, self.clock.now())
        health = self.app.state.coordinator.health
        await health.look()
        await health.share_and_read()
        return (await (await self.client()).get("/metrics")).text

    async def one(self, sql: str, *arguments: Any) -> Any:
        return await self.owner.fetchval(sql, *arguments)

    async def pool(self, quota: str = EXPORTS) -> dict[str, int]:
        row = await self.owner.fetchrow("SELECT * FROM pool WHERE quota = $1 AND period = $2", quota, PERIOD)
        assert row is not None
        return {name: units for name, units in row.items() if isinstance(units, int)}

    async def lease(self, agent: Agent, quota: str = EXPORTS) -> dict[str, Any]:
        row = await self.owner.fetchrow(
            "SELECT * FROM lease WHERE quota = $1 AND period = $2 AND epoch = $3", quota, PERIOD, agent.epoch
        )
        assert row is not None
        return dict(row)

    async def transfers(self, quota: str = EXPORTS) -> list[tuple[str, int]]:
        rows = await self.owner.fetch("SELECT cause, units FROM transfer WHERE quota = $1 ORDER BY id", quota)
        return [(row["cause"], row["units"]) for row in rows]

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Yield the address of the coordinator on a real port, which streams need."""
        async with served(self.app, self._end) as url:
            yield url

    async def _end(self) -> None:
        self.hub.close()


async def books_are_their_transfers(owner: Connection) -> None:
    """Recompute pools and leases from the transfers alone, and compare them."""
    wrong = await owner.fetch(
        """
        WITH moved AS (
            SELECT quota, period, src AS account, -units AS units FROM transfer
            UNION ALL SELECT quota, period, dst, units FROM transfer),
        sums AS (SELECT quota, period, account, sum(units) AS units FROM moved GROUP BY quota, period, account),
        leases AS (
            SELECT quota, period, sum(outstanding) AS outstanding, sum(consumed) AS consumed,
                sum(suspense) AS suspense, sum(overage) AS overage
            FROM (SELECT quota, period, outstanding, consumed, suspense, overage FROM lease
                UNION ALL SELECT quota, period, 0, consumed, 0, 0 FROM correction) AS parts GROUP BY quota, period),
        books AS (
            SELECT pool.quota, pool.period, account, kept, held FROM pool LEFT JOIN leases USING (quota, period),
            LATERAL (VALUES ('funding', -pool.funded, NULL), ('overage', -pool.overage, -leases.overage),
                ('unallocated', pool.unallocated, NULL), ('outstanding', pool.outstanding, leases.outstanding),
                ('consumed', pool.consumed, leases.consumed), ('suspense', pool.suspense, leases.suspense))
                AS accounts (account, kept, held))
        SELECT * FROM books LEFT JOIN sums USING (quota, period, account)
        WHERE kept <> coalesce(units, 0) OR kept <> coalesce(held, kept)
        """
    )
    assert not wrong


@asynccontextmanager
async def agent_harness_on(database: str) -> AsyncIterator[AgentHarness]:
    """Run a coordinator on a database; afterwards its ledger must equal its transfers."""
    clock, hub = StandingClock(), SignalHub()
    settings = CoordinatorSettings(
        database_url=SecretStr(restricted(database)),
        database_pool_size=8,
        expire_every_ms=NEVER_MS,
        lease_ms=LEASE_MS,
        clock_limit_ms=0,  # the test's clock stands still
    )
    app = create_app(settings, clock, hub)
    async with app.router.lifespan_context(app):
        async with connected(database) as owner:
            await owner.execute(EXPIRE_LATER)
            agent_harness = AgentHarness(database, app, hub, clock, owner)
            await agent_harness.limit(DOCUMENT["quotas"])
            yield agent_harness
            for client in agent_harness.clients:
                await client.aclose()
        async with connected(database) as owner:
            await books_are_their_transfers(owner)
