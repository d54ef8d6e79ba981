"""The plan of a check: everything about it that is known before any store is asked."""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from protocol.check import NO_COSTS, Check, Hold
from protocol.identifiers import digest, operation_digest
from protocol.limits.document import AllowanceQuota
from regional_agent.admission.blocks import Blocked
from regional_agent.admission.policies import (
    CompiledPolicy,
    HoldNeeded,
    Policies,
    PolicyCharge,
    Subject,
    UnmatchedRequest,
)
from regional_agent.admission.rules.ceilings import AboveCeiling, allowance_ceiling, rate_ceiling
from regional_agent.admission.rules.hold_ids import HoldId
from regional_agent.admission.rules.modes import LOOKS, REFUND
from regional_agent.store.types import AllowanceCharge, Operation, RateCharge, SlotCharge, StoreRequest

ALLOWANCE_OPERATION_TTL_MS = 24 * 3600 * 1000
OTHER_OPERATION_TTL_MS = 10 * 60 * 1000


class InvalidField(Exception):
    """A field of the request contradicts the limits document, or another field."""

    def __init__(self, field: str, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field
        self.rule = rule


class CheckPlan(Struct, frozen=True, eq=False, gc=False):
    """A check, and what each policy that it meets takes of which quota."""

    subject: Subject
    policy_charges: list[PolicyCharge]
    request: StoreRequest
    unlimited: tuple[CompiledPolicy, ...] = ()  # policies that admit the request whatever it costs
    blocked: Blocked | None = None  # then the rest is empty
    unmatched: UnmatchedRequest | None = None  # where no enforced policy matches
    hold_ms: int | None = None  # of a hold: how long it lasts
    sibling_holds: tuple[HoldId, ...] = ()  # what is set aside for the same request in other cells
    is_subrequest: bool = False  # one cell's part of a request over several cells, whose answer is not known yet
    parts: tuple[Subject, ...] = ()  # the subjects of several checks in one, whose fields are all in `subject`

    @property
    def is_cacheable(self) -> bool:
        """Return whether the same check has the same plan as long as the policies do not change."""
        return self.blocked is None and self.request.operation is None

    @property
    def demand_already_counted(self) -> bool:
        """Return whether the peek of the same request over several cells has counted its demand."""
        return self.is_subrequest and self.request.mode not in LOOKS


def plan_blocked(check: Check, subject: Subject, blocked: Blocked) -> CheckPlan:
    return CheckPlan(subject, [], StoreRequest(check.mode, ()), blocked=blocked)


def plan_request(
    policies: Policies, check: Check, subject: Subject, adjust_ceiling: int, *, may_lack_fields: bool = False
) -> CheckPlan:
    """Raises InvalidField, UnknownSubjectField, InvalidAddress, InvalidSubjectValue or AboveCeiling."""
    costs = check.costs or NO_COSTS
    if costs:
        refuse_unknown_quotas(policies, costs)
    policy_charges = policies.charges_for(subject, check.cost, costs, may_lack_fields=may_lack_fields)
    if check.mode == "adjust":
        _refuse_above_ceiling(policy_charges, adjust_ceiling, costs)
    elif check.mode == REFUND:
        policy_charges = _refunds(policy_charges, costs if check.cost is None else NO_COSTS)
    request = StoreRequest(
        check.mode, tuple([each.charge for each in policy_charges]), _operation(check, subject, policy_charges)
    )
    unlimited = policies.unlimited_for(subject) if policies.has_unlimited else ()
    for each in policy_charges:
        if not each.is_shadow:
            return CheckPlan(subject, policy_charges, request, unlimited)
    if any(not policy.is_shadow for policy in unlimited):
        return CheckPlan(subject, policy_charges, request, unlimited)
    return CheckPlan(subject, policy_charges, request, unlimited, unmatched=policies.unmatched(subject))


def merge_plans(plans: Sequence[CheckPlan]) -> CheckPlan:
    """Return one plan of several checks of one mode without operations: all of them are admitted, or none is."""
    first, *others = plans
    if not others:
        return first
    charges = [each for plan in plans for each in plan.policy_charges]
    return CheckPlan(
        subject={name: value for plan in reversed(plans) for name, value in plan.subject.items()},
        policy_charges=charges,
        request=StoreRequest(first.request.mode, tuple([each.charge for each in charges])),
        unlimited=tuple(policy for plan in plans for policy in plan.unlimited),
        blocked=next((plan.blocked for plan in plans if plan.blocked is not None), None),
        unmatched=next((plan.unmatched for plan in plans if plan.unmatched is not None), None),
        parts=tuple(plan.subject for plan in plans),
    )


def refuse_unknown_quotas(policies: Policies, costs: Mapping[str, int]) -> None:
    """Raise InvalidField for a quota that the document does not have."""
    for name in costs:
        if name not in policies.quotas:
            raise InvalidField(f"costs.{name}", "known", f"there is no quota {name!r}")


def require_no_slots(plan: CheckPlan, mode: str) -> None:
    """Raise HoldNeeded where a check would take slots, which only a hold can release."""
    for each in plan.policy_charges:
        if isinstance(each.charge, SlotCharge) and mode != "peek" and not each.charge.is_shadow:
            raise HoldNeeded(each.policy.spec.name)


def as_hold(plan: CheckPlan, hold: Hold) -> CheckPlan:
    """Turn the plan of a check into the plan of a hold: allowances set units aside, and the rest costs the same."""
    if hold.units is None and not hold.costs:
        raise InvalidField("units", "required", "give the units to hold, or `costs` by quota")
    policy_charges = [each.for_hold(hold) for each in plan.policy_charges]
    operation = plan.request.operation
    if operation is not None:
        operation = operation._replace(body=digest(["hold", operation.body, str(hold.units), str(hold.ttl_ms)]))
    request = StoreRequest("hold", tuple(each.charge for each in policy_charges), operation)
    return replace(plan, policy_charges=policy_charges, request=request, hold_ms=hold.ttl_ms)


def _refunds(policy_charges: Sequence[PolicyCharge], quotas: Collection[str]) -> list[PolicyCharge]:
    """Return what each rate gets back: those of the named quotas, or all if none is named."""
    refunds = []
    for each in policy_charges:
        if quotas and each.policy.quota_name not in quotas:
            continue
        if isinstance(each.charge, RateCharge):
            refunds.append(replace(each, charge=replace(each.charge, cost=-each.charge.cost)))
        elif not each.is_shadow:
            raise InvalidField("mode", "refundable", _why_not_refundable(each))
    return refunds


def _why_not_refundable(each: PolicyCharge) -> str:
    if isinstance(each.charge, SlotCharge):
        return f"policy {each.policy.name!r} limits concurrency: release its hold instead"
    return (
        f"policy {each.policy.name!r} counts the allowance {each.policy.quota_name!r}, which is billed: give units of "
        "it back with an adjustment (POST /v1/adjustments of the coordinator, `leasehold adjustment propose credit`); "
        "to refund only rates, name them in `costs`"
    )


def _refuse_above_ceiling(policy_charges: Sequence[PolicyCharge], factor: int, costs: Mapping[str, int]) -> None:
    for each in policy_charges:
        charge = each.charge
        if isinstance(charge, AllowanceCharge):
            ceiling = allowance_ceiling(charge.limit, factor)
        elif isinstance(charge, RateCharge):
            ceiling = rate_ceiling(charge.rate_micro, charge.burst, factor)
        else:
            continue
        if charge.cost > ceiling:
            name = each.policy.quota_name
            raise AboveCeiling(f"costs.{name}" if name in costs else "cost", each.policy.name, ceiling)


def _operation(check: Check, subject: Subject, policy_charges: Sequence[PolicyCharge]) -> Operation | None:
    """Return the check's operation. It is known within its tenant; another body under the same id is refused."""
    if check.operation_id is None or check.mode == "peek":
        return None
    has_allowance = any(isinstance(each.policy.quota, AllowanceQuota) for each in policy_charges)
    fields = [f"{field}={value}" for field, value in sorted(subject.items())]
    costs = [f"costs.{quota}={units}" for quota, units in sorted((check.costs or NO_COSTS).items())]
    body = digest([check.mode, str(check.cost), *fields, *costs])
    ttl_ms = ALLOWANCE_OPERATION_TTL_MS if has_allowance else OTHER_OPERATION_TTL_MS
    return Operation(operation_digest(subject.get("tenant", ""), check.operation_id), body, ttl_ms)
