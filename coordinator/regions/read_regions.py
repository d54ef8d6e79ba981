"""Read regions with their current epochs."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

import asyncpg
import msgspec
from msgspec import Struct

from coordinator.database.connection import Connection
from coordinator.epochs.rules.split_brain import WINDOW, conflicting_stores


class AgentView(Struct, frozen=True):
    """An agent of a region, as it stated itself within the last day."""

    name: str
    release: str
    capabilities: list[str]
    last_seen_at: datetime


class RegionView(Struct, frozen=True):
    name: str
    weight: int
    status: str
    created_at: datetime
    epoch: int | None  # the current one, or the newest of a Cluster's cells; None before the first
    split_brain: bool = False  # two stores open epochs under its name in turn, and are refused further ones
    last_seen_at: datetime | None = None  # by any coordinator, to about ten seconds
    regressed_lanes: int = 0  # lanes that wait for an approved rebase
    agents: list[AgentView] = []
    identities: list[str] = []  # names in client certificates by which its agents authenticate themselves


async def read_region(connection: Connection, name: str, now: datetime) -> RegionView | None:
    row = await connection.fetchrow(f"{_REGIONS} WHERE name = $2", now - WINDOW, name)
    return _region(row) if row else None


async def read_regions(connection: Connection, after: str, count: int, now: datetime) -> list[RegionView]:
    """Return up to `count` regions by name, from the one after `after`."""
    rows = await connection.fetch(f"{_REGIONS} WHERE name > $2 ORDER BY name LIMIT $3", now - WINDOW, after, count)
    return [_region(row) for row in rows]


def _region(row: asyncpg.Record) -> RegionView:
    fields = dict(row)
    agents = msgspec.json.decode(fields.pop("agents"), type=list[AgentView])
    return RegionView(split_brain=_has_split_brain(fields.pop("openings")), agents=agents, **fields)


def _has_split_brain(openings: Iterable[str]) -> bool:
    """Return whether two stores compete for any cell of the region. A Cluster has an epoch for each cell."""
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
    (SELECT coalesce(json_agg(json_build_object('name', its.agent, 'release', its.release,
        'capabilities', its.capabilities, 'last_seen_at', its.last_seen_at) ORDER BY its.agent), '[]')::text
        FROM region_agent AS its WHERE its.region = region.name) AS agents,
    ARRAY(SELECT identity FROM region_identity WHERE region_identity.region = region.name ORDER BY identity)
        AS identities,
    (SELECT count(DISTINCT (lane.epoch, lane.lane)) FROM region_epoch AS its JOIN lane USING (epoch)
        JOIN quarantine ON quarantine.epoch = lane.epoch AND quarantine.lane = lane.lane
            AND quarantine.quota = '' AND quarantine.seq > lane.last_seq
        WHERE its.region = region.name) AS regressed_lanes
FROM region
"""
