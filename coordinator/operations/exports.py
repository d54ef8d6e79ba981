"""Exports: asked for by people, counted and hashed by whichever coordinator comes first, and read as often as wanted.

No file is kept. What is below a seal is never added to and never changed, so the lines of an export, read in the order
of the ledger, are the same bytes each time: counting them once makes the manifest, and a download is the same walk. It
goes in short statements, each for some thousand lines, found in a stretch of the ledger that is bounded too, for of one
tenant there may be few: nobody's slow download holds a transaction open, memory does not grow, and a walk can begin at
any of the marks that the count has left.
"""

import hashlib
from collections.abc import AsyncIterator
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

import asyncpg
import msgspec
from msgspec import Struct

from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.domain.export import ExportFormat, ExportRow, encoded, heading
from coordinator.operations.read_usage import PLAN_FOR_WHAT_IS_ASKED
from protocol.clock import Clock

CHUNK = 5_000  # lines
STRETCH = 50_000  # transfers that are looked through for them
CHUNKS_TO_A_MARK = 5


class LedgerHead(Struct, frozen=True):
    """The seal that the export is of: whoever keeps its hash elsewhere can tell if any of it is changed."""

    seal: int
    hash: str
    position: int
    transfer: int


class Export(Struct, frozen=True, kw_only=True):
    """The manifest. Without `finished_at` it is being counted: `progress` is how far that is, in thousandths."""

    id: UUID
    period: str
    tenant: str | None
    format: ExportFormat
    is_final: bool  # the period is closed, and this is all of it
    ledger_head: LedgerHead
    asked_at: datetime
    finished_at: datetime | None
    progress: int
    rows: int
    bytes: int
    sha256: str | None
    columns: tuple[str, ...] = ExportRow._fields


class NoExport(StrEnum):
    NO_PERIOD = "the books have no such period"
    NOT_SEALED = "nothing is sealed yet: ask again in a minute"


class ExportRequest(NamedTuple):
    period: str
    tenant: str | None
    format: ExportFormat


async def ask_export(
    connection: Connection, export_id: UUID, request: ExportRequest, token_id: UUID, now: datetime
) -> Export | NoExport:
    """Safe to repeat: an id is one export."""
    if not await connection.fetchval("SELECT EXISTS (SELECT FROM period WHERE id = $1)", request.period):
        return NoExport.NO_PERIOD
    seal = await connection.fetchrow("SELECT number, transfer FROM seal ORDER BY number DESC LIMIT 1")
    if seal is None:
        return NoExport.NOT_SEALED
    is_final = await connection.fetchval(_IS_FINAL, request.period, seal["transfer"])
    await connection.execute(_ASK, export_id, *request, seal["number"], is_final, token_id, now)
    found = await read_export(connection, export_id)
    assert found is not None
    return found


async def read_export(connection: Connection, export_id: UUID) -> Export | None:
    row = await connection.fetchrow(_READ, export_id)
    return _export(row) if row else None


def _export(row: asyncpg.Record) -> Export:
    head = LedgerHead(row["seal"], row["hash"].hex(), row["position"], row["transfer"])
    return Export(
        ledger_head=head,
        progress=1000 if row["finished_at"] else min(999, 1000 * row["reached"] // max(1, head.transfer)),
        format=ExportFormat(row["format"]),
        sha256=row["sha256"].hex() if row["sha256"] else None,
        **{name: row[name] for name in _AS_KEPT},
    )


_AS_KEPT = ("id", "period", "tenant", "is_final", "asked_at", "finished_at", "rows", "bytes")


# --- the walk ---------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    body: bytes
    rows: int
    reached: int  # the last transfer that it may be of


async def walk(database: Database, export: Export, after: int = 0) -> AsyncIterator[Chunk]:
    """All that comes after a transfer; from the beginning with the heading."""
    if not after:
        yield Chunk(heading(export.format), 0, 0)
    while (end := await _end_of_stretch(database, export, after)) is not None:
        while after < end:
            rows = await _rows(database, export, end, after)
            after = rows[-1].transfer if len(rows) == CHUNK else end
            yield Chunk(encoded(export.format, rows), len(rows), after)


async def _end_of_stretch(database: Database, export: Export, after: int) -> int | None:
    """None if nothing is left."""
    asked = export.period, export.ledger_head.transfer, after, STRETCH
    end: int | None = await database.read(lambda c: c.fetchval(_END_OF_STRETCH, *asked))
    return end


async def _rows(database: Database, export: Export, end: int, after: int) -> list[ExportRow]:
    async def read(connection: Connection) -> list[asyncpg.Record]:
        await connection.execute(PLAN_FOR_WHAT_IS_ASKED)
        return list(await connection.fetch(_LINES, export.period, export.tenant, end, after, CHUNK))

    return [ExportRow(*row) for row in await database.run(read, snapshot=True)]


async def read_from(database: Database, export: Export, start: int) -> AsyncIterator[bytes]:
    """From a byte on: found from the last mark before it."""
    marks: list[tuple[int, int]] = msgspec.json.decode(
        await database.read(lambda c: c.fetchval("SELECT marks FROM export WHERE id = $1", export.id))
    )
    at, after = max((mark for mark in marks if mark[0] <= start), default=(0, 0))
    async for chunk in walk(database, export, after):
        rest = chunk.body[max(0, start - at) :]
        at += len(chunk.body)
        if rest:
            yield rest


async def do_exports(database: Database, clock: Clock) -> None:
    """All that wait, one after the other."""
    while (export_id := await database.read(lambda c: c.fetchval(_NEXT))) is not None:
        await _count(database, export_id, clock)


async def _count(database: Database, export_id: UUID, clock: Clock) -> None:
    """From its beginning: a count that somebody began and did not end is begun anew."""
    export = await database.read(lambda c: read_export(c, export_id))
    assert export is not None
    digest, marks = hashlib.sha256(), list[tuple[int, int]]()
    chunks = rows = size = 0
    async for chunk in walk(database, export):
        digest.update(chunk.body)
        chunks, rows, size = chunks + 1, rows + chunk.rows, size + len(chunk.body)
        if chunks % CHUNKS_TO_A_MARK == 0:
            marks.append((size, chunk.reached))
            progress = export_id, chunk.reached, rows, size
            await database.run(lambda c, told=progress: c.execute(_REACHED, *told))  # type: ignore[misc]
    told = msgspec.json.encode(marks).decode()
    await database.run(lambda c: c.execute(_FINISH, export_id, clock.now(), rows, size, digest.digest(), told))


# --- the statements ---------------------------------------------------------------------------------------------------

_IS_FINAL = """
SELECT state = 'closed' AND NOT EXISTS (SELECT FROM transfer WHERE transfer.period = period.id AND transfer.id > $2)
FROM period WHERE id = $1
"""
_ASK = """
INSERT INTO export (id, period, tenant, format, seal, is_final, asked_by, asked_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO NOTHING
"""
_READ = """
SELECT export.*, seal.hash, seal.position, seal.transfer
FROM export JOIN seal ON seal.number = export.seal WHERE id = $1
"""
_END_OF_STRETCH = """
SELECT max(id) FROM (
    SELECT id FROM transfer WHERE period = $1 AND id <= $2 AND id > $3 ORDER BY id LIMIT $4) AS stretch
"""
# The ids of transfers below a seal are as final as its position. Only lines that are given are joined to their pool.
_LINES = """
SELECT line.id, line.window_at, period, line.charge_period, coalesce(pool.tenant, line.dimensions ->> 'tenant'),
    pool.name, quota, line.region, line.dimensions ->> 'policy', line.dimensions ->> 'route_class',
    line.dimensions ->> 'api_key', line.dimensions ->> 'degraded', line.units, line.cause, line.epoch, line.lane,
    line.seq, line.line, line.part, coalesce(line.dimensions ->> 'counted_as', 'included')
FROM (
    SELECT * FROM transfer
    WHERE period = $1 AND dst = 'consumed' AND id <= $3 AND id > $4 AND ($2::text IS NULL
        OR quota IN (SELECT quota FROM pool WHERE period = $1 AND tenant = $2)
        OR (dimensions ->> 'tenant' = $2 AND quota IN (SELECT quota FROM pool WHERE period = $1 AND tenant IS NULL)))
    ORDER BY id LIMIT $5
) AS line JOIN pool USING (quota, period) ORDER BY line.id
"""
_NEXT = "SELECT id FROM export WHERE finished_at IS NULL ORDER BY asked_at, id LIMIT 1"
_REACHED = "UPDATE export SET reached = $2, rows = $3, bytes = $4 WHERE id = $1 AND finished_at IS NULL"
_FINISH = """
UPDATE export SET finished_at = $2, rows = $3, bytes = $4, sha256 = $5, marks = $6
WHERE id = $1 AND finished_at IS NULL
"""
