"""Request an archive of a period, and read how far each has come. `job.py` writes them."""

from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import NamedTuple
from uuid import UUID

import asyncpg
from msgspec import UNSET, Struct
from sqlalchemy import Text, select

from coordinator.access.token_names import TokenName, with_token_names
from coordinator.database.compiled import CompiledStatement, compiled, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import quarantine
from coordinator.suspense.read_suspense import IS_OPEN


class ArchiveObstacle(StrEnum):
    SETTING = "setting"
    NOT_CLOSED = "not_closed"
    EMPTY = "empty"
    NOT_SEALED = "not_sealed"
    SUSPENSE = "suspense"
    PROPOSAL = "proposal"
    QUARANTINE = "quarantine"
    EXPORT = "export"


class MissingForArchive(Struct, frozen=True):
    """An obstacle that has to be resolved before the period can be archived."""

    what: ArchiveObstacle
    reason: str


class ArchiveState(StrEnum):
    WAITING = "waiting"
    WRITING = "writing"
    FAILED = "failed"  # `failure` says why; request it again when that is mended
    ARCHIVED = "archived"


class Archive(Struct, frozen=True, kw_only=True):
    """The progress of an archive: `rows` of `rows_expected` are written. A complete one has the fields after it."""

    period: str
    state: ArchiveState
    requested_by: UUID
    requested_at: datetime
    rows: int
    rows_expected: int
    bytes: int
    failure: str | None
    location: str | None
    manifest_sha256: str | None
    transfers: int | None  # that left the database
    archived_at: datetime | None
    requested_by_name: TokenName = UNSET


class ArchivePreview(Struct, frozen=True, kw_only=True):
    """The extent of an archive: the transfers of the period, and the bytes of its partition with its indexes."""

    period: str
    rows: int
    bytes: int
    missing: list[MissingForArchive]


class ArchiveRefused(NamedTuple):
    missing: list[MissingForArchive]


async def preview_archive(connection: Connection, period: str, setting: str | None) -> ArchivePreview | None:
    """Return what an archive would take, or None if the period is unknown. `setting` is what the coordinator lacks."""
    row = await connection.fetchrow(_PREVIEW, period)
    if row is None:
        return None
    missing = await _missing(connection, period, setting, row)
    return ArchivePreview(period=period, rows=row["transfers"] or 0, bytes=row["bytes"], missing=missing)


async def request_archive(
    connection: Connection, period: str, setting: str | None, token_id: UUID, now: datetime
) -> Archive | ArchiveRefused | None:
    """Request an archive. A repeated request returns the archive, and lets one that failed begin again."""
    found = await read_archive_progress(connection, period)
    if found is not None and found.state is not ArchiveState.FAILED:
        return found
    preview = await preview_archive(connection, period, setting)
    if preview is None:
        return None
    if preview.missing:
        return ArchiveRefused(preview.missing)
    await connection.execute(_REQUEST, period, token_id, now)
    return await read_archive_progress(connection, period)


async def read_archive_progress(connection: Connection, period: str) -> Archive | None:
    row = await connection.fetchrow(f"{_PROGRESS} WHERE archive.period = $1", period)
    return (await with_token_names(connection, [_archive(row)]))[0] if row else None


async def list_archives(connection: Connection, after: str, count: int) -> list[Archive]:
    rows = await connection.fetch(
        f"{_PROGRESS} WHERE archive.period > $1 ORDER BY archive.period LIMIT $2", after, count
    )
    return await with_token_names(connection, [_archive(row) for row in rows])


def _archive(row: asyncpg.Record) -> Archive:
    if row["archived_at"]:
        state = ArchiveState.ARCHIVED
    elif row["failure"]:
        state = ArchiveState.FAILED
    else:
        state = ArchiveState.WRITING if row["attempt"] else ArchiveState.WAITING
    manifest = row["manifest_sha256"]
    same = {name: value for name, value in row.items() if name not in ("attempt", "manifest_sha256")}
    return Archive(state=state, manifest_sha256=manifest and manifest.hex(), **same)


async def obstacles(connection: Connection, period: str) -> list[MissingForArchive]:
    """Return what has to be resolved first. The job asks again, because something may have come up meanwhile."""
    row = await connection.fetchrow(_PREVIEW, period)
    assert row is not None
    return await _missing(connection, period, None, row)


async def _missing(
    connection: Connection, period: str, setting: str | None, row: asyncpg.Record
) -> list[MissingForArchive]:
    found = [(ArchiveObstacle.SETTING, setting)] if setting else []
    if row["state"] != "closed":
        return [
            MissingForArchive(*each)
            for each in [*found, (ArchiveObstacle.NOT_CLOSED, f"It is {row['state']}: close it.")]
        ]
    found += [(what, reason) for what, reason in _REASONS.items() if row[what.value]]
    if await connection.fetchval(*_open_quarantine().with_values(period=period)):
        found.append((ArchiveObstacle.QUARANTINE, "Evidence of it is in quarantine: resolve it first."))
    return [MissingForArchive(what, reason) for what, reason in found]


_REASONS = {
    ArchiveObstacle.EMPTY: "It has no transfers, so there is nothing to archive.",
    ArchiveObstacle.NOT_SEALED: "Its close is not sealed yet. Retry in a minute.",
    ArchiveObstacle.SUSPENSE: "Units of it are still in suspense, carried into a later period: resolve them first.",
    ArchiveObstacle.PROPOSAL: "A resolution or an adjustment of it is proposed: approve or withdraw it first.",
    ArchiveObstacle.EXPORT: "An export of it is being made: wait for it, or cancel it.",
}


# --- the statements ---------------------------------------------------------------------------------------------------


@cache
def _open_quarantine() -> CompiledStatement:
    rows = select(quarantine.c.reason).where(quarantine.c.period == parameter("period", Text), IS_OPEN)
    return compiled(rows)


_PREVIEW = """
SELECT state, transfers, pg_total_relation_size(to_regclass(format('%I', 'transfer_' || id))) AS bytes,
    transfers = 0 AS empty,
    NOT EXISTS (SELECT FROM seal WHERE transfer >= (SELECT max(id) FROM transfer WHERE transfer.period = period.id)
        AND audit >= (SELECT max(id) FROM audit WHERE action = 'period.closed' AND object = period.id))
        AND transfers > 0 AS not_sealed,
    EXISTS (SELECT FROM correction WHERE charge_period = period.id AND suspense_carried > 0) AS suspense,
    EXISTS (SELECT FROM resolution WHERE resolution.period = period.id AND approved_at IS NULL)
        OR EXISTS (SELECT FROM adjustment WHERE adjustment.period = period.id AND approved_at IS NULL
            AND withdrawn_at IS NULL AND expires_at > clock_timestamp()) AS proposal,
    EXISTS (SELECT FROM export WHERE export.period = period.id AND finished_at IS NULL AND cancelled_at IS NULL)
        AS export
FROM period WHERE id = $1
"""
_PROGRESS = """
SELECT archive.period, attempt, requested_by, requested_at, rows, period.transfers AS rows_expected, bytes, failure,
    location, manifest_sha256, archive.transfers, archived_at
FROM archive JOIN period ON period.id = archive.period
"""
_REQUEST = """
INSERT INTO archive AS kept (period, requested_by, requested_at) VALUES ($1, $2, $3)
ON CONFLICT (period) DO UPDATE SET requested_by = excluded.requested_by, requested_at = excluded.requested_at,
    failure = NULL, rows = 0, bytes = 0
WHERE kept.archived_at IS NULL AND kept.failure IS NOT NULL
"""
