"""What services ask and what they are told: the shapes of contracts.md, and the headers that say the same."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from protocol.blocks import BlockField
from protocol.units import PositiveUnits

MAX_BATCH = 1000

SubjectValue = Annotated[str, Meta(min_length=1, max_length=256)]
OperationId = Annotated[str, Meta(min_length=1, max_length=128)]
Mode = Literal["enforce", "peek", "adjust"]


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


class CheckBatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checks: Annotated[list[Check], Meta(min_length=1, max_length=MAX_BATCH)]


class PolicyAnswer(Struct, frozen=True, kw_only=True):
    policy: str
    quota: str
    kind: str
    allowed: bool
    limit: int
    remaining: int
    reset_ms: int
    retry_after_ms: int
    delay_ms: int = 0  # of a leaky bucket: how long to wait before the work is begun


class CheckAnswer(Struct, frozen=True, kw_only=True):
    allowed: bool
    degraded: Literal["open", "closed", "local"] | None
    policies: list[PolicyAnswer]
    denied_by: str | None
    retry_after_ms: int
    blocked_by: BlockField | None = None  # the field of the block that denies the request, before any policy


class BatchItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a check alone would have been answered: its status, and its answer or the problem instead of one."""

    status: int
    answer: CheckAnswer | None = None
    problem: dict[str, Any] | None = None


class BatchAnswer(Struct, frozen=True, kw_only=True):
    """One item for each check, in order."""

    items: list[BatchItem]


def headers_of(policies: Sequence[PolicyAnswer], windows_s: Sequence[int]) -> dict[str, str]:
    """RateLimit by the current draft for every policy, and the X- set for the tightest."""
    if not policies:
        return {}
    tightest = min(policies, key=lambda each: (each.allowed, each.remaining))
    return {
        "RateLimit-Policy": ", ".join(
            f'"{each.policy}";q={each.limit};w={window}' for each, window in zip(policies, windows_s, strict=True)
        ),
        "RateLimit": ", ".join(f'"{each.policy}";r={each.remaining};t={_seconds(each.reset_ms)}' for each in policies),
        "X-RateLimit-Limit": str(tightest.limit),
        "X-RateLimit-Remaining": str(tightest.remaining),
        "X-RateLimit-Reset": str(_seconds(tightest.reset_ms)),
    }


def retry_after_header(retry_after_ms: int, jitter: float) -> Mapping[str, str]:
    """Whole seconds, never earlier than the exact time, and up to a tenth (at most a minute) later: no herd returns."""
    spread_ms = min(retry_after_ms / 10 + 1000, 60_000)
    return {"Retry-After": str(_seconds(retry_after_ms + jitter * spread_ms))}


def _seconds(milliseconds: float) -> int:
    return math.ceil(milliseconds / 1000)
