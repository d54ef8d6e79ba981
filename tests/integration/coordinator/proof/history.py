"""A history with everything that finance reads: two months with limits, people, suspense and a close.

It is written through the coordinator's own API and operations, so nothing in it may be reported as tampering.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import httpx

from coordinator.access.issue_token import issue_token
from coordinator.access.jwt_callers import identity_id, note_identity
from coordinator.access.revoke_token import revoke_token
from coordinator.exchange.expire_leases import expire_leases
from coordinator.regions.put_identities import put_identities
from tests.integration.coordinator.admin_harness import DOCUMENT, AdminHarness, Region, Used, open_region, sealed
from tests.integration.coordinator.fixtures import put_off
from web.credentials.jwt_claims import JwtIdentity

NOVEMBER, DECEMBER, DAY = "2026-11", "2026-12", "2026-11-18"
ACME, GLOBEX, INITECH = (f"exports:tenant={tenant}" for tenant in ("acme", "globex", "initech"))
MAILS = "mails:tenant=acme"
MORNING = datetime(2026, 11, 18, 9, 5, tzinfo=UTC)
IN_DECEMBER = datetime(2026, 12, 2, 6, tzinfo=UTC)
LIMITS: dict[str, Any] = DOCUMENT | {
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": 1000, "period": "month", "carry_over": 300, "cap": "soft"},
        {"name": "mails", "kind": "allowance", "limit": {"free": 100, "pro": 500}, "period": "day"},
        {"name": "api", "kind": "rate", "limit": "100/second, burst 200"},
    ]
}
# Texts by people that tests search for.
CREDIT, WRITE_OFF, WITHDRAWN, PROPOSED = "TICKET-1", "TICKET-2", "TICKET-3", "TICKET-4"
CHARGED, ESTIMATED, WAITING = "the invoice shows it", "as in October", "the region is asked"


class History:
    """Several people and regions that call one coordinator."""

    def __init__(self, admin_harness: AdminHarness, clients: Mapping[str, httpx.AsyncClient]) -> None:
        self.admin_harness, self.clients = admin_harness, clients

    async def ask(self, who: str, method: str, path: str, body: object = None) -> dict[str, Any]:
        answer = await self.clients[who].request(method, path, json=body)
        assert answer.status_code < 300, answer.text
        return dict(answer.json()) if answer.content else {}

    async def seal(self) -> None:
        await sealed(self.admin_harness)

    async def adjust(self, document: str, *, approve: bool = True, **terms: Any) -> str:
        body = {"quota": ACME, "period": NOVEMBER, "kind": "credit", "units": 50, "reason": "an outage"}
        made = await self.ask("proposer", "POST", "/v1/adjustments", body | {"document": document} | terms)
        if approve:
            await self.ask("approver", "POST", f"/v1/adjustments/{made['id']}:approve")
        return str(made["id"])

    async def resolve(self, region: Region, quota: str, kind: str, reason: str, *, approve: bool = True) -> str:
        body = {"epoch": region.epoch, "quota": quota, "period": NOVEMBER, "kind": kind, "reason": reason}
        body |= {"units": 5} if kind == "estimate" else {}
        made = await self.ask("proposer", "POST", "/v1/suspense:propose", body)
        if approve:
            await self.ask("approver", "POST", f"/v1/suspense/{made['id']}:approve")
        return str(made["id"])

    async def expire(self) -> None:
        async with self.admin_harness.owner.transaction():
            await expire_leases(self.admin_harness.owner, self.admin_harness.clock.now())


async def write_history(admin_harness: AdminHarness) -> None:
    await put_off(admin_harness.owner, "seal", "expire_leases", "close_periods", "recall_suspense")
    scopes = {"admin": "admin", "proposer": "adjust:propose", "approver": "adjust:approve", "closer": "period:close"}
    history = History(admin_harness, {who: await admin_harness.caller(scope) for who, scope in scopes.items()})
    await _change_limits(history)
    regions = await _use(history)
    await history.seal()
    await _adjust(history)
    await _resolve(history, *regions)
    await history.seal()
    await _close(history)
    await history.seal()
    await _come_late(history, regions[0])
    await _change_tokens(history)
    await history.seal()


async def _change_limits(history: History) -> None:
    await history.ask("admin", "PUT", "/v1/limits", DOCUMENT)
    history.admin_harness.clock.move(seconds=1)
    await history.ask("admin", "PUT", "/v1/limits", LIMITS)
    for tenant, plan in (("acme", "pro"), ("acme", "free"), ("acme", "pro"), ("globex", "pro"), ("umbrella", "pro")):
        history.admin_harness.clock.move(seconds=1)
        await history.ask("admin", "PUT", f"/v1/subscriptions/{tenant}", {"plan": plan})
    await history.ask("admin", "DELETE", "/v1/subscriptions/umbrella")
    override = {"quota": "exports", "subject": {"tenant": "globex"}, "limit": 2000, "reason": "a launch"}
    await history.ask("admin", "POST", "/v1/overrides", override)
    ended = await history.ask("admin", "POST", "/v1/overrides", override | {"subject": {"tenant": "hooli"}})
    await history.ask("admin", "DELETE", f"/v1/overrides/{ended['id']}")


async def _use(history: History) -> list[Region]:
    regions = [
        await open_region(history.admin_harness, history.clients["admin"], name) for name in ("eu-west", "us-east")
    ]
    for minute, (region, quota) in enumerate((region, quota) for region in regions for quota in (ACME, GLOBEX)):
        await region.use(
            quota, NOVEMBER, [Used(MORNING.replace(minute=minute), 60), Used(MORNING, 3, labels="model=large")]
        )
    await regions[0].use(MAILS, DAY, [Used(MORNING, 7, "mail")])
    for region in regions:
        for quota in (ACME, GLOBEX, INITECH):
            await region.exchange(quota, demands=[{"quota": quota, "waiting": 9}])
    return regions


async def _adjust(history: History) -> None:
    await history.adjust(CREDIT)
    await history.adjust(WRITE_OFF, kind="write_off", units=2)
    withdrawn = await history.adjust(WITHDRAWN, approve=False)
    await history.ask("proposer", "POST", f"/v1/adjustments/{withdrawn}:withdraw")
    await history.adjust(PROPOSED, approve=False)


async def _resolve(history: History, eu: Region, us: Region) -> None:
    """Resolve two leases, replace a proposal by another, and let one store lose its data."""
    history.admin_harness.clock.move(minutes=10)
    await history.expire()
    await history.resolve(eu, ACME, "charge", CHARGED)
    await history.resolve(eu, INITECH, "estimate", ESTIMATED)
    await history.resolve(us, ACME, "write_off", "a first thought", approve=False)
    await history.resolve(us, ACME, "write_off", WAITING)
    await history.resolve(us, GLOBEX, "write_off", "replaced", approve=False)
    await history.resolve(us, GLOBEX, "charge", "charged in the end")
    lost = await open_region(history.admin_harness, history.clients["admin"], "us-east")
    await lost.use(GLOBEX, NOVEMBER, [Used(MORNING, 4)])
    await history.ask("admin", "POST", f"/v1/epochs/{us.epoch}:retire", {"reason": "its store is gone"})


async def _close(history: History) -> None:
    """Carry suspense out of the month, and unused units over."""
    history.admin_harness.clock.time = IN_DECEMBER
    await history.expire()
    for minutes in (0, 20):
        history.admin_harness.clock.move(minutes=minutes)
        for period in (NOVEMBER, DAY):
            await history.ask("closer", "POST", f"/v1/periods/{period}:close", {"carry_suspense": True})
    states = await history.admin_harness.owner.fetch("SELECT state FROM period WHERE id = ANY ($1)", [NOVEMBER, DAY])
    assert [row["state"] for row in states] == ["closed", "closed"]


async def _come_late(history: History, region: Region) -> None:
    lease = region.leases[ACME, NOVEMBER]
    lease["consumed"] += 4
    lines = [{"minute": int(MORNING.timestamp()) // 60, "dimensions": {"tenant": "acme"}, "units": 4}]
    await region.exchange(ACME, frozen=[lease | {"lines": lines}])
    await region.use(ACME, DECEMBER, [Used(IN_DECEMBER, 11)])
    await history.adjust("TICKET-5", kind="write_off", units=1)


async def _change_tokens(history: History) -> None:
    owner, now = history.admin_harness.owner, history.admin_harness.clock.now()
    old = await issue_token(owner, ["usage:read"], "billing", now)
    await revoke_token(owner, old.id, now)
    new = await issue_token(owner, ["usage:read"], "billing", now)
    await issue_token(owner, ["usage:read"], "billing, since December", now, new.token)
    for name in ("Ada", "Ada Lovelace"):
        ada = JwtIdentity("https://login.example.com", "ada", name, frozenset(), 0.0)
        await note_identity(owner, identity_id(ada.issuer, ada.subject), ada, now)
    async with owner.transaction():
        await put_identities(owner, "us-east", ["spiffe://example.org/us-east"], None, now)
