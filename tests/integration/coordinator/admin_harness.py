"""A whole coordinator on a real Postgres, called through its API, with a clock that only the test moves."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from secrets import token_hex
from typing import Any

import asyncpg
import httpx
import msgspec
from pydantic import SecretStr

from coordinator.access.issue_token import issue_token
from coordinator.database.connection import Connection
from coordinator.main import create_app
from coordinator.proof.seal import seal
from coordinator.settings import CoordinatorSettings
from protocol.identifiers import lane_of
from protocol.periods import minute_of
from tests.conftest import restricted
from tests.integration.coordinator.fixtures import StandingClock, connected

FINGERPRINT = "one life"


@dataclass
class AdminHarness:
    """The coordinator under test, with callers of any scopes."""

    transport: httpx.ASGITransport
    owner: Connection
    clock: StandingClock
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    async def caller(self, *scopes: str) -> httpx.AsyncClient:
        """Return a caller with a token of these scopes; without scopes, a caller without a token."""
        headers = {}
        if scopes:
            _, token = await issue_token(self.owner, scopes, "a test", self.clock.now())
            headers = {"Authorization": f"Bearer {token}"}
        return self.caller_with(headers)

    def caller_with(self, headers: Mapping[str, str]) -> httpx.AsyncClient:
        client = httpx.AsyncClient(transport=self.transport, base_url="http://coordinator", headers=headers)
        self.clients.append(client)
        return client


async def sealed(admin_harness: AdminHarness) -> None:
    """Seal all reports up to now, again if the coordinator's own sealing is in progress."""
    for _ in range(10):
        admin_harness.clock.move(seconds=1)
        try:
            async with admin_harness.owner.transaction():
                await seal(admin_harness.owner, admin_harness.clock.now())
            return
        except asyncpg.UniqueViolationError:
            continue
    raise AssertionError("the coordinator seals without end")


@asynccontextmanager
async def admin_harness_on(database: str, **settings: Any) -> AsyncIterator[AdminHarness]:
    """Run a coordinator on a database, with a clock that stands still until a test moves it."""
    clock = StandingClock()
    url = SecretStr(restricted(database))
    given: dict[str, Any] = {
        "database_url": url,
        "database_pool_size": 4,
        "lease_ms": 60_000,
        "clock_limit_ms": 0,
    } | settings
    app = create_app(CoordinatorSettings(**given), clock)
    async with app.router.lifespan_context(app), connected(database) as owner:
        admin_harness = AdminHarness(httpx.ASGITransport(app, raise_app_exceptions=False), owner, clock)
        yield admin_harness
        for client in admin_harness.clients:
            await client.aclose()


DOCUMENT: dict[str, Any] = {
    "plans": {"free": {}, "pro": {}},
    "default_plan": "free",
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": 1000, "period": "month"},
        {"name": "mails", "kind": "allowance", "limit": {"free": 100, "pro": 500}, "period": "day"},
        {"name": "api", "kind": "rate", "limit": "100/second, burst 200"},
    ],
    "policies": [
        {"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports"},
        {"name": "mail", "match": {"route": "/v1/mails"}, "by": ["tenant"], "quota": "mails"},
        {"name": "search", "match": {"route": "/v1/search*"}, "by": ["tenant"], "quota": "api"},
    ],
}


@dataclass
class Used:
    """Return a line of so many units of one minute."""

    at: datetime
    units: int
    policy: str = "export"
    labels: str = ""

    @property
    def dimensions(self) -> dict[str, str]:
        return {"policy": self.policy} | ({"labels": self.labels} if self.labels else {})


class Region:
    """A region as seen by the coordinator: it requests leases, spends them and reports, batch by batch."""

    def __init__(self, client: httpx.AsyncClient, name: str, epoch: int, lanes: int) -> None:
        self.client, self.name, self.epoch, self.lanes = client, name, epoch, lanes
        self.seqs: dict[int, int] = {}
        self.leases: dict[tuple[str, str], dict[str, Any]] = {}
        self.overdrafts: dict[tuple[str, str], int] = {}  # its last reply

    async def use(self, quota: str, period: str, used: Sequence[Used]) -> None:
        """Lease the units and report them as used, in two exchanges."""
        tenant = quota.partition("tenant=")[2]
        await self.exchange(quota, demands=[{"quota": quota, "waiting": sum(each.units for each in used)}])
        lease = self.leases[quota, period]
        lease["consumed"] += sum(each.units for each in used)
        lines = [
            {
                "minute": minute_of(each.at),
                "dimensions": {"tenant": tenant, **each.dimensions},
                "units": each.units,
            }
            for each in used
        ]
        await self.exchange(quota, frozen=[lease | {"lines": lines}])

    async def exchange(self, quota: str, *, frozen: Sequence[Any] = (), demands: Sequence[Any] = ()) -> None:
        lane = lane_of(quota, self.lanes)
        seq = self.seqs[lane] = self.seqs.get(lane, 0) + 1
        batch = {"epoch": self.epoch, "lane": lane, "seq": seq, "leases": frozen}
        exchange = {"frozen": msgspec.json.encode(batch).decode(), "live": {"demands": demands}}
        body = {"fingerprint": FINGERPRINT, "exchanges": [exchange]}
        answer = await self.client.post(f"/v1/regions/{self.name}/exchanges", json=body)
        assert answer.status_code == 200, answer.text
        (reply,) = answer.json()["replies"]
        assert reply["outcome"] == "applied", reply
        for lease in reply["leases"]:
            self._install(lease)

    def _install(self, lease: dict[str, Any]) -> None:
        self.overdrafts[lease["quota"], lease["period"]] = lease["overdraft"]
        known = {name: lease[name] for name in ("quota", "period", "granted", "overage")}
        blank = {"consumed": 0, "returned": 0}
        self.leases[lease["quota"], lease["period"]] = (
            blank | self.leases.get((lease["quota"], lease["period"]), {}) | known
        )


async def open_region(admin_harness: AdminHarness, admin: httpx.AsyncClient, name: str) -> Region:
    added = await admin.post("/v1/regions", json={"name": name})
    assert added.status_code in (200, 201), added.text
    client = await admin_harness.caller(f"region:{name}")
    body = {"nonce": token_hex(16), "fingerprint": FINGERPRINT}
    opened = await client.post(f"/v1/regions/{name}/epochs", json=body)
    assert opened.status_code in (200, 201), opened.text
    return Region(client, name, opened.json()["epoch"], opened.json()["lanes"])


def problem(answer: httpx.Response) -> tuple[int, list[tuple[str, str]]]:
    """Return the status of a refusal, and each (field, rule)."""
    assert answer.headers["Content-Type"] == "application/problem+json", answer.text
    assert answer.headers["X-Request-Id"]
    document = answer.json()
    assert document["status"] == answer.status_code
    return answer.status_code, [(each["field"], each["rule"]) for each in document.get("invalid_parameters", ())]
