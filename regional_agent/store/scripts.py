"""Each Lua script as one typed method. Names of keys and order of arguments meet here and nowhere else.

lua/ has the scripts; the header of each is its contract.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import Struct

from protocol.identifiers import lane_of
from protocol.messages import ExchangeReply, LeaseReply, RateReport, RateShare, SlotReport, SlotShare
from protocol.outcomes import DenialReason, HoldOutcome
from protocol.policy import WINDOWS, Rate, RateAlgorithm
from protocol.units import MAX_UNITS
from regional_agent.admission.rules.hold_ids import HoldId, HoldPart, HoldTerms
from regional_agent.admission.rules.modes import LOOKS
from regional_agent.store import keys
from regional_agent.store.connection import Argument, Reply, Store, StoreError
from regional_agent.store.sources import digests, sources

MOST_LINES = 500  # of a batch: so many are frozen in some milliseconds
MOST_CLAIMS = 500  # operations in one call
PROBE_KEPT_MS = 60_000
SHADOW = "shadow:"  # before an algorithm's name: it is decided, and never refuses
KEYS_KEPT = 65_536  # names of keys that are remembered, for those that are asked for again and again


class Fenced(Exception):
    """The store is another incarnation than the caller thought: look at the fence again."""


class LeaseLost(Fenced):
    """The store has forgotten a lease that was used: the epoch is over."""


class OperationConflict(Exception):
    """The operation_id was used before, with another body."""


class StoreIncarnation(NamedTuple):
    """One life of the store, or of one of a Cluster's cells, and the epoch that was issued to it."""

    fingerprint: str
    epoch: int
    lanes: int
    cell: int | None = None

    def tag(self, lane: int) -> int:
        """What a lane's keys have as their hash tag."""
        return lane if self.cell is None else self.cell


class Fence(NamedTuple):
    fingerprint: str | None
    nonce: str | None
    epoch: int | None
    lanes: int | None
    whole: int | None = None  # the epoch before, if the store certainly kept all of it
    is_exempt: bool = False  # the store fsynced every write, alone, when it adopted its epoch


class AllowanceCharge(NamedTuple):
    quota: str
    cost: int
    limit: int
    dimensions: str  # JSON, keys in order: it names a usage line
    on_hold_expiry: str = "release"

    def asked(self, incarnation: StoreIncarnation) -> tuple[tuple[bytes, ...], tuple[Argument, ...]]:
        """The algorithm's keys and arguments, as its header has them."""
        names = _allowance_keys(self.quota, incarnation.lanes, incarnation.epoch, incarnation.cell)
        return names, ("allowance", self.cost, self.limit, self.quota, self.dimensions, self.on_hold_expiry)


class RateCharge(NamedTuple):
    quota: str
    cost: int
    rate_micro: int
    burst: int  # of a window: its limit
    algorithm: str = "token_bucket"
    window_ms: int = 0  # of the algorithms that count in windows
    may_slice: bool = False  # an agent may take more than one request needs, and give it out by itself
    is_shadow: bool = False
    is_shared: bool = False  # by demand with other regions: the rate is the safe share, as long as there is no other

    def asked(self, incarnation: StoreIncarnation) -> tuple[tuple[bytes, ...], tuple[Argument, ...]]:
        names = _rate_keys(self.quota, incarnation.lanes, incarnation.cell)
        name = SHADOW + self.algorithm if self.is_shadow else self.algorithm
        arguments = (name, self.cost, self.rate_micro, self.burst)
        if self.algorithm not in WINDOWS:
            return names[:1], arguments
        is_logged = self.algorithm == RateAlgorithm.SLIDING_LOG
        return names if is_logged else names[:1], (*arguments, max(1, self.window_ms))


class SlotCharge(NamedTuple):
    quota: str
    cost: int
    limit: int  # of all regions where they share it, else the region's part
    slot_ttl_ms: int
    is_shadow: bool = False
    safe: int = -1  # the region's safe share; below zero: its part is not shared

    @property
    def is_shared(self) -> bool:
        return self.safe >= 0

    @property
    def algorithm(self) -> str:
        return f"{SHADOW}concurrency" if self.is_shadow else "concurrency"

    def asked(self, incarnation: StoreIncarnation) -> tuple[tuple[bytes, ...], tuple[Argument, ...]]:
        names = _slot_keys(self.quota, incarnation.lanes, incarnation.cell)
        return names, (self.algorithm, self.cost, self.limit, self.slot_ttl_ms, self.safe)


Charge = AllowanceCharge | RateCharge | SlotCharge
# By algorithm, of those that can hold: what names the keys of a part.
_HOLDING: dict[str, Callable[[str], Charge]] = {
    "allowance": lambda quota: AllowanceCharge(quota, 0, 0, ""),
    "concurrency": lambda quota: SlotCharge(quota, 0, 0, 0),
    f"{SHADOW}concurrency": lambda quota: SlotCharge(quota, 0, 0, 0, is_shadow=True),
}


def part_of(charge: Charge) -> HoldPart | None:
    """What a hold sets aside for it; nothing of a rate, which is spent at once."""
    if isinstance(charge, RateCharge):
        return None
    return HoldPart("allowance" if isinstance(charge, AllowanceCharge) else charge.algorithm, charge.quota)


def _tag(name: str, lanes: int, cell: int | None) -> int:
    return lane_of(name, lanes) if cell is None else cell


@lru_cache(KEYS_KEPT)
def _allowance_keys(quota: str, lanes: int, epoch: int, cell: int | None) -> tuple[bytes, ...]:
    lane = _tag(quota, lanes, cell)
    return (
        keys.lease(lane, epoch, quota),
        keys.lines(lane, epoch, quota),
        keys.dirty(lane, epoch),
        keys.holds(lane, epoch, quota),
        keys.due(lane, epoch, quota),
    )


@lru_cache(KEYS_KEPT)
def _rate_keys(quota: str, lanes: int, cell: int | None) -> tuple[bytes, ...]:
    """The state, and the log of those that keep one."""
    lane = _tag(quota, lanes, cell)
    return keys.rate(lane, quota), keys.log(lane, quota)


@lru_cache(KEYS_KEPT)
def _slot_keys(quota: str, lanes: int, cell: int | None) -> tuple[bytes, ...]:
    lane = _tag(quota, lanes, cell)
    return keys.slots(lane, quota), keys.slots_due(lane, quota), keys.slots_over(lane, quota)


class Operation(NamedTuple):
    digest: str  # of its id, within its tenant
    body: str  # digest of what was asked
    remembered_ms: int


class OperationClaim(StrEnum):
    CLAIMED = "claimed"
    CHARGED = "charged"  # a script has executed it, or another journal has claimed it
    ANOTHER_BODY = "another_body"  # its id was used for something else


class KnownOperation(NamedTuple):
    """An operation over several cells that was decided before."""

    hold: HoldTerms
    is_concluded: bool  # all that was set aside for it has been spent


class Request(NamedTuple):
    """All that one request asks of the store: it is decided as a whole."""

    mode: str
    charges: Sequence[Charge]
    operation: Operation | None = None
    hold: HoldTerms | None = None  # only of an operation, and with it the mode is `hold`

    @property
    def may_repeat(self) -> bool:
        """Asked again, it is decided anew, by itself."""
        return self.mode == "enforce" and self.operation is None

    @property
    def may_slice(self) -> bool:
        """All of it may be given out without the store, if there is anything."""
        is_usual = self.mode not in LOOKS and self.operation is None and self.charges
        return bool(is_usual) and all(isinstance(each, RateCharge) and each.may_slice for each in self.charges)


class PolicyDecision(Struct, frozen=True, gc=False):
    """In the order in which check.lua packs it."""

    code: int  # why not; 0: allowed
    limit: int
    remaining: int
    reset_ms: int
    retry_after_ms: int
    available: int  # of a bucket: what is in it, in parts
    last_grant: int  # of a bucket: its rate, in millionths of a unit a second
    delay_ms: int

    @property
    def allowed(self) -> bool:
        return self.code == 0

    @property
    def reason(self) -> str:
        return REASONS[self.code]


class Decision(Struct, frozen=True, gc=False):
    allowed: bool
    replayed: bool
    policies: list[PolicyDecision]
    hold: HoldTerms | None = None  # what is held, and for how much longer; replayed, what was held the first time


Outcome = Decision | Exception
OnDecisions = Callable[[Sequence[Outcome]], None]
REASONS = ("", *(reason.value for reason in DenialReason))
_POLICY = struct.Struct("<B7q")
_ONE_POLICY = struct.Struct("<BB7q")  # of a request that meets one: its outcome as well
_HELD = struct.Struct("<qH")
_DENIED, _ALLOWED, _REPLAYED, _ANOTHER_BODY, _FAILED = range(5)
_LENGTH_BYTES = 2


class Run(NamedTuple):
    """A request, how many times in a row it is asked, and who hears of it: all the decisions of a call at once."""

    request: Request
    times: int
    on_decisions: OnDecisions


def runs_of(request: Request, times: int, on_decisions: OnDecisions) -> list[Run]:
    """An operation, and units that come back, of which a full bucket loses some each time, are asked one by one."""
    if request.may_repeat:
        return [Run(request, times, on_decisions)]
    return [Run(request, 1, on_decisions)] * times


class RateWant(NamedTuple):
    quota: str
    safe: Rate
    demand_micro: int
    is_contended: bool


class SlotWant(NamedTuple):
    slots: SlotCharge
    waiting: int  # units that were asked for in vain, at this agent


class SlotsReported(NamedTuple):
    mono_us: int
    reports: list[SlotReport]


class RatesReported(NamedTuple):
    mono_us: int
    reports: list[RateReport]


class Frozen(NamedTuple):
    bytes: str
    seq: int
    mono_us: int
    held: Mapping[str, int]  # units of each quota that was asked for, as they are now
    has_more: bool = False  # another batch is to follow at once: not all that is to be reported fitted in


class CutOff(NamedTuple):
    """What a store knows of it."""

    is_so: bool
    overdrawn: int  # units beyond its leases, since it began


class HoldState(NamedTuple):
    """What was done with a hold, and what it is now."""

    outcome: HoldOutcome
    state: str = ""
    units: int = 0
    committed: int = 0
    expires_in_ms: int = 0


def _hold_state(fields: Sequence[Any]) -> tuple[Any, ...]:
    return (fields[0].decode(), *fields[1:]) if fields else ()


class SlotsInUse(NamedTuple):
    quota: str
    units: int
    holders: int


class Scripts:
    def __init__(self, store: Store, cell: int | None = None) -> None:
        self._store = store
        self.cell = cell
        self.most_lines = MOST_LINES
        self._fence_key = keys.of_cell(keys.FENCE, cell)
        self._epochs_key = keys.of_cell(keys.EPOCHS, cell)
        self._probe_key = keys.of_cell(keys.PROBE, cell)
        self._source, self._sha = sources(), digests()

    async def _run(self, name: str, names: Sequence[bytes], *arguments: Argument) -> Any:
        try:
            return await self._store.call("EVALSHA", self._sha[name], len(names), *names, *arguments)
        except StoreError as error:
            if not _is_unknown(error):
                raise
        # The store does not have the script, so it has not run: sending its source runs it once.
        return await self._store.call("EVAL", self._source[name], len(names), *names, *arguments)

    # --- the life of the store ---------------------------------------------------------------------------------------

    async def read_fence(self) -> Fence:
        return _fence(await self._store.call("HMGET", self._fence_key, *_FENCE))

    async def begin_incarnation(
        self, fingerprint: str, fresh_nonce: str, ended_nonce: str = "", whole: int | None = None
    ) -> Fence:
        arguments = fingerprint, fresh_nonce, ended_nonce, whole or ""
        return _fence(await self._run("begin_incarnation", [self._fence_key], *arguments))

    async def adopt_epoch(
        self,
        fingerprint: str,
        nonce: str,
        epoch: int,
        lanes: int,
        *,
        is_exempt: bool = False,
        is_whole: bool = True,
    ) -> bool:
        names = [self._fence_key, self._epochs_key]
        arguments = (fingerprint, nonce, epoch, lanes, int(is_exempt), int(not is_whole))
        return bool(await self._run("adopt_epoch", names, *arguments))

    async def rebind_epoch(self, fence: Fence, fingerprint: str) -> bool:
        """The epoch of that fence goes on in this incarnation of the store. False if the fence is another by now."""
        assert fence.fingerprint is not None
        assert fence.nonce is not None
        assert fence.epoch is not None
        return bool(
            await self._run("rebind_epoch", [self._fence_key], fence.fingerprint, fence.nonce, fence.epoch, fingerprint)
        )

    async def seqs(self, epoch: int, lanes: int) -> list[int]:
        """Of each lane, the last number that was given to a batch."""
        names = [keys.lane(lane if self.cell is None else self.cell, epoch) for lane in range(lanes)]
        rows = [await self._store.call("HMGET", name, "seq", "frozen_seq") for name in names]
        return [max(int(each or 0) for each in row) for row in rows]

    async def older_epochs(self, incarnation: StoreIncarnation) -> list[StoreIncarnation]:
        """Epochs that this store had before: their evidence is still to be reported."""
        pairs = await self._store.call("HGETALL", self._epochs_key)
        known = {int(pairs[i]): int(pairs[i + 1]) for i in range(0, len(pairs), 2)}
        return [
            incarnation._replace(epoch=epoch, lanes=lanes)
            for epoch, lanes in sorted(known.items())
            if epoch < incarnation.epoch
        ]

    async def forget_epoch(self, older: StoreIncarnation) -> bool:
        """False if there is something to report of it after all."""
        dirty = [keys.dirty(older.tag(lane), older.epoch) for lane in range(older.lanes)]
        forgotten: int = await self._run(
            "forget_epoch", [self._fence_key, self._epochs_key, *dirty], older.fingerprint, older.epoch
        )
        if forgotten < 0:
            raise Fenced
        return bool(forgotten)

    # --- the hot path ------------------------------------------------------------------------------------------------

    async def check(
        self, incarnation: StoreIncarnation, mode: str, charges: Sequence[Charge], operation: Operation | None = None
    ) -> Decision:
        """One request in a call of its own. `gathering.Gatherer` asks for all that waits in one."""
        runs = [Run(Request(mode, charges, operation), 1, _nobody_hears)]
        names, arguments = _asked(self._fence_key, incarnation, runs)
        ((decision,),) = _decisions(await self._run("check", names, *arguments), runs)
        if isinstance(decision, Exception):
            raise decision
        return decision

    def send_check(
        self,
        incarnation: StoreIncarnation,
        runs: Sequence[Run],
        on_call: Callable[[Reply | Exception], None],
    ) -> None:
        """All these in one call, at once: each hears its decisions, or why there are none, before anything else runs.

        `on_call` hears first what came of the call as a whole.
        """
        names, arguments = _asked(self._fence_key, incarnation, runs)

        def on_reply(reply: Reply | Exception) -> None:
            if isinstance(reply, StoreError) and _is_unknown(reply):
                self._store.send(("EVAL", self._source["check"], len(names), *names, *arguments), on_reply)
                return
            on_call(reply)
            for run, decisions in zip(runs, _decisions(reply, runs), strict=True):
                run.on_decisions(decisions)

        self._store.send(("EVALSHA", self._sha["check"], len(names), *names, *arguments), on_reply)

    def probe(self, on_reply: Callable[[Reply | Exception], None]) -> None:
        """A write: a store without memory, or that may not write to its disk, answers reads."""
        self._store.send(("SET", self._probe_key, "1", "PX", PROBE_KEPT_MS), on_reply)

    async def claim_operations(
        self, incarnation: StoreIncarnation, claimant: str, operations: Sequence[Operation]
    ) -> list[OperationClaim]:
        """Claim operations that were admitted without the store. Give for each whether it was charged by the store."""
        claims: list[OperationClaim] = []
        for begin in range(0, len(operations), MOST_CLAIMS):
            some = operations[begin : begin + MOST_CLAIMS]
            names = [self._fence_key]
            arguments: list[Argument] = [incarnation.fingerprint, claimant]
            for each in some:
                names.append(self._operation_key(incarnation, each.digest))
                arguments += (each.body, each.remembered_ms)
            answer = await self._run("claim_operations", names, *arguments)
            if answer[0] == b"fenced":
                raise Fenced
            claims += [OperationClaim(claim.decode()) for claim in answer[1:]]
        return claims

    async def operation_left_ms(self, incarnation: StoreIncarnation, digest: str) -> int:
        """For how much longer it is remembered; below zero if it is not."""
        return int(await self._store.call("PTTL", self._operation_key(incarnation, digest)))

    async def find_operation(self, incarnation: StoreIncarnation, operation: Operation) -> KnownOperation | None:
        """Read what is known of an operation over several cells. Raises Fenced or OperationConflict."""
        names = [self._fence_key, self._operation_key(incarnation, operation.digest)]
        answer = await self._run("find_operation", names, incarnation.fingerprint, operation.body)
        if answer[0] == b"fenced":
            raise Fenced
        if answer[0] == b"another_body":
            raise OperationConflict
        if answer[0] == b"unknown":
            return None
        _, is_concluded, left_ms, hold = answer
        return KnownOperation(HoldTerms(HoldId.parse(hold.decode()), left_ms), bool(is_concluded))

    async def replace_operation(
        self, incarnation: StoreIncarnation, operation: Operation, before: HoldId, hold: HoldId, *, is_concluded: bool
    ) -> bool:
        """Write down what is set aside for it by now, or that all of it is spent. False: the record is another."""
        names = [self._fence_key, self._operation_key(incarnation, operation.digest)]
        arguments = (incarnation.fingerprint, operation.body, str(before), str(hold), int(is_concluded))
        replaced: int = await self._run("replace_operation", names, *arguments)
        if replaced < 0:
            raise Fenced
        return bool(replaced)

    def _operation_key(self, incarnation: StoreIncarnation, digest: str) -> bytes:
        return keys.operation(_tag(digest, incarnation.lanes, incarnation.cell), digest)

    # --- holds -------------------------------------------------------------------------------------------------------

    async def tell_hold(self, fingerprint: str, hold: HoldId, action: str, amount: int = 0) -> HoldState:
        """What became of the work: `commit` of so many units, `spend` of all, `release`, `extend` by ms; or `look`."""
        if not all(part.algorithm in _HOLDING for part in hold.parts):
            return HoldState(HoldOutcome.UNKNOWN)
        incarnation = StoreIncarnation(fingerprint, hold.epoch, hold.lanes, self.cell)
        names: list[bytes] = [self._fence_key, self._epochs_key]
        arguments: list[Argument] = [fingerprint, hold.epoch, hold.lanes, hold.name, action, amount, len(hold.parts)]
        for part in hold.parts:
            part_names, part_arguments = _HOLDING[part.algorithm](part.quota).asked(incarnation)
            names += part_names
            arguments += part_arguments
        outcome, *state = await self._run("hold", names, *arguments)
        if outcome == b"fenced":
            raise Fenced
        return HoldState(HoldOutcome(outcome.decode()), *_hold_state(state))

    # --- leasing and reporting ---------------------------------------------------------------------------------------

    async def give_back(
        self,
        incarnation: StoreIncarnation,
        quota: str,
        keep: int,
        *,
        ahead: bool = False,
        period: str | None = None,
        most: int | None = None,
    ) -> int:
        """Give back what is idle beyond `keep`, at most `most` units; `ahead`: also the lease of the next period.

        `period`: nothing is given back of the current lease unless it is of that period.
        """
        lease, lines, dirty, *holds = _allowance_keys(quota, incarnation.lanes, incarnation.epoch, incarnation.cell)
        names = [self._fence_key, lease, dirty, lines, *holds]
        rest, limit = "return" if ahead else "keep", "" if most is None else most
        units: int = await self._run(
            "give_back", names, incarnation.fingerprint, incarnation.epoch, quota, keep, rest, period or "", limit
        )
        if units < 0:
            raise Fenced
        return units

    async def dirty(self, incarnation: StoreIncarnation, lane: int, most: int) -> list[str]:
        """Quotas of the lane with something to report, and at most so many."""
        members = await self._store.call("SRANDMEMBER", keys.dirty(incarnation.tag(lane), incarnation.epoch), most)
        return sorted(member.decode() for member in members)

    async def frozen_seq(self, incarnation: StoreIncarnation, lane: int) -> int | None:
        """The number of the batch that waits for its receipt."""
        seq = await self._store.call("HGET", keys.lane(incarnation.tag(lane), incarnation.epoch), "frozen_seq")
        return None if seq is None else int(seq)

    async def freeze(self, incarnation: StoreIncarnation, lane: int, quotas: Sequence[str]) -> Frozen:
        names = self._lane_keys(incarnation, lane)
        for quota in quotas:
            lease, lines, _, *holds = _allowance_keys(quota, incarnation.lanes, incarnation.epoch, incarnation.cell)
            names += (lease, lines, *holds)
        answer = await self._run(
            "freeze", names, incarnation.fingerprint, incarnation.epoch, lane, self.most_lines, *quotas
        )
        _check_conversation(answer)
        held = dict(zip(quotas, answer[4], strict=True))
        return Frozen(answer[1].decode(), answer[2], int(answer[3]), held, bool(answer[5]))

    def _lane_keys(self, incarnation: StoreIncarnation, lane: int) -> list[bytes]:
        tag = incarnation.tag(lane)
        return [self._fence_key, keys.lane(tag, incarnation.epoch), keys.dirty(tag, incarnation.epoch)]

    async def settle(
        self, incarnation: StoreIncarnation, lane: int, sent_mono_us: int, reply: ExchangeReply
    ) -> dict[str, int]:
        """Take in a reply whose batch was booked. Gives the units that each quota gained by it."""
        assert reply.seq is not None  # only what could not be read has none, and is not booked
        leases = sorted(reply.leases, key=lambda lease: lease.first_minute)  # an old period ends before a new one
        names = self._lane_keys(incarnation, lane)
        for lease in leases:
            key, _, _, holds, _ = _allowance_keys(lease.quota, incarnation.lanes, incarnation.epoch, incarnation.cell)
            names += (key, holds)
        arguments: list[Argument] = [
            incarnation.fingerprint,
            incarnation.epoch,
            reply.seq,
            sent_mono_us,
            len(leases),
        ]
        for lease in leases:
            arguments += _lease_arguments(lease)
        answer = await self._run("settle", names, *arguments)
        _check_conversation(answer)
        gained: dict[str, int] = {}
        for lease, units in zip(leases, answer[2:], strict=False):  # an older epoch's reply installs nothing
            gained[lease.quota] = gained.get(lease.quota, 0) + units
        return gained

    async def unheard(self, incarnation: StoreIncarnation) -> CutOff:
        """The coordinator gave no answer."""
        answer = await self._run("unheard", [self._fence_key], incarnation.fingerprint, incarnation.epoch)
        if answer[0] == b"fenced":
            raise Fenced
        return CutOff(bool(answer[1]), answer[2])

    # --- shares of rates ---------------------------------------------------------------------------------------------

    async def report_rates(
        self, incarnation: StoreIncarnation, agent: str, wanted: Sequence[RateWant]
    ) -> RatesReported:
        """What all agents of the region want, and what is in force; what is not used is given up first."""
        names = [self._fence_key]
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, agent]
        for each in wanted:
            tag, safe = _tag(each.quota, incarnation.lanes, incarnation.cell), each.safe
            names += (keys.rate(tag, each.quota), keys.demands(tag, each.quota))
            arguments += (safe.rate_micro, safe.burst, each.demand_micro, int(each.is_contended))
        answer = await self._run("report_rates", names, *arguments)
        if answer[0] == b"fenced":
            raise Fenced
        numbers = [min(int(number), MAX_UNITS) for number in answer[2:]]  # sums over the region's agents
        reports = [
            RateReport(quota=each.quota, number=number, rate_micro=rate_micro, spent=spent, demand_micro=demand_micro)
            for each, (number, rate_micro, spent, demand_micro) in zip(
                wanted, (numbers[i : i + 4] for i in range(0, len(numbers), 4)), strict=True
            )
        ]
        return RatesReported(int(answer[1]), reports)

    async def share_rates(
        self, incarnation: StoreIncarnation, sent_mono_us: int, shares: Sequence[tuple[Rate, RateShare]]
    ) -> int:
        """Each with its safe share. Gives how many of them were new."""
        names = [self._fence_key]
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, sent_mono_us]
        for safe, share in shares:
            names.append(keys.rate(_tag(share.quota, incarnation.lanes, incarnation.cell), share.quota))
            arguments += (safe.rate_micro, safe.burst)
            arguments += (share.number, share.rate_micro, share.after_micro, share.expires_in_ms)
        answer = await self._run("share_rates", names, *arguments)
        if answer[0] == b"fenced":
            raise Fenced
        return int(answer[1])

    async def report_slots(
        self, incarnation: StoreIncarnation, agent: str, wanted: Sequence[SlotWant]
    ) -> SlotsReported:
        """The same of slots that are shared."""
        names = [self._fence_key]
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, agent]
        for slots, waiting in wanted:
            demands = keys.demands(_tag(slots.quota, incarnation.lanes, incarnation.cell), slots.quota)
            names += (*_slot_keys(slots.quota, incarnation.lanes, incarnation.cell), demands)
            arguments += (slots.limit, slots.slot_ttl_ms, slots.safe, waiting)
        answer = await self._run("report_slots", names, *arguments)
        if answer[0] == b"fenced":
            raise Fenced
        numbers = [min(int(number), MAX_UNITS) for number in answer[2:]]  # sums over the region's agents
        reports = []
        for place, (slots, _) in enumerate(wanted):
            number, held, units, lost_ms = numbers[4 * place : 4 * place + 4]
            reports.append(
                SlotReport(
                    quota=slots.quota, epoch=incarnation.epoch, wanted=units, number=number, held=held, lost_ms=lost_ms
                )
            )
        return SlotsReported(int(answer[1]), reports)

    async def share_slots(self, incarnation: StoreIncarnation, sent_mono_us: int, shares: Sequence[SlotShare]) -> int:
        """Gives how many of them were new."""
        names = [self._fence_key]
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, sent_mono_us]
        for share in shares:
            names += _slot_keys(share.quota, incarnation.lanes, incarnation.cell)
            arguments += (share.number, share.units, share.after_units, share.expires_in_ms, share.slot_ttl_ms)
        answer = await self._run("share_slots", names, *arguments)
        if answer[0] == b"fenced":
            raise Fenced
        return int(answer[1])

    # --- looking -----------------------------------------------------------------------------------------------------

    async def leased(self, incarnation: StoreIncarnation) -> list[str]:
        """Every quota that this epoch has a lease of. It walks all keys: for leaving and for people only."""
        return sorted({name.split(":", 4)[4] for name in await self._names(b"lease:%d:*" % incarnation.epoch)})

    async def _names(self, ending: bytes) -> set[str]:
        pattern = (b"lh:{*}:" if self.cell is None else b"lh:{%d}:" % self.cell) + ending
        found: set[str] = set()
        cursor = b"0"
        while True:
            cursor, names = await self._store.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found |= {name.decode() for name in names}
            if cursor == b"0":
                return found

    async def slotted(self, _: StoreIncarnation) -> list[str]:
        """Every quota of which slots are taken, or were lately. It walks all keys: for people only."""
        return sorted({name.split(":", 3)[3] for name in await self._names(b"slots:*")})

    async def slots_in_use(self, incarnation: StoreIncarnation, quota: str, mono_us: int) -> SlotsInUse:
        """As it is by now: who has run out is free, though no script has swept it yet."""
        slots, due, _ = _slot_keys(quota, incarnation.lanes, incarnation.cell)
        names = await self._store.call("ZRANGEBYSCORE", due, f"({mono_us}", "+inf")
        texts = await self._store.call("HMGET", slots, *names) if names else []
        units = [int(text.split()[1]) for text in texts if text is not None]
        return SlotsInUse(quota, sum(units), len(units))

    async def held(self, incarnation: StoreIncarnation) -> int:
        """Units that holds of this epoch have set aside."""
        fields = [await self.lease_fields(incarnation, quota) for quota in await self.leased(incarnation)]
        return sum(int(each.get("held", 0)) for each in fields)

    async def lease_fields(self, incarnation: StoreIncarnation, quota: str) -> dict[str, str]:
        tag = _tag(quota, incarnation.lanes, incarnation.cell)
        pairs = await self._store.call("HGETALL", keys.lease(tag, incarnation.epoch, quota))
        return {pairs[i].decode(): pairs[i + 1].decode() for i in range(0, len(pairs), 2)}

    async def mono_us(self) -> int:
        return int(await self._store.call("HGET", self._fence_key, "mono") or 0)


_FENCE = ("fingerprint", "nonce", "epoch", "lanes", "whole", "exempt")


def _fence(fields: list[bytes | None]) -> Fence:
    fingerprint, nonce, epoch, lanes, whole, exempt = (field.decode() if field else None for field in fields)
    return Fence(fingerprint, nonce, _number(epoch), _number(lanes), _number(whole), exempt == "1")


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def _check_conversation(answer: Sequence[Any]) -> None:
    if answer[0] == b"fenced":
        raise Fenced
    if answer[0] == b"lost":
        raise LeaseLost(f"the store has forgotten the lease of {answer[1].decode()}")


def _lease_arguments(lease: LeaseReply) -> tuple[Argument, ...]:
    return (
        lease.quota,
        lease.period,
        lease.granted,
        lease.overage,
        lease.unallocated - lease.beyond_limit,  # what `remaining` counts beside what is available; it may be negative
        lease.expires_in_ms,
        lease.ends_in_ms,
        lease.first_minute,
        lease.last_minute,
        lease.starts_in_ms,
        lease.overdraft,
        lease.consumed,
        lease.returned,
        int(lease.current),
    )


def _is_unknown(error: StoreError) -> bool:
    return str(error).startswith("NOSCRIPT")


def _nobody_hears(_: Sequence[Outcome]) -> None:
    """Whoever asks reads the answer itself."""


def _asked(fence: bytes, incarnation: StoreIncarnation, runs: Sequence[Run]) -> tuple[list[bytes], list[Argument]]:
    """The keys and arguments of check.lua."""
    names: list[bytes] = [fence]
    arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, len(runs)]
    for (mode, charges, operation, hold), times, _ in runs:
        if operation is None:
            arguments += (mode, times, len(charges), "")
        else:
            names.append(keys.operation(_tag(operation.digest, incarnation.lanes, incarnation.cell), operation.digest))
            arguments += (mode, times, len(charges), operation.body, operation.remembered_ms)
        if hold is not None:
            arguments += (str(hold.id), hold.id.name, hold.ttl_ms)
        for charge in charges:
            charge_names, charge_arguments = charge.asked(incarnation)
            names += charge_names
            arguments += charge_arguments
    return names, arguments


def _decisions(reply: Reply | Exception, runs: Sequence[Run]) -> Iterator[Sequence[Outcome]]:
    """Of each run its own."""
    if isinstance(reply, bytes):
        yield from _unpacked(reply, runs)
    else:
        why = reply if isinstance(reply, Exception) else Fenced()
        yield from ([why] * run.times for run in runs)


def _unpacked(reply: bytes, runs: Sequence[Run]) -> Iterator[Sequence[Outcome]]:
    at = 0
    for request, times, _ in runs:
        if request.hold is None and len(request.charges) == 1 and reply[at] <= _ALLOWED:  # a run fails as a whole
            end = at + times * _ONE_POLICY.size
            yield [
                Decision(outcome != _DENIED, False, [PolicyDecision(*policy)])
                for outcome, *policy in _ONE_POLICY.iter_unpack(reply[at:end])
            ]
            at = end
            continue
        decisions: list[Outcome] = []
        for _ in range(times):
            decision, at = _decision(reply, at, request)
            decisions.append(decision)
        yield decisions


def _decision(reply: bytes, at: int, request: Request) -> tuple[Outcome, int]:
    """The one that begins there, and where the next begins."""
    outcome, at = reply[at], at + 1
    if outcome == _ANOTHER_BODY:
        return OperationConflict(), at
    if outcome == _FAILED:
        begin = at + _LENGTH_BYTES
        end = begin + int.from_bytes(reply[at:begin], "little")
        return StoreError(reply[begin:end].decode(errors="replace")), end
    held = None
    if request.hold is not None and outcome != _DENIED:
        held, at = _held(reply, at)
    end = at + _POLICY.size * len(request.charges)
    policies = [PolicyDecision(*_POLICY.unpack_from(reply, begin)) for begin in range(at, end, _POLICY.size)]
    return Decision(outcome != _DENIED, outcome == _REPLAYED, policies, held), end


def _held(reply: bytes, at: int) -> tuple[HoldTerms, int]:
    expires_in_ms, length = _HELD.unpack_from(reply, at)
    begin = at + _HELD.size
    return HoldTerms(HoldId.parse(reply[begin : begin + length].decode()), expires_in_ms), begin + length
