"""Make requested exports, one after the other. If a coordinator dies in the middle, another one begins again.

An attempt has a number and writes under that number. So an attempt that was taken for dead never mixes its results with
those of a newer one. It stops when the export is cancelled.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import msgspec

from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.exports.requests import Chunk, Export, count_rows, lines, read_export, walk
from coordinator.exports.rules import ExportFormat, ParquetFile, can_be_written
from protocol.clock import Clock

CHUNKS_TO_A_MARK = 5
ROW_GROUP = 100_000  # lines; each row group of a Parquet file is stored as a part and shown as progress
KEPT_FOR = timedelta(days=7)


async def make_exports(database: Database, clock: Clock) -> None:
    """Make all exports that wait and that this coordinator can write. Those that were begun before come last."""
    written = [each.value for each in ExportFormat if can_be_written(each)]
    while (export_id := await database.read(lambda c: c.fetchval(_NEXT, written))) is not None:
        await _make(database, export_id, clock)


class _Attempt(NamedTuple):
    export: UUID
    number: int


class _Made(NamedTuple):
    """The progress of an attempt."""

    last_transfer: int
    rows: int
    bytes: int


async def _make(database: Database, export_id: UUID, clock: Clock) -> None:
    attempt = await database.run(lambda c: _begin(c, export_id))
    if attempt is None:
        return  # cancelled meanwhile
    export = await database.read(lambda c: read_export(c, export_id))
    assert export is not None
    expected = await count_rows(database, export)
    if not await database.run(lambda c: _still(c, _EXPECT, attempt, expected)):
        return
    parquet = export.format is ExportFormat.PARQUET
    chunks = file_of(database, export) if parquet else walk(database, export)
    done = await (_keep_parts if parquet else _leave_marks)(database, attempt, chunks)
    if done is not None:
        resume_points = msgspec.json.encode(done.resume_points).decode()
        expires_at = clock.now() + KEPT_FOR if parquet else None
        told = clock.now(), done.made.rows, done.made.bytes, done.sha256, resume_points, expires_at
        await database.run(lambda c: _still(c, _FINISH, attempt, *told))


async def _begin(connection: Connection, export_id: UUID) -> _Attempt | None:
    """Begin a new attempt and delete what earlier ones have made. Return None if the export was cancelled."""
    number = await connection.fetchval(_BEGIN, export_id)
    if number is None:
        return None
    await connection.execute("DELETE FROM export_part WHERE export = $1", export_id)
    return _Attempt(export_id, number)


async def _still(connection: Connection, statement: str, attempt: _Attempt, *told: object) -> bool:
    """Run a statement for this attempt. Return false if it is not the newest any more, or the export was cancelled."""
    return await connection.execute(statement, *attempt, *told) != "UPDATE 0"


class _Done(NamedTuple):
    made: _Made
    sha256: bytes
    resume_points: list[tuple[int, int]]  # byte, transfer


async def _leave_marks(database: Database, attempt: _Attempt, chunks: AsyncIterator[Chunk]) -> _Done | None:
    digest, made, resume_points, number = hashlib.sha256(), _Made(0, 0, 0), list[tuple[int, int]](), 0
    async for chunk in chunks:
        digest.update(chunk.body)
        number, made = number + 1, _with(made, chunk)
        if number % CHUNKS_TO_A_MARK == 0:
            resume_points.append((made.bytes, made.last_transfer))
            if not await database.run(lambda c, told=made: _still(c, _REACHED, attempt, *told)):  # type: ignore[misc]
                return None
    return _Done(made, digest.digest(), resume_points)


async def _keep_parts(database: Database, attempt: _Attempt, chunks: AsyncIterator[Chunk]) -> _Done | None:
    digest, made = hashlib.sha256(), _Made(0, 0, 0)
    async for chunk in chunks:
        digest.update(chunk.body)
        starts_at, made = made.bytes, _with(made, chunk)
        if chunk.body and not await database.run(
            lambda c, told=made, part=(starts_at, chunk.body): _keep(c, attempt, told, *part)  # type: ignore[misc]
        ):
            return None
    return _Done(made, digest.digest(), [])


def _with(made: _Made, chunk: Chunk) -> _Made:
    return _Made(chunk.last_transfer, made.rows + chunk.rows, made.bytes + len(chunk.body))


async def _keep(connection: Connection, attempt: _Attempt, made: _Made, starts_at: int, body: bytes) -> bool:
    """Store a part. The export's row stays locked meanwhile, so no new attempt and no cancellation comes between."""
    if not await _still(connection, _REACHED, attempt, *made):
        return False
    await connection.execute(_KEEP, attempt.export, starts_at, body)
    return True


async def file_of(database: Database, export: Export) -> AsyncIterator[Chunk]:
    """Make a Parquet file outside of the event loop: packing thousands of lines takes too long for other requests."""
    head = export.ledger_head
    facts = {
        "export": str(export.id),
        "period": export.period,
        "tenant": export.tenant or "",
        "is_final": str(export.is_final).lower(),
        "seal": str(head.seal),
        "seal_hash": head.hash,
        "position": str(head.position),
    }
    file, last_transfer = await asyncio.to_thread(ParquetFile, facts, ROW_GROUP), 0
    async for rows, last_transfer in lines(database, export):
        yield Chunk(await asyncio.to_thread(file.add, rows), len(rows), last_transfer)
    yield Chunk(await asyncio.to_thread(file.end), 0, last_transfer)


async def delete_expired_exports(connection: Connection, now: datetime) -> None:
    """Delete the bytes of expired files. Their manifests stay."""
    await connection.execute(_FORGET, now)


EXPORTS_WAITING = "EXISTS (SELECT FROM export WHERE finished_at IS NULL AND cancelled_at IS NULL)"
_NEXT = """
SELECT id FROM export WHERE finished_at IS NULL AND cancelled_at IS NULL AND format = ANY ($1)
ORDER BY attempt, requested_at, id LIMIT 1
"""
_BEGIN = """
UPDATE export SET attempt = attempt + 1, rows_expected = NULL, last_transfer = 0, rows = 0, bytes = 0
WHERE id = $1 AND finished_at IS NULL AND cancelled_at IS NULL RETURNING attempt
"""
# Each statement changes nothing unless the attempt is still the newest.
_EXPECT = """
UPDATE export SET rows_expected = $3
WHERE id = $1 AND attempt = $2 AND finished_at IS NULL AND cancelled_at IS NULL
"""
_REACHED = """
UPDATE export SET last_transfer = $3, rows = $4, bytes = $5
WHERE id = $1 AND attempt = $2 AND finished_at IS NULL AND cancelled_at IS NULL
"""
_KEEP = "INSERT INTO export_part (export, starts_at, body) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
_FINISH = """
UPDATE export SET finished_at = $3, rows = $4, bytes = $5, sha256 = $6, resume_points = $7, expires_at = $8
WHERE id = $1 AND attempt = $2 AND finished_at IS NULL AND cancelled_at IS NULL
"""
_FORGET = "DELETE FROM export_part USING export WHERE export.id = export_part.export AND expires_at <= $1"
