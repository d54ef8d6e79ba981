"""Helpers for the tests of scripts."""

import asyncio
from collections.abc import Sequence
from typing import Any

from protocol.circuit_breaker import CircuitBreaker
from protocol.clock import SystemClock
from protocol.identifiers import lane_of, quota_key
from protocol.limits.rates import Rate
from protocol.messages import ExchangeReply, LeaseReply, RateShare
from protocol.outcomes import ExchangeOutcome
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.metrics import AgentMetrics
from regional_agent.store.circuit_breaker import StoreCircuitBreaker
from regional_agent.store.scripts import Scripts
from regional_agent.store.types import (
    AllowanceCharge,
    Charge,
    Operation,
    RateCharge,
    RequestRun,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
    hold_part,
)

QUOTA = quota_key("exports", [("tenant", "acme")])
RATE = quota_key("api", [("tenant", "acme")])
DIMENSIONS = '{"policy":"export"}'


def breaker() -> StoreCircuitBreaker:
    return StoreCircuitBreaker(CircuitBreaker(5, 60_000), SystemClock(), AgentMetrics(), lambda on_reply: None, 60_000)


def lease_reply(quota: str = QUOTA, **changed: Any) -> LeaseReply:
    fields: dict[str, Any] = {
        "quota": quota,
        "period": "2026-11",
        "granted": 100,
        "overage": 0,
        "unallocated": 900,
        "starts_in_ms": 0,
        "expires_in_ms": 60_000,
        "ends_in_ms": 3_600_000,
        "first_minute": 0,
        "last_minute": 2**40,
    }
    return LeaseReply(**(fields | changed))


async def install(scripts: Scripts, incarnation: StoreIncarnation, *leases: LeaseReply, seq: int = 1) -> dict[str, int]:
    """Settle a lane as the coordinator's reply to an exchange does; all leases are of one lane."""
    lane = lane_of(leases[0].quota, incarnation.lanes)
    reply = ExchangeReply(lane=lane, seq=seq, outcome=ExchangeOutcome.APPLIED, leases=list(leases))
    return await scripts.settle(incarnation, lane, await scripts.read_mono_us(), reply)


SAFE = Rate(1_000, 10)


async def give_share(
    scripts: Scripts,
    incarnation: StoreIncarnation,
    number: int,
    rate_micro: int,
    after_micro: int = 0,
    expires_in_ms: int = 8_000,
    safe: Rate = SAFE,
) -> int:
    share = RateShare(
        quota=RATE,
        number=number,
        rate_micro=rate_micro,
        after_micro=after_micro,
        expires_in_ms=expires_in_ms,
        refresh_in_ms=1_000,
        contended=False,
    )
    return await scripts.share_rates(incarnation, await scripts.read_mono_us(), [(safe, share)])


async def take(
    scripts: Scripts,
    incarnation: StoreIncarnation,
    cost: int = 1,
    *,
    mode: str = "enforce",
    operation: Operation | None = None,
) -> StoreDecision:
    return await scripts.check(incarnation, mode, [AllowanceCharge(QUOTA, cost, 1000, DIMENSIONS)], operation)


async def take_rate(
    scripts: Scripts,
    incarnation: StoreIncarnation,
    cost: int = 1,
    *,
    rate_micro: int = 1_000,
    burst: int = 10,
    mode: str = "enforce",
) -> StoreDecision:
    """Take from a bucket that refills so slowly that a test does not notice."""
    return await scripts.check(incarnation, mode, [RateCharge(RATE, cost, rate_micro, burst)])


def hold_request(
    incarnation: StoreIncarnation,
    *charges: Charge,
    name: str = "once",
    ttl_ms: int = 60_000,
    remembered_ms: int = 3_600_000,
    mode: str = "hold",
) -> StoreRequest:
    """Hold units for an operation of that name, of all charges that can be held."""
    parts = [part for charge in charges if (part := hold_part(charge)) is not None]
    terms = HoldTerms(HoldId.fresh(incarnation.epoch, incarnation.lanes, parts), ttl_ms)
    return StoreRequest(mode, charges, Operation(name, "body", remembered_ms), terms)


def charge_of(units: int, quota: str = QUOTA, on_expiry: str = "release") -> AllowanceCharge:
    return AllowanceCharge(quota, units, 1000, DIMENSIONS, on_expiry)


async def set_aside(
    scripts: Scripts, incarnation: StoreIncarnation, units: int, *, on_expiry: str = "release", **rest: Any
) -> HoldId:
    decision = await ask_for_hold(scripts, incarnation, charge_of(units, on_expiry=on_expiry), **rest)
    assert decision.hold is not None
    return decision.hold.id


async def ask_for_hold(scripts: Scripts, incarnation: StoreIncarnation, *charges: Charge, **rest: Any) -> StoreDecision:
    told: list[StoreDecision | Exception] = []
    answer = asyncio.Event()

    def hear(decisions: Sequence[StoreDecision | Exception]) -> None:
        told.extend(decisions)
        answer.set()

    scripts.checks.send(incarnation, [RequestRun(hold_request(incarnation, *charges, **rest), 1, hear)], lambda _: None)
    await answer.wait()
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


async def available(scripts: Scripts, incarnation: StoreIncarnation, quota: str = QUOTA) -> int:
    fields = {
        name: int(value) for name, value in (await scripts.lease_fields(incarnation, quota)).items() if value.isdigit()
    }
    given = fields.get("granted", 0) + fields.get("overage", 0)
    return given - fields.get("consumed", 0) - fields.get("returned", 0) - fields.get("held", 0)
