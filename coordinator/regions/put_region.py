"""Add a region, or change its weight or status. It changes the shares of all regions, so all agents are notified."""

from datetime import datetime
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.limits.version import advance_catalogue, lock_catalogue
from coordinator.notice import Notice
from coordinator.regions.read_regions import RegionView, read_region
from protocol.messages import Signal

DEFAULT_WEIGHT = 1
ACTIVE, DRAINING = "active", "draining"


class PutRegion(NamedTuple):
    region: RegionView
    is_new: bool


async def put_region(
    connection: Connection, name: str, weight: int | None, status: str | None, by: Actor | None, now: datetime
) -> PutRegion:
    """Add or change a region. A value that is None stays as it is, or is the default of a new region."""
    await lock_catalogue(connection)
    found = await read_region(connection, name, now)
    before = found or RegionView(name, DEFAULT_WEIGHT, ACTIVE, now, epoch=None)
    after = replace(
        before, weight=before.weight if weight is None else weight, status=before.status if status is None else status
    )
    if after != found:
        await connection.execute(_UPSERT, name, after.weight, after.status, now)
        await advance_catalogue(connection)
        details = {"weight": after.weight, "status": after.status, "was": _told(found)}
        await record(connection, by, Action.REGION_PUT, name, details, now)
    if after.status not in (ACTIVE, before.status):
        await notify(connection, [Notice(Signal(kind="drain"), region=name)])
    return PutRegion(after, is_new=found is None)


def _told(region: RegionView | None) -> dict[str, object] | None:
    return None if region is None else {"weight": region.weight, "status": region.status}


_UPSERT = """
INSERT INTO region (name, weight, status, created_at) VALUES ($1, $2, $3, $4)
ON CONFLICT (name) DO UPDATE SET weight = excluded.weight, status = excluded.status
"""
