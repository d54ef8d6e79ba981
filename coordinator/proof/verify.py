"""Verify the ledger: every lane's chain, every seal, every balance. Needs a snapshot.

It reads the ledger once for the chains and once for the seals, row by row, and keeps one report, the lanes and the sums
of the periods, so its memory does not grow with the ledger. It ends at the first fault, because what comes after a
forged link proves nothing.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from datetime import datetime
from typing import NamedTuple

import asyncpg
from msgspec import Struct
from sqlalchemy import and_, func, select

from coordinator.archives.statements import hold_archives, read_archives
from coordinator.database.compiled import compiled
from coordinator.database.connection import Connection
from coordinator.database.tables import report, transfer
from coordinator.proof.rules import (
    FIRST_PREVIOUS,
    Chain,
    Digest,
    FaultKind,
    KeptSeal,
    LaneRow,
    LedgerFault,
    ReportRow,
    Seal,
    SealedBalance,
    TransferRow,
    fault_of_kept,
    fault_of_seal,
)
from coordinator.proof.seal import audit_entries, movement_entries, report_entries, seal_of
from coordinator.proof.verify_audited import fault_of_audited
from coordinator.proof.verify_guards import fault_of_guards, guards_are_known
from coordinator.proof.verify_periods import fault_of_periods

PREFETCH = 2000
PATIENCE_S = 3600  # for the first row, which may wait for a sort of all rows


class Verification(Struct, frozen=True, kw_only=True):
    """`intact`, or the first fault. The counts say how far the verification came."""

    intact: bool
    fault: LedgerFault | None
    lanes: int
    reports: int
    transfers: int
    movements: int
    seals: int
    sealed_position: int
    newest_seal: str | None  # its hash, to compare with the one that was kept elsewhere
    not_compared: list[str] = []  # parts that could not be compared, with the reason


GUARDS_UNKNOWN = "guards: the schema is of another release; verify with that release"


class _Counts:
    def __init__(self) -> None:
        self.lanes = self.reports = self.transfers = self.movements = self.seals = self.sealed_position = 0
        self.newest_seal: str | None = None


async def verify(connection: Connection, now: datetime, kept: Sequence[KeptSeal] = ()) -> Verification:
    """Verify the whole ledger. `kept` are seals that an auditor has kept elsewhere; they must exist unchanged."""
    await hold_archives(connection)
    await connection.execute("SET LOCAL statement_timeout = 0")
    counts = _Counts()
    fault = (
        await _fault_of_chains(connection, counts)
        or await _fault_of_seals(connection, counts, kept)
        or await fault_of_audited(connection)
        or await fault_of_periods(connection, now)
    )
    knows_guards = await guards_are_known(connection)
    if fault is None and knows_guards:
        fault = await fault_of_guards(connection)
    archives = [
        f"archive of {each.period}: its lines are in {each.location}" for each in await read_archives(connection)
    ]
    not_compared = [*archives, *([] if knows_guards else [GUARDS_UNKNOWN])]
    return Verification(intact=fault is None, fault=fault, not_compared=not_compared, **vars(counts))


# --- chains -----------------------------------------------------------------------------------------------------------

_Place = tuple[int, int]


async def _fault_of_chains(connection: Connection, counts: _Counts) -> LedgerFault | None:
    """Walk lanes and their reports side by side, both in the order of epoch and lane."""
    waiting = {(row["epoch"], row["lane"]): LaneRow(*row.values()) for row in await connection.fetch(_LANES)}
    counts.lanes = len(waiting)
    archived = {(row["epoch"], row["lane"]): row["transfers"] for row in await connection.fetch(_ARCHIVED)}
    place, chain = None, None
    async for group in _groups(connection):
        if group.place != place:
            if chain and (fault := chain.fault_at_end()):
                return fault
            if None in group.place:
                return _without_lane(group)
            if fault := _fault_of_the_silent(waiting, group.place):
                return fault
            place, lane = group.place, waiting.pop(group.place, None)
            if lane is None:
                return _without_lane(group)
            chain = Chain(lane, archived.get(group.place, 0))
        assert chain is not None
        if fault := chain.fault_of(group.seq, group.report, group.transfers):
            return fault
        counts.reports += 1
        counts.transfers += len(group.transfers)
    return (chain and chain.fault_at_end()) or _fault_of_the_silent(waiting, None)


def _fault_of_the_silent(waiting: dict[_Place, LaneRow], before: _Place | None) -> LedgerFault | None:
    """Check lanes without any report: their heads must be where they began."""
    silent = [place for place in waiting if before is None or place < before]
    faults = (Chain(waiting.pop(place)).fault_at_end() for place in sorted(silent))
    return next((fault for fault in faults if fault), None)


class _Group(NamedTuple):
    """The rows of one sequence number of one lane."""

    place: _Place
    seq: int
    report: ReportRow | None
    transfers: list[TransferRow]


def _without_lane(group: _Group) -> LedgerFault:
    return LedgerFault(FaultKind.LANE_UNKNOWN, "the lane was never opened", *group.place, group.seq)


async def _groups(connection: Connection) -> AsyncIterator[_Group]:
    group: _Group | None = None
    async for row in connection.cursor(_BOOKED, prefetch=PREFETCH, timeout=PATIENCE_S):
        values = tuple(row)
        key, transfer = values[:3], values[_OF_REPORT:]
        if group is None or (*group.place, group.seq) != key:
            if group is not None:
                yield group
            report = None if values[3] is None else ReportRow(*key, *values[3:_OF_REPORT])
            group = _Group((values[0], values[1]), values[2], report, [])
        if transfer[0] is not None:
            group.transfers.append(TransferRow._make(transfer))
    if group is not None:
        yield group


# --- seals ------------------------------------------------------------------------------------------------------------


async def _fault_of_seals(connection: Connection, counts: _Counts, kept: Sequence[KeptSeal]) -> LedgerFault | None:
    """Check the seals' hashes first, and then the contents that they vouch for."""
    ends: list[int] = []
    numbers, hashes = {seal.number for seal in kept}, dict[int, str]()
    number, previous, last = 1, FIRST_PREVIOUS, None
    async for row in connection.cursor(_SEALS, prefetch=PREFETCH):
        last = seal_of(row)
        if fault := fault_of_seal(last, row["hash"], number, previous):
            return fault
        ends.append(last.transfer)
        if number in numbers:
            hashes[number] = row["hash"].hex()
        number, previous = number + 1, row["hash"]
    if last is not None:
        counts.seals, counts.sealed_position, counts.newest_seal = last.number, last.position, previous.hex()
    if (fault := fault_of_kept(kept, hashes, counts.seals)) or last is None:
        return fault
    return await _fault_of_sealed(connection, counts, last, ends)


async def _fault_of_sealed(connection: Connection, counts: _Counts, last: Seal, ends: list[int]) -> LedgerFault | None:
    contents = _Contents(connection, last)
    archived = await read_archives(connection)
    moves = _Moves(connection, ends, [each.period for each in archived])
    async for row in connection.cursor(_SEALS, prefetch=PREFETCH):
        seal = seal_of(row)
        if fault := await contents.fault_of(seal) or await moves.fault_of(seal):
            return fault
        counts.movements += seal.movements
    return None


class Entries:
    """Rows in the order of the number that each begins with, taken as far as a seal goes."""

    def __init__(self, rows: AsyncIterator[list[object]], kind: FaultKind) -> None:
        self._rows = rows
        self._kind = kind
        self._next: list[object] | None = None
        self._begins_after = 0

    async def fault_of(self, seal: int, up_to: int, rows: int, kept: bytes) -> LedgerFault | None:
        digest = Digest()
        row = self._next or await anext(self._rows, None)
        while row is not None and int(str(row[0])) <= up_to:
            digest.add(row)
            row = await anext(self._rows, None)
        self._next = row
        begins_after, self._begins_after = self._begins_after, up_to
        if (digest.rows, digest.value) == (rows, kept):
            return None
        reason = f"{rows} were sealed from {begins_after + 1} to {up_to}, and {digest.rows} are there"
        return LedgerFault(
            self._kind, reason if digest.rows != rows else f"{reason}, not all of them as they were", seal=seal
        )

    async def has_more(self) -> bool:
        self._next = self._next or await anext(self._rows, None)
        return self._next is not None


class _Contents:
    """The contents of the seals, up to the last one."""

    def __init__(self, connection: Connection, last: Seal) -> None:
        self._reports = Entries(report_entries(connection, 0, last.position), FaultKind.SEALED_REPORTS_CHANGED)
        self._movements = Entries(movement_entries(connection, 0, last.transfer), FaultKind.SEALED_MOVEMENTS_CHANGED)
        self._audit = Entries(audit_entries(connection, 0, last.audit), FaultKind.SEALED_AUDIT_CHANGED)

    async def fault_of(self, seal: Seal) -> LedgerFault | None:
        return (
            await self._reports.fault_of(seal.number, seal.position, seal.reports, seal.reports_hash)
            or await self._movements.fault_of(seal.number, seal.transfer, seal.movements, seal.movements_hash)
            or await self._audit.fault_of(seal.number, seal.audit, seal.entries, seal.entries_hash)
        )


class _Moves:
    """The units moved between two seals, added up by the database and summed here."""

    def __init__(self, connection: Connection, transfers: list[int], archived: Collection[str]) -> None:
        """The transfers of `archived` periods are in their archives, so their balances are not compared here."""
        # The next seal begins at the first id that this one does not cover.
        self._rows = aiter(
            connection.cursor(_MOVED, [0, *(last + 1 for last in transfers)], prefetch=PREFETCH, timeout=PATIENCE_S)
        )
        self._next: asyncpg.Record | None = None
        self._balance = SealedBalance()
        self._archived = frozenset(archived)

    async def fault_of(self, seal: Seal) -> LedgerFault | None:
        row = self._next or await anext(self._rows, None)
        moved = set()
        while row is not None and row["seal"] <= seal.number:
            self._balance.move(row["period"], row["src"], row["dst"], row["units"])
            moved.add(row["period"])
            row = await anext(self._rows, None)
        self._next = row
        made = self._balance.of(sorted(moved - self._archived))
        sealed = {period: units for period, units in seal.balances.items() if period not in self._archived}
        if made == sealed:
            return None
        period = min(period for period in {*made, *sealed} if made.get(period) != sealed.get(period))
        reason = f"{sealed.get(period)} was sealed, and the transfers make {made.get(period)}"
        return LedgerFault(FaultKind.SEALED_BALANCE_CHANGED, reason, seal=seal.number, period=period)


# --- the statements ---------------------------------------------------------------------------------------------------

_LANES = """
SELECT epoch, lane, region, last_seq, last_hash, head FROM lane JOIN region_epoch USING (epoch) ORDER BY epoch, lane
"""
_ARCHIVED = "SELECT epoch, lane, sum(transfers) AS transfers FROM archived_sum GROUP BY epoch, lane"
_OF_REPORT = 7  # number of columns before those of the transfer
_OF_REPORTS = select(transfer).where(transfer.c.seq.is_not(None)).subquery("booked")
_NUMBER = [func.coalesce(report.c[name], _OF_REPORTS.c[name]) for name in ("epoch", "lane", "seq")]
_SAME_NUMBER = and_(*(report.c[name] == _OF_REPORTS.c[name] for name in ("epoch", "lane", "seq")))
_BOOKED = compiled(
    select(
        *(*_NUMBER, report.c.body_hash, report.c.head, report.c.lines, report.c.recorded_at),
        *(_OF_REPORTS.c[name] for name in TransferRow._fields),
    )
    .select_from(report.join(_OF_REPORTS, _SAME_NUMBER, full=True))
    .order_by(*_NUMBER, _OF_REPORTS.c.line, _OF_REPORTS.c.part, _OF_REPORTS.c.id)
).sql
_SEALS = "SELECT * FROM seal ORDER BY number"
_MOVED = """
SELECT width_bucket(id, $1::bigint[]) AS seal, period, src, dst, sum(units) AS units
FROM transfer WHERE id < ($1::bigint[])[cardinality($1::bigint[])] GROUP BY 1, 2, 3, 4 ORDER BY 1
"""
