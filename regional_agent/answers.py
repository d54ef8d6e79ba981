"""What services ask and what they are told: the shapes of contracts.md, and the headers that say the same.

Whichever door a check came through, `answered` makes its answer: so the doors cannot differ.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from doors.problems import MEDIA_TYPE, PROBLEMS
from protocol.blocks import BlockField
from protocol.units import PositiveUnits, Units
from regional_agent.domain.denial_causes import DenialCause
from regional_agent.domain.hold_ids import HoldId, HoldSeal, HoldTerms

MAX_BATCH = 1000
MOST_HOLD_MS = 24 * 3600 * 1000

SubjectValue = Annotated[str, Meta(min_length=1, max_length=256)]
HoldMilliseconds = Annotated[int, Meta(ge=1, le=MOST_HOLD_MS, description="a duration in milliseconds")]
OperationId = Annotated[str, Meta(min_length=1, max_length=128)]
Mode = Literal["enforce", "peek", "adjust"]
FailureMode = Literal["open", "closed", "local"]


class Subject(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who asks, and for what. Policies choose which of these they count by."""

    tenant: SubjectValue | None = None
    user: SubjectValue | None = None
    api_key: SubjectValue | None = None
    ip: SubjectValue | None = None
    route: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    method: Annotated[str, Meta(min_length=1, max_length=16)] | None = None


class Check(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    subject: Subject
    cost: PositiveUnits | None = None
    operation_id: OperationId | None = None
    mode: Mode = "enforce"


class Hold(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Units to set aside of every allowance that the subject meets; of a rate each policy's own cost is spent."""

    subject: Subject
    units: PositiveUnits
    ttl_ms: HoldMilliseconds
    operation_id: OperationId


class HoldCommit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    units: Units


class HoldExtension(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttl_ms: HoldMilliseconds


class HoldRelease(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class HoldStatus(Struct, frozen=True, kw_only=True):
    """A hold as it is now. `lapsed` and `charged`: it ran out, and its policy says which. `nothing_held`: nothing
    limits what it is for, or it was granted without the store."""

    hold_id: str
    state: Literal["open", "committed", "released", "lapsed", "charged", "nothing_held"]
    units: int
    committed: int
    expires_in_ms: int


class CheckBatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checks: Annotated[list[Check], Meta(min_length=1, max_length=MAX_BATCH)]


class CheckPieces(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CheckBatch whose checks are not decoded yet: each is accepted or refused by itself."""

    checks: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_BATCH)]


class PolicyAnswer(Struct, frozen=True, kw_only=True, gc=False):
    policy: str
    quota: str
    kind: str
    allowed: bool
    limit: int
    remaining: int
    reset_ms: int
    retry_after_ms: int | None  # the first moment at which it may pass; null where it never can
    reason: DenialCause | None = None  # why it is denied
    degraded: FailureMode | None = None  # the failure mode that answered in place of the store
    delay_ms: int = 0  # of a leaky bucket: how long to wait before the work is begun
    shadow: bool = False  # what it says is counted, and stops nobody


class CheckAnswer(Struct, frozen=True, kw_only=True, gc=False):
    allowed: bool
    degraded: FailureMode | None
    policies: list[PolicyAnswer]
    denied_by: str | None
    retry_after_ms: int | None
    blocked_by: BlockField | None = None  # the field of the block that denies the request, before any policy


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


class BatchItem(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a check alone would have been answered: its status, and its answer or the problem instead of one."""

    status: int
    answer: CheckAnswer | None = None
    problem: dict[str, Any] | None = None


class BatchAnswer(Struct, frozen=True, kw_only=True):
    """One item for each check, in order."""

    items: list[BatchItem]


class HoldAnswer(Struct, frozen=True, kw_only=True):
    hold_id: str
    units: int
    expires_in_ms: int
    degraded: FailureMode | None
    policies: list[PolicyAnswer]


class Denial(CheckAnswer, frozen=True, kw_only=True):
    """A problem document (RFC 9457) that has the answer's fields, too. Its type leads to an explanation."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str


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
_SAYS: Mapping[DenialCause | None, str] = {
    DenialCause.LIMIT: "its limit is used up",
    DenialCause.NO_LEASE: "this region holds no units of it now, and has asked the coordinator for some",
    DenialCause.EXPIRED: "this region's lease has expired and is being renewed",
    DenialCause.CUT_OFF: "this region is cut off from the coordinator, and its lease is spent or expired",
    DenialCause.DRAINED: "this region is drained: send the request to another one",
    DenialCause.NEVER: "its cost is above what the limit ever allows at once",
    DenialCause.STORE: "the region's store cannot be asked, and what may pass without it is used up",
}


def cause_of_denial(answer: CheckAnswer) -> DenialCause | None:
    """Return the reason of the policy that denies."""
    return next((each.reason for each in answer.policies if each.policy == answer.denied_by and each.reason), None)


def _detail_of_denial(answer: CheckAnswer) -> str:
    if answer.blocked_by is not None:
        return f"a block on its {answer.blocked_by} denies this request, whatever its quotas"
    cause = cause_of_denial(answer)
    if answer.degraded == "closed":
        whom = (
            "the coordinator, which decides each request of it,"
            if cause is DenialCause.CUT_OFF
            else "the region's store"
        )
        return f"policy {answer.denied_by!r} fails closed, and {whom} cannot be asked"
    when = "" if answer.retry_after_ms is None else f"; ask again in {_seconds(answer.retry_after_ms)} s"
    return f"policy {answer.denied_by!r} denies this request: {_SAYS.get(cause, _SAYS[DenialCause.LIMIT])}{when}"


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
