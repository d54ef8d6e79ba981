"""Which keys a reset is for, by the limits document in force."""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.limits.rules.validation import DocumentFault
from protocol.identifiers import quota_key
from protocol.limits.document import AllowanceQuota, LimitsDocument, Quota, RateQuota


class ResetPlan(NamedTuple):
    """The keys to reset, or why there are none."""

    keys: list[str]
    faults: list[DocumentFault]


def plan_reset(document: LimitsDocument, quota: str, subject: Mapping[str, str]) -> ResetPlan:
    spec = next((each for each in document.quotas if each.name == quota), None)
    if spec is None:
        return ResetPlan([], [DocumentFault("quota", "known", f"There is no quota {quota!r}.")])
    if not isinstance(spec, RateQuota):
        return ResetPlan([], [DocumentFault("quota", "resettable", _why_not_resettable(spec))])
    ways = [policy.by for policy in document.policies if policy.quota == quota]
    # A key has its fields in the order of the policy that counts by it.
    keys = dict.fromkeys(
        quota_key(quota, [(field, subject[field]) for field in by]) for by in ways if set(by) == subject.keys()
    )
    if keys:
        return ResetPlan(list(keys), [])
    counted = "; or ".join(dict.fromkeys(", ".join(by) or "nothing" for by in ways)) or "no policy"
    reason = f"{quota!r} is counted by {counted}. Give a value for each of these fields, and no other."
    return ResetPlan([], [DocumentFault("subject", "counted", reason)])


def _why_not_resettable(spec: Quota) -> str:
    if isinstance(spec, AllowanceQuota):
        return (
            f"{spec.name!r} is an allowance, which is billed, so its usage cannot be forgotten. Give units back with "
            "an adjustment (`POST /v1/adjustments`), or raise the limit with an override."
        )
    return f"{spec.name!r} limits concurrency: its slots come back when their holds are released, or after `slot_ttl`."
