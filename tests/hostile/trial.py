"""Honest regions serve their tenants while a hostile region attacks the coordinator and a hostile caller an agent.

The verdict is what the attack cost them.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import asyncpg
import httpx

from coordinator.access.issue_token import issue_token
from leasehold.local_stack.processes import wait_until
from protocol.clock import SystemClock
from protocol.limits.document import PeriodKind
from protocol.periods import Calendar, period_at
from tests.chaos.pieces import AGENTS, Stack
from tests.hostile.caller import TENANT, HostileCaller
from tests.hostile.region import REGION, HostileRegion

ATTACKERS = ("region", "caller")
ATTACKED_AGENT = "agent-eu-west"

TENANTS = ("honest1", "honest2", "honest3")
LIMIT = 10_000_000
REPORTED = {"report_within": "5s"}  # so the trial need not wait for a minute before it compares
LIMITS = {
    "plans": {"small": {}, "large": {}},
    "default_plan": "large",
    "quotas": [
        {"name": "exports", "kind": "allowance", "limit": {"small": 300, "large": LIMIT}, "period": "month"} | REPORTED,
        {"name": "hourly", "kind": "allowance", "limit": LIMIT, "period": "hour"} | REPORTED,
        {"name": "api", "kind": "rate", "limit": "100000/second, burst 100000"},
    ],
    "policies": [
        {"name": "export", "match": {"route": "/v1/exports"}, "by": ["tenant"], "quota": "exports", "wait": "5s"},
        {"name": "search", "match": {"route": "/v1/search"}, "by": ["tenant"], "quota": "api"},
    ],
}
# No region gets all of a tenant's units, which is set where regions do not trust each other.
CEILING = {"mode": "weigh", "quota": "exports", "settings": {REGION: {"ceiling": 1000}}}
PAUSE_S = 0.02
TRANSPORT_S = 30.0
SETTLED_S = 180
# What a minute of every budget may cost: 10,000 pools and leases, 60 tables, 4 MiB of evidence with its indexes, and
# the reports themselves.
MIB_A_MINUTE, MIB_ONCE = 120, 60
TABLES_A_MINUTE, TABLES_ONCE = 65 * 8, 100


class Attacker(Protocol):
    statuses: dict[str, Counter[int]]  # answers by attack

    async def run(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Honest:
    """The answers that services got."""

    admitted: Counter[str] = field(default_factory=Counter)  # units of `exports`, by tenant
    answers: Counter[int] = field(default_factory=Counter)
    quiet_ms: list[float] = field(default_factory=list)  # before the attack
    attacked_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Size:
    relations: int
    bytes: int


@dataclass(frozen=True)
class Verdict:
    honest: Honest
    attackers: Sequence[Attacker]
    minutes: float
    before: Size
    after: Size
    quarantined: int
    over_budget: dict[str, float]
    booked: dict[str, int]  # of the honest tenants' exports
    findings: list[str]  # of the reconciliation, about regions other than the hostile one

    def faults(self) -> list[str]:
        found = [f"{count} honest requests were answered {status}" for status, count in self.honest.answers.items()]
        found = [each for each in found if not each.endswith(" 200")]
        for attack, statuses in self.statuses():
            found += [f"{attack}: answered {status}" for status in statuses if status >= 500]
        for tenant in TENANTS:
            if self.booked.get(tenant, 0) != self.honest.admitted[tenant]:
                found.append(f"{tenant}: {self.honest.admitted[tenant]} admitted, {self.booked.get(tenant)} booked")
        tables, mib = self.after.relations - self.before.relations, (self.after.bytes - self.before.bytes) >> 20
        if tables > TABLES_ONCE + self.minutes * TABLES_A_MINUTE:
            found.append(f"{tables} more relations in the database")
        if mib > MIB_ONCE + self.minutes * MIB_A_MINUTE:
            found.append(f"{mib} MiB more in the database")
        return found + self.findings

    def statuses(self) -> list[tuple[str, Counter[int]]]:
        return [pair for attacker in self.attackers for pair in sorted(attacker.statuses.items())]


async def trial(stack: Stack, kinds: Collection[str], seconds: float, seed: int) -> Verdict:
    token = await _prepare(stack)
    period = period_at(Calendar(PeriodKind.MONTH), SystemClock().now()).id
    victims = [f"exports:tenant={tenant}" for tenant in TENANTS]
    honest, attackers = Honest(), list[Attacker]()
    if "region" in kinds:
        attackers.append(HostileRegion(stack.coordinator, token, victims, period, seed))
    if "caller" in kinds:
        attackers.append(HostileCaller(stack.agents[ATTACKED_AGENT], seed))
    before = await _size(stack)
    await _serve(stack, honest, honest.quiet_ms, asyncio.sleep(min(10, seconds / 4)))
    attacks = [asyncio.create_task(attacker.run()) for attacker in attackers]
    await _serve(stack, honest, honest.attacked_ms, asyncio.wait(attacks, timeout=seconds))
    for attacker in attackers:
        attacker.stop()
    await asyncio.gather(*attacks)
    booked = await asyncio.to_thread(_settled, stack, period, honest)
    return Verdict(
        honest,
        attackers,
        seconds / 60,
        before,
        await _size(stack),
        await _value(stack, "SELECT count(*) FROM quarantine"),
        _over_budget(stack),
        booked,
        await asyncio.to_thread(_findings, stack, period),
    )


async def _prepare(stack: Stack) -> str:
    def ask() -> None:
        stack.ask("PUT", f"{stack.coordinator}/v1/limits", LIMITS)
        stack.ask("PUT", f"{stack.coordinator}/v1/regions/{REGION}", {})
        stack.ask("POST", f"{stack.coordinator}/v1/rebalances", CEILING)

    await asyncio.to_thread(ask)
    connection = await asyncpg.connect(stack.owners_url)
    try:
        return (await issue_token(connection, [f"region:{REGION}"], "hostile", SystemClock().now())).token
    finally:
        await connection.close()


async def _serve(stack: Stack, honest: Honest, took_ms: list[float], until: Awaitable[Any]) -> None:
    """Send checks for every tenant to every agent in turn until the event is set."""
    ends = asyncio.ensure_future(until)
    async with httpx.AsyncClient(timeout=TRANSPORT_S, trust_env=False) as http:

        async def work(agent: str, tenant: str) -> None:
            while not ends.done():
                for route in ("/v1/exports", "/v1/search"):
                    began = time.monotonic()
                    body = {"subject": {"tenant": tenant, "route": route}}
                    answer = await http.post(f"{stack.agents[agent]}/v1/check", json=body)
                    took_ms.append((time.monotonic() - began) * 1000)
                    honest.answers[answer.status_code] += 1
                    honest.admitted[tenant] += route == "/v1/exports" and answer.status_code == httpx.codes.OK
                await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(work(agent, tenant) for agent in AGENTS for tenant in TENANTS))
    await ends


def _settled(stack: Stack, period: str, honest: Honest) -> dict[str, int]:
    """Return what is booked for the honest tenants, once all that agents admitted has arrived."""
    found: dict[str, int] = {}

    def has_arrived() -> bool:
        tenants = "".join(f"&tenant={tenant}" for tenant in TENANTS)
        books = stack.read(f"/v1/usage?group_by=tenant,region&quota=exports&from={period}-01{tenants}")
        found.clear()
        for row in books["data"]:
            if row["dimensions"]["region"] != REGION:
                tenant = row["dimensions"]["tenant"]
                found[tenant] = found.get(tenant, 0) + row["units"]
        return all(found.get(tenant, 0) == honest.admitted[tenant] for tenant in TENANTS)

    wait_until(has_arrived, SETTLED_S)
    return found


def _findings(stack: Stack, period: str) -> list[str]:
    found = stack.read(f"/v1/periods/{period}/reconciliation")
    others = [each for each in found["findings"] if each["region"] != REGION and TENANT not in each["quota_key"]]
    return [f"{each['quota_key']}: {each['reason']}" for each in others]


def _over_budget(stack: Stack) -> dict[str, float]:
    name = "leasehold_coordinator_region_budget_exceeded_total"
    lines = httpx.get(f"{stack.coordinator}/metrics", timeout=TRANSPORT_S, trust_env=False).text.splitlines()
    return {line.split("{")[1].split("}")[0]: float(line.split()[-1]) for line in lines if line.startswith(name)}


async def _size(stack: Stack) -> Size:
    return Size(
        await _value(stack, "SELECT count(*) FROM pg_class"),
        await _value(stack, "SELECT pg_database_size(current_database())"),
    )


async def _value(stack: Stack, sql: str) -> int:
    connection = await asyncpg.connect(stack.owners_url)
    try:
        found: int = await connection.fetchval(sql)
        return found
    finally:
        await connection.close()


def report(verdict: Verdict) -> str:
    honest = verdict.honest
    attacks = [f"  {name:24} {dict(statuses)}" for name, statuses in verdict.statuses()]
    outcomes = [dict(each.outcomes) for each in verdict.attackers if isinstance(each, HostileRegion)]
    return "\n".join(
        [
            f"honest requests: {dict(honest.answers)}",
            f"  before the attack: {_latency(honest.quiet_ms)}",
            f"  under attack:      {_latency(honest.attacked_ms)}",
            "hostile calls, by what they were answered:",
            *attacks,
            *(f"  exchanges: {each}" for each in outcomes),
            f"relations: {verdict.before.relations} -> {verdict.after.relations}",
            f"database: {verdict.before.bytes >> 20} -> {verdict.after.bytes >> 20} MiB",
            f"rows in quarantine: {verdict.quarantined}",
            "over budget:",
            *(f"  {name}: {count:,.0f}" for name, count in sorted(verdict.over_budget.items())),
            *(verdict.faults() or ["honest regions did not notice, and the books are right"]),
        ]
    )


def _latency(took_ms: list[float]) -> str:
    return f"p50 {_percentile(took_ms, 50):.1f} ms, p99 {_percentile(took_ms, 99):.1f} ms"


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[(len(values) - 1) * percent // 100] if values else 0.0
