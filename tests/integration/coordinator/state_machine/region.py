"""A region in the state machine: a store that spends, freezes and receives replies, incarnation after incarnation.

It knows only its replies and its own actions, as a real one does. What was really done is recorded in the `Truth`,
which no false report and no data loss changes.
"""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from coordinator.exchange.rules.balances import Key
from protocol.identifiers import lane_of
from protocol.messages import ExchangeReply, FrozenBatch, FrozenLease, LeaseReply, UsageLine
from protocol.outcomes import ExchangeOutcome
from protocol.periods import minute_of, period_of

ACKNOWLEDGED = {ExchangeOutcome.APPLIED, ExchangeOutcome.REPLAYED, ExchangeOutcome.RETIRED}


class Lie(StrEnum):
    """Faults that a broken store may report of a lease, and that the ledger detects."""

    A_LINE_TOO_MANY = "a_line_too_many"
    A_LINE_TOO_FEW = "a_line_too_few"
    RETURNED_TOO_MUCH = "returned_too_much"


@dataclass
class Truth:
    admitted: Counter[Key] = field(default_factory=Counter)  # on a lease that had the units
    done: Counter[tuple[int, Key]] = field(default_factory=Counter)  # by epoch, with what was done without asking


@dataclass
class Held:
    """A lease as its store holds it."""

    granted: int = 0
    overage: int = 0
    consumed: int = 0
    returned: int = 0
    told: int = 0  # of what was consumed, with the last batch
    expires_at: datetime | None = None

    @property
    def left(self) -> int:
        return max(0, self.granted + self.overage - self.consumed - self.returned)

    def hear(self, reply: LeaseReply, now: datetime) -> None:
        self.granted, self.overage = max(self.granted, reply.granted), max(self.overage, reply.overage)
        expires_at = now + timedelta(milliseconds=reply.expires_in_ms)
        self.expires_at = max(self.expires_at or expires_at, expires_at)


@dataclass
class Memory:
    """The data that a store may lose."""

    held: dict[Key, Held] = field(default_factory=dict)
    seqs: Counter[int] = field(default_factory=Counter)  # the last acknowledged number of each lane
    frozen: dict[int, str] = field(default_factory=dict)  # the batches without a receipt


@dataclass
class StoreIncarnation:
    """One incarnation of a region's store, in its epoch."""

    region: str
    epoch: int
    nonce: str
    fingerprint: str
    lanes: int
    truth: Truth
    memory: Memory = field(default_factory=Memory)
    backup: Memory = field(default_factory=Memory)
    sent: list[tuple[int, str]] = field(default_factory=list)
    is_over: bool = False
    forgot: bool = False

    # --- services ----------------------------------------------------------------------------------------------------

    def spend(self, key: Key, units: int, now: datetime) -> None:
        held = self.memory.held.get(key)
        if self.is_over or held is None or held.expires_at is None or held.expires_at <= now:
            return
        units = min(units, held.left)
        held.consumed += units
        self.truth.admitted[key] += units
        self.truth.done[self.epoch, key] += units

    def spend_without_asking(self, key: Key, units: int) -> None:
        """Spend without a check, as services with an open failure mode, or with usage larger than their hold."""
        if not self.is_over:
            self.memory.held.setdefault(key, Held()).consumed += units
            self.truth.done[self.epoch, key] += units

    def give_back(self, keep: int = 0, quota: str | None = None) -> None:
        for key, held in self.memory.held.items():
            if quota in (None, key.quota):
                held.returned += max(0, held.left - keep)

    # --- the store ---------------------------------------------------------------------------------------------------

    def back_up(self) -> None:
        self.backup = deepcopy(self.memory)

    def end(self, *, lost_data: bool) -> None:
        self.is_over, self.forgot = True, lost_data
        if lost_data:
            self.memory = self.backup

    # --- exchanges ---------------------------------------------------------------------------------------------------

    def freeze(self, lane: int, now: datetime, lie: Lie | None = None) -> str:
        if lane not in self.memory.frozen:
            leases = list(self._leases(lane, now, lie))
            batch = FrozenBatch(epoch=self.epoch, lane=lane, seq=self.memory.seqs[lane] + 1, leases=leases)
            self.memory.frozen[lane] = msgspec.json.encode(batch).decode()
        frozen = self.memory.frozen[lane]
        self.sent.append((lane, frozen))
        return frozen

    def _leases(self, lane: int, now: datetime, lie: Lie | None) -> Iterator[FrozenLease]:
        for key, held in self.memory.held.items():
            if lane_of(key.quota, self.lanes) == lane:
                if period_of(key.period).ends_at <= now:
                    held.returned += held.left
                yield self._lease(key, held, now, lie)

    def _lease(self, key: Key, held: Held, now: datetime, lie: Lie | None) -> FrozenLease:
        if lie is Lie.RETURNED_TOO_MUCH:
            held.returned += held.left + 1_000
        used, held.told = held.consumed - held.told, held.consumed
        halves = {"export": used // 2, "other": used - used // 2}
        if lie is Lie.A_LINE_TOO_MANY:
            halves["more"] = 1
        elif lie is Lie.A_LINE_TOO_FEW:
            halves["other"] = 0
        lines = [
            UsageLine(minute=minute_of(now), dimensions={"tenant": "acme", "policy": policy}, units=units)
            for policy, units in halves.items()
            if units
        ]
        totals = {name: getattr(held, name) for name in ("granted", "overage", "consumed", "returned")}
        return FrozenLease(quota=key.quota, period=key.period, lines=lines, **totals)

    def take_in(self, reply: ExchangeReply, now: datetime) -> None:
        lane, seq = reply.lane, reply.seq
        if lane is not None and seq is not None and reply.outcome in ACKNOWLEDGED and self._seq_of(lane) == seq:
            del self.memory.frozen[lane]
            self.memory.seqs[lane] = seq
        for lease in reply.leases:
            self.memory.held.setdefault(Key(lease.quota, lease.period), Held()).hear(lease, now)
            if lease.recall_keep is not None:
                self.give_back(lease.recall_keep, lease.quota)
        self.is_over |= reply.outcome is ExchangeOutcome.RETIRED

    def _seq_of(self, lane: int) -> int | None:
        frozen = self.memory.frozen.get(lane)
        return msgspec.json.decode(frozen, type=FrozenBatch).seq if frozen else None
