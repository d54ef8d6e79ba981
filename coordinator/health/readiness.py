"""Statements of health checks: prove a commit, read the database's clock, and share measured figures.

One coordinator measures for all of them (`measure`, a job), and each reads the result: a scrape of the metrics asks
the database nothing, and costly sums are computed once.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import asyncpg
import msgspec
from msgspec import Struct

from coordinator.database.connection import Connection
from coordinator.regions.read_regions import read_regions

MOST_REGIONS = 1_000


class RegionFigures(Struct, frozen=True):
    regressed_lanes: int
    split_brain: bool


class Figures(Struct, frozen=True, omit_defaults=True):
    """The figures that one coordinator measures for all."""

    units: list[tuple[str, str, float]]  # quota, account and units of the current periods
    regions: dict[str, RegionFigures]
    growing: dict[str, int] = {}  # tenants whose usage has suddenly grown, by quota: see coordinator/usage/find_signals
    used_up: dict[str, int] = {}  # keys that have nothing left, by quota


class Measured(NamedTuple):
    """The newest figures, when they were measured, and when any coordinator last saw each region."""

    figures: Figures | None
    measured_at: datetime | None
    read_at: datetime  # by the database's clock, like the other times
    last_seen_at: Mapping[str, datetime]
    down: frozenset[str]


async def schema_revision(connection: Connection) -> str | None:
    """Return the revision of the schema, or None if no migration has run."""
    try:
        found: str | None = await connection.fetchval("SELECT version_num FROM alembic_version")
    except asyncpg.UndefinedTableError:
        return None
    return found


async def read_database_clock(connection: Connection) -> datetime:
    now: datetime = await connection.fetchval("SELECT clock_timestamp()")
    return now


async def write_message(connection: Connection) -> None:
    """Write a message to the log, so that the transaction's commit is as durable as any when it returns.

    It changes no table. A transaction that writes nothing would not wait for the disk and the synchronous standby.
    """
    await connection.execute("SELECT pg_logical_emit_message(true, 'leasehold', 'ready')")


async def measure(connection: Connection, now: datetime) -> None:
    """Measure the units of the current periods, and the regions, for all coordinators."""
    rows = await connection.fetch(_UNITS)
    units = [(row["name"], account, float(row[account])) for row in rows for account in ACCOUNTS]
    regions = {
        region.name: RegionFigures(region.regressed_lanes, region.split_brain)
        for region in await read_regions(connection, "", MOST_REGIONS, now)
    }
    await connection.execute(_KEEP, msgspec.json.encode(Figures(units, regions)).decode())


async def read_measured(connection: Connection) -> Measured:
    row = await connection.fetchrow(_MEASURED)
    assert row is not None
    figures = None if row["figures"] is None else msgspec.json.decode(row["figures"], type=Figures)
    seen = await connection.fetch(_LAST_SEEN)
    return Measured(
        figures,
        row["measured_at"],
        row["read_at"],
        {each["region"]: each["last_seen_at"] for each in seen},
        frozenset(each["region"] for each in seen if each["is_down"]),
    )


async def note_seen_regions(connection: Connection, ago_ms: Mapping[str, int]) -> None:
    """Note how long ago each region was seen. The latest time of any coordinator counts."""
    if ago_ms:
        names = sorted(ago_ms)
        await connection.execute(_NOTE_SEEN, names, [ago_ms[name] for name in names])


ACCOUNTS = ("funded", "unallocated", "outstanding", "consumed", "suspense", "overage")
_UNITS = """
SELECT name, sum(funded) AS funded, sum(unallocated) AS unallocated, sum(outstanding) AS outstanding,
    sum(consumed) AS consumed, sum(suspense) AS suspense, sum(overage) AS overage
FROM pool JOIN period ON period.id = pool.period WHERE period.ends_at > now() GROUP BY name
"""
_KEEP = """
INSERT INTO measurement (figures, measured_at) VALUES ($1::text::jsonb, clock_timestamp())
ON CONFLICT (only_row) DO UPDATE
SET figures = measurement.figures || excluded.figures, measured_at = excluded.measured_at
"""
_MEASURED = """
SELECT clock_timestamp() AS read_at, figures::text AS figures, measured_at
FROM (VALUES (true)) AS one (row) LEFT JOIN measurement ON only_row
"""
_LAST_SEEN = """
SELECT region, last_seen_at, status = 'down' AS is_down
FROM region_last_seen JOIN region ON region.name = region_last_seen.region
"""
_NOTE_SEEN = """
INSERT INTO region_last_seen (region, last_seen_at)
SELECT region.name, clock_timestamp() - make_interval(secs => seen.ago_ms / 1000.0)
FROM unnest($1::text[], $2::bigint[]) AS seen (name, ago_ms) JOIN region USING (name)
ORDER BY region.name
ON CONFLICT (region) DO UPDATE SET last_seen_at = greatest(region_last_seen.last_seen_at, excluded.last_seen_at)
"""
