"""How it would show that somebody changed the books. Three things, each of which covers what the others cannot.

    chain     Each report's head hashes the one before it in its lane, and everything that is booked with it.
              Whoever changes, drops or inserts a transfer or a report has to change every head after it.
    seal      Every minute, what came since the last seal is hashed together with it: the reports by their positions,
              what the coordinator moved by itself, what people did, and what all periods add up to. Whoever
              computes a lane's heads anew has to compute every seal anew, and one that was exported tells.
    balance   Pools and leases are the sums of their transfers (coordinator/usage/rules/reconciliation.py).

The encodings are fixed here: JSON without spaces, the keys of objects sorted, times as microseconds since 1970.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from coordinator.exchange.rules.balances import Report, Transfer
from protocol.counting import counted

_encoder = msgspec.json.Encoder(order="sorted")
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MINUTE_US = 60_000_000


def microseconds(moment: datetime) -> int:
    return (moment - _BEGINNING) // _MICROSECOND


# --- the chain of a lane ----------------------------------------------------------------------------------------------


def genesis_head(epoch: int, lane: int) -> bytes:
    return hashlib.sha256(f"leasehold lane {epoch}/{lane}".encode()).digest()


def next_head(head: bytes, report: Report, body_hash: bytes, recorded_at: datetime) -> bytes:
    billed = [_billed(transfer) for transfer in report.transfers]
    return _hashed(head, report.region, report.epoch, report.lane, report.seq, body_hash, recorded_at, billed)


def _hashed(
    head: bytes,
    region: str,
    epoch: int,
    lane: int,
    seq: int,
    body_hash: bytes,
    recorded_at: datetime,
    billed: Sequence[object],
) -> bytes:
    covered = [region, epoch, lane, seq, body_hash.hex(), microseconds(recorded_at), billed]
    return hashlib.sha256(head + _encoder.encode(covered)).digest()


def _billed(transfer: Transfer) -> list[object]:
    return [
        transfer.line,
        transfer.part,
        transfer.key.quota,
        transfer.key.period,
        transfer.charge_period,
        transfer.src,
        transfer.dst,
        transfer.units,
        transfer.cause,
        None if transfer.minute is None else transfer.minute * _MINUTE_US,
        transfer.dimensions,
        None,  # a report reverses nothing
        None,  # and is no movement of the coordinator's own
    ]


# --- the chain, computed again from the rows --------------------------------------------------------------------------


class TransferRow(NamedTuple):
    """A row of the table, in the order of COLUMNS."""

    id: int
    period: str
    quota: str
    src: str
    dst: str
    units: int
    cause: str
    region: str | None
    epoch: int | None
    lane: int | None
    seq: int | None
    line: int | None
    part: int
    movement_id: object
    window_at: datetime | None
    dimensions: str | None
    charge_period: str
    reverses: int | None
    recorded_at: datetime


class ReportRow(NamedTuple):
    epoch: int
    lane: int
    seq: int
    body_hash: bytes
    head: bytes
    lines: int
    recorded_at: datetime


class LaneRow(NamedTuple):
    epoch: int
    lane: int
    region: str
    last_seq: int
    last_hash: bytes | None
    head: bytes


class FaultKind(StrEnum):
    LANE_UNKNOWN = "lane_unknown"  # of reports or transfers
    REPORT_MISSING = "report_missing"  # a number is left out, or the lane ends too early
    REPORT_UNEXPECTED = "report_unexpected"  # beyond the lane's last number
    TRANSFER_WITHOUT_REPORT = "transfer_without_report"
    LINES_DIFFER = "lines_differ"  # the report counts more or fewer transfers than there are
    REPORT_CHANGED = "report_changed"  # it, or one of its transfers, does not hash to its head
    LANE_CHANGED = "lane_changed"  # the lane's row is not what its last report made it
    SEAL_MISSING = "seal_missing"
    SEAL_CHANGED = "seal_changed"
    KEPT_SEAL_MISSING = "kept_seal_missing"  # an auditor kept a seal that is not there
    KEPT_SEAL_DIFFERS = "kept_seal_differs"  # an auditor kept another hash for that number
    SEALED_REPORTS_CHANGED = "sealed_reports_changed"
    SEALED_MOVEMENTS_CHANGED = "sealed_movements_changed"
    SEALED_AUDIT_CHANGED = "sealed_audit_changed"
    SEALED_BALANCE_CHANGED = "sealed_balance_changed"
    CLOSED_PERIOD_CHANGED = "closed_period_changed"  # it does not hash to the root of its close
    PERIOD_CHANGED = "period_changed"  # this and the next seven: the row is not what the sealed audit tells of it
    ADJUSTMENT_CHANGED = "adjustment_changed"
    RESOLUTION_CHANGED = "resolution_changed"
    LIMITS_CHANGED = "limits_changed"
    SUBSCRIPTION_CHANGED = "subscription_changed"
    OVERRIDE_CHANGED = "override_changed"
    TOKEN_CHANGED = "token_changed"  # noqa: S105 - the name of a fault
    EPOCH_CHANGED = "epoch_changed"  # that people have retired
    BALANCE = "balance"  # a pool or a lease is not the sum of its transfers
    ROLLUP_DIFFERS = "rollup_differs"  # a row of hourly or daily usage is not the sum of its transfers
    LEASE_CHANGED = "lease_changed"  # a lease or a correction names another region than its epoch
    POOL_CHANGED = "pool_changed"  # it is stored under a name, a tenant or a period that is not its own
    GUARD_CHANGED = "guard_changed"  # a trigger, constraint or privilege is not as the migrations made it


class Fault(Struct, frozen=True, omit_defaults=True):
    """The first place that is not as it was booked."""

    kind: FaultKind
    reason: str
    epoch: int | None = None
    lane: int | None = None
    seq: int | None = None
    seal: int | None = None
    period: str | None = None
    table: str | None = None
    key: str | None = None  # of the row in that table


class Chain:
    """One lane, from nothing. It is shown everything that the books have of the lane, in the order of `seq`."""

    def __init__(self, lane: LaneRow) -> None:
        self._lane = lane
        self._seq = 0
        self._head = genesis_head(lane.epoch, lane.lane)
        self._body_hash: bytes | None = None

    def fault_of(self, seq: int, report: ReportRow | None, transfers: Sequence[TransferRow]) -> Fault | None:
        expected = self._seq + 1
        if seq > expected and expected <= self._lane.last_seq:
            return self._fault(FaultKind.REPORT_MISSING, expected, f"the next one that is there is {seq}")
        if report is None:
            reason = f"a report that is not there, named by {counted(len(transfers), 'transfer')}"
            return self._fault(FaultKind.TRANSFER_WITHOUT_REPORT, seq, reason)
        if seq != expected or seq > self._lane.last_seq:
            reason = f"the lane's last report is {self._lane.last_seq}"
            return self._fault(FaultKind.REPORT_UNEXPECTED, seq, reason)
        return self._fault_within(report, transfers)

    def _fault_within(self, report: ReportRow, transfers: Sequence[TransferRow]) -> Fault | None:
        if report.lines != len(transfers):
            reason = f"it was booked with {counted(report.lines, 'transfer')}, and has {len(transfers)}"
            return self._fault(FaultKind.LINES_DIFFER, report.seq, reason)
        for row in transfers:
            if row.region != self._lane.region or row.recorded_at != report.recorded_at:
                reason = f"its line {row.line} names another region or another time than the report"
                return self._fault(FaultKind.REPORT_CHANGED, report.seq, reason)
        if self._hash(report, transfers) != report.head:
            return self._fault(FaultKind.REPORT_CHANGED, report.seq, "it does not hash to its head")
        self._seq, self._head, self._body_hash = report.seq, report.head, report.body_hash
        return None

    def _hash(self, report: ReportRow, transfers: Sequence[TransferRow]) -> bytes:
        lane = self._lane
        billed = [billed_row(row) for row in transfers]
        return _hashed(
            self._head, lane.region, lane.epoch, lane.lane, report.seq, report.body_hash, report.recorded_at, billed
        )

    def fault_at_end(self) -> Fault | None:
        if self._seq < self._lane.last_seq:
            reason = f"the lane goes up to {self._lane.last_seq}, and nothing more is there"
            return self._fault(FaultKind.REPORT_MISSING, self._seq + 1, reason)
        if (self._lane.head, self._lane.last_hash) != (self._head, self._body_hash):
            return self._fault(FaultKind.LANE_CHANGED, self._seq, "its head is not the last report's")
        return None

    def _fault(self, kind: FaultKind, seq: int, reason: str) -> Fault:
        return Fault(kind, reason, self._lane.epoch, self._lane.lane, seq)


def billed_row(row: TransferRow) -> list[object]:
    return [
        row.line,
        row.part,
        row.quota,
        row.period,
        row.charge_period,
        row.src,
        row.dst,
        row.units,
        row.cause,
        None if row.window_at is None else microseconds(row.window_at),
        None if row.dimensions is None else msgspec.json.decode(row.dimensions),
        row.reverses,
        None if row.movement_id is None else str(row.movement_id),
    ]


# --- seals ------------------------------------------------------------------------------------------------------------

FIRST_PREVIOUS = hashlib.sha256(b"leasehold seal").digest()


class Digest:
    """Of rows, one after the other, without keeping them."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.rows = 0

    def add(self, row: Iterable[object]) -> None:
        self._hash.update(_encoder.encode([plain(value) for value in row]) + b"\n")
        self.rows += 1

    @property
    def value(self) -> bytes:
        return self._hash.digest()


def plain(value: object) -> object:
    if isinstance(value, datetime):
        return microseconds(value)
    return value.hex() if isinstance(value, bytes) else value


# A period's accounts, as its pools have them: what is not there is zero.
Balances = Mapping[str, Mapping[str, int]]


class Seal(NamedTuple):
    """A row of the table. What it counts and hashes is what came since the seal before."""

    number: int
    previous: bytes
    position: int
    transfer: int
    audit: int
    reports: int
    reports_hash: bytes
    movements: int
    movements_hash: bytes
    entries: int
    entries_hash: bytes
    balances: Balances
    sealed_at: datetime


def seal_hash(seal: Seal) -> bytes:
    return hashlib.sha256(_encoder.encode([plain(value) for value in seal])).digest()


class KeptSeal(Struct, frozen=True, forbid_unknown_fields=True):
    """A seal that somebody wrote down elsewhere."""

    number: Annotated[int, Meta(ge=1, le=2**53 - 1)]
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="as GET /v1/seals lists it")]


def fault_of_kept(kept: Iterable[KeptSeal], hashes: Mapping[int, str], newest: int) -> Fault | None:
    """Compare what was kept with the seals that are there: so seals that were cut off at the end are missed."""
    for each in sorted(kept, key=lambda seal: seal.number):
        found = hashes.get(each.number)
        if found is None:
            reason = f"the newest seal that is there is {newest}" if newest else "there are no seals"
            return Fault(FaultKind.KEPT_SEAL_MISSING, reason, seal=each.number, table="seal", key=str(each.number))
        if found != each.hash:
            reason = f"its hash is {found}, and {each.hash} was kept"
            return Fault(FaultKind.KEPT_SEAL_DIFFERS, reason, seal=each.number, table="seal", key=str(each.number))
    return None


def fault_of_seal(seal: Seal, kept_hash: bytes, number: int, previous: bytes) -> Fault | None:
    """Does it follow on the one before, and is it what it was?"""
    if seal.number != number:
        return Fault(FaultKind.SEAL_MISSING, f"the next one that is there is {seal.number}", seal=number)
    if seal.previous != previous or seal_hash(seal) != kept_hash:
        return Fault(FaultKind.SEAL_CHANGED, "it does not hash to what it was", seal=number)
    return None


# Where units come from: the books name these accounts by what has come out of them.
_SOURCES = {"funding": "funded", "soft_cap_extension": "soft_cap_extension"} | {
    name: name for name in ("overage", "suspense_carried_in", "correction", "adjustment", "carried_over_in")
}


class TrialBalance:
    """What the transfers of each period add up to, so far."""

    def __init__(self) -> None:
        self._periods: dict[str, dict[str, int]] = {}

    def move(self, period: str, src: str, dst: str, units: int) -> None:
        accounts = self._periods.setdefault(period, {})
        for account, change in ((src, -units), (dst, units)):
            name = _SOURCES.get(account, account)
            accounts[name] = accounts.get(name, 0) + (-change if account in _SOURCES else change)

    def of(self, periods: Iterable[str]) -> dict[str, dict[str, int]]:
        return {period: without_zeros(self._periods[period]) for period in periods}


def without_zeros(accounts: Mapping[str, Any]) -> dict[str, int]:
    return {account: int(units) for account, units in accounts.items() if units}
