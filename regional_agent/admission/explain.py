"""Explain a check: which policies match it, which do not, and why. Nothing is consumed, and no store is asked."""

from msgspec.structs import asdict

from protocol.check import NO_COSTS, Check, ExplainAnswer
from protocol.limits.subjects import fields_of
from regional_agent.admission.engine import Admission, NoPoliciesYet
from regional_agent.admission.plan import refuse_unknown_quotas


def explain_check(admission: Admission, check: Check, now_ms: int) -> ExplainAnswer:
    """Raises NoPoliciesYet or InvalidField."""
    policies, blocks, subject = admission.policies, admission.blocks, fields_of(check.subject)
    if policies is None:
        raise NoPoliciesYet
    costs = check.costs or NO_COSTS
    refuse_unknown_quotas(policies, costs)
    blocked = blocks.find(subject, now_ms) if blocks else None
    return ExplainAnswer(
        **asdict(policies.explain(subject, check.cost, costs)),
        policy_version=policies.version,
        blocked_by=None if blocked is None else blocked.field,
    )
