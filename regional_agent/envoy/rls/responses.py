"""Write the response to a request of Envoy from the verdicts on its stages."""

import random
from collections.abc import Sequence

import msgspec

from protocol.check import CheckAnswer, PolicyAnswer, cause_of_denial
from protocol.denials import denial_of
from protocol.problems import MEDIA_TYPE
from regional_agent.admission.answers import Verdict
from regional_agent.admission.policies import Window
from regional_agent.envoy.rls import messages
from regional_agent.envoy.rls.planning import RequestPlan
from regional_agent.http.schemas import headers_of, retry_after_header
from web.request_ids import new_request_id

SHOULD_RATE_LIMIT = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
BLOCKED, UNMATCHED = "blocked", "unmatched"  # reasons, beside those of policies
MOST_KNOWN = 1_000

Figures = tuple[PolicyAnswer, Window]

_OK = messages.encode_code(messages.OK)
_OVER_LIMIT = messages.encode_code(messages.OVER_LIMIT)
_encode = msgspec.json.Encoder().encode
_limits: dict[tuple[str, int, int], bytes] = {}


def encode_response(plan: RequestPlan, verdicts: Sequence[Verdict]) -> bytes:
    """Return the response to a request whose stages were decided so far; only the last may be a denial."""
    last = verdicts[-1]
    answer = last.answer
    parts = [_OK if answer.allowed else _OVER_LIMIT, *_statuses(plan, verdicts)]
    if plan.rules.response_headers:
        parts.append(messages.encode_headers(_headers(plan, verdicts[0] if answer.allowed else last)))
    if not answer.allowed and plan.rules.response_body:
        parts.append(messages.encode_body(_encode(denial_of(answer, SHOULD_RATE_LIMIT, new_request_id()))))
    if not answer.allowed or answer.degraded or answer.unmatched or _has_shadow_denial(answer):
        parts.append(messages.encode_metadata(_metadata(answer)))
    return b"".join(parts)


def _headers(plan: RequestPlan, verdict: Verdict) -> dict[str, str]:
    headers, answer = headers_of(verdict), verdict.answer
    if not answer.allowed:
        headers |= retry_after_header(answer.retry_after_ms, random.random())  # noqa: S311  (it spreads a herd, no more)
        if plan.rules.response_body:
            headers["Content-Type"] = MEDIA_TYPE
    return headers


def _statuses(plan: RequestPlan, verdicts: Sequence[Verdict]) -> list[bytes]:
    """Return a status for each descriptor: the figures of its tightest policy, which denies if any does."""
    tightest: list[Figures | None] = [None] * plan.descriptors
    for verdict in verdicts:
        # Policies without a limit charge nothing. They are behind all others.
        for each, policy in zip(verdict.policy_charges, verdict.answer.policies, strict=False):
            place = plan.places[id(each)]
            if _has_figures(policy) and _is_tighter(policy, tightest[place]):
                tightest[place] = policy, each.window
    statuses = [_status(each) for each in tightest]
    answer = verdicts[-1].answer
    if answer.allowed:
        return statuses
    over = messages.encode_status(messages.OVER_LIMIT)
    if answer.blocked_by is not None:
        return [over] * plan.descriptors
    if answer.denied_by is None:
        for place in plan.unmatched_places:
            statuses[place] = over
    return statuses


def _has_figures(policy: PolicyAnswer) -> bool:
    return not policy.shadow and not (policy.allowed and policy.degraded == "open")


def _is_tighter(policy: PolicyAnswer, than: Figures | None) -> bool:
    return than is None or (policy.allowed, policy.remaining) < (than[0].allowed, than[0].remaining)


def _status(figures: Figures | None) -> bytes:
    if figures is None:
        return messages.encode_status(messages.OK)
    policy, window = figures
    limit = policy.policy, policy.limit, window.seconds
    known = _limits.get(limit)
    if known is None:
        if len(_limits) >= MOST_KNOWN:
            _limits.clear()
        known = _limits[limit] = messages.encode_limit(*limit)
    code = messages.OK if policy.allowed else messages.OVER_LIMIT
    return messages.encode_status(code, known, policy.remaining, policy.reset_ms)


def _has_shadow_denial(answer: CheckAnswer) -> bool:
    return any(each.shadow and not each.allowed for each in answer.policies)


def _metadata(answer: CheckAnswer) -> dict[str, str | int | bool]:
    """Return what access logs and other filters may read of the decision, as dynamic metadata."""
    denying = next((each for each in answer.policies if each.policy == answer.denied_by), None)
    shadow = next((each for each in answer.policies if each.shadow and not each.allowed), None)
    found: dict[str, str | int | bool | None] = {
        "allowed": answer.allowed,
        "policy": answer.denied_by,
        "quota": None if denying is None else denying.quota,
        "reason": None if answer.allowed else _reason(answer),
        "retry_after_ms": answer.retry_after_ms or None,
        "degraded": answer.degraded,
        "unmatched": answer.unmatched,
        "shadow_denied_by": None if shadow is None else shadow.policy,
    }
    return {name: value for name, value in found.items() if value is not None}


def _reason(answer: CheckAnswer) -> str:
    if answer.blocked_by is not None:
        return BLOCKED
    return cause_of_denial(answer) or UNMATCHED
