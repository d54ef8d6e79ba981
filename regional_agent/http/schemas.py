"""What services ask and what they are told: the shapes of contracts.md, and the headers that say the same.

Whichever door a check came through, `answered` makes its answer: so the web cannot differ.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from protocol.check import MAX_BATCH, CheckAnswer, Hold, HoldAnswer, PolicyAnswer
from protocol.denials import denial_of
from protocol.problems import MEDIA_TYPE
from regional_agent.admission.rules.hold_ids import HoldId, HoldSeal, HoldTerms


class CheckPieces(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CheckBatch whose checks are not decoded yet: each is accepted or refused by itself."""

    checks: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_BATCH)]


def answer_of(allowed: bool, degraded: str | None, policies: list[PolicyAnswer]) -> CheckAnswer:
    """Denied by the policy that may pass last, or never."""
    if allowed:
        return CheckAnswer(allowed=True, degraded=degraded, policies=policies, denied_by=None, retry_after_ms=0)  # type: ignore[arg-type]
    denials = [policy for policy in policies if not (policy.allowed or policy.shadow)]
    last = max(denials, key=_passes_last, default=None)
    return CheckAnswer(
        allowed=allowed,
        degraded=degraded,  # type: ignore[arg-type]  # the modes of StoreFailure
        policies=policies,
        denied_by=None if last is None else last.policy,
        retry_after_ms=0 if last is None else last.retry_after_ms,
    )


def _passes_last(policy: PolicyAnswer) -> tuple[bool, int]:
    return policy.retry_after_ms is None, policy.retry_after_ms or 0


class Window(NamedTuple):
    """What the headers say of a policy's time."""

    seconds: int
    refills: bool = False  # its units come back one by one, and not all at once


class Verdict(Struct, frozen=True, gc=False):
    """The answer, and the window of each of its policies for the headers."""

    answer: CheckAnswer
    windows: Sequence[Window]
    hold: HoldTerms | None = None  # where units were set aside

    def held(self, ttl_ms: int) -> HoldTerms:
        """Where nothing could be set aside, and the work may be done, the id says so."""
        return self.hold or HoldTerms(HoldId.of_nothing(), ttl_ms)


class Answered(NamedTuple):
    status: int
    media_type: str
    headers: Mapping[str, str]
    body: bytes


_encode = msgspec.json.Encoder().encode


def hold_answered(verdict: Verdict, hold: Hold, path: str, request_id: str, seal: HoldSeal) -> Answered:
    """A denial is that of a check."""
    answer = verdict.answer
    if not answer.allowed:
        return answered(verdict, path, request_id)
    held = verdict.held(hold.ttl_ms)
    told = HoldAnswer(
        hold_id=seal.seal(held.id),
        units=hold.units,
        expires_in_ms=held.ttl_ms,
        degraded=answer.degraded,
        policies=answer.policies,
    )
    return Answered(201, "application/json", headers_of(answer.policies, verdict.windows), _encode(told))


def answered(verdict: Verdict, path: str, request_id: str) -> Answered:
    answer = verdict.answer
    headers = headers_of(answer.policies, verdict.windows)
    if answer.allowed:
        return Answered(200, "application/json", headers, _encode(answer))
    headers |= retry_after_header(answer.retry_after_ms, random.random())  # noqa: S311  (it spreads a herd, no more)
    denial = denial_of(answer, path, request_id)
    return Answered(denial.status, MEDIA_TYPE, headers, _encode(denial))


# Structured fields (RFC 9651) know no larger integers.
MOST_IN_A_HEADER = 999_999_999_999_999


def headers_of(policies: Sequence[PolicyAnswer], windows: Sequence[Window]) -> dict[str, str]:
    """RateLimit by the current draft (-11) for every policy that is enforced, and the X- set for the tightest.

    A policy that let the request pass without counting it (`open`) has no figures to tell.
    """
    pairs = zip(policies, windows, strict=True)
    enforced = [pair for pair in pairs if not pair[0].shadow and not (pair[0].allowed and pair[0].degraded == "open")]
    if not enforced:
        return {}
    quotas = [
        f'"{each.policy}";q={min(each.limit, MOST_IN_A_HEADER)}{_window(each.kind, window.seconds)}'
        for each, window in enforced
    ]
    left = [
        f'"{each.policy}";r={min(each.remaining, MOST_IN_A_HEADER)}{_more(each, window)}' for each, window in enforced
    ]
    tightest, _ = enforced[0] if len(enforced) == 1 else min(enforced, key=_room)
    return {
        "RateLimit-Policy": ", ".join(quotas),
        "RateLimit": ", ".join(left),
        "X-RateLimit-Limit": str(tightest.limit),
        "X-RateLimit-Remaining": str(tightest.remaining),
        "X-RateLimit-Reset": str(_seconds(tightest.reset_ms)),
    }


def _more(answer: PolicyAnswer, window: Window) -> str:
    """Return `t`, the time until more quota is there, where that is known. Retry-After is never earlier."""
    if not answer.allowed:
        return "" if answer.retry_after_ms is None else f";t={_seconds(answer.retry_after_ms)}"
    if answer.kind == "concurrency":
        return ""  # a slot comes back when its holder says so
    missing = answer.limit - answer.remaining
    if window.refills and missing > 1:
        return f";t={_seconds(-(-answer.reset_ms // missing))}"
    return f";t={_seconds(answer.reset_ms)}"


def _room(pair: tuple[PolicyAnswer, Window]) -> tuple[bool, int]:
    return pair[0].allowed, pair[0].remaining


def _window(kind: str, window_s: int) -> str:
    """What is limited at once, and not in a time, has no window; and none may be zero."""
    if kind == "concurrency":
        return ';qu="concurrent-requests"'
    return f";w={window_s}" if window_s else ""


def retry_after_header(retry_after_ms: int | None, jitter: float) -> Mapping[str, str]:
    """Whole seconds, never earlier than the exact time, and up to a tenth (at most a minute) later: no herd returns.

    A request that can never pass has no such header.
    """
    if retry_after_ms is None:
        return {}
    spread_ms = min(retry_after_ms // 10 + 1000, 60_000)
    return {"Retry-After": str(_seconds(retry_after_ms + int(jitter * spread_ms)))}


def _seconds(milliseconds: int) -> int:
    """Rounded up: never too early."""
    return -(-milliseconds // 1000)
