"""Postgres in plain Python, as far as an exchange needs it: rows, and transactions that commit or vanish whole.

What is decided is decided by the real domain; here are only the rows and the order of reading and writing, as
`coordinator/operations` has them in SQL. test_ledger_model.py drives both with the same calls and demands equal replies
and equal rows.

A transaction works on copies. `commit` puts them in place and keeps what stood there before, so that a fail-over can
lose the last few commits, all or nothing each.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from msgspec import structs

from coordinator.adjustments.rules import (
    EXPIRES_AFTER,
    AdjustmentKind,
    AdjustmentRefusal,
    AdjustmentState,
    adjust,
    booked_under,
    entry_of,
    refusal_of,
    state_of,
)
from coordinator.adjustments.rules import AdjustmentTerms as Adjusting
from coordinator.database.expect import UnexpectedRows
from coordinator.epochs.rules.lost_ledger import (
    empty_reports,
    is_too_far_behind,
    may_keep_another,
    rebase_all,
    reported_leases,
    state_of_restored_lease,
)
from coordinator.epochs.rules.promotion import PreviousEpoch, may_be_whole, says_whole
from coordinator.epochs.rules.split_brain import WINDOW, conflicting_stores
from coordinator.exchange.rules import decision, replies, submissions
from coordinator.exchange.rules import locked as locking
from coordinator.exchange.rules.allocation import fund
from coordinator.exchange.rules.balances import Account, Correction, Key, Lease, Pool
from coordinator.exchange.rules.decision import BookedReport, Decided
from coordinator.exchange.rules.granting import LeaseTerms
from coordinator.exchange.rules.locked import LockedPool, RegionalOverage
from coordinator.exchange.rules.posting import COUNTED_AS, Entry, Movement, Transfer
from coordinator.exchange.rules.settlement import EpochState, Lane, QuarantineReason, expire, key_of
from coordinator.exchange.rules.submissions import ExchangeCall, Matched
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, RegionShare, entitlement, quotas_of
from coordinator.notice import Notice
from coordinator.periods.rules.carry_over import CarryOver, carry_over, carry_over_of, may_carry_over
from coordinator.periods.rules.closing import (
    HOLD_WAIT,
    Late,
    Missing,
    Obstacle,
    OpenHoldTerms,
    carry,
    close_lease,
    correction_of,
    late_of,
    leave_holds,
    missing_for_close,
    open_key,
)
from coordinator.proof.rules import genesis_head
from coordinator.rebalancing.rules.division import (
    Move,
    by_weight,
    debitable,
    division_of,
    fetch_notice,
    funded_for,
    recall_notice,
)
from coordinator.rebalancing.rules.plan import DividedPool, Plan, Planner, end_of_move, plan_of
from coordinator.rebalancing.rules.region_settings import Setting, Settings
from coordinator.resets.rules import plan_reset
from coordinator.suspense.rules import EpochEnd, ResolutionKind, ResolutionRefusal, propose, resolve, resolve_late
from coordinator.suspense.rules import ResolutionTerms as Agreed
from coordinator.usage.rules.reconciliation import reconcile
from protocol.identifiers import parse_quota_key, wider_keys
from protocol.lease import LeaseEvent, LeaseState, after
from protocol.limits.document import LimitsDocument, LimitValue, PolicyBundle
from protocol.limits.usage_labels import LABELS
from protocol.messages import (
    EpochOpened,
    ExchangeResponse,
    FrozenBatch,
    OpenEpoch,
    RebindEpoch,
    Receipt,
    ResetBatch,
    ResetKeys,
    Signal,
)
from protocol.outcomes import EpochRefusal
from protocol.periods import period_at, period_of
from tests.simulation.simulated.model_queries import open_leases, read_books


class Epoch(NamedTuple):
    region: str
    nonce: str
    fingerprint: str
    lanes: int
    state: EpochState
    opened_at: datetime
    lost_data: bool = False
    loss_is_assumed: bool = False
    cell: int = 0
    cells: int = 1

    def is_in_place_of(self, region: str, request: OpenEpoch) -> bool:
        return self.region == region and (self.cell == request.cell or self.cells != request.cells)


class LaneRow(NamedTuple):
    last_seq: int
    last_hash: bytes | None
    head: bytes


class PeriodRow(NamedTuple):
    state: str
    close_requested_at: datetime | None = None
    carries_suspense: bool = False
    closed_at: datetime | None = None


OPEN = PeriodRow("open")
Row = TypeVar("Row", Pool, Lease, Correction, Move)
_VALUES = {kind: attrgetter(*(each.name for each in fields(kind))) for kind in (Pool, Lease, Correction, Move)}


def copy(row: Row) -> Row:
    """Copy a row, without copy.copy's look-up of its fields."""
    return type(row)(*_VALUES[type(row)](row))


class Proposal(NamedTuple):
    """A proposed end of one lease's suspense, until it is approved or another takes its place."""

    id: str
    terms: Agreed


class Adjustment(NamedTuple):
    """A correction that one person proposed, and what became of it."""

    terms: Adjusting
    proposed_by: UUID
    expires_at: datetime
    approved_by: UUID | None = None
    approved_at: datetime | None = None
    booked_in: str | None = None
    withdrawn_by: UUID | None = None
    withdrawn_at: datetime | None = None

    def state(self, now: datetime) -> AdjustmentState:
        return state_of(self.approved_at, self.withdrawn_at, self.expires_at, now)


_ENDED = {
    AdjustmentState.APPROVED: AdjustmentRefusal.APPROVED_BEFORE,
    AdjustmentState.WITHDRAWN: AdjustmentRefusal.WITHDRAWN,
    AdjustmentState.EXPIRED: AdjustmentRefusal.EXPIRED,
}


class Name(NamedTuple):
    """A row: its table and its key."""

    table: str
    key: Any


class Kept(NamedTuple):
    """A batch that showed its ledger to have lost data."""

    batch: FrozenBatch
    recorded_at: datetime


class Override(NamedTuple):
    """Rows of one key are in the order of their making: a later one counts before an earlier."""

    key: str
    limit: int
    valid_from: datetime
    valid_until: datetime

    def is_in_force(self, now: datetime) -> bool:
        return self.valid_from <= now < self.valid_until


@dataclass
class Transaction:
    """The writes of one transaction. No other sees them before it is committed."""

    writes: dict[Name, Any] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)  # with their transfers, in the order of their booking
    quarantined: list[tuple[object, ...]] = field(default_factory=list)  # epoch, lane, seq, quota, period, reason
    lost: list[tuple[str, list[int]]] = field(default_factory=list)  # epochs whose store was shown to have lost data
    asked: Counter[tuple[Key, str]] = field(default_factory=Counter)  # units that requests wait for, by region


class LedgerModel:
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.rows: dict[str, dict[Any, Any]] = defaultdict(dict)
        self.rows["policy_version"][0] = 0
        self.rows["limits"][0] = LimitsDocument()
        self._undo: list[dict[Name, Any]] = []
        self._position = 0
        self.kept: set[int] = set()  # epochs of which a promoted replica has proved that it has everything
        self._epochs = 0  # a sequence: it never gives a number twice, whatever was rolled back
        self.on_commit: Callable[[Transaction], None] = lambda _: None
        self.on_write: Callable[[Transaction, Mapping[Name, Any]], None] = lambda *_: None  # with the rows before
        self.between_reads: list[Callable[[], None]] = []  # done once an exchange has read the catalogue
        self.touched: dict[tuple[int, Key], None] = {}  # leases, since the last look, in the order of their writing
        self.proved: set[tuple[int, Key]] = set()  # leases that were lost and then were not, likewise
        self.held_for_people: set[tuple[object, object]] = set()  # quota and period of what is in quarantine

    # --- rows ---------------------------------------------------------------------------------------------------------

    @property
    def pools(self) -> dict[Key, Pool]:
        return self.rows["pool"]

    @property
    def leases(self) -> dict[tuple[int, Key], Lease]:
        return self.rows["lease"]

    @property
    def corrections(self) -> dict[tuple[int, str, str, str], Correction]:
        """Corrections by epoch, quota, the period of the lease and the period of booking."""
        return self.rows["correction"]

    def period(self, period: str) -> PeriodRow:
        row: PeriodRow = self.rows["period"].get(period, OPEN)
        return row

    def is_closed(self, key: Key) -> bool:
        return self.period(key.period).closed_at is not None

    def late_books(self, epoch: int, key: Key) -> list[Correction]:
        """The corrections of a lease since its period was closed."""
        about = (epoch, key.quota, key.period)
        return [each for name, each in self.corrections.items() if name[:3] == about]

    @property
    def proposals(self) -> dict[tuple[int, Key], Proposal | None]:
        """Resolutions by lease; None once approved."""
        return self.rows["proposal"]

    @property
    def epochs(self) -> dict[int, Epoch]:
        return self.rows["epoch"]

    @property
    def lane_rows(self) -> dict[tuple[int, int], LaneRow]:
        return self.rows["lane"]

    def commit(self, transaction: Transaction) -> None:
        self._refuse_closed(transaction)
        undo: dict[Name, Any] = {}
        for name, row in transaction.writes.items():
            undo[name] = self.rows[name.table].get(name.key)
            self.rows[name.table][name.key] = row
            if name.table == "lease":
                self.touched[name.key] = None
                was = undo[name]
                if was is not None and was.state is LeaseState.LOST and row.state is not LeaseState.LOST:
                    self.proved.add(name.key)
        self._move(transaction.entries, undo)
        self.held_for_people |= {(quota, period) for _, _, _, quota, period, _ in transaction.quarantined}
        self.on_write(transaction, undo)
        if undo:
            self._undo.append(undo)
        del self._undo[:-200]
        self.on_commit(transaction)

    def _refuse_closed(self, transaction: Transaction) -> None:
        """Refuse what the triggers refuse. A close writes its period last, so the earlier state decides."""
        for name, row in transaction.writes.items():
            is_in_a_period = name.table in ("pool", "lease", "correction")
            if is_in_a_period and self.is_closed(row.key) and row != self.rows[name.table].get(name.key):
                raise UnexpectedRows(f"{name} is of a closed period")
        for entry in transaction.entries:
            if closed := [each for each in entry.transfers if self.is_closed(each.key)]:
                raise UnexpectedRows(f"{closed} are of a closed period")

    def _move(self, entries: Iterable[Entry], undo: dict[Name, Any]) -> None:
        """Return the sums of transfers, to compare with the projections."""
        moved = self.rows["moved"]
        for entry in entries:
            for each in entry.transfers:
                about = (each.key, entry.epoch, each.charge_period, each.src, each.dst, each.cause)
                undo.setdefault(Name("moved", about), moved.get(about))
                moved[about] = moved.get(about, 0) + each.units
                if each.dst is Account.CONSUMED:
                    self._add("used", each, undo)
                if COUNTED_AS in (each.dimensions or {}):
                    self._add("overage", each, undo)
                if each.dst is Account.CONSUMED and LABELS in (each.dimensions or {}):
                    self._add_labelled(entry, each, undo)

    def _add(self, table: str, each: Transfer, undo: dict[Name, Any]) -> None:
        name, rows = Name(table, (each.key, each.charge_period)), self.rows[table]
        undo.setdefault(name, rows.get(name.key))
        rows[name.key] = rows.get(name.key, 0) + each.units

    def _add_labelled(self, entry: Entry, each: Transfer, undo: dict[Name, Any]) -> None:
        name = Name("labelled", (entry.region, each.key.quota, each.charge_period, (each.dimensions or {})[LABELS]))
        undo.setdefault(name, self.rows["labelled"].get(name.key))
        self.rows["labelled"][name.key] = self.rows["labelled"].get(name.key, 0) + each.units

    def everything_is_replicated(self) -> None:
        self._undo.clear()

    def lose(self, commits: int) -> int:
        """A fail-over to a replica that had not heard of the last commits. Gives how many were lost."""
        lost = 0
        while self._undo and lost < commits:
            for name, row in self._undo.pop().items():
                if row is None:
                    self.rows[name.table].pop(name.key, None)
                else:
                    self.rows[name.table][name.key] = row
            lost += 1
        return lost

    def since_approval(self) -> int:
        """Return how many commits must be lost to lose the last approval; 0 if there is none."""
        for commits, undo in enumerate(reversed(self._undo), 1):
            if any(isinstance(row, Proposal) for row in undo.values()):
                return commits
        return 0

    # --- operations of people -----------------------------------------------------------------------------------------

    def put_limits(self, document: LimitsDocument) -> Transaction:
        if document == self.rows["limits"][0]:
            return Transaction()
        version = self.rows["policy_version"][0] + 1
        signal = Notice(Signal(kind="policies"))
        return Transaction({Name("limits", 0): document, Name("policy_version", 0): version}, [signal])

    def put_region(self, name: str, status: str, weight: int = 1) -> Transaction:
        if self.rows["region"].get(name) == RegionShare(status, weight):
            return Transaction()
        version = self.rows["policy_version"][0] + 1
        notices = [Notice(Signal(kind="policies"))]
        if status != "active":
            notices.append(Notice(Signal(kind="drain"), region=name))
        writes = {Name("region", name): RegionShare(status, weight), Name("policy_version", 0): version}
        return Transaction(writes, notices)

    def overridden(self, now: datetime) -> dict[str, dict[str, LimitValue]]:
        """Return the settings in force, by quota and key."""
        made: dict[int, Override] = self.rows["override"]
        found: dict[str, dict[str, LimitValue]] = {}
        for each in made.values():
            if each.valid_until > now:
                found.setdefault(parse_quota_key(each.key)[0], {})[each.key] = each.limit
        return found

    def add_override(self, override: Override) -> Transaction:
        version = self.rows["policy_version"][0] + 1
        signal = Notice(Signal(kind="policies"))
        writes = {Name("override", len(self.rows["override"])): override, Name("policy_version", 0): version}
        return Transaction(writes, [signal])

    # --- rebalance ----------------------------------------------------------------------------------------------------

    def add_reset(self, quota: str, subject: Mapping[str, str], now: datetime) -> Transaction:
        """Add a reset. Its number is the time in milliseconds, or one more than the last."""
        plan = plan_reset(self.rows["limits"][0], quota, subject)
        if not plan.keys:
            return Transaction()  # a document without the quota
        number = max(round(now.timestamp() * 1000), 1 + max(self.rows["reset"], default=0))
        reset = ResetKeys(number=number, keys=plan.keys)
        return Transaction({Name("reset", number): reset}, [Notice(Signal(kind="resets"))])

    def resets(self, since: int) -> ResetBatch:
        later = [reset for number, reset in sorted(self.rows["reset"].items()) if number > since]
        return ResetBatch(version=max((reset.number for reset in later), default=since), data=later)

    def set(self, key: str, settings: Mapping[str, Setting]) -> Transaction:
        version = self.rows["policy_version"][0] + 1
        writes: dict[Name, Any] = {Name("setting", (key, region)): each for region, each in settings.items()}
        signal = Notice(Signal(kind="policies"))
        return Transaction(writes | {Name("policy_version", 0): version}, [signal])

    def begin_moves(self, key: Key, planner: Planner, id_: UUID, now: datetime) -> tuple[Plan | None, Transaction]:
        """Move units; None if there is no such pool, another rebalance moves it, or nothing can be moved."""
        transaction = Transaction()
        pools = self._lock_pools([key], [], transaction)
        if not any(locked.period_is_open for locked in pools.values()) or self._open_moves([key]):
            return None, transaction
        plan = plan_of(self._tables(pools, now), planner, now)
        if not plan.moves:
            return None, transaction
        for number, each in enumerate(plan.moves, 1):
            move = Move(id_, number, each.key, each.source, each.target, each.units)
            transaction.writes |= {Name("move", move.name): move, Name("rebalance", id_): now}
            transaction.notices += [
                notice for notice in [recall_notice(move, self._read_leases(pools, (), pools), now)] if notice
            ]
        return plan, transaction

    def follow_moves(self, id_: UUID, now: datetime) -> Transaction:
        """Follow one rebalance, as coordinators do every second."""
        transaction = Transaction()
        moves = [move for move in self._open_moves() if move.rebalance == id_]
        pools = self._lock_pools({move.key for move in moves}, [], transaction)
        tables = {table.key: table for table in self._tables(pools, now)}
        for move in moves:
            begun_at, is_open = self.rows["rebalance"][id_], pools[move.key].period_is_open
            table = tables[move.key]
            if end_of_move(move, table, begun_at, now, period_is_open=is_open):
                transaction.writes[Name("move", move.name)] = None
            else:
                hints = recall_notice(move, table.leases, now), fetch_notice(move)
                transaction.notices += [notice for notice in hints if notice]
        return transaction

    def cancel_moves(self, id_: UUID) -> Transaction:
        moves = [move for move in self._open_moves() if move.rebalance == id_]
        return Transaction({Name("move", move.name): None for move in moves})

    def _tables(self, pools: Mapping[Key, LockedPool], now: datetime) -> list[DividedPool]:
        catalogue = self.catalogue([key.quota for key in pools], now)
        divisions = locking.divisions_of(catalogue, pools, self._open_moves(pools))
        leases = self._read_leases(pools, (), pools)
        current = {epoch.region for epoch in self.epochs.values() if epoch.state is EpochState.CURRENT}
        regions = {region for region in current if catalogue.is_active(region)}
        return [
            DividedPool(locked.pool, [each for each in leases if each.key == key], divisions[key], regions)
            for key, locked in sorted(pools.items())
        ]

    def policy_bundle(self, region: str) -> PolicyBundle:
        active = {name: each.weight for name, each in self.rows["region"].items() if each.is_active}
        return PolicyBundle(
            version=self.rows["policy_version"][0],
            document=self.rows["limits"][0],
            subscriptions={},
            weight=active.get(region, 0),
            total_weight=max(1, sum(active.values())),
            hold_key=hashlib.sha256(region.encode()).digest(),
        )

    # --- open_epoch ---------------------------------------------------------------------------------------------------

    def open_epoch(
        self, region: str, request: OpenEpoch, now: datetime
    ) -> tuple[EpochOpened | EpochRefusal | None, Transaction]:
        transaction = Transaction()
        share = self.rows["region"].get(region)
        if share is None:
            return None, transaction
        if share.status == "down" and not request.journal:
            return EpochRefusal.REGION_DOWN, transaction
        for number, epoch in self.epochs.items():
            if epoch.nonce == request.nonce:
                return self.again(number, epoch, region, request), transaction
        in_place = [epoch for epoch in self.epochs.values() if epoch.is_in_place_of(region, request)]
        lately = (epoch.fingerprint for epoch in in_place if epoch.opened_at > now - WINDOW)
        if request.fingerprint in conflicting_stores(lately):
            return EpochRefusal.TWO_STORES, transaction
        request = self._judge_previous(region, request)
        if not request.journal:
            self._fence(region, request, transaction)
        self._epochs += 1
        lanes = self.lanes if request.cells == 1 else 1
        is_whole = self._is_whole(self._epochs, region, request, transaction)
        opened = EpochOpened(epoch=self._epochs, lanes=lanes, is_whole=is_whole)
        state = EpochState.FENCED if request.journal else EpochState.CURRENT
        epoch = Epoch(region, request.nonce, request.fingerprint, lanes, state, now)
        epoch = epoch._replace(cell=request.cell, cells=request.cells)
        transaction.writes[Name("epoch", self._epochs)] = epoch
        for lane in range(lanes):
            row = LaneRow(0, None, genesis_head(self._epochs, lane))
            transaction.writes[Name("lane", (self._epochs, lane))] = row
        return opened, transaction

    def _judge_previous(self, region: str, request: OpenEpoch) -> OpenEpoch:
        epoch = self.epochs.get(request.previous or 0)
        if not says_whole(request):
            return request
        if epoch is None or epoch.region != region:
            return structs.replace(request, lost_data=True)
        seqs = {lane: self.lane_rows[request.previous or 0, lane].last_seq for lane in range(epoch.lanes)}
        is_current = epoch.state is EpochState.CURRENT
        previous = PreviousEpoch(epoch.nonce, epoch.fingerprint, is_current, epoch.lost_data, seqs)
        if not may_be_whole(previous, request):
            return structs.replace(request, lost_data=True)
        if request.promoted is not None:
            self.kept.add(request.previous or 0)
        return structs.replace(request, lost_data=False)

    def _is_whole(self, number: int, region: str, request: OpenEpoch, transaction: Transaction | None = None) -> bool:
        in_place = [
            each for each, epoch in self.epochs.items() if epoch.is_in_place_of(region, request) and each < number
        ]
        before = max(in_place, default=None)
        if before is None:
            return True
        epoch = (transaction.writes if transaction else {}).get(Name("epoch", before), self.epochs[before])
        return before == request.previous and says_whole(request) and not epoch.lost_data

    def again(self, number: int, epoch: Epoch, region: str, request: OpenEpoch) -> EpochOpened | EpochRefusal:
        if (epoch.region, epoch.fingerprint) != (region, request.fingerprint):
            return EpochRefusal.NONCE_OF_ANOTHER_INCARNATION
        is_whole = self._is_whole(number, region, request)
        return EpochOpened(epoch=number, lanes=epoch.lanes, is_whole=is_whole)

    def _fence(self, region: str, request: OpenEpoch, transaction: Transaction) -> None:
        kept = None if request.lost_data else request.previous
        for number, epoch in self.epochs.items():
            in_place = epoch.is_in_place_of(region, request)
            if in_place and epoch.state is EpochState.CURRENT:
                is_lost = number != kept
                fenced = epoch._replace(state=EpochState.FENCED, lost_data=is_lost, loss_is_assumed=is_lost)
                transaction.writes[Name("epoch", number)] = fenced
                event = LeaseEvent.LOSE if is_lost else LeaseEvent.FENCE
                self._end(number, event, transaction, None)
            elif number == kept and epoch.region == region and epoch.loss_is_assumed:
                self._prove(number, epoch, transaction)
            elif kept is None and in_place and self._has_more_to_say(number, epoch):
                doubted = epoch._replace(lost_data=True, loss_is_assumed=True)
                transaction.writes[Name("epoch", number)] = doubted
                self._end(number, LeaseEvent.LOSE, transaction, None)

    def _has_more_to_say(self, number: int, epoch: Epoch) -> bool:
        return (
            epoch.state is EpochState.FENCED
            and not epoch.lost_data
            and any(
                lease.epoch == number and lease.state is LeaseState.FENCED and lease.unaccounted
                for lease in self.leases.values()
            )
        )

    def _prove(self, number: int, epoch: Epoch, transaction: Transaction) -> None:
        if epoch.state is EpochState.FENCED:
            transaction.writes[Name("epoch", number)] = epoch._replace(lost_data=False, loss_is_assumed=False)
            self._end(number, LeaseEvent.PROVE, transaction, None)
            for name, lease in transaction.writes.items():
                if name.table == "lease" and name.key[0] == number:
                    lease.region_returned = lease.returned

    def rebind_epoch(
        self, region: str, number: int, request: RebindEpoch
    ) -> tuple[EpochOpened | EpochRefusal, Transaction]:
        epoch, transaction = self.epochs.get(number), Transaction()
        if self.rows["region"][region].status == "down":
            return EpochRefusal.REGION_DOWN, transaction
        if epoch is None or (epoch.region, epoch.nonce) != (region, request.nonce):
            return EpochRefusal.NOT_ISSUED, transaction
        if any(self.lane_rows[number, lane].last_seq > seq for lane, seq in enumerate(request.seqs)):
            return EpochRefusal.STORE_BEHIND, transaction
        if epoch.fingerprint not in (request.previous, request.fingerprint):
            return EpochRefusal.ANOTHER_INCARNATION, transaction
        if epoch.state is not EpochState.CURRENT:
            return EpochRefusal.EPOCH_OVER, transaction
        transaction.writes[Name("epoch", number)] = epoch._replace(fingerprint=request.fingerprint)
        return EpochOpened(epoch=number, lanes=epoch.lanes), transaction

    def fence_lost(self, region: str, epochs: Iterable[int], now: datetime) -> Transaction:
        transaction = Transaction()
        self._lose(region, epochs, transaction, now)
        return transaction

    def _lose(self, region: str, epochs: Iterable[int], transaction: Transaction, now: datetime) -> None:
        for number in epochs:
            epoch = self.epochs[number]
            is_known = epoch.lost_data and not epoch.loss_is_assumed
            if epoch.region == region and epoch.state is not EpochState.RETIRED and not is_known:
                changed = epoch._replace(state=EpochState.FENCED, lost_data=True, loss_is_assumed=False)
                transaction.writes[Name("epoch", number)] = changed
                self._end(number, LeaseEvent.LOSE, transaction, now)

    def retire_epoch(self, number: int, now: datetime) -> Transaction:
        transaction = Transaction({Name("epoch", number): self.epochs[number]._replace(state=EpochState.RETIRED)})
        self._end(number, LeaseEvent.RETIRE, transaction, now)
        return transaction

    def _end(self, number: int, by: LeaseEvent, transaction: Transaction, now: datetime | None) -> None:
        """`now`: nobody may spend of it any more."""
        for (epoch, key), lease in self.leases.items():
            state = after(lease.state, by) if epoch == number else None
            if state is not None and state is not lease.state:
                ended = copy(lease)
                ended.state = state
                ended.expires_at = min(lease.expires_at, now) if now else lease.expires_at
                transaction.writes[Name("lease", (epoch, key))] = ended

    # --- resolve_suspense ---------------------------------------------------------------------------------------------

    def propose(
        self, name: tuple[int, Key], kind: ResolutionKind, units: int, id_: str, now: datetime
    ) -> tuple[ResolutionRefusal | None, Transaction]:
        """Replace the open proposal."""
        transaction = Transaction()
        book = self._book_of(name, now, transaction)
        terms = propose(book, kind, units) if book else ResolutionRefusal.NO_SUCH_LEASE
        if isinstance(terms, ResolutionRefusal):
            return terms, transaction
        transaction.writes[Name("proposal", name)] = Proposal(id_, terms)
        return None, transaction

    def approve(self, name: tuple[int, Key], id_: str, now: datetime) -> tuple[ResolutionRefusal | None, Transaction]:
        proposal = self.proposals.get(name)
        if proposal is None or proposal.id != id_:
            return ResolutionRefusal.NO_SUCH_PROPOSAL, Transaction()
        refusal, transaction = self._resolve(name, proposal.terms, id_, now)
        if refusal is None:
            transaction.writes[Name("proposal", name)] = None
        return refusal, transaction

    def _book_of(self, name: tuple[int, Key], now: datetime, transaction: Transaction) -> Lease | Correction | None:
        """Return the lease, or its open correction if its period is closed."""
        if not self.is_closed(name[1]):
            return self.leases.get(name)
        late = self._late_of(name, now, transaction)
        return late.book if late else None

    def _late_of(self, name: tuple[int, Key], now: datetime, transaction: Transaction) -> Late | None:
        (number, key), epoch = name, self.epochs[name[0]]
        known = self.leases.get(name)
        lease, closed_at = (
            copy(known) if known else Lease(key, number, epoch.region, now, now),
            self.period(key.period)[-1],
        )
        assert closed_at
        closed = self._locked(self.pools.get(key) or Pool(key))
        pools, corrections = self._lock_late({key: closed}, [number], now, transaction)
        if not corrections and not lease.granted:
            return None
        open_pools = {key: locked.pool for key, locked in pools.items() if not locked.closed_at}
        known_of = lease, closed_at, corrections, open_pools, now
        return late_of(*known_of, closed=closed.pool, returns_count=not epoch.lost_data)

    def _resolve(
        self, name: tuple[int, Key], terms: Agreed, resolution: object, now: datetime
    ) -> tuple[ResolutionRefusal | None, Transaction]:
        transaction = Transaction()
        entry: Movement | ResolutionRefusal
        if self.is_closed(name[1]):
            late = self._late_of(name, now, transaction)
            assert late
            entry = resolve_late(late, terms, resolution, now)
            writes: dict[Name, Any] = {Name("pool", late.pool.key): late.pool, _correction(late.book): late.book}
        else:
            lease, epoch = copy(self.leases[name]), self.epochs[name[0]]
            pool = copy(self.pools[lease.key])
            entry = resolve(pool, lease, terms, EpochEnd(epoch.state, epoch.lost_data), resolution, now)
            writes = {Name("pool", pool.key): pool, Name("lease", name): lease}
        if isinstance(entry, ResolutionRefusal):
            return entry, transaction
        transaction.writes |= writes
        transaction.entries.append(entry)
        return None, transaction

    # --- adjust -------------------------------------------------------------------------------------------------------

    @property
    def adjustments(self) -> dict[UUID, Adjustment]:
        return self.rows["adjustment"]

    def propose_adjustment(
        self, id_: UUID, terms: Adjusting, by: UUID, now: datetime
    ) -> tuple[Adjustment | AdjustmentRefusal, Transaction]:
        if id_ in self.adjustments:
            return self.adjustments[id_], Transaction()
        if now < period_of(terms.key.period).starts_at:
            return AdjustmentRefusal.NOT_BEGUN, Transaction()
        if terms.key not in self.pools and not self._is_known(terms.key, now):
            return AdjustmentRefusal.UNKNOWN_QUOTA, Transaction()
        proposed = Adjustment(terms, by, now + EXPIRES_AFTER)
        return proposed, Transaction({Name("adjustment", id_): proposed})

    def _is_known(self, key: Key, now: datetime) -> bool:
        found = entitlement(self.catalogue([key.quota], now), key.quota)
        return isinstance(found, Entitlement) and found.calendar == period_of(key.period).calendar

    def approve_adjustment(
        self, id_: UUID, by: UUID, now: datetime
    ) -> tuple[Adjustment | AdjustmentRefusal, Transaction]:
        transaction, found = Transaction(), self.adjustments.get(id_)
        if found is None:
            return AdjustmentRefusal.NO_SUCH_ADJUSTMENT, transaction
        if (state := found.state(now)) is not AdjustmentState.PROPOSED:
            return found if found.approved_by == by else _ENDED[state], transaction
        if found.proposed_by == by:
            return AdjustmentRefusal.SAME_PERSON, transaction
        key = self._adjust(id_, found.terms, transaction, now)
        if isinstance(key, AdjustmentRefusal):
            return key, transaction
        approved = found._replace(approved_by=by, approved_at=now, booked_in=key.period)
        transaction.writes[Name("adjustment", id_)] = approved
        return approved, transaction

    def withdraw_adjustment(
        self, id_: UUID, by: UUID, now: datetime
    ) -> tuple[Adjustment | AdjustmentRefusal, Transaction]:
        found = self.adjustments.get(id_)
        if found is None:
            return AdjustmentRefusal.NO_SUCH_ADJUSTMENT, Transaction()
        if (state := found.state(now)) is not AdjustmentState.PROPOSED:
            return found if found.withdrawn_by == by else _ENDED[state], Transaction()
        withdrawn = found._replace(withdrawn_by=by, withdrawn_at=now)
        return withdrawn, Transaction({Name("adjustment", id_): withdrawn})

    def _adjust(self, id_: UUID, terms: Adjusting, transaction: Transaction, now: datetime) -> Key | AdjustmentRefusal:
        entry, key = entry_of(id_), booked_under(terms, now, is_closed=self.is_closed(terms.key))
        self._lock_pools([terms.key], [terms.key], transaction)
        locked = self._lock_pools([key], [key], transaction)[key]
        if locked.closed_at:
            raise UnexpectedRows(f"{key} should be open by the clock, and is closed")
        pool, was_grantable = locked.pool, locked.pool.grantable
        most = 0 if terms.kind is AdjustmentKind.WRITE_OFF else self._fund(entry, pool, now)
        if refusal := refusal_of(terms, pool, most, self._billed(terms.key)):
            return refusal
        adjust(entry, pool, terms)
        transaction.writes[Name("pool", key)] = pool
        transaction.entries.append(entry)
        if pool.grantable and not was_grantable:
            transaction.notices.append(Notice(Signal(kind="grant", quota=key.quota)))
        return key

    def _fund(self, entry: Movement, pool: Pool, now: datetime) -> int:
        catalogue = self.catalogue([pool.key.quota], now)
        division = division_of(catalogue, pool.key, (), by_weight(catalogue))
        leases = self._read_leases({pool.key: self._locked(pool)}, (), [pool.key]) if division.is_regional else ()
        found = entitlement(catalogue, pool.key.quota)
        if isinstance(found, Entitlement) and period_at(found.calendar, now, found.written).id == pool.key.period:
            fund(entry, pool, funded_for(found.limit, pool, leases, division))
        return debitable(pool, leases, division)

    def _billed(self, key: Key) -> int:
        """Wherever it was booked, and not written off."""
        leases = (lease for (_, about), lease in self.leases.items() if about == key)
        late = (each for each in self.corrections.values() if (each.key.quota, each.charge_period) == key)
        off = (each for each in self.adjustments.values() if each.booked_in and each.terms.key == key)
        return (
            sum(lease.consumed + lease.estimated for lease in leases)
            + sum(each.consumed + each.estimated - each.replaced for each in late)
            - sum(each.terms.units for each in off if each.terms.kind is AdjustmentKind.WRITE_OFF)
        )

    # --- rebase_lane --------------------------------------------------------------------------------------------------

    def regressed(self) -> list[tuple[int, int, int]]:
        """Return kept batches that are ahead of their lanes: epoch, lane, seq."""
        return [name for name in self.rows["regressed"] if name[2] > self.lane_rows[name[:2]].last_seq]

    def rebase(
        self, name: tuple[int, int, int], resolution: object, now: datetime
    ) -> tuple[ResolutionRefusal | None, Transaction]:
        number, lane_number, seq = name
        lane, transaction, region = self._lane(number, lane_number), Transaction(), self.epochs[number].region
        if seq <= lane.last_seq:
            return ResolutionRefusal.NOT_REGRESSED, transaction
        if is_too_far_behind(lane, seq):
            return ResolutionRefusal.TOO_FAR_BEHIND, transaction
        if lane.epoch_state is not EpochState.RETIRED:
            self._rebase_leases(
                lane, region, reported_leases(self.rows["regressed"][name].batch), resolution, now, transaction
            )
        for each in empty_reports(lane, region, seq, resolution, now):
            self._book(transaction, each, now)
        return None, transaction

    def _rebase_leases(
        self, lane: Lane, region: str, frozen: Any, resolution: object, now: datetime, transaction: Transaction
    ) -> None:
        keys = [key_of(each) for each in frozen]
        pools = self._lock_pools(keys, keys, transaction)
        pools, corrections = self._lock_late(pools, [lane.epoch], now, transaction)
        known = {key: self.leases.get((lane.epoch, key)) for key in keys}
        leases = {
            key: copy(lease) if lease else Lease(key, lane.epoch, region, now, now, state_of_restored_lease(lane))
            for key, lease in known.items()
        }
        done = rebase_all(lane, frozen, leases, pools, corrections, resolution, now)
        transaction.entries += done.entries
        transaction.writes |= {Name("pool", pool.key): pool for pool in done.pools}
        transaction.writes |= {Name("lease", (lease.epoch, lease.key)): lease for lease in done.leases}
        transaction.writes |= {_correction(each): each for each in done.corrections}

    # --- expire_leases ------------------------------------------------------------------------------------------------

    def expire_leases(self, now: datetime) -> Transaction:
        transaction = Transaction()
        for name, lease in self.leases.items():
            if lease.outstanding and lease.expires_at <= now:
                changed = copy(lease)
                pool = transaction.writes.setdefault(Name("pool", lease.key), copy(self.pools[lease.key]))
                if entry := expire(pool, changed, now):
                    transaction.writes[Name("lease", name)] = changed
                    transaction.entries.append(entry)
        return transaction

    # --- recall -------------------------------------------------------------------------------------------------------

    def recall_outstanding(self, period: str, now: datetime) -> Transaction:
        held = [lease for lease in self.leases.values() if lease.key.period == period and lease.outstanding]
        return self._recall([(lease.epoch, lease.region, lease.key) for lease in held], now)

    def recall_suspense(self, now: datetime) -> Transaction:
        waiting = [
            (lease.epoch, lease.region, lease.key)
            for lease in self.leases.values()
            if lease.suspense and lease.state is LeaseState.EXPIRED
        ]
        waiting += [
            (each.epoch, each.region, Key(each.key.quota, each.charge_period))
            for each in self.corrections.values()
            if each.suspense_carried and not each.quarantined
        ]
        return self._recall([each for each in waiting if self.epochs[each[0]].state is EpochState.CURRENT], now)

    def _recall(self, waiting: Iterable[tuple[int, str, Key]], now: datetime) -> Transaction:
        keeps: dict[tuple[str, str], int] = {}
        for epoch, region, key in waiting:
            running = [
                lease
                for (its, other), lease in self.leases.items()
                if (its, other.quota) == (epoch, key.quota) and other != key and period_of(other.period).holds(now)
            ]
            keep = max((lease.outstanding for lease in running), default=0)
            keeps[region, key.quota] = max(keep, keeps.get((region, key.quota), 0))
        signals = [(Signal(kind="recall", quota=quota, keep=keep), region) for (region, quota), keep in keeps.items()]
        return Transaction(notices=[Notice(signal, region) for signal, region in signals])

    # --- close_period -------------------------------------------------------------------------------------------------

    def close_period(
        self, period: str, carries: bool | None, grace: timedelta, now: datetime
    ) -> tuple[list[Missing] | None, Transaction]:
        """`carries`: somebody asks for it, and agrees to carry suspense or does not. None: it goes on by itself.

        Gives what is missing; None if there is nothing to be done.
        """
        row, transaction = self.period(period), Transaction()
        if row.state == "closed" or (carries is None and row.state != "closing"):
            return None, transaction
        wanted = row._replace(
            state="closing",
            close_requested_at=row.close_requested_at or now,
            carries_suspense=row.carries_suspense or bool(carries),
        )
        names, left = self._left(period, now)
        missing = self._missing(period, row, wanted.carries_suspense, grace, now) + self._earlier(period, names)
        if any(each.is_for_people for each in missing):
            return missing, transaction
        transaction.writes[Name("period", period)] = wanted
        if not missing:
            self._close(period, wanted, left, transaction, now)
        return missing, transaction

    def _left(self, period: str, now: datetime) -> tuple[list[str], list[CarryOver]]:
        """The quotas of which something may go over, and what would."""
        names = may_carry_over(dict(self.catalogue([], now).quotas))
        of_period = (key for key, pool in self.pools.items() if key.period == period and pool.unallocated)
        keys = sorted(key for key in of_period if parse_quota_key(key.quota)[0] in names)
        catalogue = self.catalogue([key.quota for key in keys], now)
        found = [carry_over_of(self._locked(self.pools[key]).pool, catalogue) for key in keys]
        return names, [each for each in found if each and not self.is_closed(each.into)]

    def _earlier(self, period: str, names: Collection[str]) -> list[Missing]:
        about = period_of(period)
        funded = {
            key.period
            for key, pool in self.pools.items()
            if pool.funded and parse_quota_key(key.quota)[0] in names and self.period(key.period).state != "closed"
        }
        reason = "close it first: its unused units are carried over into this period"
        return [
            Missing(what=Obstacle.EARLIER, reason=f"{each}: {reason}")
            for each in sorted(funded)
            if (period_of(each).calendar, period_of(each).ends_at) == (about.calendar, about.starts_at)
        ]

    def _missing(
        self, period: str, row: PeriodRow, carries_suspense: bool, grace: timedelta, now: datetime
    ) -> list[Missing]:
        findings = reconcile(period, read_books(self, period), now).findings
        return missing_for_close(
            period_of(period),
            open_leases(self, period),
            findings,
            (row.close_requested_at or now) + grace,
            now,
            OpenHoldTerms((row.close_requested_at or now) + grace + HOLD_WAIT),
            carries_suspense=carries_suspense,
        )

    def _close(
        self, period: str, row: PeriodRow, left: Iterable[CarryOver], transaction: Transaction, now: datetime
    ) -> None:
        leases = {name: copy(lease) for name, lease in self.leases.items() if lease.key.period == period}
        late = [copy(each) for each in self.corrections.values() if each.key.period == period]
        parts: list[Lease | Correction] = [*leases.values(), *late]
        for lease in leases.values():
            if lease.outstanding:  # held, and nobody waits for it any more
                kept = transaction.writes.setdefault(Name("pool", lease.key), copy(self.pools[lease.key]))
                transaction.entries.append(leave_holds(kept, lease))
        for part in parts:
            if part.to_carry:
                self._carry(part, transaction, now)
        for each in left:
            self._carry_over(each, transaction)
        for name, lease in leases.items():
            close_lease(lease)
            transaction.writes[Name("lease", name)] = lease
        transaction.writes[Name("period", period)] = row._replace(state="closed", closed_at=now)

    def _carry(self, part: Lease | Correction, transaction: Transaction, now: datetime) -> None:
        there = open_key(part.key, now)
        pools = {
            key: transaction.writes.setdefault(Name("pool", key), copy(self.pools.get(key) or Pool(key)))
            for key in (part.key, there)
        }
        arrives = correction_of(part, there.period)
        transaction.entries.append(carry(pools[part.key], part, pools[there], arrives))
        changed = [arrives, part] if isinstance(part, Correction) else [arrives]
        transaction.writes |= {_correction(each): each for each in changed}

    def _carry_over(self, each: CarryOver, transaction: Transaction) -> None:
        pool, into = (
            transaction.writes.setdefault(Name("pool", key), copy(self.pools.get(key) or Pool(key)))
            for key in (each.key, each.into)
        )
        if not into.grantable:
            transaction.notices.append(Notice(Signal(kind="grant", quota=into.key.quota)))
        transaction.entries.append(carry_over(pool, into, each.units))

    # --- apply_exchange -----------------------------------------------------------------------------------------------

    def apply_exchange(
        self, call: ExchangeCall, terms: LeaseTerms, now: datetime
    ) -> tuple[ExchangeResponse, Transaction]:
        (response,), transaction = self.apply_exchanges([call], terms, now)
        return response, transaction

    def apply_exchanges(
        self, calls: Sequence[ExchangeCall], terms: LeaseTerms, now: datetime
    ) -> tuple[list[ExchangeResponse], Transaction]:
        """Several calls in one transaction, no lane in two of them.

        The catalogue is read before the pools are locked. If it decides otherwise behind the locks, all begins again.
        """
        while (done := self._try_exchanges(calls, terms, now)) is None:
            pass
        return done

    def _try_exchanges(
        self, calls: Sequence[ExchangeCall], terms: LeaseTerms, now: datetime
    ) -> tuple[list[ExchangeResponse], Transaction] | None:
        quotas = submissions.wanted_quotas(calls)
        quotas |= submissions.regional_quotas(calls, self.catalogue(quotas, now))
        catalogue = self.catalogue(quotas, now)
        matched = submissions.match_wants(submissions.classify(calls, self._lock_lanes(calls)), catalogue, terms, now)
        matched = submissions.with_granted(matched, self._granted_keys(submissions.replays_in_ended_epochs(matched)))
        while self.between_reads:
            self.between_reads.pop()()
        transaction = Transaction()
        matched, pools = self._lock_plausible_pools(matched, terms, transaction, now)
        epochs = locking.reporting_epochs(matched)
        pools, corrections = self._lock_late(pools, epochs, now, transaction)
        moves = self._open_moves(locking.moved_keys(pools))
        divisions = locking.divisions_of(catalogue, pools, moves)
        leases = self._read_leases(pools, epochs, locking.divided_keys(divisions, catalogue.quotas))
        if not catalogue.decides_like(self.catalogue(quotas, now)):
            return None
        held = locking.lock(matched, pools, leases, corrections, divisions, catalogue.quotas, now)
        for each in matched:
            for request in each.requests:
                transaction.asked[request.key, each.exchange.region] += request.waiting
        decided = decision.decide(held, self._bounds(held, terms, now), terms, now)
        receipts = self._write(transaction, decided, now)
        receipts |= {
            (epoch, lane): self.rows["receipt"][epoch, lane, seq]
            for epoch, lane, seq in replies.replayed_reports(decided.exchanges)
        }
        exchanges, responses = iter(decided.exchanges), []
        for call in calls:
            own = list(islice(exchanges, len(call.submissions)))
            responses.append(replies.respond(call, own, held, catalogue, receipts, terms, now))
            if lost := replies.epochs_with_data_loss(own):
                transaction.lost.append((call.region, lost))
        return responses, transaction

    def _granted_keys(self, batches: Iterable[FrozenBatch]) -> dict[tuple[int, int], list[Key]]:
        return {
            (each.epoch, each.lane): [
                key
                for (number, key), lease in self.leases.items()
                if (number, lease.reported_at) == (each.epoch, self.rows["booked_at"][each.epoch, each.lane])
                and lease.outstanding + lease.suspense
            ]
            for each in batches
        }

    def _bounds(self, held: locking.Locked, terms: LeaseTerms, now: datetime) -> locking.Bounds:
        stopped = {name[0] for name in self.regressed()}
        waiting = locking.waiting_epochs(held, now) - stopped
        pushable = {number for number in waiting if self.epochs[number].state is EpochState.CURRENT}
        overages = locking.possible_overages(held)
        about = locking.pushable_quotas(held, pushable) | {overage.key.quota for overage in overages}
        limits = locking.limits_of(self.catalogue(about, now), about)
        used = {each: self._overage(each) for each in overages}
        return locking.bounds_of(held, pushable, used, limits, terms.claims)

    def _lock_plausible_pools(
        self, matched: list[Matched], terms: LeaseTerms, transaction: Transaction, now: datetime
    ) -> tuple[list[Matched], dict[Key, LockedPool]]:
        pools = self._lock_pools(locking.pools_to_lock(matched, now), (), transaction)
        _, reported = locking.keys_without_pool(matched, pools)
        known_periods = {key.period for key in self.pools} | self.rows["period"].keys()
        in_force = self.catalogue({key.quota for key in reported}, now)
        matched = submissions.hold_implausible_reports(matched, reported, in_force, known_periods, terms, now)
        pools = locking.without_held(matched, pools)
        missing = locking.needed_pools(matched) - pools.keys()
        return matched, pools | self._lock_pools(missing, missing, transaction)

    def _overage(self, asked: RegionalOverage) -> int:
        region, key = asked
        leases = (each.overage for each in self.leases.values() if (each.region, each.key) == asked)
        late = self.corrections.values()
        corrections = (
            each.correction
            for each in late
            if (each.region, each.key.quota, each.charge_period) == (region, key.quota, key.period)
        )
        return sum(leases) + sum(corrections)

    def _lock_lanes(self, calls: Iterable[ExchangeCall]) -> dict[tuple[int, int], Lane]:
        names = [(each.batch.epoch, each.batch.lane, call.region) for call in calls for each in call.submissions]
        return {
            (number, lane): self._lane(number, lane)
            for number, lane, region in names
            if (number, lane) in self.lane_rows and self.epochs[number].region == region
        }

    def _lane(self, number: int, lane: int) -> Lane:
        row, epoch = self.lane_rows[number, lane], self.epochs[number]
        return Lane(number, lane, *row, epoch.state, epoch.fingerprint, epoch.lanes, epoch.lost_data)

    def catalogue(self, quotas: Iterable[str], now: datetime) -> Catalogue:
        document: LimitsDocument = self.rows["limits"][0]
        version = self.rows["policy_version"][0]
        keys = {key for quota in quotas for key in wider_keys(quota)}
        made: dict[int, Override] = self.rows["override"]
        overrides = {each.key: each.limit for each in made.values() if each.key in keys and each.is_in_force(now)}
        regions, settings = dict(self.rows["region"]), self._settings()
        plan = document.default_plan
        return Catalogue(version, quotas_of(document), plan, {}, regions, overrides, settings=settings)

    def _settings(self) -> Settings:
        found: dict[str, dict[str, Setting]] = defaultdict(dict)
        for (key, region), setting in self.rows["setting"].items():
            found[key][region] = setting
        return found

    def _lock_pools(
        self, keys: Collection[Key], must_exist: Collection[Key], transaction: Transaction
    ) -> dict[Key, LockedPool]:
        """Missing ones are made, and made durable, even if nothing is booked in them: as in SQL."""
        for key in sorted(set(must_exist) - self.pools.keys()):
            if not self.period(key.period).closed_at:
                transaction.writes[Name("pool", key)] = Pool(key)
        found = {key: self.pools.get(key) or transaction.writes.get(Name("pool", key)) for key in sorted(keys)}
        locked = {key: self._locked(pool) for key, pool in found.items() if pool is not None}
        missing = {*keys, *must_exist} - locked.keys()
        gone = {key: self._locked(Pool(key))._replace(exists=False) for key in missing}
        return locked | {key: each for key, each in gone.items() if each.closed_at}

    def _locked(self, pool: Pool) -> LockedPool:
        row = self.period(pool.key.period)
        moves = sum(move is not None and move.key == pool.key for move in self.rows["move"].values())
        locked, corrections = copy(pool), self.corrections.values()
        locked.late = sum(each.consumed for each in corrections if each.key == pool.key)
        since = [each for each in corrections if Key(each.key.quota, each.charge_period) == pool.key]
        locked.late_included = sum(each.consumed - each.overage_used for each in since)
        return LockedPool(locked, row.state == "open", row.closed_at, moves)

    def _lock_late(
        self, pools: dict[Key, LockedPool], epochs: Collection[int], now: datetime, transaction: Transaction
    ) -> tuple[dict[Key, LockedPool], list[Correction]]:
        closed = locking.closed_keys(pools)
        corrections = self._read_corrections(closed, epochs)
        missing = locking.late_pools(closed, corrections, now) - pools.keys()
        return pools | self._lock_pools(missing, missing, transaction), corrections

    def _read_corrections(self, closed: Collection[Key], epochs: Collection[int]) -> list[Correction]:
        return [
            copy(each)
            for (epoch, quota, charge_period, _), each in self.corrections.items()
            if epoch in epochs and Key(quota, charge_period) in closed
        ]

    def _read_leases(
        self, pools: Mapping[Key, LockedPool], epochs: Collection[int], divided: Collection[Key]
    ) -> list[Lease]:
        quotas = {key.quota for key in divided}
        return [
            copy(lease)
            for (epoch, key), lease in self.leases.items()
            if key in pools and (lease.state is LeaseState.ACTIVE or epoch in epochs or key.quota in quotas)
        ]

    def _open_moves(self, keys: Collection[Key] | None = None) -> list[Move]:
        """The oldest first: the table is in the order of their making."""
        moves: dict[Any, Move | None] = self.rows["move"]
        return [copy(move) for move in moves.values() if move is not None and (keys is None or move.key in keys)]

    def _write(self, transaction: Transaction, decided: Decided, now: datetime) -> dict[tuple[int, int], Receipt]:
        for _, batch, *_ in decided.regressed:
            name = Name("regressed", (batch.epoch, batch.lane, batch.seq))
            open_ = [self.rows["regressed"][each] for each in self.regressed() if each[:2] == name.key[:2]]
            if name.key not in self.rows["regressed"] and may_keep_another([each.recorded_at for each in open_], now):
                transaction.writes[name] = Kept(batch, now)
                transaction.quarantined.append((*name.key, "", "", QuarantineReason.LEDGER_REGRESSED.value))
        if not decided.booked:
            return {}
        for pool in decided.pools:
            transaction.writes[Name("pool", pool.key)] = pool
        for lease in decided.leases:
            self._expect_state(lease, decided)
            transaction.writes[Name("lease", (lease.epoch, lease.key))] = lease
        transaction.writes |= {_correction(each): each for each in decided.corrections}
        transaction.writes |= {Name("move", move.name): move for move in decided.moves}
        transaction.notices += decided.notices
        transaction.entries += [each for each in decided.entries if isinstance(each, Movement)]
        return {(each.report.epoch, each.report.lane): self._book(transaction, each, now) for each in decided.booked}

    def _expect_state(self, lease: Lease, decided: Decided) -> None:
        """The state stands in the WHERE."""
        found = self.leases.get((lease.epoch, lease.key))
        if found is not None and found.state is not decided.states[lease.epoch, lease.key]:
            raise UnexpectedRows("lease")

    def _book(self, transaction: Transaction, each: BookedReport, now: datetime) -> Receipt:
        report = each.report
        if (report.epoch, report.lane, report.seq) in self.rows["receipt"]:
            raise UnexpectedRows("report: its number is its primary key")
        self._position += 1
        receipt = Receipt(position=self._position, head=each.head.hex())
        transaction.writes[Name("receipt", (report.epoch, report.lane, report.seq))] = receipt
        transaction.writes[Name("lane", (report.epoch, report.lane))] = LaneRow(report.seq, each.body_hash, each.head)
        transaction.writes[Name("booked_at", (report.epoch, report.lane))] = now
        transaction.entries.append(report)
        transaction.quarantined += [
            (report.epoch, report.lane, report.seq, *bad.key, bad.reason.value) for bad in each.quarantined
        ]
        return receipt


def _correction(each: Correction) -> Name:
    return Name("correction", (each.epoch, each.key.quota, each.charge_period, each.key.period))
