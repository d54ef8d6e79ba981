"""The hot path: may this request happen now?

One script in the region's store decides all policies of a request at once. This is also the one place that decides
what a failure means: where the store cannot be asked, each policy's `on_store_failure` answers, and the answer says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from protocol.clock import Clock
from protocol.outcomes import DenialReason
from protocol.policy import QuotaKind, StoreFailure
from regional_agent.answers import Check, CheckAnswer, PolicyAnswer
from regional_agent.blocks import Blocked, Blocks
from regional_agent.leasing import Leasing
from regional_agent.life import LifeKeeper
from regional_agent.metrics import Metrics
from regional_agent.policies import Demanded, Policies, digest
from regional_agent.store.connection import StoreError, StoreUnavailable
from regional_agent.store.gathering import Gatherer
from regional_agent.store.scripts import (
    AllowanceCharge,
    Charge,
    Decision,
    Fenced,
    Operation,
    PolicyDecision,
    RateCharge,
    Request,
)

ALLOWANCE_WINDOW_MS = 24 * 3600 * 1000
OTHER_WINDOW_MS = 10 * 60 * 1000
RETRY_WHEN_DEGRADED_MS = 1000
RETRY_WHEN_BLOCKED_MS = 3_600_000  # of a block without an end, which people may lift any time

# What more units, or a renewed lease, may turn into an admission.
WORTH_WAITING = {DenialReason.NO_LEASE, DenialReason.LEASE_EXPIRED, DenialReason.LEASE_SPENT}


class NoPoliciesYet(Exception):
    """The agent has never heard any policies: it cannot tell what is limited."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, and for each of its policies the length of its window for the headers."""

    answer: CheckAnswer
    windows_s: Sequence[int]


class Admission:
    def __init__(self, gatherer: Gatherer, life: LifeKeeper, leasing: Leasing, metrics: Metrics, clock: Clock) -> None:
        self._gatherer = gatherer
        self._life = life
        self._leasing = leasing
        self._metrics = metrics
        self._clock = clock
        self.policies: Policies | None = None
        self.blocks: Blocks | None = None

    async def decide(self, check: Check) -> Verdict:
        if self.policies is None:
            raise NoPoliciesYet
        subject: dict[str, str] = msgspec.to_builtins(check.subject)
        if self.blocks is not None and (blocked := self.blocks.find(subject, self._clock.monotonic_ms())):
            return self._denied(blocked)
        demanded = self.policies.demand(subject, check.cost)
        if not demanded:
            return Verdict(_answer(True, None, []), [])
        operation = _operation(check, subject, demanded)
        with self._metrics.check_seconds.time():
            try:
                decision = await self._decide_in_store(check.mode, demanded, operation)
            except (StoreUnavailable, StoreError, Fenced):
                return self._decide_without_store(demanded)
        return self._verdict(demanded, decision)

    def _denied(self, blocked: Blocked) -> Verdict:
        """Nothing is consumed, and nobody is asked: a block holds while the store is down, too."""
        self._metrics.blocked.labels(blocked.field.value).inc()
        ends_at_ms = blocked.ends_at_ms
        retry_ms = RETRY_WHEN_BLOCKED_MS if ends_at_ms is None else ends_at_ms - self._clock.monotonic_ms()
        answer = _answer(False, None, [])
        return Verdict(msgspec.structs.replace(answer, retry_after_ms=max(1, retry_ms), blocked_by=blocked.field), [])

    # --- with the store ----------------------------------------------------------------------------------------------

    async def _decide_in_store(self, mode: str, demanded: list[Demanded], operation: Operation | None) -> Decision:
        charges = [each.charge for each in demanded]
        decision = await self._ask_store(mode, charges, operation)
        if not decision.replayed:
            self._note(demanded, decision)
        deadline_ms: int | None = None
        while not decision.allowed and (short := self._worth_waiting(demanded, decision)) is not None:
            now_ms = self._clock.monotonic_ms()
            deadline_ms = now_ms + short.wait_ms if deadline_ms is None else deadline_ms
            if now_ms >= deadline_ms:
                break
            self._metrics.waits.inc()
            await self._leasing.wait(short.charge.quota, short.charge.cost, deadline_ms - now_ms)
            decision = await self._ask_store(mode, charges, operation)
        return decision

    async def _ask_store(self, mode: str, charges: Sequence[Charge], operation: Operation | None) -> Decision:
        life = self._life.current
        if life is None:
            raise StoreUnavailable("the region has no epoch yet")
        try:
            return await self._gatherer.decide(life, Request(mode, charges, operation))
        except Fenced:
            self._life.doubt()
            raise

    def _note(self, demanded: list[Demanded], decision: Decision) -> None:
        for each, policy in zip(demanded, decision.policies, strict=True):
            if isinstance(each.charge, AllowanceCharge):
                if policy.reason != DenialReason.COST_ABOVE_LIMIT:  # it could never be granted, so it is no demand
                    self._leasing.note(each.charge.quota, each.charge.cost, policy)
            else:
                self._leasing.note_rate(each.charge.quota, each.charge.cost, each.charge.rate_micro // 1000)

    def _worth_waiting(self, demanded: list[Demanded], decision: Decision) -> Demanded | None:
        """The allowance to wait for. None if there is none, or another policy denies the request anyway."""
        denials = [
            (each, policy) for each, policy in zip(demanded, decision.policies, strict=True) if not policy.allowed
        ]
        if any(policy.reason not in WORTH_WAITING for _, policy in denials):
            return None
        waitable = (each for each, _ in denials if self._leasing.may_wait(each.charge.quota))
        return next(waitable, None)

    def _verdict(self, demanded: list[Demanded], decision: Decision) -> Verdict:
        answers = [self._policy_answer(each, policy) for each, policy in zip(demanded, decision.policies, strict=True)]
        for answer in answers:
            self._metrics.checks.labels(answer.policy, "allowed" if answer.allowed else "denied").inc()
        windows_s = [_window_s(each) for each in demanded]
        return Verdict(_answer(decision.allowed, None, answers), windows_s)

    def _policy_answer(self, each: Demanded, policy: PolicyDecision) -> PolicyAnswer:
        return PolicyAnswer(
            policy=each.policy.spec.name,
            quota=each.policy.quota.name,
            kind=each.policy.quota.kind.value,
            allowed=policy.allowed,
            limit=policy.limit,
            remaining=policy.remaining,
            reset_ms=policy.reset_ms,
            retry_after_ms=self._retry_after_ms(each, policy),
            delay_ms=policy.delay_ms,
        )

    def _retry_after_ms(self, each: Demanded, policy: PolicyDecision) -> int:
        """An allowance that is used up comes back with its period; one that is only elsewhere may come any moment."""
        if policy.allowed or not isinstance(each.charge, AllowanceCharge):
            return policy.retry_after_ms
        final = policy.reason == DenialReason.COST_ABOVE_LIMIT or self._leasing.is_exhausted(each.charge.quota)
        return policy.retry_after_ms if final and policy.retry_after_ms else RETRY_WHEN_DEGRADED_MS

    # --- without the store -------------------------------------------------------------------------------------------

    def _decide_without_store(self, demanded: list[Demanded]) -> Verdict:
        """Each policy's failure mode answers. One that is closed closes the request: all or nothing here, too."""
        answers = [_degraded(each) for each in demanded]
        closed = not all(answer.allowed for answer in answers)
        for each in demanded:
            self._metrics.degraded.labels(each.policy.spec.name, each.policy.spec.on_store_failure.value).inc()
        mode = StoreFailure.CLOSED if closed else StoreFailure.OPEN
        return Verdict(_answer(not closed, mode.value, answers), [_window_s(each) for each in demanded])


def _operation(check: Check, subject: dict[str, str], demanded: list[Demanded]) -> Operation | None:
    """An operation is known within its tenant; the same id for another body is a mistake of the caller's."""
    if check.operation_id is None or check.mode == "peek":
        return None
    long = any(each.policy.quota.kind is QuotaKind.ALLOWANCE for each in demanded)
    body = digest([check.mode, str(check.cost), *(f"{field}={value}" for field, value in sorted(subject.items()))])
    window_ms = ALLOWANCE_WINDOW_MS if long else OTHER_WINDOW_MS
    return Operation(digest([subject.get("tenant", ""), check.operation_id]), body, window_ms)


def _degraded(each: Demanded) -> PolicyAnswer:
    is_open = each.policy.spec.on_store_failure is StoreFailure.OPEN
    charge = each.charge
    return PolicyAnswer(
        policy=each.policy.spec.name,
        quota=each.policy.quota.name,
        kind=each.policy.quota.kind.value,
        allowed=is_open,
        limit=charge.burst if isinstance(charge, RateCharge) else charge.limit,
        remaining=0,
        reset_ms=0,
        retry_after_ms=0 if is_open else RETRY_WHEN_DEGRADED_MS,
    )


def _answer(allowed: bool, degraded: str | None, answers: list[PolicyAnswer]) -> CheckAnswer:
    denials = [answer for answer in answers if not answer.allowed]
    last = max(denials, key=lambda answer: answer.retry_after_ms, default=None)
    return CheckAnswer(
        allowed=allowed,
        degraded=degraded,  # type: ignore[arg-type]  # the modes of StoreFailure
        policies=answers,
        denied_by=None if last is None else last.policy,
        retry_after_ms=0 if last is None else last.retry_after_ms,
    )


def _window_s(each: Demanded) -> int:
    if isinstance(each.charge, RateCharge) and each.charge.window_ms:
        return each.charge.window_ms // 1000
    if isinstance(each.charge, RateCharge) and each.charge.rate_micro:
        return max(1, each.charge.burst * 1_000_000 // each.charge.rate_micro)
    return each.policy.window_s
