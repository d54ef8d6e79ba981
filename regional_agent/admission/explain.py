"""Explain a check: which policies match it, which do not, and why. Nothing is consumed, and no store is asked."""

from msgspec.structs import asdict

from protocol.check import BlockField, Check
from protocol.limits.explain import RequestExplanation
from protocol.limits.subjects import fields_of
from regional_agent.admission.engine import Admission, NoPoliciesYet


class ExplainAnswer(RequestExplanation, frozen=True, kw_only=True):
    """For each policy of the document, in its order: does it match, and if not, which conditions are not met."""

    policy_version: int
    blocked_by: BlockField | None  # the field of the block that denies the request, before any policy


def explain_check(admission: Admission, check: Check, now_ms: int) -> ExplainAnswer:
    """Raises NoPoliciesYet."""
    policies, blocks, subject = admission.policies, admission.blocks, fields_of(check.subject)
    if policies is None:
        raise NoPoliciesYet
    blocked = blocks.find(subject, now_ms) if blocks else None
    return ExplainAnswer(
        **asdict(policies.explain(subject)),
        policy_version=policies.version,
        blocked_by=None if blocked is None else blocked.field,
    )
