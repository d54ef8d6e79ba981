"""What agents send to the decision log of the coordinator: every denial, and a sample of the admissions.

Times are those of the agent's machine. The rule that only durations travel is for what grants or books: nothing is
computed from these times, and people compare them with the times of their own logs. Unknown fields are ignored, as in
all messages between the services.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.units import MAX_UNITS, Units

MAX_DECISIONS = 1_000  # in one batch
MAX_LOSSES = 1_440  # minutes of a day
MAX_BATCH_BYTES = 4 * 1024 * 1024  # decompressed
MAX_LOGGED_POLICIES = 64  # of one decision

EpochMilliseconds = Annotated[int, Meta(ge=0, le=253_402_300_799_000, description="milliseconds since 1970")]
Text = Annotated[str, Meta(max_length=512)]
SubjectValue = Annotated[str, Meta(max_length=1024)]
BatchId = Annotated[str, Meta(pattern="^[0-9a-f]{24}$")]
Amount = Annotated[int, Meta(ge=-MAX_UNITS, le=MAX_UNITS)]
Outcome = Literal["denied", "admitted", "shadow_denied"]
LOST = "lost"  # the outcome of a row that counts decisions which were not kept


class LoggedPolicy(Struct, frozen=True, omit_defaults=True):
    """The answer of one policy."""

    policy: Text
    quota: Text  # the quota key
    cost: Amount
    limit: Amount
    share: Amount
    remaining: Amount
    reason: Text | None = None  # of a denial
    shadow: bool = False


class LoggedDecision(Struct, frozen=True, omit_defaults=True):
    """A decision, or equal denials of one second. A denial of a block or of `unmatched: deny` has no policy."""

    at_ms: EpochMilliseconds
    outcome: Outcome
    mode: Text
    subject: Annotated[dict[Text, SubjectValue], Meta(max_length=32)]  # route and method in their normal form
    policies: Annotated[list[LoggedPolicy], Meta(max_length=MAX_LOGGED_POLICIES)] = []
    policy: Text | None = None  # the policy that denied, or would have
    reason: Text | None = None  # of the denial: a cause, `blocked` or `unmatched`
    retry_after_ms: Units | None = None
    degraded: Text | None = None
    epoch: Units | None = None
    latency_us: Units | None = None  # None: the store was not asked
    operation: Text | None = None  # digest of tenant and operation id
    weight: Annotated[float, Meta(ge=1, le=1e9)] = 1.0  # so many admissions the row stands for
    count: Annotated[int, Meta(ge=1, le=2**53 - 1)] = 1  # equal denials of the second
    last_ms: EpochMilliseconds | None = None  # of them, the last


class DecisionsLost(Struct, frozen=True):
    """The number of decisions of a minute that an agent could not keep or deliver."""

    minute_ms: EpochMilliseconds
    count: Annotated[int, Meta(ge=1, le=2**53 - 1)]


class DecisionBatch(Struct, frozen=True, omit_defaults=True):
    """The same bytes may come more than once; the id tells, so that they are stored once."""

    id: BatchId
    agent: Annotated[str, Meta(min_length=1, max_length=192)]
    decisions: Annotated[list[LoggedDecision], Meta(max_length=MAX_DECISIONS)]
    lost: Annotated[list[DecisionsLost], Meta(max_length=MAX_LOSSES)] = []


class DecisionsStored(Struct, frozen=True):
    """The number of decisions of a batch that were stored. Others were malformed, or older than what is kept."""

    stored: int
    refused: int
