"""The regions, and which epoch each is in."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

import asyncpg
from msgspec import Struct

from coordinator.database.connection import Connection
from coordinator.epochs.rules.split_brain import WINDOW, conflicting_stores


class Region(Struct, frozen=True):
    name: str
    weight: int
    status: str
    created_at: datetime
    epoch: int | None  # the current one, of a Cluster's cells the newest; None before the region's first
    contested: bool = False  # two stores answer under its name, and neither is given another epoch for now
    last_seen_at: datetime | None = None  # by any coordinator, to about ten seconds; None: never
    regressed_lanes: int = 0  # of any of its epochs: they stand until people have approved how they go on


async def read_region(connection: Connection, name: str, now: datetime) -> Region | None:
    row = await connection.fetchrow(f"{_REGIONS} WHERE name = $2", now - WINDOW, name)
    return _region(row) if row else None


async def read_regions(connection: Connection, after: str, count: int, now: datetime) -> list[Region]:
    """At most so many, by name, that come after the given one."""
    rows = await connection.fetch(f"{_REGIONS} WHERE name > $2 ORDER BY name LIMIT $3", now - WINDOW, after, count)
    return [_region(row) for row in rows]


def _region(row: asyncpg.Record) -> Region:
    fields = dict(row)
    return Region(contested=_is_contested(fields.pop("openings")), **fields)


def _is_contested(openings: Iterable[str]) -> bool:
    """Any cell of it: a Cluster opens an epoch for each."""
    by_cell: dict[str, list[str]] = defaultdict(list)
    for cell, _, fingerprint in (opening.partition(" ") for opening in openings):
        by_cell[cell].append(fingerprint)
    return any(conflicting_stores(fingerprints) for fingerprints in by_cell.values())


_REGIONS = """
SELECT name, weight, status, created_at,
    (SELECT max(its.epoch) FROM region_epoch AS its WHERE its.region = region.name AND its.state = 'current') AS epoch,
    (SELECT last_seen_at FROM region_last_seen WHERE region_last_seen.region = region.name) AS last_seen_at,
    ARRAY(SELECT its.cell || ' ' || its.fingerprint FROM region_epoch AS its
        WHERE its.region = region.name AND its.opened_at > $1) AS openings,
    (SELECT count(DISTINCT (lane.epoch, lane.lane)) FROM region_epoch AS its JOIN lane USING (epoch)
        JOIN quarantine ON quarantine.epoch = lane.epoch AND quarantine.lane = lane.lane
            AND quarantine.quota = '' AND quarantine.seq > lane.last_seq
        WHERE its.region = region.name) AS regressed_lanes
FROM region
"""
