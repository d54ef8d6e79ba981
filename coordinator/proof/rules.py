"""Rules of the proof that the ledger was not changed. Three mechanisms, each of which covers what the others cannot.

    chain     Each report's head hashes the one before it in its lane, and all that is booked with the report. A change,
              removal or insertion of a transfer or report would change every later head of the lane.
    seal      Every minute a seal hashes the previous seal and what came since: the reports by their positions, the
              coordinator's own movements, the audit, and the sums of all periods. Recomputing a lane's heads would
              change every later seal, and a seal that an auditor has kept elsewhere would show it.
    balance   Pools and leases are the sums of their transfers (coordinator/usage/rules/reconciliation.py).

The encoding is fixed: JSON without spaces, with sorted keys, and times as microseconds since 1970.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from coordinator.exchange.rules.posting import Report, Transfer
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
        None,  # reports reverse nothing
        None,  # reports are no movements of the coordinator
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
    LANE_UNKNOWN = "lane_unknown"  # reports or transfers name a lane that does not exist
    REPORT_MISSING = "report_missing"  # a sequence number is missing, or the lane ends too early
    REPORT_UNEXPECTED = "report_unexpected"  # beyond the lane's last sequence number
    TRANSFER_WITHOUT_REPORT = "transfer_without_report"
    LINES_DIFFER = "lines_differ"  # the number of transfers is not the one in the report
    REPORT_CHANGED = "report_changed"  # the report and its transfers do not hash to its head
    LANE_CHANGED = "lane_changed"  # the lane's row does not agree with its last report
    SEAL_MISSING = "seal_missing"
    SEAL_CHANGED = "seal_changed"
    KEPT_SEAL_MISSING = "kept_seal_missing"  # a kept seal does not exist
    KEPT_SEAL_DIFFERS = "kept_seal_differs"  # a kept seal has another hash
    SEALED_REPORTS_CHANGED = "sealed_reports_changed"
    SEALED_MOVEMENTS_CHANGED = "sealed_movements_changed"
    SEALED_AUDIT_CHANGED = "sealed_audit_changed"
    SEALED_BALANCE_CHANGED = "sealed_balance_changed"
    CLOSED_PERIOD_CHANGED = "closed_period_changed"  # the period does not hash to the root of its close
    PERIOD_CHANGED = "period_changed"  # this and the next eight: the row does not agree with the sealed audit
    ADJUSTMENT_CHANGED = "adjustment_changed"
    RESOLUTION_CHANGED = "resolution_changed"
    LIMITS_CHANGED = "limits_changed"
    SUBSCRIPTION_CHANGED = "subscription_changed"
    OVERRIDE_CHANGED = "override_changed"
    TOKEN_CHANGED = "token_changed"  # noqa: S105 - the name of a fault
    IDENTITY_CHANGED = "identity_changed"
    REGION_IDENTITY_CHANGED = "region_identity_changed"
    EPOCH_CHANGED = "epoch_changed"  # an epoch that people have retired
    BALANCE = "balance"  # a pool or a lease is not the sum of its transfers
    ROLLUP_DIFFERS = "rollup_differs"  # a row of hourly or daily usage is not the sum of its transfers
    LEASE_CHANGED = "lease_changed"  # a lease or a correction names another region than its epoch
    POOL_CHANGED = "pool_changed"  # stored under another name, tenant or period than its own
    ARCHIVE_CHANGED = "archive_changed"  # an archive, its file or its record is not as it was written
    GUARD_CHANGED = "guard_changed"  # a trigger, constraint or privilege is not as the migrations made it


class LedgerFault(Struct, frozen=True, omit_defaults=True):
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
    """The chain of one lane, computed from the lane's rows, which are given in the order of `seq`.

    `archived` transfers of the lane are in archives. A report that lacks some of its transfers is one of those then.
    """

    def __init__(self, lane: LaneRow, archived: int = 0) -> None:
        self._lane = lane
        self._archived = archived
        self._seq = 0
        self._head = genesis_head(lane.epoch, lane.lane)
        self._body_hash: bytes | None = None

    def fault_of(self, seq: int, report: ReportRow | None, transfers: Sequence[TransferRow]) -> LedgerFault | None:
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

    def _fault_within(self, report: ReportRow, transfers: Sequence[TransferRow]) -> LedgerFault | None:
        missing = report.lines - len(transfers)
        if missing > 0 and self._archived:
            self._archived -= missing  # the archive proves the report: its head is believed here
        elif fault := fault_of_report(self._head, self._lane.region, report, transfers):
            return fault
        self._seq, self._head, self._body_hash = report.seq, report.head, report.body_hash
        return None

    def fault_at_end(self) -> LedgerFault | None:
        if self._seq < self._lane.last_seq:
            reason = f"the lane goes up to {self._lane.last_seq}, and nothing more is there"
            return self._fault(FaultKind.REPORT_MISSING, self._seq + 1, reason)
        if (self._lane.head, self._lane.last_hash) != (self._head, self._body_hash):
            return self._fault(FaultKind.LANE_CHANGED, self._seq, "its head is not the last report's")
        if self._archived:
            reason = (
                f"{counted(abs(self._archived), 'transfer')} {'more' if self._archived < 0 else 'fewer'} are missing"
            )
            return self._fault(FaultKind.LINES_DIFFER, self._seq, f"{reason} than archives have")
        return None

    def _fault(self, kind: FaultKind, seq: int, reason: str) -> LedgerFault:
        return LedgerFault(kind, reason, self._lane.epoch, self._lane.lane, seq)


def fault_of_report(
    previous: bytes, region: str, report: ReportRow, transfers: Sequence[TransferRow]
) -> LedgerFault | None:
    """Compare a report and all its transfers with its head, which hashes them onto the head before."""
    place = report.epoch, report.lane, report.seq
    if report.lines != len(transfers):
        reason = f"it was booked with {counted(report.lines, 'transfer')}, and has {len(transfers)}"
        return LedgerFault(FaultKind.LINES_DIFFER, reason, *place)
    for row in transfers:
        if row.region != region or row.recorded_at != report.recorded_at:
            reason = f"its line {row.line} names another region or another time than the report"
            return LedgerFault(FaultKind.REPORT_CHANGED, reason, *place)
    billed = [billed_row(row) for row in transfers]
    if _hashed(previous, region, *place, report.body_hash, report.recorded_at, billed) != report.head:
        return LedgerFault(FaultKind.REPORT_CHANGED, "it does not hash to its head", *place)
    return None


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
    """A hash of rows, one after the other, without keeping them."""

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


# The accounts of a period's pools; missing ones are zero.
Balances = Mapping[str, Mapping[str, int]]


class Seal(NamedTuple):
    """A row of the table. Its counts and hashes are of what came since the previous seal."""

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
    """A seal that an auditor has kept elsewhere."""

    number: Annotated[int, Meta(ge=1, le=2**53 - 1)]
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="as GET /v1/seals lists it")]


def fault_of_kept(kept: Iterable[KeptSeal], hashes: Mapping[int, str], newest: int) -> LedgerFault | None:
    """Compare kept seals with those of the database, which shows seals that were cut off at the end as well."""
    for each in sorted(kept, key=lambda seal: seal.number):
        found = hashes.get(each.number)
        if found is None:
            reason = f"the newest seal that is there is {newest}" if newest else "there are no seals"
            return LedgerFault(
                FaultKind.KEPT_SEAL_MISSING, reason, seal=each.number, table="seal", key=str(each.number)
            )
        if found != each.hash:
            reason = f"its hash is {found}, and {each.hash} was kept"
            return LedgerFault(
                FaultKind.KEPT_SEAL_DIFFERS, reason, seal=each.number, table="seal", key=str(each.number)
            )
    return None


def fault_of_seal(seal: Seal, kept_hash: bytes, number: int, previous: bytes) -> LedgerFault | None:
    """Check that a seal follows the previous one and that its hash is right."""
    if seal.number != number:
        return LedgerFault(FaultKind.SEAL_MISSING, f"the next one that is there is {seal.number}", seal=number)
    if seal.previous != previous or seal_hash(seal) != kept_hash:
        return LedgerFault(FaultKind.SEAL_CHANGED, "it does not hash to what it was", seal=number)
    return None


# The sources of units: these accounts count what has left them.
_SOURCES = {"funding": "funded", "soft_cap_extension": "soft_cap_extension"} | {
    name: name for name in ("overage", "suspense_carried_in", "correction", "adjustment", "carried_over_in")
}


class SealedBalance:
    """The sums of each period's transfers so far."""

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
