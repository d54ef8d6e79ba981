"""Write the files of an archive. What is closed and sealed never changes, so it is read with short statements.

One pass over the reports of the seals writes everything in the order of the ledger. Memory is bounded by a row group of
each file. The rows are hashed as the database returned them, to be compared with what is read back.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import asyncpg

from coordinator.archives.rules import (
    FILES,
    FORMAT,
    MANIFEST,
    ArchivedFile,
    ArchivedHead,
    ArchivedReport,
    ArchivedSeal,
    ArchivedTransfer,
    Manifest,
    SealRange,
    encoded_manifest,
)
from coordinator.archives.statements import read_archives_of, usage_hash
from coordinator.archives.store import ArchiveStore, ArchiveWriter
from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.proof.rules import Digest

REPORTS_AT_ONCE = 1_000
SEALS_AT_ONCE = 1_000

Progress = Callable[[int, int], Awaitable[None]]  # rows and bytes that are written


Row = TypeVar("Row", bound=tuple[Any, ...])


class ClosedPeriod(NamedTuple):
    """The record of a period's close."""

    id: str
    closed_at: datetime
    transfers: int
    root: bytes


class _Written(NamedTuple):
    files: Mapping[str, ArchivedFile]
    transfers_sha256: str
    first_position: int
    last_position: int


async def write_archive(
    database: Database, store: ArchiveStore, folder: str, period: ClosedPeriod, now: datetime, progress: Progress
) -> None:
    """Write all files into the folder, and the manifest last."""
    seals = await database.read(lambda c: _seals_of(c, period.id))
    writer = _Writer(database, store, folder, period.id, seals, progress)
    written = await writer.write()
    usage = await database.run(lambda c: _usage(c, period.id), snapshot=True)
    last_seal = await database.read(lambda c: c.fetchrow("SELECT hash FROM seal WHERE number = $1", seals.last))
    last_transfer = await database.read(lambda c: c.fetchval(_LAST_TRANSFER, period.id))
    assert last_seal is not None
    manifest = Manifest(
        format=FORMAT,
        period=period.id,
        closed_at=period.closed_at,
        root=period.root.hex(),
        transfers=period.transfers,
        transfers_sha256=written.transfers_sha256,
        usage_sha256=usage.hex(),
        first_position=written.first_position,
        last_position=written.last_position,
        last_transfer=last_transfer or 0,
        seals=seals,
        seal_hash=last_seal["hash"].hex(),
        written_at=now,
        files=dict(written.files),
    )
    await asyncio.to_thread(store.flush, folder)
    await asyncio.to_thread(store.put, folder, MANIFEST, encoded_manifest(manifest))
    await asyncio.to_thread(store.flush, folder)


async def _usage(connection: Connection, period: str) -> bytes:
    await connection.execute("SET LOCAL statement_timeout = 0")
    return await usage_hash(connection, period)


async def _seals_of(connection: Connection, period: str) -> SealRange:
    row = await connection.fetchrow(_SEAL_RANGE, period)
    assert row is not None
    return SealRange(*row.values())


class _Writer:
    """The writers of all files of one archive, and one pass over the ledger that fills them."""

    def __init__(
        self, database: Database, store: ArchiveStore, folder: str, period: str, seals: SealRange, progress: Progress
    ) -> None:
        self._database, self._store, self._folder, self._progress = database, store, folder, progress
        self._period, self._seals = period, seals
        self._digest, self._rows = Digest(), 0
        self._positions: list[int] = []  # of the first report and of the last
        self._files: dict[str, ArchiveWriter] = {}

    async def write(self) -> _Written:
        self._files = {name: await asyncio.to_thread(self._store.writer, self._folder, name) for name in FILES}
        await self._write_reports()
        await self._write_movements()
        await self._write_seals()
        files = {name: await asyncio.to_thread(writer.end) for name, writer in self._files.items()}
        first, last = (self._positions[0], self._positions[-1]) if self._positions else (0, 0)
        return _Written(files, self._digest.value.hex(), first, last)

    async def _write_reports(self) -> None:
        async for heads in self._pages(_HEADS, self._seals.before_position, self._seals.position, REPORTS_AT_ONCE):
            await self._add("heads", _rows_of(ArchivedHead, heads))
            bounds = heads[0]["position"], heads[-1]["position"]
            rows = await self._database.read(lambda c, b=bounds: c.fetch(_REPORTS, self._period, *b))  # type: ignore[misc]
            reports = _rows_of(ArchivedReport, rows)
            if not reports:
                continue
            lines = await self._lines(reports)
            own = [line for line in lines if line.period == self._period]
            for line in own:
                self._digest.add(line[1:])
            await self._add("reports", reports)
            await self._add("transfers", own)
            await self._add("others", [line for line in lines if line.period != self._period])
            self._positions = [*self._positions[:1], reports[0].position, reports[-1].position]
            self._rows += len(own)
            await self._progress(self._rows, sum(writer.bytes for writer in self._files.values()))

    async def _lines(self, reports: Sequence[ArchivedReport]) -> list[ArchivedTransfer]:
        """Return all lines of the reports. Those of periods that were archived before are read from their archives."""
        positions = [report.position for report in reports]
        rows = await self._database.read(lambda c: c.fetch(_LINES, positions))
        lines = [_transfer(row) for row in rows]
        if len(lines) < sum(report.lines for report in reports):
            lines += await self._archived_lines(positions)
            lines.sort(key=lambda line: (line.position, line.line, line.part, line.id))
        return lines

    async def _archived_lines(self, positions: Sequence[int]) -> list[ArchivedTransfer]:
        wanted, first, last = frozenset(positions), positions[0], positions[-1]
        found: list[ArchivedTransfer] = []
        for archive in await self._database.read(lambda c: read_archives_of(c, first, last)):
            async for line in self._store.rows(archive.folder, "transfers", ArchivedTransfer, after=first - 1):
                if line.position is not None and line.position > last:
                    break
                if line.position in wanted:
                    found.append(line)
        return found

    async def _write_movements(self) -> None:
        covered = self._seals.before_transfer, self._seals.transfer
        async for rows in self._pages(_MOVEMENTS, *covered, REPORTS_AT_ONCE):
            await self._add("movements", [_transfer(row) for row in rows])

    async def _write_seals(self) -> None:
        async for rows in self._pages(_SEALS, self._seals.first - 1, self._seals.last, SEALS_AT_ONCE):
            await self._add("seals", _rows_of(ArchivedSeal, rows))

    async def _pages(self, sql: str, after: int, up_to: int, count: int) -> AsyncIterator[list[asyncpg.Record]]:
        """Return rows page by page. The next page begins after the number `page_end`."""
        while rows := await self._database.read(lambda c, at=after: c.fetch(sql, at, up_to, count)):  # type: ignore[misc]
            yield rows
            after = rows[-1]["page_end"]

    async def _add(self, name: str, rows: Sequence[tuple[Any, ...]]) -> None:
        await asyncio.to_thread(self._files[name].add, rows)


def _rows_of(columns: type[Row], rows: Sequence[asyncpg.Record]) -> list[Row]:
    names = columns._fields  # type: ignore[attr-defined]  # of a NamedTuple
    return [columns(*(row[name] for name in names)) for row in rows]


def _transfer(row: asyncpg.Record) -> ArchivedTransfer:
    values = {name: row[name] for name in ArchivedTransfer._fields}
    movement: UUID | None = values["movement_id"]
    return ArchivedTransfer(**values | {"movement_id": None if movement is None else str(movement)})


# --- the statements ---------------------------------------------------------------------------------------------------

_COLUMNS = ", ".join(f"transfer.{name}" for name in ArchivedTransfer._fields[1:])
# A report and its transfers are booked in one transaction, so the seal that covers a transfer covers its report.
_SEAL_RANGE = """
WITH covered AS (
    SELECT (SELECT min(number) FROM seal WHERE transfer >= (SELECT min(id) FROM transfer WHERE period = $1)) AS first,
        (SELECT min(number) FROM seal WHERE transfer >= (SELECT max(id) FROM transfer WHERE period = $1)) AS last
)
SELECT first, last, coalesce(before.position, 0), coalesce(before.transfer, 0), seal.position, seal.transfer
FROM covered JOIN seal ON seal.number = last LEFT JOIN seal AS before ON before.number = first - 1
"""
_LAST_TRANSFER = "SELECT max(id) FROM transfer WHERE period = $1"
_HEADS = """
SELECT position, epoch, lane, seq, head, position AS page_end FROM report
WHERE position > $1 AND position <= $2 ORDER BY position LIMIT $3
"""
_REPORTS = """
SELECT report.position, region, report.epoch, report.lane, report.seq, report.body_hash, before.head AS previous,
    report.head, report.lines, report.recorded_at
FROM report JOIN region_epoch USING (epoch)
LEFT JOIN report AS before ON (before.epoch, before.lane, before.seq) = (report.epoch, report.lane, report.seq - 1)
WHERE report.position BETWEEN $2 AND $3 AND EXISTS (
    SELECT FROM transfer WHERE period = $1
        AND (transfer.epoch, transfer.lane, transfer.seq) = (report.epoch, report.lane, report.seq))
ORDER BY report.position
"""
_LINES = """
SELECT report.position, {columns} FROM report JOIN transfer USING (epoch, lane, seq)
WHERE report.position = ANY ($1::bigint[]) ORDER BY report.position, line, part, transfer.id
""".replace("{columns}", _COLUMNS)
_MOVEMENTS = """
SELECT NULL::bigint AS position, {columns}, id AS page_end FROM transfer
WHERE seq IS NULL AND id > $1 AND id <= $2 ORDER BY id LIMIT $3
""".replace("{columns}", _COLUMNS)
_SEALS = """
SELECT number, previous, position, transfer, audit, reports, reports_hash, movements, movements_hash, entries,
    entries_hash, balances, sealed_at, hash, number AS page_end
FROM seal WHERE number > $1 AND number <= $2 ORDER BY number LIMIT $3
"""
