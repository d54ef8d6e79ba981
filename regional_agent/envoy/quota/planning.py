"""Plan a quota bucket: the rates that limit its requests, or one rule for all of them.

A report may be lost with its stream, so what a proxy admits cannot be counted to the unit. That is enough for a rate,
whose bound says so, and for nothing that is billed or given back.
"""

from typing import NamedTuple

from protocol.check import Check, Unmatched
from protocol.limits.descriptors import UnreadableDescriptor
from protocol.limits.document import QuotaKind
from protocol.limits.rates import SLICED
from regional_agent.admission.engine import Admission, NoPoliciesYet
from regional_agent.admission.policies import PolicyCharge
from regional_agent.envoy.quota.messages import Blanket, BucketId
from regional_agent.http.refusals import REFUSALS, problem_of
from regional_agent.store.types import RateCharge

USE_RLS = "Limit these requests with the rate limit service (RLS), which asks for each of them"


class RateOfBucket(NamedTuple):
    """A rate that a bucket's requests count against."""

    policy_charge: PolicyCharge
    charge: RateCharge
    cost: int  # units of a request


class BucketPlan(NamedTuple):
    """The limits of a bucket. Without rates, all of its requests are admitted or denied, for the reason."""

    rates: tuple[RateOfBucket, ...] = ()
    blanket: Blanket = Blanket.ALLOW_ALL
    reason: str = ""
    is_refused: bool = False  # the document limits the bucket by something that a proxy cannot have a part of


def plan_bucket(admission: Admission, domain: str, bucket: BucketId) -> BucketPlan:
    """Raises NoPoliciesYet."""
    if admission.policies is None:
        raise NoPoliciesYet
    try:
        subject = admission.policies.descriptors.subject(domain, bucket)
        plan = admission.plan_check(Check(subject=subject, mode="peek"), may_lack_fields=True)
    except UnreadableDescriptor as refusal:
        return _refused(f"the bucket {refusal}")
    except NoPoliciesYet:
        raise
    except REFUSALS as refusal:
        return _refused(str(problem_of(refusal).detail))
    if plan.blocked is not None:
        return BucketPlan(blanket=Blanket.DENY_ALL, reason="blocked")
    enforced = [each for each in plan.policy_charges if not each.is_shadow]
    for each in enforced:
        if reason := _obstacle(each):
            return _refused(f"policy {each.policy.name!r}: {reason}")
    if not enforced:
        is_denied = plan.unmatched is not None and plan.unmatched.answer is Unmatched.DENY
        return BucketPlan(
            blanket=Blanket.DENY_ALL if is_denied else Blanket.ALLOW_ALL,
            reason="unlimited" if plan.unmatched is None else "no policy matches it",
        )
    return _limited(enforced)


def _refused(reason: str) -> BucketPlan:
    return BucketPlan(blanket=Blanket.DENY_ALL, reason=reason, is_refused=True)


def _obstacle(each: PolicyCharge) -> str:
    """Return why no part of what a policy charges can be assigned; nothing if it can."""
    charge = each.charge
    if not isinstance(charge, RateCharge):
        if each.policy.kind == QuotaKind.ALLOWANCE.value:
            return f"an allowance is counted exactly, and a report of a proxy may be lost. {USE_RLS}"
        return "slots are given back when work ends, which proxies do not report. Take them with holds of a service"
    if charge.algorithm not in SLICED:
        return f"a rate that is counted by {charge.algorithm} has no parts: use token_bucket or gcra. {USE_RLS}"
    if isinstance(charge.rate_micro, float):
        return f"a rate of less than 0.9 an hour is too slow to divide. {USE_RLS}"
    return ""


def _limited(enforced: list[PolicyCharge]) -> BucketPlan:
    rates: dict[str, RateOfBucket] = {}
    for each in enforced:
        charge = each.charge
        assert isinstance(charge, RateCharge)
        before = rates.get(charge.quota)
        rates[charge.quota] = RateOfBucket(each, charge, charge.cost + (before.cost if before else 0))
    if any(rate.charge.burst < rate.cost for rate in rates.values()):
        return BucketPlan(blanket=Blanket.DENY_ALL, reason="a request costs more than the limit ever has")
    return BucketPlan(tuple(rates.values()))
