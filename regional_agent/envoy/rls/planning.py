"""Plan a request of Envoy: each descriptor is a check of its own, and all of them are admitted, or none is."""

from collections.abc import Iterable

from msgspec.structs import asdict, replace

from protocol.check import MAX_VALUE_LENGTH, Check, Mode, Subject
from protocol.limits.descriptors import UnreadableDescriptor, shorten
from protocol.limits.document import EnvoyDomain, LimitOverrides
from protocol.limits.subjects import InvalidSubjectValue
from protocol.units import MAX_UNITS
from regional_agent.admission.engine import Admission, NoPoliciesYet
from regional_agent.admission.plan import CheckPlan, merge_plans
from regional_agent.admission.policies import HoldNeeded, Policies
from regional_agent.envoy.door.methods import GrpcError, Status
from regional_agent.envoy.rls.messages import OVERRIDE_UNITS, Descriptor, Override, RateLimitRequest
from regional_agent.http.refusals import REFUSALS, problem_of
from regional_agent.store.types import StoreRequest

MAX_DESCRIPTORS = 64
SHORT_VALUE = 48  # characters that are left of a value for which a quota key has no room
STAGES: tuple[Mode, ...] = ("peek", "enforce", "refund")  # in this order, as long as all before are admitted


class RequestPlan(CheckPlan, frozen=True, eq=False, gc=False, kw_only=True):
    """The plan of a request: of its first stage, with those that follow. Most requests have one."""

    descriptors: int
    places: dict[int, int]  # the descriptor that a charge is of, by the charge's id()
    unmatched_places: tuple[int, ...]  # the descriptors that no enforced policy matches
    rules: EnvoyDomain
    later: tuple[CheckPlan, ...] = ()


def plan_descriptors(admission: Admission, request: RateLimitRequest) -> RequestPlan:
    """Raises GrpcError for what cannot be decided; its text names the field."""
    if admission.policies is None:
        raise GrpcError(Status.UNAVAILABLE, "the agent has not received its policies yet")
    if not request.domain:
        raise _invalid("domain", "it is required")
    if not 1 <= len(request.descriptors) <= MAX_DESCRIPTORS:
        raise _invalid("descriptors", f"a request has 1 to {MAX_DESCRIPTORS} of them")
    rules = admission.policies.descriptors.rules_of(request.domain)
    plans = [
        _plan_descriptor(admission, admission.policies, request.domain, rules, f"descriptors[{place}]", each)
        for place, each in enumerate(request.descriptors)
    ]
    first, *later = (merge_plans(stage) for stage in _stages(plans))
    return RequestPlan(
        **asdict(first),
        descriptors=len(plans),
        places={id(each): place for place, plan in enumerate(plans) for each in plan.policy_charges},
        unmatched_places=tuple(place for place, plan in enumerate(plans) if plan.unmatched is not None),
        rules=rules,
        later=tuple(later),
    )


def _stages(plans: Iterable[CheckPlan]) -> list[list[CheckPlan]]:
    """Return the plans by mode: descriptors with no hits are only looked at, and those with negative hits refunded."""
    by_mode: dict[str, list[CheckPlan]] = {}
    for plan in plans:
        by_mode.setdefault(plan.request.mode, []).append(plan)
    return [by_mode[mode] for mode in STAGES if mode in by_mode]


def _plan_descriptor(
    admission: Admission, policies: Policies, domain: str, rules: EnvoyDomain, where: str, descriptor: Descriptor
) -> CheckPlan:
    if not descriptor.entries or not all(key for key, _ in descriptor.entries):
        raise _invalid(f"{where}.entries", "a descriptor has entries, each with a key")
    if descriptor.hits is not None and descriptor.hits > MAX_UNITS:
        raise _invalid(f"{where}.hits_addend", f"at most {MAX_UNITS} hits are accepted")
    try:
        subject = policies.descriptors.subject(domain, descriptor.entries)
    except UnreadableDescriptor as error:
        raise _invalid(f"{where}.entries", str(error)) from None
    plan = _plan_check(admission, where, Check(subject=subject, cost=descriptor.hits or None, mode=_mode(descriptor)))
    if descriptor.override is None:
        return plan
    if rules.limit_overrides is LimitOverrides.REFUSE:
        reason = f"limit overrides are refused: the limits document may allow them for the domain {domain!r}"
        raise _invalid(f"{where}.limit", reason)
    return _honour(policies, plan, descriptor.override, f"{where}.limit")


def _mode(descriptor: Descriptor) -> Mode:
    if descriptor.hits == 0:
        return "peek"
    return "refund" if descriptor.is_refund else "enforce"


def _plan_check(admission: Admission, where: str, check: Check) -> CheckPlan:
    try:
        try:
            return admission.plan_check(check, may_lack_fields=True)
        except InvalidSubjectValue:
            # The values are too long together for a quota key. Clients choose values, so no error may be the answer.
            return admission.plan_check(replace(check, subject=_shortened(check.subject)), may_lack_fields=True)
    except REFUSALS as refusal:
        raise _refusal(where, refusal) from None


def _shortened(subject: Subject) -> Subject:
    """Return a subject whose long values are replaced by a part of them with a hash."""
    fields = {name: value for name, value in asdict(subject).items() if isinstance(value, str)}
    short = {name: _short(value) for name, value in fields.items() if name not in ("route", "method", "ip")}
    labels = {name: _short(value) for name, value in (subject.labels or {}).items()}
    route = None if subject.route is None else shorten(subject.route, MAX_VALUE_LENGTH)
    return replace(subject, **short | {"labels": labels, "route": route})


def _short(value: str) -> str:
    """Return a value that takes little of a quota key: each character beyond ASCII takes up to twelve."""
    return shorten(value.encode("ascii", "backslashreplace").decode(), SHORT_VALUE)


def _honour(policies: Policies, plan: CheckPlan, override: Override, where: str) -> CheckPlan:
    """Return the plan with another limit for each rate that it charges."""
    unit = OVERRIDE_UNITS.get(override.unit)
    if unit is None or not override.requests:
        raise _invalid(where, f"a limit has requests per {', '.join(OVERRIDE_UNITS.values())}")
    try:
        charges = [policies.with_limit(each, f"{override.requests}/{unit}") for each in plan.policy_charges]
    except ValueError as error:
        raise _invalid(where, str(error)) from None
    request = StoreRequest(plan.request.mode, tuple(each.charge for each in charges))
    return replace(plan, policy_charges=charges, request=request)


def _refusal(where: str, refusal: Exception) -> GrpcError:
    if isinstance(refusal, NoPoliciesYet):
        return GrpcError(Status.UNAVAILABLE, str(problem_of(refusal).detail))
    if isinstance(refusal, HoldNeeded):
        return GrpcError(Status.FAILED_PRECONDITION, f"{where}: {refusal}, which Envoy's protocol does not have")
    return GrpcError(Status.INVALID_ARGUMENT, f"{where}: {problem_of(refusal).detail}")


def _invalid(field: str, reason: str) -> GrpcError:
    return GrpcError(Status.INVALID_ARGUMENT, f"{field}: {reason}")
