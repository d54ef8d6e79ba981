"""The regions, and which epoch each is in."""

from datetime import datetime

from msgspec import Struct

from coordinator.database.connection import Connection


class Region(Struct, frozen=True):
    name: str
    weight: int
    status: str
    created_at: datetime
    epoch: int | None  # the current one; None before the region's first
    regressed_lanes: int = 0  # of any of its epochs: they stand until people have approved how they go on


async def read_region(connection: Connection, name: str) -> Region | None:
    row = await connection.fetchrow(f"{_REGIONS} WHERE name = $1", name)
    return Region(*row.values()) if row else None


async def read_regions(connection: Connection, after: str, count: int) -> list[Region]:
    """At most so many, by name, that come after the given one."""
    rows = await connection.fetch(f"{_REGIONS} WHERE name > $1 ORDER BY name LIMIT $2", after, count)
    return [Region(*row.values()) for row in rows]


_REGIONS = """
SELECT name, weight, status, created_at, epoch,
    (SELECT count(DISTINCT (lane.epoch, lane.lane)) FROM region_epoch AS its JOIN lane USING (epoch)
        JOIN quarantine ON quarantine.epoch = lane.epoch AND quarantine.lane = lane.lane
            AND quarantine.quota = '' AND quarantine.seq > lane.last_seq
        WHERE its.region = region.name)
FROM region LEFT JOIN region_epoch ON region_epoch.region = region.name AND region_epoch.state = 'current'
"""
