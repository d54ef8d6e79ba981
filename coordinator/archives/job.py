"""Archive the periods that are requested: write the files, check them, and only then remove what is in them.

    write     each attempt into a folder of its own, so that one that was taken for dead spoils nothing
    check     the files are read back: hashes, chains, seals, sums, and the rows against those of the database
    remove    one transaction empties the period's partition of what the archive has, and records the archive

A coordinator may die anywhere. An attempt without a manifest is deleted by the next one. An attempt whose manifest is
there is checked again, and not written again.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import structlog

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.archives.check import check_archive
from coordinator.archives.requests import obstacles
from coordinator.archives.rules import MANIFEST, Manifest, parse_manifest
from coordinator.archives.statements import RecordedArchive, usage_hash
from coordinator.archives.store import ArchiveStore, ArchiveUnreadable
from coordinator.archives.write import ClosedPeriod, write_archive
from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.periods.close import period_root
from coordinator.usage.reconcile import read_books
from coordinator.usage.rules.reconciliation import BalanceStatus, reconcile
from protocol.clock import Clock

_log = structlog.get_logger(__name__)


class NotArchived(Exception):
    """The period cannot be archived. The message is shown to people, who request it again."""


async def archive_periods(database: Database, store: ArchiveStore, clock: Clock) -> None:
    """Archive the requested periods one after the other. One that fails waits until it is requested again."""
    while (row := await database.read(lambda c: c.fetchrow(_NEXT))) is not None:
        period = ClosedPeriod(*row.values())
        attempt = await database.read(lambda c, of=period.id: c.fetchval(_BEGIN, of))  # type: ignore[misc]
        try:
            await _archive(database, store, period, attempt, clock)
        except (NotArchived, ArchiveUnreadable, OSError) as error:
            failure = str(error) or type(error).__name__
            await database.read(lambda c, of=period.id, why=failure: c.execute(_FAIL, of, why))  # type: ignore[misc]
            _log.warning("period not archived", period=period.id, reason=failure)


async def _archive(database: Database, store: ArchiveStore, period: ClosedPeriod, attempt: int, clock: Clock) -> None:
    await database.run(lambda c: _check_period(c, period, clock.now()), snapshot=True)
    folder = await asyncio.to_thread(_complete_attempt, store, period.id)
    if folder is None:
        await asyncio.to_thread(store.delete, period.id)
        folder = f"{period.id}/{attempt}"

        async def note(rows: int, size: int) -> None:
            if await database.read(lambda c: c.execute(_REACHED, period.id, attempt, rows, size)) == "UPDATE 0":
                raise NotArchived("Another coordinator has begun a newer attempt.")

        await write_archive(database, store, folder, period, clock.now(), note)
    manifest = await asyncio.to_thread(store.get, folder, MANIFEST)
    found = await check_archive(store, folder)
    if found.fault is not None:
        await asyncio.to_thread(store.delete, folder)
        raise NotArchived(f"The files that were written do not verify: {found.fault.table}: {found.fault.reason}")
    await database.run(lambda c: _record(c, store, folder, attempt, manifest, clock.now()))
    _log.info("period archived", period=period.id, location=f"{store.location}/{folder}")


def _complete_attempt(store: ArchiveStore, period: str) -> str | None:
    """Return the folder of an attempt that wrote its manifest and whose coordinator died afterwards."""
    complete = [name for name in store.names(period) if name.endswith(f"/{MANIFEST}")]
    return f"{period}/{complete[0].partition('/')[0]}" if complete else None


async def _check_period(connection: Connection, period: ClosedPeriod, now: datetime) -> None:
    """Refuse a period with something unresolved, and one that is not what was booked and closed."""
    await connection.execute("SET LOCAL statement_timeout = 0")
    for each in await obstacles(connection, period.id):
        raise NotArchived(each.reason)
    found = reconcile(period.id, await read_books(connection, period.id), now)
    for finding in found.findings:
        if finding.kind in _UNSOUND:
            raise NotArchived(f"Its accounts do not agree: {finding.kind}: {finding.quota_key}: {finding.reason}")
    if await period_root(connection, period.id) != period.root:
        raise NotArchived("Its pools, leases and corrections do not hash to the root of its close.")


# A region's own total may differ from the ledger for ever, once the period is closed.
_UNSOUND = (BalanceStatus.PROJECTION, BalanceStatus.ROLLUP, BalanceStatus.GAPS, BalanceStatus.CHAIN)


async def _record(
    connection: Connection, store: ArchiveStore, folder: str, attempt: int, content: bytes, now: datetime
) -> None:
    """Remove the transfers and record the archive, with its entry in the audit, in one transaction."""
    await connection.execute("SET LOCAL statement_timeout = 0")
    await connection.execute("SET LOCAL lock_timeout = '2s'")
    manifest = parse_manifest(content)
    if (await usage_hash(connection, manifest.period)).hex() != manifest.usage_sha256:
        raise NotArchived("Its hourly and daily usage was changed meanwhile.")
    archive = _recorded(store, folder, manifest, content, now)
    values: dict[str, Any] = {**archive._asdict(), "attempt": attempt}
    await connection.execute(_ARCHIVE, msgspec.json.encode(_plain(values)).decode(), timeout=3600)
    details = {name: value for name, value in _plain(archive._asdict(), bytes.hex).items() if name != "archived_at"}
    by = await connection.fetchval("SELECT requested_by::text FROM archive WHERE period = $1", manifest.period)
    await record(connection, Actor(by), Action.PERIOD_ARCHIVED, manifest.period, details, now)


def _recorded(store: ArchiveStore, folder: str, manifest: Manifest, content: bytes, now: datetime) -> RecordedArchive:
    return RecordedArchive(
        period=manifest.period,
        location=f"{store.location}/{folder}",
        folder=folder,
        manifest_sha256=hashlib.sha256(content).digest(),
        transfers=manifest.files["transfers"].rows,
        first_position=manifest.first_position,
        last_position=manifest.last_position,
        last_transfer=manifest.last_transfer,
        usage_sha256=bytes.fromhex(manifest.usage_sha256),
        archived_at=now,
    )


def _plain(values: Mapping[str, Any], encode: Any = lambda value: f"\\x{value.hex()}") -> dict[str, Any]:
    return {name: encode(value) if isinstance(value, bytes) else value for name, value in values.items()}


# --- the statements ---------------------------------------------------------------------------------------------------

ARCHIVES_WAITING = "EXISTS (SELECT FROM archive WHERE archived_at IS NULL AND failure IS NULL)"
_NEXT = """
SELECT id, closed_at, period.transfers, root FROM archive JOIN period ON period.id = archive.period
WHERE archived_at IS NULL AND failure IS NULL ORDER BY requested_at, id LIMIT 1
"""
_BEGIN = "UPDATE archive SET attempt = attempt + 1, rows = 0, bytes = 0 WHERE period = $1 RETURNING attempt"
_REACHED = "UPDATE archive SET rows = $3, bytes = $4 WHERE period = $1 AND attempt = $2 AND failure IS NULL"
_FAIL = "UPDATE archive SET failure = $2 WHERE period = $1 AND archived_at IS NULL"
_ARCHIVE = "SELECT archive_transfers(json_populate_record(NULL::archive, $1::json))"
