"""The values that go into the scripts of a region's store and come out of them."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from msgspec import Struct

from protocol.limits.rates import WINDOWS, Rate, RateAlgorithm
from protocol.limits.windows import CalendarWindow
from protocol.messages import RateReport, SlotReport
from protocol.outcomes import DenialReason, HoldOutcome
from protocol.traces.trace_context import TraceContext
from regional_agent.admission.rules.hold_ids import HoldPart, HoldTerms
from regional_agent.admission.rules.modes import LOOKS, REFUND
from regional_agent.store import keys
from regional_agent.store.connection import Argument

CALENDAR_WINDOW = "calendar_window"  # the algorithm of a fixed window that begins with the calendar
SHADOW = "shadow:"  # before an algorithm's name: the algorithm decides, and its denial stops no request
REASONS = ("", *(reason.value for reason in DenialReason))

KeysAndArguments = tuple[tuple[bytes, ...], tuple[Argument, ...]]


class Fenced(Exception):
    """The store is another incarnation than the caller assumed: read the fence again."""


class LeaseLost(Fenced):
    """The store has lost a lease that was used: its epoch is over."""


class OperationConflict(Exception):
    """The operation_id was used before, with another body."""


class StoreIncarnation(NamedTuple):
    """One incarnation of the store, or of a cell of a Cluster, and the epoch that the coordinator issued to it."""

    fingerprint: str
    epoch: int
    lanes: int
    cell: int | None = None

    def hash_tag(self, lane: int) -> int:
        """Return the hash tag of a lane's keys: in a Cluster the cell's."""
        return lane if self.cell is None else self.cell


class Fence(NamedTuple):
    """A store's own statement of its incarnation, and of the epoch that it adopted."""

    fingerprint: str | None
    nonce: str | None
    epoch: int | None
    lanes: int | None
    kept_epoch: int | None = None  # the epoch before, if the store certainly kept all of its data
    is_exempt: bool = False  # the store fsynced every write, and had no replica, when it adopted its epoch
    format: int = keys.OLDEST_FORMAT  # of the store's keys
    promoted: str = ""  # why `kept_epoch` is kept, if the store is a promoted replica (JSON)


# --- what a check takes -----------------------------------------------------------------------------------------------


class AllowanceCharge(Struct, frozen=True, gc=False):
    """Units of a leased allowance."""

    quota: str
    cost: int
    limit: int
    dimensions: str  # JSON, keys in order: it names a usage line
    on_hold_expiry: str = "release"

    def script_args(self, incarnation: StoreIncarnation) -> KeysAndArguments:
        """Return the keys and arguments that algorithms/allowance.lua reads."""
        names = keys.of_allowance(self.quota, incarnation.lanes, incarnation.epoch, incarnation.cell)
        return names, ("allowance", self.cost, self.limit, self.quota, self.dimensions, self.on_hold_expiry)


class RateCharge(Struct, frozen=True, gc=False):
    """Units of a rate."""

    quota: str
    cost: int
    rate_micro: float  # an integer, except for a slow rate
    burst: int  # of a window: its limit
    algorithm: str = "token_bucket"
    window_ms: int = 0  # of the algorithms that count in windows
    may_slice: bool = False  # an agent may take more than one request needs, and hand it out by itself
    is_shadow: bool = False
    is_shared: bool = False  # with other regions, by demand: `rate_micro` is the base share, used without a newer one
    calendar: CalendarWindow | None = None  # of a fixed window that begins with the calendar

    def script_args(self, incarnation: StoreIncarnation) -> KeysAndArguments:
        """Return the keys and arguments that the rate's algorithm reads."""
        tag = keys.hash_tag(self.quota, incarnation.lanes, incarnation.cell)
        names: tuple[bytes, ...] = (keys.rate(tag, self.quota),)
        algorithm = self.algorithm if self.calendar is None else CALENDAR_WINDOW
        name = SHADOW + algorithm if self.is_shadow else algorithm
        rate_micro = self.rate_micro if isinstance(self.rate_micro, int) else repr(self.rate_micro)
        arguments = (name, self.cost, rate_micro, self.burst)
        if self.algorithm not in WINDOWS:
            return names, arguments
        if self.calendar is not None:
            return names, (*arguments, self.window_ms, *self.calendar)
        if self.algorithm == RateAlgorithm.SLIDING_LOG:
            names = (*names, keys.rate_log(tag, self.quota))
        return names, (*arguments, max(1, self.window_ms))


class SlotCharge(Struct, frozen=True, gc=False):
    """Slots of a concurrency."""

    quota: str
    cost: int
    limit: int  # of all regions where they share it, else the region's part
    slot_ttl_ms: int
    is_shadow: bool = False
    base_share: int = -1  # the region's base share; below zero: its part is not shared

    @property
    def is_shared(self) -> bool:
        return self.base_share >= 0

    @property
    def algorithm(self) -> str:
        return f"{SHADOW}concurrency" if self.is_shadow else "concurrency"

    def script_args(self, incarnation: StoreIncarnation) -> KeysAndArguments:
        """Return the keys and arguments that algorithms/concurrency.lua reads."""
        names = keys.of_slots(self.quota, incarnation.lanes, incarnation.cell)
        return names, (self.algorithm, self.cost, self.limit, self.slot_ttl_ms, self.base_share)


Charge = AllowanceCharge | RateCharge | SlotCharge


def hold_part(charge: Charge) -> HoldPart | None:
    """Return the part that a hold sets aside for a charge; None for a rate, which is spent at once."""
    if isinstance(charge, RateCharge):
        return None
    return HoldPart("allowance" if isinstance(charge, AllowanceCharge) else charge.algorithm, charge.quota)


class Operation(NamedTuple):
    """An idempotent request: the store remembers its answer."""

    digest: str  # of its id, within its tenant
    body: str  # digest of the request
    remembered_ms: int


class EncodedCharges(Struct, eq=False, frozen=True, gc=False):
    """The keys and arguments of all charges of a request, for one incarnation of the store."""

    incarnation: StoreIncarnation
    names: tuple[bytes, ...]
    arguments: tuple[Argument, ...]


class StoreRequest(Struct, eq=False, gc=False):
    """Everything that one check needs of the store, which decides it as a whole. Only its encoding ever changes."""

    mode: str
    charges: Sequence[Charge]
    operation: Operation | None = None
    hold: HoldTerms | None = None  # only with mode `hold`
    encoded: EncodedCharges | None = None  # what `script_args` made last: a request that is repeated is encoded once

    def script_args(self, incarnation: StoreIncarnation) -> EncodedCharges:
        """Make, keep and return the keys and arguments that the algorithms of its charges read."""
        names: tuple[bytes, ...] = ()
        arguments: tuple[Argument, ...] = ()
        for charge in self.charges:
            charge_names, charge_arguments = charge.script_args(incarnation)
            names += charge_names
            arguments += charge_arguments
        self.encoded = EncodedCharges(incarnation, names, arguments)
        return self.encoded

    @property
    def is_repeatable(self) -> bool:
        """Return whether the same request sent again is decided anew."""
        return self.mode == "enforce" and self.operation is None

    @property
    def may_slice(self) -> bool:
        """Return whether token slices may answer all of it."""
        is_usual = self.mode not in LOOKS and self.mode != REFUND and self.operation is None and self.charges
        return bool(is_usual) and all(isinstance(each, RateCharge) and each.may_slice for each in self.charges)


# --- what the store decides -------------------------------------------------------------------------------------------


class PolicyDecision(Struct, frozen=True, gc=False):
    """The decision of one policy; the fields are in the order in which check.lua packs them."""

    code: int  # the reason of a denial; 0: allowed
    limit: int
    remaining: int
    reset_ms: int
    retry_after_ms: int
    available: int  # of a bucket: its level, in nano-units
    last_grant: int  # of a bucket: its rate, in micro-units a second
    delay_ms: int

    @property
    def allowed(self) -> bool:
        return self.code == 0

    @property
    def reason(self) -> str:
        return REASONS[self.code]


class StoreDecision(Struct, frozen=True, gc=False):
    """The decision on a request, with one entry per policy."""

    allowed: bool
    replayed: bool
    policies: list[PolicyDecision]
    hold: HoldTerms | None = None  # what is held, and for how much longer; replayed: what was held the first time


Outcome = StoreDecision | Exception
OnDecisions = Callable[[Sequence[Outcome]], None]


class Run(Protocol):
    """A request that is decided `times` times in a row, more than once only if it is repeatable."""

    @property
    def request(self) -> StoreRequest: ...
    @property
    def times(self) -> int: ...
    def trace_contexts(self) -> Sequence[TraceContext]:
        """Return the sampled requests that it decides."""

    def complete(self, outcomes: Sequence[Outcome], /) -> None:
        """Take all outcomes at once. It must not raise."""


class RequestRun(NamedTuple):
    """A run that passes its outcomes to a function."""

    request: StoreRequest
    times: int
    on_decisions: OnDecisions

    def trace_contexts(self) -> Sequence[TraceContext]:
        return ()

    def complete(self, outcomes: Sequence[Outcome]) -> None:
        self.on_decisions(outcomes)


class OperationClaim(StrEnum):
    """The result of a journal's claim to book an operation."""

    CLAIMED = "claimed"
    CHARGED = "charged"  # a script has executed it, or another journal has claimed it
    ANOTHER_BODY = "another_body"  # its id was used with another body


class KnownOperation(NamedTuple):
    """An operation over several cells that was decided before."""

    hold: HoldTerms
    is_concluded: bool  # all that was set aside for it has been spent


class PartUnits(NamedTuple):
    """The units that one part of a hold has set aside, and those that were committed."""

    units: int
    committed: int


class HoldState(NamedTuple):
    """The outcome of an action on a hold, and the hold as it is now."""

    outcome: HoldOutcome
    state: str = ""
    units: int = 0
    committed: int = 0
    expires_in_ms: int = 0
    parts: tuple[PartUnits, ...] = ()  # in the order of the hold's


class SlotsInUse(NamedTuple):
    """The slots of a quota that are taken, and how many holds have them."""

    quota: str
    units: int
    holders: int


# --- what the exchange with the coordinator needs ---------------------------------------------------------------------


class DueQuotas(NamedTuple):
    """The quotas of a lane to report now."""

    quotas: Sequence[str]
    oldest_ms: int  # age of the oldest usage that is not booked: due first, or in a batch that waits for its receipt


class FrozenBytes(NamedTuple):
    """The bytes that a lane reports until it gets their receipt."""

    bytes: str
    seq: int
    mono_us: int
    held: Mapping[str, int]  # units that are held now, for each quota of the call
    has_more: bool = False  # not everything fitted in: another batch follows at once


class PartitionState(NamedTuple):
    """The store's record of whether the region is partitioned from the coordinator."""

    is_partitioned: bool
    overdrawn: int  # units admitted beyond the leases since this store began


class AgentRateDemand(NamedTuple):
    """The demand of one agent for a rate that regions share."""

    quota: str
    base_share: Rate
    demand_micro: int
    is_contended: bool


class AgentSlotDemand(NamedTuple):
    """The demand of one agent for slots that regions share."""

    slots: SlotCharge
    waiting: int  # units that this agent could not get lately


class SlotReports(NamedTuple):
    """The region's reports of its shared slots, and the store's clock when it made them."""

    mono_us: int
    reports: list[SlotReport]


class RateReports(NamedTuple):
    """The region's reports of its shared rates, and the store's clock when it made them."""

    mono_us: int
    reports: list[RateReport]
