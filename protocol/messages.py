"""Messages between a region and the coordinator.

An exchange has a *frozen* part, whose exact bytes are made once by a script in the region's store and sent again until
they are acknowledged, and a *live* part, which says how things are at the moment of sending. Only the frozen part
identifies the exchange: its bytes are hashed, its numbers are booked. It travels as text inside the envelope, so that
nothing on the way can re-encode it.

Durations travel, never timestamps. The one label that looks like a time is a usage line's minute: it says where on the
customer's calendar the usage belongs, and nothing is computed from it but sums.
"""

import hashlib
from typing import Annotated

from msgspec import Meta, Struct, field

from protocol.identifiers import PeriodId, QuotaKey
from protocol.outcomes import ExchangeOutcome, GrantRefusal
from protocol.units import MicroUnitsPerSecond, Milliseconds, MilliUnitsPerSecond, PositiveUnits, Units

MAX_LANES = 64
MAX_CELLS = 64
MAX_EXCHANGES = MAX_LANES
MAX_LEASES_PER_EXCHANGE = 500
MAX_LINES_PER_LEASE = 50_000  # a month of minutes, which is as many as one policy can make in one period
MAX_RATES = 2000
MAX_FROZEN_BYTES = 8 * 1024 * 1024

Sequence = Annotated[int, Meta(ge=1, le=2**53 - 1)]
Lane = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
Epoch = Annotated[int, Meta(ge=1, le=2**53 - 1)]
Fingerprint = Annotated[str, Meta(min_length=1, max_length=256, description="one incarnation of a store")]
Nonce = Annotated[str, Meta(min_length=16, max_length=64, pattern=r"^[0-9a-f]+$")]
DimensionName = Annotated[str, Meta(max_length=64)]
DimensionValue = Annotated[str, Meta(max_length=256)]
MAX_DIMENSIONS_LENGTH = 2048  # of a line: characters of all names and values


class ServiceMessage(Struct, frozen=True, kw_only=True):
    """The base of what travels between the two services.

    Unknown fields are ignored, so that a release can read messages of the next one.
    """


# --- epochs ----------------------------------------------------------------------------------------------------------


class PromotedReplica(ServiceMessage, frozen=True):
    """The proof that a store has all of its previous epoch: a replica that confirmed each reply is the primary now."""

    nonce: Nonce  # with which that epoch was opened
    history: Annotated[str, Meta(min_length=1, max_length=128, description="of the former primary")]
    offset: Units  # how far the replica has it
    seqs: Annotated[list[Units], Meta(max_length=MAX_LANES, description="of each lane, the last number that it has")]


class OpenEpoch(ServiceMessage, frozen=True, omit_defaults=True):
    nonce: Nonce
    fingerprint: Fingerprint
    previous: Epoch | None = None  # the epoch that this store had before, if it is known
    lost_data: bool = True  # did the store lose any of that epoch's? Who does not know assumes the worst
    journal: bool = False  # what an agent admitted by itself: over from its beginning, and only told of
    # Which cell of the region's store it is for, of how many. A single store is one cell.
    cell: Annotated[int, Meta(ge=0, lt=MAX_CELLS)] = 0
    cells: Annotated[int, Meta(ge=1, le=MAX_CELLS)] = 1
    promoted: PromotedReplica | None = None  # if it proves that nothing was lost, `lost_data` does not count


class RebindEpoch(ServiceMessage, frozen=True):
    """A single store that fsyncs every write has restarted, and goes on in its epoch."""

    nonce: Nonce  # with which the epoch was opened
    previous: Fingerprint
    fingerprint: Fingerprint
    seqs: Annotated[list[Units], Meta(max_length=MAX_LANES, description="of each lane, the last number that it has")]


class EpochOpened(ServiceMessage, frozen=True):
    epoch: Epoch
    lanes: Annotated[int, Meta(ge=1, le=MAX_LANES)]
    is_whole: bool = False  # no store has admitted anything in this one's place that it does not know


# --- a region's side of an exchange ----------------------------------------------------------------------------------


class UsageLine(ServiceMessage, frozen=True):
    minute: Annotated[int, Meta(ge=0, le=2**40, description="minutes since 1970-01-01T00:00Z")]
    dimensions: Annotated[dict[DimensionName, DimensionValue], Meta(max_length=16)]
    units: PositiveUnits


class FrozenLease(ServiceMessage, frozen=True):
    """One lease as the store knew it when the batch was frozen."""

    quota: QuotaKey
    period: PeriodId
    granted: Units
    overage: Units
    consumed: Units
    returned: Units
    overdrawn: Units = 0  # of what was consumed or is held: admitted beyond the lease while the region was cut off
    lines: Annotated[list[UsageLine], Meta(max_length=MAX_LINES_PER_LEASE)] = []


class FrozenBatch(ServiceMessage, frozen=True):
    """The part of an exchange that is booked. One script makes its bytes, once."""

    epoch: Epoch
    lane: Lane
    seq: Sequence
    leases: Annotated[list[FrozenLease], Meta(max_length=MAX_LEASES_PER_EXCHANGE)] = []


class LeaseDemand(ServiceMessage, frozen=True):
    """A region's demand for one quota: it requests a grant, in the current period."""

    quota: QuotaKey
    held: Units = 0
    demand_milli: MilliUnitsPerSecond = 0
    waiting: Units = 0  # units of the requests that wait for this very exchange


class LiveState(ServiceMessage, frozen=True):
    demands: Annotated[list[LeaseDemand], Meta(max_length=MAX_LEASES_PER_EXCHANGE)] = []


class Exchange(ServiceMessage, frozen=True):
    frozen: Annotated[
        str, Meta(min_length=2, max_length=MAX_FROZEN_BYTES, description="a FrozenBatch, as its exact bytes")
    ]
    live: LiveState = field(default_factory=LiveState)


class Versions(ServiceMessage, frozen=True):
    policies: Units = 0
    blocks: Units = 0


class ExchangeRequest(ServiceMessage, frozen=True):
    fingerprint: Fingerprint
    exchanges: Annotated[list[Exchange], Meta(min_length=1, max_length=MAX_EXCHANGES)]


# --- the coordinator's side ------------------------------------------------------------------------------------------


class LeaseReply(ServiceMessage, frozen=True):
    """The totals of one lease, and for how long it may be spent, counted from the sending of the request."""

    quota: QuotaKey
    period: PeriodId
    granted: Units
    overage: Units
    unallocated: Units  # what no region holds yet, for the answers that services get
    starts_in_ms: Milliseconds
    expires_in_ms: Milliseconds  # never past the period's end
    ends_in_ms: Milliseconds  # the period's end
    first_minute: Units  # the period's minutes, to clamp the windows of usage lines
    last_minute: Units
    final: bool = False  # nothing more will be granted in this period
    recall_keep: Units | None = None  # others wait: give back what is idle beyond this
    overdraft: Units = 0  # so much may be admitted beyond the lease while the region is cut off
    refusal: GrantRefusal | None = None  # why nothing, or less than wanted, was granted
    consumed: Units = 0  # the region's totals, as the region last reported them
    returned: Units = 0
    current: bool = False  # the quota was asked for, and this is its period at the moment
    report_within_ms: Milliseconds = 0  # so long usage of it may wait for its report
    report_at: Units = 0  # report at once when `consumed` reaches this: a threshold may be reached; 0: none is left
    beyond_limit: Units = 0  # under a soft cap: of the lease and of `unallocated`, so much is beyond the limit


class ItemRefused(ServiceMessage, frozen=True):
    """A demand, rate or slot that was not accepted. It leads to no lease and no share."""

    quota: Annotated[str, Meta(description="as it was sent, valid or not; empty if none could be read")]
    refusal: GrantRefusal
    rule: str | None = None  # of an invalid one: a stable word, as in a fault
    reason: str | None = None  # of an invalid one: which of its fields is wrong, and why


class ExchangeFault(ServiceMessage, frozen=True):
    """The first fault of an exchange, for which it was refused."""

    field: Annotated[str, Meta(description="such as frozen.leases[2].consumed; empty for the exchange as a whole")]
    rule: Annotated[str, Meta(description="a stable word, such as max_length, unique, lane, contention or internal")]
    reason: str
    # The same bytes may be sent again after so long: something else stood in the way. None: they are refused again.
    again_in_ms: Milliseconds | None = None


class Receipt(ServiceMessage, frozen=True):
    """Proof that a batch was booked: where in the ledger, and the lane's chain up to it."""

    position: Units
    head: str


class ExchangeReply(ServiceMessage, frozen=True):
    """The answer to one exchange of a request."""

    outcome: ExchangeOutcome
    lane: Lane | None = None  # None if the batch could not be read
    seq: Sequence | None = None
    fault: ExchangeFault | None = None  # of an exchange that was refused
    receipt: Receipt | None = None
    expected_seq: Sequence | None = None
    leases: list[LeaseReply] = []
    refused: list[ItemRefused] = []


class ExchangeResponse(ServiceMessage, frozen=True):
    replies: Annotated[
        list[ExchangeReply], Meta(description="one for each exchange of the request, in the order of the request")
    ]
    versions: Versions
    drain: bool = False  # return what is unspent, ask for nothing


# --- shares of rates: no ledger, and nothing is frozen ----------------------------------------------------------------


class RateReport(ServiceMessage, frozen=True):
    """The state of one rate in a region's store at one moment."""

    quota: QuotaKey
    demand_micro: MicroUnitsPerSecond
    number: Units  # of the share that is in force; 0: none was given
    rate_micro: MicroUnitsPerSecond  # in force
    spent: Units = 0  # since there was a share first


class SlotReport(ServiceMessage, frozen=True):
    """The state of shared slots in a region's store at one moment."""

    quota: QuotaKey
    epoch: Epoch
    wanted: Units  # in use or waited for
    number: Units  # of the share that the store has; 0: none
    held: Units  # what may be in use there: the share, or what is in use, if that is more
    lost_ms: Milliseconds = 0  # for so long yet, slots may be in use that the store has forgotten


class SharesRequest(ServiceMessage, frozen=True):
    rates: Annotated[list[RateReport], Meta(max_length=MAX_RATES)] = []
    slots: Annotated[list[SlotReport], Meta(max_length=MAX_RATES)] = []


class RateShare(ServiceMessage, frozen=True):
    """The rate that a region may use, counted from the sending of the request."""

    quota: QuotaKey
    number: Units  # a store takes only a higher one than it has
    rate_micro: MicroUnitsPerSecond
    after_micro: MicroUnitsPerSecond  # when the share has expired; some time after that, the base share again
    expires_in_ms: Milliseconds
    refresh_in_ms: Milliseconds
    contended: bool  # others want more than they have: what is not used is to be given up
    bound_milli: Units = 0  # thousandths of a unit beyond limit and burst, in all regions together: in the worst case
    overshoot_milli: Units = 0  # and at most so far


class SlotShare(ServiceMessage, frozen=True):
    """The slots that a region may have in use, counted from the sending of the request."""

    quota: QuotaKey
    number: Units  # a store takes only a higher one than it has
    units: Units
    after_units: Units  # when the share has expired; some time after that, the base share again
    expires_in_ms: Milliseconds
    refresh_in_ms: Milliseconds
    slot_ttl_ms: Milliseconds  # for so long a slot is taken by this share at most
    contended: bool


class SharesResponse(ServiceMessage, frozen=True):
    rates: list[RateShare]
    slots: list[SlotShare] = []
    refused: list[ItemRefused] = []


# --- signals: hints that never carry truth; what is missed comes with the next exchange -------------------------------


class Signal(ServiceMessage, frozen=True):
    # recall | grant: units came free | fetch: units are there for you, ask | rate: report it | policies | blocks |
    # resets | drain
    kind: str
    quota: QuotaKey | None = None
    keep: Units = 0


MAX_RESETS = 1_000  # in one answer

ResetNumber = Annotated[Units, Meta(description="grows with each reset")]


class ResetKeys(Struct, frozen=True, kw_only=True):
    """The keys of one reset: every region forgets what a rate has counted of them."""

    number: ResetNumber
    keys: list[QuotaKey]


class ResetBatch(Struct, frozen=True, kw_only=True):
    """Resets in order of their numbers; `version` is the number to ask from next."""

    version: ResetNumber
    data: list[ResetKeys]


def body_hash(frozen: str) -> bytes:
    """Return what identifies an exchange: the hash of its frozen bytes."""
    return hashlib.sha256(frozen.encode()).digest()
