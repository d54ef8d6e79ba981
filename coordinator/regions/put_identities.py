"""Say by which names in client certificates the agents of a region authenticate themselves."""

from collections.abc import Collection
from datetime import datetime

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.limits.version import lock_catalogue
from coordinator.regions.read_regions import RegionView, read_region


class IdentityTaken(Exception):
    """Another region has one of the identities. The message names both."""


async def put_identities(
    connection: Connection, region: str, identities: Collection[str], by: Actor | None, now: datetime
) -> RegionView | None:
    """Replace the identities of a region and return it, or return None if there is no such region."""
    await lock_catalogue(connection)
    found = await read_region(connection, region, now)
    if found is None:
        return None
    taken = await connection.fetchrow(_TAKEN, list(identities), region)
    if taken is not None:
        raise IdentityTaken(f"The region {taken['region']!r} has the identity {taken['identity']!r}.")
    if set(identities) != set(found.identities):
        await connection.execute(_DELETE, region, list(identities))
        await connection.executemany(_INSERT, [(each, region, now) for each in identities])
        rows = await connection.fetch(_READ, region)
        kept = {row["identity"]: row["created_at"].isoformat() for row in rows}
        details = {"identities": kept, "was": found.identities}
        await record(connection, by, Action.REGION_IDENTITIES_PUT, region, details, now)
    return await read_region(connection, region, now)


_TAKEN = "SELECT identity, region FROM region_identity WHERE identity = ANY ($1::text[]) AND region <> $2 LIMIT 1"
_DELETE = "DELETE FROM region_identity WHERE region = $1 AND identity <> ALL ($2::text[])"
_INSERT = "INSERT INTO region_identity (identity, region, created_at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
_READ = "SELECT identity, created_at FROM region_identity WHERE region = $1 ORDER BY identity"
