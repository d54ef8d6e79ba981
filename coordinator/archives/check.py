"""Check an archive from its own files: hashes, chains, seals and sums. It needs no database and no coordinator.

The manifest's hashes find every change of a file. A forger can write a new manifest as well, so everything is computed
again: each report hashes to its head, the heads and movements hash to the seals, each seal hashes the one before, and
the transfers add up to the balances of the last seal. The last seal's hash is compared with a copy that an auditor
kept, or with the database.
"""

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec import Struct

from coordinator.archives.rules import (
    FILES,
    MANIFEST,
    ArchivedHead,
    ArchivedReport,
    ArchivedTransfer,
    Manifest,
    movement_entry,
    parse_manifest,
    transfer_row,
)
from coordinator.archives.store import ArchiveStore, ArchiveUnreadable
from coordinator.proof.rules import (
    Digest,
    FaultKind,
    KeptSeal,
    LedgerFault,
    SealedBalance,
    fault_of_report,
    fault_of_seal,
    genesis_head,
)
from coordinator.proof.verify import Entries


class ArchiveVerification(Struct, frozen=True, kw_only=True):
    """`intact`, or the first fault. `newest_seal` is NUMBER:HASH, to compare with one that was kept elsewhere."""

    location: str
    period: str | None
    intact: bool
    fault: LedgerFault | None
    manifest_sha256: str | None = None
    reports: int = 0
    transfers: int = 0
    movements: int = 0
    seals: int = 0
    newest_seal: str | None = None


async def check_archive(
    store: ArchiveStore, folder: str, recorded: bytes | None = None, kept: Sequence[KeptSeal] = ()
) -> ArchiveVerification:
    """Check the archive in a folder. `recorded` is the hash of its manifest, and `kept` are seals kept elsewhere."""
    location = f"{store.location}/{folder}".rstrip("/")
    try:
        content = store.get(folder, MANIFEST)
        manifest = parse_manifest(content)
    except (ArchiveUnreadable, ValueError) as error:
        missing = _fault(MANIFEST, f"there is no archive: {error}")
        return ArchiveVerification(location=location, period=None, intact=False, fault=missing)
    found, check = hashlib.sha256(content), _Check(store, folder, manifest)
    fault: LedgerFault | None
    try:
        if recorded is not None and found.digest() != recorded:
            fault = _fault(MANIFEST, "it is not the one that the ledger has recorded")
        else:
            fault = await check.fault(kept)
    except ArchiveUnreadable as error:
        fault = _fault("", str(error))
    files = manifest.files
    return ArchiveVerification(
        location=location,
        period=manifest.period,
        intact=fault is None,
        fault=fault,
        manifest_sha256=found.hexdigest(),
        reports=files["reports"].rows,
        transfers=files["transfers"].rows,
        movements=files["movements"].rows,
        seals=files["seals"].rows,
        newest_seal=f"{manifest.seals.last}:{manifest.seal_hash}",
    )


def _fault(file: str, reason: str, **place: Any) -> LedgerFault:
    return LedgerFault(FaultKind.ARCHIVE_CHANGED, reason, table=file, **place)


class _Check:
    """The files of one archive, each read once for its hash and once for its rows."""

    def __init__(self, store: ArchiveStore, folder: str, manifest: Manifest) -> None:
        self._store, self._folder, self._manifest = store, folder, manifest
        self._balance, self._booked = SealedBalance(), 0  # the sums and the number of the period's transfers

    async def fault(self, kept: Sequence[KeptSeal]) -> LedgerFault | None:
        return (
            self._fault_of_files()
            or await self._fault_of_reports()
            or await self._fault_of_seals(kept)
            or self._fault_of_counts()
        )

    def _rows(self, name: str) -> AsyncIterator[Any]:
        return self._store.rows(self._folder, name, FILES[name])

    def _fault_of_files(self) -> LedgerFault | None:
        expected = {f"{name}.parquet" for name in FILES} | {MANIFEST}
        for name in sorted(expected ^ set(self._store.names(self._folder))):
            return _fault(name, "it is missing" if name in expected else "no archive has such a file")
        for name, file in self._manifest.files.items():
            size, sha256 = self._store.sha256(self._folder, f"{name}.parquet")
            if (size, sha256) != (file.bytes, file.sha256):
                return _fault(f"{name}.parquet", f"its {size} bytes are not the {file.bytes} that were written")
        return None

    async def _fault_of_reports(self) -> LedgerFault | None:
        """Hash each report again, and compare it with its entry among the heads, which the seals hash."""
        own, others = _Cursor(self._rows("transfers")), _Cursor(self._rows("others"))
        heads, ends, digest = _Cursor(self._rows("heads")), dict[tuple[int, int], tuple[int, bytes]](), Digest()
        async for report in self._rows("reports"):
            transfers = await own.take(report.position)
            for row in transfers:
                digest.add(row[1:])
                self._note(row)
            rows = sorted(map(transfer_row, [*transfers, *await others.take(report.position)]), key=_line)
            if fault := self._fault_of_chain(report, ends) or fault_of_report(
                report.previous or genesis_head(report.epoch, report.lane), report.region, report.row, rows
            ):
                return fault
            head = ArchivedHead(report.position, report.epoch, report.lane, report.seq, report.head)
            if not transfers or await heads.take(report.position) != [head]:
                return self._changed(report, "the seals have no such report of the period")
            ends[report.epoch, report.lane] = report.seq, report.head
        for name, cursor in (("transfers", own), ("others", others)):
            if cursor.skipped or await cursor.take_next() is not None:
                return _fault(f"{name}.parquet", "it has lines of a report that the archive does not have")
        if digest.value.hex() != self._manifest.transfers_sha256:
            return _fault("transfers.parquet", "its rows are not those that the database had")
        return None

    def _fault_of_chain(
        self, report: ArchivedReport, ends: dict[tuple[int, int], tuple[int, bytes]]
    ) -> LedgerFault | None:
        """Check that a report follows the one before it in its lane, where the archive has that one as well."""
        seq, head = ends.get((report.epoch, report.lane), (0, None))
        if report.seq <= seq or (report.seq == seq + 1 and report.previous != head):
            return self._changed(report, "it does not follow the report before it in its lane")
        return None

    def _changed(self, report: ArchivedReport, reason: str) -> LedgerFault:
        return LedgerFault(FaultKind.REPORT_CHANGED, reason, report.epoch, report.lane, report.seq)

    def _note(self, row: ArchivedTransfer) -> None:
        """Count a transfer of the period."""
        if row.period == self._manifest.period:
            self._booked += 1
            self._balance.move(row.period, row.src, row.dst, row.units)

    async def _fault_of_seals(self, kept: Sequence[KeptSeal]) -> LedgerFault | None:
        """Check the chain of the seals and what each hashes, and compare the last one's balances."""
        covered, wanted = self._manifest.seals, {seal.number: seal.hash for seal in kept}
        heads = Entries(_listed(self._rows("heads")), FaultKind.SEALED_REPORTS_CHANGED)
        movements = Entries(self._movements(), FaultKind.SEALED_MOVEMENTS_CHANGED)
        number, previous, balances = covered.first, None, None
        async for row in self._rows("seals"):
            seal, found = row.seal, row.hash.hex()
            if wanted.get(seal.number, found) != found:
                reason = f"its hash is {found}, and {wanted[seal.number]} was kept"
                return LedgerFault(FaultKind.KEPT_SEAL_DIFFERS, reason, seal=seal.number)
            if fault := (
                fault_of_seal(seal, row.hash, number, previous or seal.previous)
                or await heads.fault_of(seal.number, seal.position, seal.reports, seal.reports_hash)
                or await movements.fault_of(seal.number, seal.transfer, seal.movements, seal.movements_hash)
            ):
                return fault
            number, previous = number + 1, row.hash
            balances = seal.balances.get(self._manifest.period, balances)
        return self._fault_at_last_seal(number - 1, previous, balances) or await self._fault_beyond(heads, movements)

    def _fault_at_last_seal(self, number: int, found: bytes | None, balances: object) -> LedgerFault | None:
        manifest = self._manifest
        if (number, found and found.hex()) != (manifest.seals.last, manifest.seal_hash):
            return LedgerFault(FaultKind.SEAL_MISSING, "the archive does not have it", seal=manifest.seals.last)
        made = self._balance.of([manifest.period])[manifest.period]
        if balances != made:
            reason = f"{balances} was sealed, and the transfers make {made}"
            return LedgerFault(FaultKind.SEALED_BALANCE_CHANGED, reason, seal=number, period=manifest.period)
        return None

    async def _fault_beyond(self, *entries: Entries) -> LedgerFault | None:
        if any([await each.has_more() for each in entries]):
            reason = "there are entries after the last seal"
            return LedgerFault(FaultKind.SEALED_REPORTS_CHANGED, reason, seal=self._manifest.seals.last)
        return None

    async def _movements(self) -> AsyncIterator[list[object]]:
        async for row in self._rows("movements"):
            self._note(row)
            yield movement_entry(row)

    def _fault_of_counts(self) -> LedgerFault | None:
        if self._booked == self._manifest.transfers:
            return None
        reason = f"it was closed with {self._manifest.transfers} transfers, and the archive has {self._booked}"
        return LedgerFault(FaultKind.CLOSED_PERIOD_CHANGED, reason, period=self._manifest.period)


class _Cursor:
    """Rows in the order of the position that each begins with, taken position by position."""

    def __init__(self, rows: AsyncIterator[Any]) -> None:
        self._rows, self._next, self.skipped = rows, None, 0

    async def take_next(self) -> Any:
        row, self._next = self._next, None
        return row or await anext(self._rows, None)

    async def take(self, position: int) -> list[Any]:
        """Return the rows of a position, and skip those before it."""
        found: list[Any] = []
        while (row := await self.take_next()) is not None:
            if row.position > position:
                self._next = row
                break
            if row.position == position:
                found.append(row)
            else:
                self.skipped += 1
        return found


async def _listed(rows: AsyncIterator[ArchivedHead]) -> AsyncIterator[list[object]]:
    async for row in rows:
        yield [*row]


def _line(row: Any) -> tuple[int, int, int]:
    return row.line, row.part, row.id
