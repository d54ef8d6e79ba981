"""The rows of archives in the database, and what decides whether a period may be archived."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import asyncpg

from coordinator.database.connection import Connection
from coordinator.proof.rules import Digest


class RecordedArchive(NamedTuple):
    """A complete archive: the transfers of the period's reports are in it, and no more in the database."""

    period: str
    location: str  # for people
    folder: str  # below the place that a coordinator is configured with
    manifest_sha256: bytes
    transfers: int
    first_position: int
    last_position: int
    last_transfer: int
    usage_sha256: bytes
    archived_at: datetime


async def hold_archives(connection: Connection) -> None:
    """Keep periods from being archived until this transaction ends. A snapshot has to begin after this statement."""
    await connection.execute("LOCK TABLE archive IN ACCESS SHARE MODE")


async def read_archives(connection: Connection) -> list[RecordedArchive]:
    return _recorded(await connection.fetch(f"{_RECORDED} ORDER BY period"))


async def read_archive(connection: Connection, period: str) -> RecordedArchive | None:
    return next(iter(_recorded(await connection.fetch(f"{_RECORDED} AND period = $1", period))), None)


async def read_archives_of(connection: Connection, first: int, last: int) -> list[RecordedArchive]:
    """Return the archives that have lines of reports between two positions."""
    overlap = f"{_RECORDED} AND first_position <= $2 AND last_position >= $1 ORDER BY period"
    return _recorded(await connection.fetch(overlap, first, last))


def _recorded(rows: Sequence[asyncpg.Record]) -> list[RecordedArchive]:
    return [RecordedArchive(*row.values()) for row in rows]


async def find_archive_needed(
    connection: Connection, starts_at: datetime, ends_at: datetime, periods: Sequence[str] | None, before: int | None
) -> RecordedArchive | None:
    """Return an archive with lines between two times, or None. With `before`, of reports after that position only."""
    rows = await connection.fetch(f"{_RECORDED} {_IS_NEEDED}", starts_at, ends_at, periods, before)
    return next(iter(_recorded(rows)), None)


async def usage_hash(connection: Connection, period: str) -> bytes:
    """Return the hash of a period's usage by hours, days and labels. It does not depend on the database's collation."""
    digest = Digest()
    for sql in _USAGE_OF:
        async for row in connection.cursor(sql, period, prefetch=2000):
            digest.add(row.values())
    return digest.value


_RECORDED = """
SELECT period, location, folder, manifest_sha256, transfers, first_position, last_position, last_transfer,
    usage_sha256, archived_at
FROM archive WHERE archived_at IS NOT NULL"""
# Late usage is booked in another period than the one in which it happened.
_IS_NEEDED = """
AND ($3::text[] IS NULL OR period = ANY ($3)) AND ($4::bigint IS NULL OR last_position > $4) AND (
    EXISTS (SELECT FROM period WHERE id = archive.period AND starts_at < $2 AND ends_at > $1)
    OR EXISTS (SELECT FROM usage_hour WHERE usage_hour.period = archive.period
        AND begins_at < $2 AND begins_at > $1 - interval '1 hour'))
ORDER BY period LIMIT 1
"""
_USAGE = """
SELECT begins_at, quota, name, tenant, region, policy, charge_period, route_class, api_key, degraded, counted_as,
    {labels}units
FROM {table} WHERE period = $1
ORDER BY begins_at, quota COLLATE "C", tenant COLLATE "C", region COLLATE "C", policy COLLATE "C",
    charge_period COLLATE "C", route_class COLLATE "C", api_key COLLATE "C", degraded COLLATE "C",
    counted_as COLLATE "C"{by_labels}
"""
# Usage without labels is not in the last one: so the hash of an archive is what it was before there were labels.
_USAGE_OF = [
    _USAGE.format(table="usage_hour", labels="", by_labels=""),
    _USAGE.format(table="usage_day", labels="", by_labels=""),
    _USAGE.format(table="labelled_usage", labels="labels, ", by_labels=', labels COLLATE "C"'),
]
