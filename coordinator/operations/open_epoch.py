"""Open a new epoch for a new life of a region's store, and fence the one before.

An agent that asks twice with the same nonce and fingerprint gets the same epoch; so do two agents that found the same
nonce in their store. The region's row puts those that ask at once in a row.
"""

from datetime import datetime

import asyncpg

from coordinator.database.connection import Connection
from coordinator.domain.proof import genesis_head
from protocol.messages import EpochOpened, OpenEpoch
from protocol.outcomes import EpochRefusal


async def open_epoch(
    connection: Connection, region: str, request: OpenEpoch, lanes: int, now: datetime
) -> EpochOpened | EpochRefusal | None:
    """None if there is no such region."""
    status = await connection.fetchval("SELECT status FROM region WHERE name = $1 FOR UPDATE", region)
    if status is None:
        return None
    if status == "down":
        return EpochRefusal.REGION_DOWN
    known = await connection.fetchrow(_BY_NONCE, request.nonce)
    if known is not None:
        return _again(known, region, request)
    await _fence(connection, region, now)
    epoch: int = await connection.fetchval(_INSERT_EPOCH, region, request.nonce, request.fingerprint, lanes, now)
    heads = [genesis_head(epoch, lane) for lane in range(lanes)]
    await connection.execute(_INSERT_LANES, epoch, list(range(lanes)), heads)
    return EpochOpened(epoch=epoch, lanes=lanes)


def _again(known: asyncpg.Record, region: str, request: OpenEpoch) -> EpochOpened | EpochRefusal:
    if (known["region"], known["fingerprint"]) != (region, request.fingerprint):
        return EpochRefusal.NONCE_OF_ANOTHER_LIFE
    return EpochOpened(epoch=known["epoch"], lanes=known["lanes"])


async def _fence(connection: Connection, region: str, now: datetime) -> None:
    """No exchange grants to the old epoch any more: each holds a share of its row until it commits."""
    fenced = await connection.fetchval(_FENCE_EPOCH, region, now)
    await connection.execute(_FENCE_LEASES, fenced)


_BY_NONCE = "SELECT epoch, region, fingerprint, lanes FROM region_epoch WHERE nonce = $1"
_FENCE_EPOCH = """
UPDATE region_epoch SET state = 'fenced', fenced_at = $2 WHERE region = $1 AND state = 'current' RETURNING epoch
"""
_FENCE_LEASES = "UPDATE lease SET state = 'lost' WHERE epoch = $1 AND state IN ('active', 'expired')"
_INSERT_EPOCH = """
INSERT INTO region_epoch (region, nonce, fingerprint, lanes, opened_at) VALUES ($1, $2, $3, $4, $5) RETURNING epoch
"""
_INSERT_LANES = "INSERT INTO lane (epoch, lane, head) SELECT $1, * FROM unnest($2::int[], $3::bytea[])"
