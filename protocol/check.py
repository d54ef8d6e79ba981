"""What a service asks its region's agent, and what the agent answers: the bodies of `/v1/check` and `/v1/holds`."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from protocol.compatibility.open_enums import OpenEnum
from protocol.units import PositiveUnits, Units

MAX_BATCH = 1000
MAX_VALUE_LENGTH = 256  # of a subject's field
MAX_LABELS = 16
LABEL_PATTERN = r"^[a-z][a-z0-9_]{0,31}$"
MAX_COSTS = 32  # quotas that one request names
NO_COSTS: Mapping[str, int] = MappingProxyType({})
MOST_HOLD_MS = 24 * 3600 * 1000

SubjectValue = Annotated[str, Meta(min_length=1, max_length=MAX_VALUE_LENGTH)]
HoldMilliseconds = Annotated[int, Meta(ge=1, le=MOST_HOLD_MS, description="a duration in milliseconds")]
LabelName = Annotated[str, Meta(pattern=LABEL_PATTERN, description="lower case letters, digits and _")]
Labels = Annotated[dict[LabelName, SubjectValue], Meta(max_length=MAX_LABELS)]
CostName = Annotated[str, Meta(min_length=1, max_length=64)]
Costs = Annotated[
    dict[CostName, PositiveUnits], Meta(min_length=1, max_length=MAX_COSTS, description="units, by the name of a quota")
]
CommittedCosts = Annotated[
    dict[CostName, Units], Meta(min_length=1, max_length=MAX_COSTS, description="units, by the name of a quota")
]
OperationId = Annotated[str, Meta(min_length=1, max_length=128)]
Mode = Literal["enforce", "peek", "adjust", "refund"]
FailureMode = Literal["open", "closed", "local"]


class DenialCause(OpenEnum):
    """The reasons of a denial, in the words that services, metrics and logs see. A newer agent may use others."""

    LIMIT = "limit"  # the limit is used up, or the rate exceeded
    NO_LEASE = "no_lease"  # the region holds no units now; the coordinator was asked for some
    CUT_OFF = "cut_off"  # the region holds no units now, and the coordinator does not answer
    DRAINED = "drained"  # the region holds no units now, and is granted none because an operator drains it
    EXPIRED = "expired"  # the region's lease has expired
    NEVER = "never"  # the cost is above the limit or the burst
    STORE = "store"  # the store does not answer, and the policy's failure mode denies


class BlockField(StrEnum):
    """The field of a subject that a block compares. For `ip` the value is an address or a network (203.0.113.0/24)."""

    TENANT = "tenant"
    USER = "user"
    API_KEY = "api_key"
    IP = "ip"


class Unmatched(StrEnum):
    """The answer to a request that no enforced policy matches."""

    ALLOW = "allow"
    WARN = "warn"  # allow it, with a field, a header and a line in the log
    DENY = "deny"


# --- requests ---------------------------------------------------------------------------------------------------------


class Subject(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who makes a request, and for what. Each policy counts by some of these fields."""

    tenant: SubjectValue | None = None
    user: SubjectValue | None = None
    api_key: SubjectValue | None = None
    ip: SubjectValue | None = None
    route: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    method: Annotated[str, Meta(min_length=1, max_length=16)] | None = None
    labels: Labels | None = None  # the service's own fields, such as {"model": "large"}


class Check(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    subject: Subject
    cost: PositiveUnits | None = None
    costs: Costs | None = None  # a quota that it names costs this much, whatever `cost` and the policy say
    operation_id: OperationId | None = None
    mode: Mode = "enforce"


class CheckBatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checks: Annotated[list[Check], Meta(min_length=1, max_length=MAX_BATCH)]


class Hold(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reserve units of every allowance that matches the subject; of a rate each policy's own cost is spent.

    `costs` has the units of each quota that it names. Without `units`, any other allowance costs what its policy says.
    """

    subject: Subject
    units: PositiveUnits | None = None
    costs: Costs | None = None
    ttl_ms: HoldMilliseconds
    operation_id: OperationId


class HoldCommit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consume what was used: of quotas in `costs` so much, of others `units` or, without it, all that is held."""

    units: Units | None = None
    costs: CommittedCosts | None = None


class HoldExtension(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttl_ms: HoldMilliseconds


class HoldRelease(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


# --- answers ----------------------------------------------------------------------------------------------------------
# A newer agent may answer with other words than these, and a client reads them as they are.

AnsweredMode = Annotated[str, Meta(extra_json_schema={"enum": sorted(get_args(FailureMode))})]
AnsweredField = Annotated[str, Meta(extra_json_schema={"enum": sorted(BlockField)})]
UnmatchedAnswer = Annotated[str, Meta(extra_json_schema={"enum": ["deny", "warn"]})]


class PolicyAnswer(Struct, frozen=True, kw_only=True, gc=False):
    policy: str
    quota: str
    kind: str
    allowed: bool
    limit: int  # what the customer has, in all regions
    share: int  # what this region may use of it now
    remaining: int
    reset_ms: int
    retry_after_ms: int | None  # the first moment at which the request may pass; null if it never can
    reason: DenialCause | None = None  # why the policy denies
    degraded: AnsweredMode | None = None  # the failure mode that answered in place of the store
    delay_ms: int = 0  # for a leaky bucket: how long to wait before the work is begun
    shadow: bool = False  # the policy is counted, and denies nothing
    unlimited: bool = False  # the policy admits everything and counts nothing; `limit` and `remaining` are the maximum


class CheckAnswer(Struct, frozen=True, kw_only=True, gc=False):
    allowed: bool
    degraded: AnsweredMode | None
    policies: list[PolicyAnswer]
    denied_by: str | None
    retry_after_ms: int | None
    blocked_by: AnsweredField | None = None  # the field of the block that denies the request, before any policy
    unmatched: UnmatchedAnswer | None = None  # no enforced policy matches, and the limits document warns or denies


class BatchItem(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The status that the check alone would have had, and its answer or its problem document."""

    status: int
    answer: CheckAnswer | None = None
    problem: dict[str, Any] | None = None


class BatchAnswer(Struct, frozen=True, kw_only=True):
    """One item for each check, in order."""

    items: list[BatchItem]


class HoldAnswer(Struct, frozen=True, kw_only=True):
    hold_id: str
    units: int  # as requested; 0 where only `costs` were
    expires_in_ms: int
    degraded: AnsweredMode | None
    policies: list[PolicyAnswer]


class HeldQuota(Struct, frozen=True, kw_only=True):
    """The units of one quota that a hold has reserved, and those of them that were committed."""

    quota: str
    units: int
    committed: int


class HoldStatus(Struct, frozen=True, kw_only=True):
    """The state of a hold. `lapsed` and `charged`: it expired, and its policy chose between the two. `nothing_held`: no
    allowance limits the subject, or the hold was granted without the store."""

    hold_id: str
    state: Literal["open", "committed", "released", "lapsed", "charged", "nothing_held"]
    units: int
    committed: int
    expires_in_ms: int
    quotas: list[HeldQuota] = []


class UnmetCondition(Struct, frozen=True):
    """A condition of a policy that a request does not meet."""

    condition: str  # such as `match.route`
    wanted: Any  # as the document has it
    found: str | None  # of the request, normalised; null if it has no such field


class PolicyExplanation(Struct, frozen=True, kw_only=True):
    policy: str
    quota: str
    matches: bool
    shadow: bool
    cost: int  # units that a check takes of the quota: from its `costs`, its `cost`, or else the policy
    unmet: list[UnmetCondition]
    key: str | None  # of the quota that the policy counts; null if the request lacks what it counts by
    invalid: str | None  # why a check that matches is refused: a field is missing, or cannot be part of a key


class RequestExplanation(Struct, frozen=True, kw_only=True):
    subject: dict[str, str]  # normalised; a label is a field such as `labels.model`
    route_class: str
    plan: str | None
    unmatched: Unmatched | None  # what the document says of a request that no enforced policy matches
    policies: list[PolicyExplanation]


class ExplainAnswer(RequestExplanation, frozen=True, kw_only=True):
    """For each policy of the document, in its order: does it match, and if not, which conditions are not met."""

    policy_version: int
    blocked_by: BlockField | None  # the field of the block that denies the request, before any policy


class Denial(CheckAnswer, frozen=True, kw_only=True):
    """A problem document (RFC 9457) that has the fields of the answer as well. Its `type` leads to an explanation."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str


def denying_policy(answer: CheckAnswer) -> PolicyAnswer | None:
    """Return the answer of the policy that denies."""
    for each in answer.policies:  # a generator would cost several times as much, for each denial
        if each.policy == answer.denied_by and each.reason:
            return each
    return None


def cause_of_denial(answer: CheckAnswer) -> DenialCause | None:
    """Return the reason of the policy that denies."""
    policy = denying_policy(answer)
    return None if policy is None else policy.reason
