"""Every Lua script as one typed method: names of keys and the order of arguments meet here and nowhere else.

lua/ has the scripts; the header of each is its contract.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protocol.check import NO_COSTS
from protocol.identifiers import name_of_quota
from protocol.limits.rates import Rate
from protocol.messages import ExchangeReply, LeaseReply, RateReport, RateShare, ResetKeys, SlotReport, SlotShare
from protocol.outcomes import HoldOutcome
from protocol.units import MAX_UNITS
from regional_agent.admission.rules.hold_ids import HoldId, HoldTerms
from regional_agent.store import keys
from regional_agent.store.check_calls import CheckCalls, decode_decisions, encode_call, operation_key
from regional_agent.store.connection import Argument, Reply, Store
from regional_agent.store.library import StoreLibrary
from regional_agent.store.sources import Library, shipped_library
from regional_agent.store.types import (
    SHADOW,
    AgentRateDemand,
    AgentSlotDemand,
    AllowanceCharge,
    Charge,
    DueQuotas,
    Fence,
    Fenced,
    FrozenBytes,
    HoldState,
    KnownOperation,
    LeaseLost,
    Operation,
    OperationClaim,
    OperationConflict,
    PartitionState,
    PartUnits,
    RateReports,
    RequestRun,
    SlotCharge,
    SlotReports,
    SlotsInUse,
    StoreDecision,
    StoreIncarnation,
    StoreRequest,
)

MAX_LINES = 500  # of a batch: the store freezes them in some milliseconds
MAX_CLAIMS = 500  # operations in one call
PROBE_TTL_MS = 60_000
SCAN_COUNT = 1_000

# By algorithm, of those that can hold: a charge that names the keys of a part.
_HOLDING: dict[str, Callable[[str, int], Charge]] = {
    "allowance": lambda quota, units: AllowanceCharge(quota, units, 0, ""),
    "concurrency": lambda quota, units: SlotCharge(quota, units, 0, 0),
    f"{SHADOW}concurrency": lambda quota, units: SlotCharge(quota, units, 0, 0, is_shadow=True),
}
_ALL_HELD = -1  # units to commit: as many as the part has set aside
_FENCE_FIELDS = ("fingerprint", "nonce", "epoch", "lanes", "kept_epoch", "exempt", "format", "promoted")


class Scripts:
    """The scripts of one store, or of one cell of a Cluster."""

    def __init__(self, store: Store, cell: int | None = None, library: Library | None = None) -> None:
        """`library`: another version of the scripts than this release's."""
        self._store = store
        self.library = StoreLibrary(store, library or shipped_library(), keys.of_cell(keys.LIBRARIES, cell))
        self.cell = cell
        self.max_lines = MAX_LINES
        self._fence_key = keys.of_cell(keys.FENCE, cell)
        self._epochs_key = keys.of_cell(keys.EPOCHS, cell)
        self._probe_key = keys.of_cell(keys.PROBE, cell)
        self.confirmed_key = keys.of_cell(keys.CONFIRMED, cell)
        self.checks = CheckCalls(store, self.library, self._fence_key)

    async def _call(self, name: str, names: Sequence[bytes], *arguments: Argument) -> Any:
        """Run a script and return its reply. Raises Fenced, LeaseLost, StoreUnavailable or StoreError."""
        reply = await self.library.call(name, names, *arguments)
        if isinstance(reply, list) and reply[0] == b"fenced":
            raise Fenced
        if isinstance(reply, list) and reply[0] == b"lost":
            raise LeaseLost(f"the store has lost the lease of {reply[1].decode()}")
        return reply

    # --- incarnations and epochs --------------------------------------------------------------------------------------

    async def read_fence(self) -> Fence:
        return _fence(await self._store.call("HMGET", self._fence_key, *_FENCE_FIELDS))

    async def begin_incarnation(
        self,
        fingerprint: str,
        fresh_nonce: str,
        ended_nonce: str = "",
        kept_epoch: int | None = None,
        promoted: str = "",
    ) -> Fence:
        """Begin a new incarnation of the store, unless it began already, and return its fence."""
        arguments = fingerprint, fresh_nonce, ended_nonce, kept_epoch or "", keys.FORMAT, promoted
        return _fence(await self._call("begin_incarnation", [self._fence_key], *arguments))

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
        """Write the epoch that the coordinator issued. Return False if the store is another incarnation by now."""
        names = [self._fence_key, self._epochs_key]
        arguments = (fingerprint, nonce, epoch, lanes, int(is_exempt), int(not is_whole))
        return bool(await self._call("adopt_epoch", names, *arguments))

    async def rebind_epoch(self, fence: Fence, fingerprint: str) -> bool:
        """Continue a fence's epoch in this incarnation of the store. Return False if the fence has changed."""
        assert fence.fingerprint is not None
        assert fence.nonce is not None
        assert fence.epoch is not None
        arguments = fence.fingerprint, fence.nonce, fence.epoch, fingerprint
        return bool(await self._call("rebind_epoch", [self._fence_key], *arguments))

    async def last_seqs(self, epoch: int, lanes: int) -> list[int]:
        """Return, for each lane, the last number that was given to a batch."""
        names = [keys.lane(lane if self.cell is None else self.cell, epoch) for lane in range(lanes)]
        rows = [await self._store.call("HMGET", name, "seq", "frozen_seq") for name in names]
        return [max(int(each or 0) for each in row) for row in rows]

    async def older_epochs(self, incarnation: StoreIncarnation) -> list[StoreIncarnation]:
        """Return the epochs that this store had before and that may have usage to report."""
        pairs = await self._store.call("HGETALL", self._epochs_key)
        known = {int(pairs[i]): int(pairs[i + 1]) for i in range(0, len(pairs), 2)}
        older = sorted((epoch, lanes) for epoch, lanes in known.items() if epoch < incarnation.epoch)
        return [incarnation._replace(epoch=epoch, lanes=lanes) for epoch, lanes in older]

    async def forget_epoch(self, older: StoreIncarnation) -> bool:
        """Forget an older epoch. Return False if it has something to report after all."""
        dirty = [keys.dirty(older.hash_tag(lane), older.epoch) for lane in range(older.lanes)]
        names = [self._fence_key, self._epochs_key, *dirty]
        return bool(await self._call("forget_epoch", names, older.fingerprint, older.epoch))

    # --- the hot path -------------------------------------------------------------------------------------------------

    async def check(
        self,
        incarnation: StoreIncarnation,
        mode: str,
        charges: Sequence[Charge],
        operation: Operation | None = None,
    ) -> StoreDecision:
        """Decide one request in a call of its own. `CheckBatcher` decides many in one."""
        runs = [RequestRun(StoreRequest(mode, charges, operation), 1, lambda _: None)]
        names, arguments = encode_call(self._fence_key, incarnation, runs)
        ((outcome,),) = decode_decisions(await self._call("check", names, *arguments), runs)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def probe(self, on_reply: Callable[[Reply | Exception], None]) -> None:
        """Send a write, for a store that has no memory left, or cannot write to its disk, still answers reads."""
        self._store.send(("SET", self._probe_key, "1", "PX", PROBE_TTL_MS), on_reply)

    # --- operations ---------------------------------------------------------------------------------------------------

    async def claim_operations(
        self, incarnation: StoreIncarnation, claimant: str, operations: Sequence[Operation]
    ) -> list[OperationClaim]:
        """Claim operations that were admitted without the store, and return for each whether the store charged it."""
        claims: list[OperationClaim] = []
        for begin in range(0, len(operations), MAX_CLAIMS):
            names = [self._fence_key]
            arguments: list[Argument] = [incarnation.fingerprint, claimant]
            for each in operations[begin : begin + MAX_CLAIMS]:
                names.append(operation_key(incarnation, each.digest))
                arguments += (each.body, each.remembered_ms)
            answer = await self._call("claim_operations", names, *arguments)
            claims += [OperationClaim(claim.decode()) for claim in answer[1:]]
        return claims

    async def operation_ttl_ms(self, incarnation: StoreIncarnation, digest: str) -> int:
        """Return for how much longer the store remembers an operation; below zero if it does not know it."""
        return int(await self._store.call("PTTL", operation_key(incarnation, digest)))

    async def find_operation(self, incarnation: StoreIncarnation, operation: Operation) -> KnownOperation | None:
        """Read what is known of an operation over several cells. Raises Fenced or OperationConflict."""
        names = [self._fence_key, operation_key(incarnation, operation.digest)]
        answer = await self._call("find_operation", names, incarnation.fingerprint, operation.body)
        if answer[0] == b"another_body":
            raise OperationConflict
        if answer[0] == b"unknown":
            return None
        _, is_concluded, left_ms, hold = answer
        return KnownOperation(HoldTerms(HoldId.parse(hold.decode()), left_ms), bool(is_concluded))

    async def replace_operation(
        self, incarnation: StoreIncarnation, operation: Operation, before: HoldId, hold: HoldId, *, is_concluded: bool
    ) -> bool:
        """Write what is set aside for it by now, or that all of it is spent. Return False if the record has changed."""
        names = [self._fence_key, operation_key(incarnation, operation.digest)]
        arguments = (incarnation.fingerprint, operation.body, str(before), str(hold), int(is_concluded))
        return bool(await self._call("replace_operation", names, *arguments))

    # --- holds --------------------------------------------------------------------------------------------------------

    async def update_hold(
        self,
        fingerprint: str,
        hold: HoldId,
        action: str,
        amount: int | None = 0,
        costs: Mapping[str, int] = NO_COSTS,
    ) -> HoldState:
        """Apply an action: `commit` so many units, `spend` all, `release`, `extend` by so many ms, or `look`.

        A commit takes the units of a quota from `costs`. For others it takes `amount`, and where that is None all that
        is held.
        """
        if not all(part.algorithm in _HOLDING for part in hold.parts):
            return HoldState(HoldOutcome.UNKNOWN)
        incarnation = StoreIncarnation(fingerprint, hold.epoch, hold.lanes, self.cell)
        names: list[bytes] = [self._fence_key, self._epochs_key]
        extend_ms = amount if action == "extend" and amount is not None else 0
        arguments: list[Argument] = [fingerprint, hold.epoch, hold.lanes, hold.name, action, extend_ms, len(hold.parts)]
        for part in hold.parts:
            units = costs.get(name_of_quota(part.quota), amount)
            charge = _HOLDING[part.algorithm](part.quota, _ALL_HELD if units is None else units)
            part_names, part_arguments = charge.script_args(incarnation)
            names += part_names
            arguments += part_arguments
        outcome, *state = await self._call("hold", names, *arguments)
        return _hold_state(HoldOutcome(outcome.decode()), state)

    # --- leases and their reports -------------------------------------------------------------------------------------

    async def return_units(
        self,
        incarnation: StoreIncarnation,
        quota: str,
        keep: int,
        *,
        ahead: bool = False,
        period: str | None = None,
        most: int | None = None,
    ) -> int:
        """Return what is idle beyond `keep`, at most `most` units; `ahead`: also the lease of the next period.

        `period`: return nothing of the current lease unless it is of that period.
        """
        lease, lines, dirty, *holds = self._allowance_keys(incarnation, quota)
        names = [self._fence_key, lease, dirty, lines, *holds]
        limit: Argument = "" if most is None else most
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, quota, keep]
        arguments += ["return" if ahead else "keep", period or "", limit]
        return int((await self._call("return_units", names, *arguments))[1])

    async def dirty_quotas(self, incarnation: StoreIncarnation, lane: int, most: int) -> list[str]:
        """Return at most so many quotas of the lane that have something to report, due or not."""
        name = keys.dirty(incarnation.hash_tag(lane), incarnation.epoch)
        return sorted(member.decode() for member in await self._store.call("ZRANGE", name, 0, most - 1))

    async def due_quotas(
        self, incarnation: StoreIncarnation, lane: int, most: int, *, is_sending: bool = False, taken_along_ms: int = 0
    ) -> DueQuotas:
        """Return quotas of the lane whose report is due, with those that are due within `taken_along_ms`.

        These are taken along only if another report is due, or with `is_sending`: the lane sends a batch in any case.
        """
        names = self._lane_keys(incarnation, lane)
        arguments = incarnation.fingerprint, most, int(is_sending), 1000 * taken_along_ms
        _, mono, frozen_since, first, *due = await self._call("find_due", names, *arguments)
        moments = [frozen_since]
        if first:
            lease, *_ = self._allowance_keys(incarnation, first.decode())
            moments.append(await self._store.call("HGET", lease, "unreported_since"))
        oldest_us = min((int(moment) for moment in moments if moment), default=int(mono))
        return DueQuotas([quota.decode() for quota in due], max(0, int(mono) - oldest_us) // 1000)

    async def frozen_seq(self, incarnation: StoreIncarnation, lane: int) -> int | None:
        """Return the number of the batch that waits for its receipt."""
        seq = await self._store.call("HGET", keys.lane(incarnation.hash_tag(lane), incarnation.epoch), "frozen_seq")
        return None if seq is None else int(seq)

    async def freeze(self, incarnation: StoreIncarnation, lane: int, quotas: Sequence[str]) -> FrozenBytes:
        """Return the batch that the lane has to report. While it waits for a receipt, its bytes stay the same."""
        names = self._lane_keys(incarnation, lane)
        for quota in quotas:
            lease, lines, _, *holds = self._allowance_keys(incarnation, quota)
            names += (lease, lines, *holds)
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, lane, self.max_lines, *quotas]
        answer = await self._call("freeze", names, *arguments)
        held = dict(zip(quotas, answer[4], strict=True))
        return FrozenBytes(answer[1].decode(), answer[2], int(answer[3]), held, bool(answer[5]))

    async def settle(
        self, incarnation: StoreIncarnation, lane: int, sent_mono_us: int, reply: ExchangeReply
    ) -> dict[str, int]:
        """Install a reply whose batch was booked. Return the units that each quota gained by it."""
        assert reply.seq is not None  # only a batch that could not be read has none, and it is not booked
        leases = sorted(reply.leases, key=lambda lease: lease.first_minute)  # an old period ends before a new one
        names = self._lane_keys(incarnation, lane)
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, reply.seq, sent_mono_us, len(leases)]
        for lease in leases:
            key, _, _, holds, _ = self._allowance_keys(incarnation, lease.quota)
            names += (key, holds)
            arguments += _lease_arguments(lease)
        answer = await self._call("settle", names, *arguments)
        gained: dict[str, int] = {}
        for lease, units in zip(leases, answer[2:], strict=False):  # an older epoch's reply installs nothing
            gained[lease.quota] = gained.get(lease.quota, 0) + units
        return gained

    async def note_coordinator_lost(self, incarnation: StoreIncarnation) -> PartitionState:
        """Note that the coordinator gave no answer, and return whether the region counts as partitioned."""
        answer = await self._call("coordinator_lost", [self._fence_key], incarnation.fingerprint, incarnation.epoch)
        return PartitionState(bool(answer[1]), answer[2])

    def _lane_keys(self, incarnation: StoreIncarnation, lane: int) -> list[bytes]:
        tag = incarnation.hash_tag(lane)
        return [self._fence_key, keys.lane(tag, incarnation.epoch), keys.dirty(tag, incarnation.epoch)]

    def _allowance_keys(self, incarnation: StoreIncarnation, quota: str) -> tuple[bytes, ...]:
        return keys.of_allowance(quota, incarnation.lanes, incarnation.epoch, incarnation.cell)

    # --- shares of rates and slots ------------------------------------------------------------------------------------

    async def report_rates(
        self, incarnation: StoreIncarnation, agent: str, demands: Sequence[AgentRateDemand]
    ) -> RateReports:
        """Report the demand of all agents and the shares in force; idle shares are given up first."""
        names = [self._fence_key]
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, agent]
        for each in demands:
            tag, base = _tag(incarnation, each.quota), each.base_share
            names += (keys.rate(tag, each.quota), keys.demands(tag, each.quota))
            arguments += (int(base.rate_micro), base.burst, each.demand_micro, int(each.is_contended))
        mono_us, rows = _rows_of_four(await self._call("report_rates", names, *arguments))
        reports = [
            RateReport(quota=each.quota, number=number, rate_micro=rate_micro, spent=spent, demand_micro=demand_micro)
            for each, (number, rate_micro, spent, demand_micro) in zip(demands, rows, strict=True)
        ]
        return RateReports(mono_us, reports)

    async def share_rates(
        self, incarnation: StoreIncarnation, sent_mono_us: int, shares: Sequence[tuple[Rate, RateShare]]
    ) -> int:
        """Install shares, each with its base share. Return how many of them were new."""
        names = [self._fence_key]
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, sent_mono_us]
        for base, share in shares:
            names.append(keys.rate(_tag(incarnation, share.quota), share.quota))
            arguments += (int(base.rate_micro), base.burst)
            arguments += (share.number, share.rate_micro, share.after_micro, share.expires_in_ms)
        return int((await self._call("share_rates", names, *arguments))[1])

    async def report_slots(
        self, incarnation: StoreIncarnation, agent: str, demands: Sequence[AgentSlotDemand]
    ) -> SlotReports:
        """Report the demand of all agents, the slots in use and the shares in force."""
        names = [self._fence_key]
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, agent]
        for slots, waiting in demands:
            names += keys.of_slots(slots.quota, incarnation.lanes, incarnation.cell)
            names.append(keys.demands(_tag(incarnation, slots.quota), slots.quota))
            arguments += (slots.limit, slots.slot_ttl_ms, slots.base_share, waiting)
        mono_us, rows = _rows_of_four(await self._call("report_slots", names, *arguments))
        epoch = incarnation.epoch
        reports = [
            SlotReport(quota=slots.quota, epoch=epoch, wanted=units, number=number, held=held, lost_ms=lost_ms)
            for (slots, _), (number, held, units, lost_ms) in zip(demands, rows, strict=True)
        ]
        return SlotReports(mono_us, reports)

    async def share_slots(self, incarnation: StoreIncarnation, sent_mono_us: int, shares: Sequence[SlotShare]) -> int:
        """Install shares. Return how many of them were new."""
        names = [self._fence_key]
        arguments: list[Argument] = [incarnation.fingerprint, incarnation.epoch, sent_mono_us]
        for share in shares:
            names += keys.of_slots(share.quota, incarnation.lanes, incarnation.cell)
            arguments += (share.number, share.units, share.after_units, share.expires_in_ms, share.slot_ttl_ms)
        return int((await self._call("share_slots", names, *arguments))[1])

    # --- reading, for status and shutdown -----------------------------------------------------------------------------

    async def leased_quotas(self, incarnation: StoreIncarnation) -> list[str]:
        """Return every quota that this epoch has a lease of. It scans all keys: for shutdown and status only."""
        return sorted({name.split(":", 4)[4] for name in await self._scan(b"lease:%d:*" % incarnation.epoch)})

    async def quotas_with_slots(self, _: StoreIncarnation) -> list[str]:
        """Return every quota with slots that are or were lately taken. It scans all keys: for status only."""
        return sorted({name.split(":", 3)[3] for name in await self._scan(b"slots:*")})

    async def reset_rates(self, incarnation: StoreIncarnation, resets: Sequence[ResetKeys]) -> int:
        """Forget what was counted of the keys of resets that the store does not know yet. Return how many these are."""
        names: list[bytes] = [self._fence_key]
        numbers: list[Argument] = []
        for each in resets:
            for key in each.keys:
                tag = _tag(incarnation, key)
                names += (keys.rate(tag, key), keys.rate_log(tag, key))
                numbers.append(each.number)
        return int((await self._call("reset_rates", names, incarnation.fingerprint, *numbers))[1])

    async def _scan(self, ending: bytes) -> set[str]:
        pattern = (b"lh:{*}:" if self.cell is None else b"lh:{%d}:" % self.cell) + ending
        found: set[str] = set()
        cursor = b"0"
        while True:
            cursor, names = await self._store.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
            found |= {name.decode() for name in names}
            if cursor == b"0":
                return found

    async def slots_in_use(self, incarnation: StoreIncarnation, quota: str, mono_us: int) -> SlotsInUse:
        """Return the slots that are taken now: one that has run out is free, also before a script removes it."""
        slots, due, _ = keys.of_slots(quota, incarnation.lanes, incarnation.cell)
        names = await self._store.call("ZRANGEBYSCORE", due, f"({mono_us}", "+inf")
        texts = await self._store.call("HMGET", slots, *names) if names else []
        units = [int(text.split()[1]) for text in texts if text is not None]
        return SlotsInUse(quota, sum(units), len(units))

    async def held_units(self, incarnation: StoreIncarnation) -> int:
        """Return the units that holds of this epoch have set aside."""
        fields = [await self.lease_fields(incarnation, quota) for quota in await self.leased_quotas(incarnation)]
        return sum(int(each.get("held", 0)) for each in fields)

    async def lease_fields(self, incarnation: StoreIncarnation, quota: str) -> dict[str, str]:
        lease = keys.lease(_tag(incarnation, quota), incarnation.epoch, quota)
        pairs = await self._store.call("HGETALL", lease)
        return {pairs[i].decode(): pairs[i + 1].decode() for i in range(0, len(pairs), 2)}

    async def read_mono_us(self) -> int:
        """Return the store's clock as the last script wrote it."""
        return int(await self._store.call("HGET", self._fence_key, "mono") or 0)


def _tag(incarnation: StoreIncarnation, quota: str) -> int:
    return keys.hash_tag(quota, incarnation.lanes, incarnation.cell)


def _fence(fields: list[bytes | None]) -> Fence:
    texts = [each.decode() if each else None for each in fields]
    fingerprint, nonce, epoch, lanes, kept_epoch, exempt, format_, promoted = texts
    return Fence(
        fingerprint,
        nonce,
        _number(epoch),
        _number(lanes),
        _number(kept_epoch),
        exempt == "1",
        _number(format_) or keys.OLDEST_FORMAT,
        promoted or "",
    )


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def _hold_state(outcome: HoldOutcome, fields: Sequence[Any]) -> HoldState:
    if not fields:
        return HoldState(outcome)
    state, units, committed, expires_in_ms, *parts = fields
    by_part = tuple(PartUnits(*parts[at : at + 2]) for at in range(0, len(parts), 2))
    return HoldState(outcome, state.decode(), units, committed, expires_in_ms, by_part)


def _rows_of_four(answer: Sequence[Any]) -> tuple[int, list[list[int]]]:
    """Return the clock, and four numbers per quota. They are sums over the region's agents, so they are bounded."""
    numbers = [min(int(number), MAX_UNITS) for number in answer[2:]]
    return int(answer[1]), [numbers[i : i + 4] for i in range(0, len(numbers), 4)]


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
        lease.report_within_ms,
        lease.report_at,
    )
