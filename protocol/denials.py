"""A denied check as a problem document, worded alike by agents and middleware."""

from collections.abc import Mapping

from protocol.check import CheckAnswer, Denial, DenialCause, PolicyAnswer, cause_of_denial, denying_policy
from protocol.problems import PROBLEMS


def denial_of(answer: CheckAnswer, path: str, request_id: str) -> Denial:
    slug = _slug_of_denial(answer)
    kind = PROBLEMS[slug]
    return Denial(
        allowed=False,
        degraded=answer.degraded,
        policies=answer.policies,
        denied_by=answer.denied_by,
        retry_after_ms=answer.retry_after_ms,
        blocked_by=answer.blocked_by,
        unmatched=answer.unmatched,
        type=f"/problems/{slug}",
        title=kind.title,
        status=kind.status,
        detail=_detail_of_denial(answer),
        instance=path,
        request_id=request_id,
    )


def status_of_answer(answer: CheckAnswer) -> int:
    return 200 if answer.allowed else PROBLEMS[_slug_of_denial(answer)].status


def _slug_of_denial(answer: CheckAnswer) -> str:
    if answer.blocked_by is not None:
        return "blocked"
    if answer.unmatched is not None:
        return "unmatched"
    cause = cause_of_denial(answer)
    if answer.degraded == "closed":
        return "coordinator-unavailable" if cause is DenialCause.CUT_OFF else "store-unavailable"
    return _SLUGS.get(cause, "quota-exceeded")


_SLUGS: Mapping[DenialCause | None, str] = {
    DenialCause.NO_LEASE: "no-lease",
    DenialCause.EXPIRED: "no-lease",
    DenialCause.CUT_OFF: "cut-off",
    DenialCause.DRAINED: "region-drained",
    DenialCause.NEVER: "cost-above-limit",
}
_REASONS: Mapping[DenialCause | None, str] = {
    DenialCause.LIMIT: "its limit is used up",
    DenialCause.NO_LEASE: "this region holds no units of it now, and has asked the coordinator for some",
    DenialCause.EXPIRED: "this region's lease has expired and is being renewed",
    DenialCause.CUT_OFF: "this region is cut off from the coordinator, and its lease is spent or expired",
    DenialCause.DRAINED: "this region is drained: send the request to another one",
    DenialCause.NEVER: "its cost is above what the limit ever allows at once",
    DenialCause.STORE: "the region's store does not answer, and what may pass without it is used up",
}


def _detail_of_denial(answer: CheckAnswer) -> str:
    if answer.blocked_by is not None:
        return f"a block on its {answer.blocked_by} denies this request, whatever its quotas"
    if answer.unmatched is not None:
        return "no policy matches this request, and the limits document denies such requests (unmatched: deny)"
    cause = cause_of_denial(answer)
    if answer.degraded == "closed":
        server = (
            "the coordinator, which decides each request of it,"
            if cause is DenialCause.CUT_OFF
            else "the region's store"
        )
        return f"policy {answer.denied_by!r} fails closed, and {server} does not answer"
    when = "" if answer.retry_after_ms is None else f"; try again in {-(-answer.retry_after_ms // 1000)} s"
    return f"policy {answer.denied_by!r} denies this request: {_reason_of(denying_policy(answer))}{when}"


def _reason_of(policy: PolicyAnswer | None) -> str:
    """Return why a policy denies, with the units if smaller costs are or would be allowed."""
    cause = DenialCause.LIMIT if policy is None or policy.reason not in _REASONS else policy.reason
    if policy is not None and cause is DenialCause.LIMIT and policy.remaining:
        return f"its cost is above the {policy.remaining} of {policy.limit} that are left here"
    if policy is not None and cause is DenialCause.NEVER and policy.kind != "allowance" and policy.share < policy.limit:
        return f"its cost is above the {policy.share} of {policy.limit} that this region ever allows at once"
    return _REASONS[cause]
