"""Exports: requested by people, made by any coordinator (job.py), and downloaded as often as needed.

No file is kept of a text export. Lines below a seal are never added or changed, so the lines of an export, read in the
order of the ledger, are the same bytes each time. Counting them once makes the manifest, and a download reads them
again. It uses short statements, each for some thousand lines of a bounded stretch of the ledger, for a tenant may have
few lines in it. So a slow download holds no transaction open, memory does not grow, and a download can resume at any
of the resume points that the count recorded.

A Parquet file is not its lines in sequence, and another release of the library may write the same lines as other bytes.
So its bytes are stored for some days, in parts, where every coordinator reads the same ones
(docs/adr/0035-keep-parquet-exports-in-postgresql-for-a-week.md).
"""

from collections.abc import AsyncIterator
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import NamedTuple
from uuid import UUID

import asyncpg
import msgspec
from msgspec import Struct
from sqlalchemy import BigInteger, ColumnElement, Text, and_, func, or_, select

from coordinator.archives.refusal import Archived
from coordinator.archives.statements import hold_archives, read_archive
from coordinator.database.compiled import CompiledStatement, compiled, constant, json_text, parameter
from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.database.tables import pool, transfer
from coordinator.exports.rules import ExportFormat, ExportRow, encoded, heading
from coordinator.usage.read_usage import PLAN_FOR_EACH_QUESTION
from protocol.limits.usage_labels import LABELS

CHUNK = 5_000  # lines
STRETCH = 50_000  # transfers that one statement reads


class LedgerHead(Struct, frozen=True):
    """The seal of an export. A copy of its hash that is kept elsewhere shows any later change."""

    seal: int
    hash: str
    position: int
    transfer: int


class Export(Struct, frozen=True, kw_only=True):
    """The manifest. Without `finished_at` the export is being made.

    `rows` of `rows_expected` are done, and `progress` is in thousandths; `rows_expected` is null until the rows are
    counted. A cancelled export is not made any more. `expires_at` is for Parquet files.
    """

    id: UUID
    period: str
    tenant: str | None
    format: ExportFormat
    is_final: bool  # the period is closed, and the export is complete
    ledger_head: LedgerHead
    requested_at: datetime
    finished_at: datetime | None
    cancelled_at: datetime | None
    expires_at: datetime | None
    progress: int
    rows: int
    rows_expected: int | None
    bytes: int
    sha256: str | None
    columns: tuple[str, ...] = ExportRow._fields

    def is_kept(self, now: datetime) -> bool:
        return self.cancelled_at is None and (self.expires_at is None or now < self.expires_at)


class NoExport(StrEnum):
    NO_PERIOD = "Unknown period."
    NOT_SEALED = "nothing is sealed yet: ask again in a minute"


IS_THE_EXPORT = "its file `transfers.parquet` has every line."


class ExportRequest(NamedTuple):
    period: str
    tenant: str | None
    format: ExportFormat


async def ask_export(
    connection: Connection, export_id: UUID, request: ExportRequest, token_id: UUID, now: datetime
) -> Export | NoExport | Archived:
    """Request an export. Safe to repeat by its id. If the same export exists or is being made, return that one."""
    await hold_archives(connection)
    if not await connection.fetchval("SELECT EXISTS (SELECT FROM period WHERE id = $1)", request.period):
        return NoExport.NO_PERIOD
    if archive := await read_archive(connection, request.period):
        return Archived(archive, IS_THE_EXPORT)
    await connection.execute(_ONE_AT_A_TIME)
    seal = await connection.fetchrow("SELECT number, transfer FROM seal ORDER BY number DESC LIMIT 1")
    if seal is None:
        return NoExport.NOT_SEALED
    is_final = await connection.fetchval(_IS_FINAL, request.period, seal["transfer"])
    same = await connection.fetchval(_THE_SAME, *request, seal["number"], is_final, now, export_id)
    if same is None:
        await connection.execute(_ASK, export_id, *request, seal["number"], is_final, token_id, now)
    else:
        await connection.execute(_WANT, same, token_id)
    found = await read_export(connection, same or export_id)
    assert found is not None
    return found


async def cancel_export(connection: Connection, export_id: UUID, token_id: UUID, now: datetime) -> Export | None:
    """Withdraw a caller's request; the export ends when no caller remains. Safe to repeat."""
    if await connection.fetchval(_CANCEL, export_id, token_id, now):
        await connection.execute("DELETE FROM export_part WHERE export = $1", export_id)
    return await read_export(connection, export_id)


async def read_export(connection: Connection, export_id: UUID) -> Export | None:
    row = await connection.fetchrow(_READ, export_id)
    return _export(row) if row else None


def _export(row: asyncpg.Record) -> Export:
    return Export(
        ledger_head=LedgerHead(row["seal"], row["hash"].hex(), row["position"], row["transfer"]),
        progress=1000 if row["finished_at"] else min(999, 1000 * row["rows"] // max(1, row["rows_expected"] or 1)),
        format=ExportFormat(row["format"]),
        sha256=row["sha256"].hex() if row["sha256"] else None,
        **{name: row[name] for name in _AS_KEPT},
    )


_AS_KEPT = (
    *("id", "period", "tenant", "is_final", "rows", "rows_expected", "bytes"),
    *("requested_at", "finished_at", "cancelled_at", "expires_at"),
)


# --- walking the ledger -----------------------------------------------------------------------------------------------


class Lines(NamedTuple):
    rows: list[ExportRow]
    last_transfer: int  # the last transfer of the stretch


async def lines(database: Database, export: Export, after: int = 0) -> AsyncIterator[Lines]:
    """Return the lines after a transfer, some thousand at a time."""
    while (end := await _end_of_stretch(database, export, after)) is not None:
        while after < end:
            rows = await _rows(database, export, end, after)
            after = rows[-1].transfer if len(rows) == CHUNK else end
            yield Lines(rows, after)


async def count_rows(database: Database, export: Export) -> int:
    """Count the rows, stretch by stretch, so that no statement takes long."""
    after = rows = 0
    while (end := await _end_of_stretch(database, export, after)) is not None:
        statement = _row_count(of_tenant=export.tenant is not None)
        ((of_stretch,),) = await _read(database, statement, export, end=end, after=after)
        after, rows = end, rows + of_stretch
    return rows


class Chunk(NamedTuple):
    body: bytes
    rows: int
    last_transfer: int


async def walk(database: Database, export: Export, after: int = 0) -> AsyncIterator[Chunk]:
    """Return the bytes of a text export; from the beginning they include the heading."""
    if not after:
        yield Chunk(heading(export.format), 0, 0)
    async for rows, last_transfer in lines(database, export, after):
        yield Chunk(encoded(export.format, rows), len(rows), last_transfer)


async def _end_of_stretch(database: Database, export: Export, after: int) -> int | None:
    """Return the last transfer of the next stretch, or None if nothing is left."""
    asked = export.period, export.ledger_head.transfer, after, STRETCH
    end: int | None = await database.read(lambda c: c.fetchval(_END_OF_STRETCH, *asked))
    return end


async def _rows(database: Database, export: Export, end: int, after: int) -> list[ExportRow]:
    statement = _lines(of_tenant=export.tenant is not None)
    rows = await _read(database, statement, export, end=end, after=after, count=CHUNK)
    return [ExportRow(*row) for row in rows]


async def _read(
    database: Database, statement: CompiledStatement, export: Export, **values: int
) -> list[asyncpg.Record]:
    async def read(connection: Connection) -> list[asyncpg.Record]:
        await connection.execute(PLAN_FOR_EACH_QUESTION)
        of_export = {"period": export.period, "tenant": export.tenant}
        return list(await connection.fetch(*statement.with_values(**of_export, **values)))

    return await database.run(read, snapshot=True)


# --- reading ----------------------------------------------------------------------------------------------------------


async def lines_archived(connection: Connection, export: Export) -> Archived | None:
    """Return the archive that has the lines of an export, which would be read again. A Parquet file is kept whole."""
    archive = None if export.format is ExportFormat.PARQUET else await read_archive(connection, export.period)
    return archive and Archived(archive, IS_THE_EXPORT)


def read_from(database: Database, export: Export, start: int) -> AsyncIterator[bytes]:
    """Return the bytes from an offset on."""
    return (_parts_from if export.format is ExportFormat.PARQUET else _walk_from)(database, export, start)


async def _walk_from(database: Database, export: Export, start: int) -> AsyncIterator[bytes]:
    """Read from the last resume point before the offset."""
    resume_points: list[tuple[int, int]] = msgspec.json.decode(
        await database.read(lambda c: c.fetchval("SELECT resume_points FROM export WHERE id = $1", export.id))
    )
    at, after = max((mark for mark in resume_points if mark[0] <= start), default=(0, 0))
    async for chunk in walk(database, export, after):
        rest = chunk.body[max(0, start - at) :]
        at += len(chunk.body)
        if rest:
            yield rest


class PartMissing(Exception):
    """A part is gone: the export was cancelled or expired during a download, which is broken off."""


async def _parts_from(database: Database, export: Export, start: int) -> AsyncIterator[bytes]:
    while start < export.bytes:
        part = await database.read(lambda c, at=start: c.fetchrow(_PART, export.id, at))  # type: ignore[misc]
        if part is None:
            raise PartMissing(export.id)
        yield part["body"][start - part["starts_at"] :]
        start = part["starts_at"] + len(part["body"])


# --- the statements ---------------------------------------------------------------------------------------------------

# Two concurrent requests for the same export get one. Requests are rare and short, so one lock serves for all.
_ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(hashtext('ask for an export'))"
_IS_FINAL = """
SELECT state = 'closed' AND NOT EXISTS (SELECT FROM transfer WHERE transfer.period = period.id AND transfer.id > $2)
FROM period WHERE id = $1
"""
# A closed period is the same as of any seal.
_THE_SAME = """
SELECT id FROM export
WHERE id = $7 OR (period = $1 AND tenant IS NOT DISTINCT FROM $2 AND format = $3 AND (seal = $4 OR ($5 AND is_final))
    AND cancelled_at IS NULL AND (expires_at IS NULL OR expires_at > $6))
ORDER BY id = $7 DESC, requested_at, id LIMIT 1
"""
_ASK = """
INSERT INTO export (id, period, tenant, format, seal, is_final, requested_by, requested_at, requesters)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, ARRAY[$7::uuid])
"""
_WANT = "UPDATE export SET requesters = requesters || $2::uuid WHERE id = $1 AND NOT $2 = ANY (requesters)"
_CANCEL = """
UPDATE export SET requesters = array_remove(requesters, $2::uuid),
    cancelled_at = CASE WHEN requesters <@ ARRAY[$2::uuid] THEN $3::timestamptz END
WHERE id = $1 AND $2::uuid = ANY (requesters) AND cancelled_at IS NULL
RETURNING cancelled_at IS NOT NULL
"""
_READ = """
SELECT export.*, seal.hash, seal.position, seal.transfer
FROM export JOIN seal ON seal.number = export.seal WHERE id = $1
"""
_PART = """
SELECT starts_at, body FROM export_part WHERE export = $1 AND starts_at <= $2
    AND starts_at + octet_length(body) > $2 ORDER BY starts_at DESC LIMIT 1
"""
_END_OF_STRETCH = """
SELECT max(id) FROM (
    SELECT id FROM transfer WHERE period = $1 AND id <= $2 AND id > $3 ORDER BY id LIMIT $4) AS stretch
"""


def _is_wanted(*, of_tenant: bool) -> ColumnElement[bool]:
    """Return the condition of usage in a stretch. If a quota has no tenants, the usage line may name one."""
    usage = [transfer.c.period == _PERIOD, transfer.c.dst == constant("consumed")]
    stretch = [transfer.c.id <= parameter("end", BigInteger), transfer.c.id > parameter("after", BigInteger)]
    if not of_tenant:
        return and_(*usage, *stretch)
    quotas = select(pool.c.quota).where(pool.c.period == _PERIOD)
    of_pool = transfer.c.quota.in_(quotas.where(pool.c.tenant == _TENANT))
    of_line = transfer.c.quota.in_(quotas.where(pool.c.tenant.is_(None)))
    return and_(*usage, *stretch, or_(of_pool, and_(json_text(transfer.c.dimensions, "tenant") == _TENANT, of_line)))


@cache
def _row_count(*, of_tenant: bool) -> CompiledStatement:
    return compiled(select(func.count()).select_from(transfer).where(_is_wanted(of_tenant=of_tenant)))


@cache
def _lines(*, of_tenant: bool) -> CompiledStatement:
    """Select lines in the order of ExportRow. Only those that are returned are joined to their pools.

    The ids of transfers below a seal are as final as its position.
    """
    wanted = select(transfer).where(_is_wanted(of_tenant=of_tenant)).order_by(transfer.c.id)
    line = wanted.limit(parameter("count", BigInteger)).subquery("line")
    tenant = func.coalesce(pool.c.tenant, json_text(line.c.dimensions, "tenant"))
    return compiled(
        select(
            *(line.c.id, line.c.window_at, line.c.period, line.c.charge_period),
            *(tenant, pool.c.name, line.c.quota, line.c.region),
            *(json_text(line.c.dimensions, name) for name in ("policy", "route_class", "api_key", "degraded")),
            *(line.c[name] for name in ("units", "cause", "epoch", "lane", "seq", "line", "part")),
            func.coalesce(json_text(line.c.dimensions, "counted_as"), constant("included")),
            json_text(line.c.dimensions, LABELS),
        )
        .join_from(line, pool, and_(pool.c.quota == line.c.quota, pool.c.period == line.c.period))
        .order_by(line.c.id)
    )


_PERIOD, _TENANT = parameter("period", Text), parameter("tenant", Text)
