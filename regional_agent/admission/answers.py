"""What a check is answered: the answer of each policy, the answer of the check, and a verdict for the HTTP headers."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from protocol.check import CheckAnswer, DenialCause, PolicyAnswer
from protocol.clock import Clock
from protocol.limits.document import AllowanceQuota
from protocol.outcomes import DenialReason
from protocol.periods import calendar_of, period_at
from protocol.units import MAX_UNITS
from regional_agent.admission.policies import CompiledPolicy, PolicyCharge
from regional_agent.admission.rules.denial_causes import RETRY_MS, LeaseOutlook, cause_of, retry_after_ms
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.leasing.quotas import Quotas
from regional_agent.store.types import AllowanceCharge, PolicyDecision, SlotCharge


class Verdict(Struct, frozen=True, gc=False):
    """The answer to a check, and what each policy charged for it."""

    answer: CheckAnswer
    policy_charges: Sequence[PolicyCharge]
    hold: HoldTerms | None = None  # where units were set aside

    def held(self, ttl_ms: int) -> HoldTerms:
        """Return the hold, or a hold of nothing where the work may be done but no units could be set aside."""
        return self.hold or HoldTerms(HoldId.of_nothing(), ttl_ms)


def answer_of(allowed: bool, degraded: str | None, policies: list[PolicyAnswer]) -> CheckAnswer:
    """Return the answer of a check. `denied_by` is the policy that will pass last, or never."""
    if allowed:
        return CheckAnswer(allowed=True, degraded=degraded, policies=policies, denied_by=None, retry_after_ms=0)
    denials = [policy for policy in policies if not (policy.allowed or policy.shadow)]
    last = max(denials, key=_passes_last, default=None)
    return CheckAnswer(
        allowed=allowed,
        degraded=degraded,
        policies=policies,
        denied_by=None if last is None else last.policy,
        retry_after_ms=0 if last is None else last.retry_after_ms,
    )


def unlimited_answer(policy: CompiledPolicy) -> PolicyAnswer:
    """Return the answer of a policy that admits everything."""
    return PolicyAnswer(
        policy=policy.name,
        quota=policy.quota_name,
        kind=policy.kind,
        allowed=True,
        limit=MAX_UNITS,
        share=MAX_UNITS,
        remaining=MAX_UNITS,
        reset_ms=0,
        retry_after_ms=0,
        shadow=policy.is_shadow,
        unlimited=True,
    )


def with_unlimited(answer: CheckAnswer, unlimited: Sequence[CompiledPolicy]) -> CheckAnswer:
    """Add the policies that admit everything to an answer, behind all that were counted."""
    return replace(answer, policies=[*answer.policies, *map(unlimited_answer, unlimited)])


def _passes_last(policy: PolicyAnswer) -> tuple[bool, int]:
    return policy.retry_after_ms is None, policy.retry_after_ms or 0


class PolicyAnswers:
    """Puts a policy's decision by the store into the words of the API."""

    def __init__(self, quotas: Quotas, clock: Clock) -> None:
        self._quotas = quotas
        self._clock = clock

    def answer(self, each: PolicyCharge, decision: PolicyDecision) -> PolicyAnswer:
        if decision.code:
            return self._denial(each, decision)
        policy = each.policy
        return PolicyAnswer(
            policy=policy.name,
            quota=policy.quota_name,
            kind=policy.kind,
            allowed=True,
            limit=each.limit,
            share=_leased(decision) if isinstance(each.charge, AllowanceCharge) else decision.limit,
            remaining=decision.remaining,
            reset_ms=decision.reset_ms,
            retry_after_ms=0,
            delay_ms=decision.delay_ms,
            shadow=policy.is_shadow,
        )

    def _denial(self, each: PolicyCharge, decision: PolicyDecision) -> PolicyAnswer:
        policy, charge = each.policy, each.charge
        is_allowance = isinstance(charge, AllowanceCharge)
        cause = cause_of(decision.reason, self._quotas.outlook(charge.quota) if is_allowance else LeaseOutlook())
        certain_ms, reset_ms = decision.retry_after_ms, decision.reset_ms
        if is_allowance and not reset_ms:  # no lease says when the period ends
            reset_ms = self._period_ends_in_ms(each)
            certain_ms = certain_ms or reset_ms
        if isinstance(charge, SlotCharge):
            certain_ms = min(certain_ms, RETRY_MS)  # mostly a slot is released before it runs out
        return PolicyAnswer(
            policy=policy.name,
            quota=policy.quota_name,
            kind=policy.kind,
            allowed=False,
            limit=each.limit,
            share=_leased(decision) if is_allowance else decision.limit,
            remaining=_remaining_here(decision, cause) if is_allowance else decision.remaining,
            reset_ms=reset_ms,
            retry_after_ms=retry_after_ms(cause, certain_ms),
            reason=cause,
            shadow=policy.is_shadow,
        )

    def _period_ends_in_ms(self, each: PolicyCharge) -> int:
        """Return when the period ends by this machine's calendar: the coordinator has not said it yet."""
        now = self._clock.now()
        assert isinstance(each.policy.quota, AllowanceQuota)
        period = period_at(calendar_of(each.policy.quota, each.began_at), now)
        return max(1, int((period.ends_at - now).total_seconds() * 1000))


def _leased(decision: PolicyDecision) -> int:
    """Return what the region may use now of an allowance, which is what its lease has left."""
    is_spendable = decision.available > 0 and not (decision.code and decision.reason == DenialReason.LEASE_EXPIRED)
    return decision.available if is_spendable else 0


def _remaining_here(decision: PolicyDecision, cause: DenialCause) -> int:
    """Return what a denied allowance has left for smaller costs: units of other regions do not help this one."""
    if cause is DenialCause.NEVER:
        return decision.remaining
    return 0 if decision.reason == DenialReason.LEASE_EXPIRED else max(0, min(decision.remaining, decision.available))
