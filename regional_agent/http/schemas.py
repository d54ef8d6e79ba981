"""HTTP answers to checks and holds: status, headers and body.

The fast path and the framework's routes both use `check_response`, so their answers cannot differ.
"""

import random
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from protocol.check import MAX_BATCH, Hold, HoldAnswer, PolicyAnswer
from protocol.denials import denial_of
from protocol.problems import MEDIA_TYPE
from regional_agent.admission.answers import Verdict
from regional_agent.admission.policies import MAX_HEADER_INTEGER, Window
from regional_agent.admission.rules.hold_ids import HoldSeal


class BatchItems(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CheckBatch whose checks are not decoded yet, for each is accepted or refused by itself."""

    checks: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_BATCH)]


class HttpAnswer(NamedTuple):
    status: int
    media_type: str
    headers: Mapping[str, str]
    body: bytes


_encode = msgspec.json.Encoder().encode


def hold_response(verdict: Verdict, hold: Hold, path: str, request_id: str, seal: HoldSeal) -> HttpAnswer:
    """Return the answer to a hold; a denial is answered as for a check."""
    answer = verdict.answer
    if not answer.allowed:
        return check_response(verdict, path, request_id)
    held = verdict.held(hold.ttl_ms)
    body = HoldAnswer(
        hold_id=seal.seal(held.id),
        units=hold.units or 0,
        expires_in_ms=held.ttl_ms,
        degraded=answer.degraded,
        policies=answer.policies,
    )
    return HttpAnswer(201, "application/json", headers_of(verdict), _encode(body))


def check_response(verdict: Verdict, path: str, request_id: str) -> HttpAnswer:
    answer, headers = verdict.answer, headers_of(verdict)
    if answer.allowed:
        return HttpAnswer(200, "application/json", headers, _encode(answer))
    headers |= retry_after_header(answer.retry_after_ms, random.random())  # noqa: S311  (it spreads a herd, no more)
    denial = denial_of(answer, path, request_id)
    return HttpAnswer(denial.status, MEDIA_TYPE, headers, _encode(denial))


def headers_of(verdict: Verdict) -> dict[str, str]:
    """Return RateLimit headers (draft -11) for all enforced policies, and X-RateLimit headers for the tightest one.

    A policy that admitted the request without counting it (`open`, or unlimited) has no figures, so it has no headers.
    Retry-After is not among them.
    """
    answer, quotas, left, tightest = verdict.answer, [], [], None
    for each, charge in zip(answer.policies, verdict.policy_charges, strict=False):  # those without a limit come last
        if each.shadow or (each.allowed and each.degraded == "open"):
            continue
        window = charge.window
        remaining = each.remaining if each.remaining < MAX_HEADER_INTEGER else MAX_HEADER_INTEGER
        quotas.append(f'"{each.policy}"{window.parameters}')
        left.append(f'"{each.policy}";r={remaining}{_time_parameter(each, window)}')
        if tightest is None or (each.allowed, each.remaining) < (tightest.allowed, tightest.remaining):
            tightest = each
    headers = {}
    if tightest is not None:
        headers["RateLimit-Policy"] = ", ".join(quotas)
        headers["RateLimit"] = ", ".join(left)
        headers["X-RateLimit-Limit"] = str(tightest.limit)
        headers["X-RateLimit-Remaining"] = str(tightest.remaining)
        headers["X-RateLimit-Reset"] = str(-(-tightest.reset_ms // 1000))
    if answer.unmatched is not None:
        headers["Leasehold-Unmatched"] = answer.unmatched
    return headers


def _time_parameter(answer: PolicyAnswer, window: Window) -> str:
    """Return `t`, the time until more quota is available, where it is known. Retry-After is never earlier."""
    until_ms = answer.reset_ms if answer.allowed else answer.retry_after_ms
    if until_ms is None or (answer.allowed and answer.kind == "concurrency"):
        return ""  # the holder of a slot decides when it is released
    if answer.allowed and window.refills and answer.share - answer.remaining > 1:
        until_ms = -(-until_ms // (answer.share - answer.remaining))
    return f";t={-(-until_ms // 1000)}"


def retry_after_header(retry_after_ms: int | None, jitter: float) -> Mapping[str, str]:
    """Return Retry-After in whole seconds: up to a tenth (at most a minute) later than exact, against thundering herds.

    A request that can never pass has no such header.
    """
    if retry_after_ms is None:
        return {}
    jitter_ms = min(retry_after_ms // 10 + 1000, 60_000)
    return {"Retry-After": str(_seconds(retry_after_ms + int(jitter * jitter_ms)))}


def _seconds(milliseconds: int) -> int:
    """Round up to seconds: never too early."""
    return -(-milliseconds // 1000)
