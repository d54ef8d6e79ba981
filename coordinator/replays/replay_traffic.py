"""Replay the logged checks of a time under a limits document: what of them would be denied."""

import asyncio
import math
from datetime import datetime
from time import monotonic

import asyncpg
from msgspec import Struct

from coordinator.database.engine import Database
from coordinator.decision_log.read import read_kept_from
from coordinator.replays.read_traffic import (
    CheckReader,
    InForce,
    Traffic,
    read_in_force,
    read_lost,
    read_slices,
)
from coordinator.replays.rules.bounds import Estimate, Z
from coordinator.replays.rules.limits import Limits
from coordinator.replays.rules.matching import Matcher
from coordinator.replays.rules.replay import PolicyResult, Replay, TenantResult
from protocol.limits.document import LimitsDocument, samples_of

MOST_ROWS = 200_000  # of the log, in one replay
MOST_SECONDS = 20.0
MOST_TENANTS = 100  # in the answer


class Denials(Struct, frozen=True):
    """The estimated least number of checks that would be denied, with its interval of 95 %."""

    checks: int
    low: int
    high: int
    share: float  # of the checks in question, from 0 to 1
    share_low: float
    share_high: float


class UnknownChecks(Struct, frozen=True):
    """Checks about which the log says too little, and why."""

    reason: str
    checks: int


class PolicyReplay(Struct, frozen=True):
    """The checks of a tenant that one policy alone would deny."""

    policy: str
    quota: str
    shadow: bool
    checks: int  # that it meets
    denied: int  # by it, in the traffic
    would_deny: Denials
    unknown: list[UnknownChecks]
    window_s: int  # shorter bursts of denials are not seen; 0: nothing was counted


class TenantReplay(Struct, frozen=True):
    """The checks of a tenant that the document would deny. `would_deny` counts each check once."""

    tenant: str | None
    checks: int
    plus_minus: int  # of `checks`, in 95 of 100 cases
    denied: int  # in the traffic
    would_deny: Denials
    policies: list[PolicyReplay]


class TrafficReplay(Struct, frozen=True):
    """The recent traffic that a limits document would deny, by tenant, the most denied first."""

    start: datetime
    end: datetime
    kept_from: datetime | None  # the log keeps nothing of before
    covered_from: datetime  # there are more rows of before than one replay reads
    rows: int  # of the log
    lost: int  # decisions that agents could not keep, of all tenants
    not_logged: list[str]  # policies whose admissions were not logged for some of the time; `*`: all others
    tenants: list[TenantReplay]
    more_tenants: int


async def replay_traffic(
    database: Database, document: LimitsDocument, traffic: Traffic, now: datetime
) -> TrafficReplay | None:
    """Replay traffic that the log has. The newest is read first, until MOST_ROWS or MOST_SECONDS are reached.

    Return None if already the newest slice has too many rows.
    """
    kept_from = await database.read(read_kept_from)
    traffic = traffic._replace(start=min(traffic.end, max(traffic.start, kept_from or traffic.end)))
    in_force = await database.run(lambda c: read_in_force(c, traffic, now), snapshot=True)
    slices, covered_from, rows, until_s = [], traffic.end, 0, monotonic() + MOST_SECONDS
    async for start, found in read_slices(database, traffic, MOST_ROWS):
        slices.append(found)
        covered_from, rows = start, rows + len(found)
        if monotonic() > until_s:
            break
    if covered_from == traffic.end > traffic.start:
        return None
    covered = traffic._replace(start=covered_from)
    results = await asyncio.to_thread(_replay, document, in_force, covered, slices) if rows else []
    rates = [rate for _, each in in_force.documents for rate in samples_of(each).items()]
    ordered = sorted(results, key=lambda each: (-each.would_deny.middle, -each.checks, each.tenant))
    return TrafficReplay(
        start=traffic.start,
        end=traffic.end,
        kept_from=kept_from,
        covered_from=covered_from,
        rows=rows,
        lost=await database.read(lambda c: read_lost(c, covered_from, traffic.end)),
        not_logged=sorted({policy for policy, rate in rates if not rate}),
        tenants=[_tenant_replay(document, each) for each in ordered[:MOST_TENANTS]],
        more_tenants=len(ordered[MOST_TENANTS:]),
    )


def _replay(
    document: LimitsDocument, in_force: InForce, covered: Traffic, slices: list[list[asyncpg.Record]]
) -> list[TenantResult]:
    matcher = Matcher(document, in_force.hasher.hash, in_force.around.plans)
    limits = Limits(document, in_force.around, covered.start, covered.end)
    replay, reader = Replay(matcher, limits, covered.start, covered.end), CheckReader(in_force)
    for rows in reversed(slices):
        for row in rows:
            for check in reader.checks(row):
                replay.add(check)
    return replay.results()


def _tenant_replay(document: LimitsDocument, result: TenantResult) -> TenantReplay:
    return TenantReplay(
        tenant=result.tenant or None,
        checks=round(result.checks),
        plus_minus=math.ceil(Z * math.sqrt(result.variance)),
        denied=round(result.denied),
        would_deny=_denials(result.would_deny, result.checks),
        policies=[_policy_replay(document, each) for each in result.policies],
    )


def _policy_replay(document: LimitsDocument, result: PolicyResult) -> PolicyReplay:
    spec = document.policies[result.place]
    unknown = sorted(result.unknown.items(), key=lambda each: -each[1])
    return PolicyReplay(
        policy=spec.name,
        quota=spec.quota,
        shadow=spec.shadow,
        checks=round(result.checks),
        denied=round(result.denied),
        would_deny=_denials(result.would_deny, result.checks),
        unknown=[UnknownChecks(reason.value, round(checks)) for reason, checks in unknown],
        window_s=result.window_s,
    )


def _denials(found: Estimate, checks: float) -> Denials:
    low, middle, high = (min(each, checks) for each in found)
    shares = (_share(each, checks) for each in (middle, low, high))
    return Denials(round(middle), round(low), round(high), *shares)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0
