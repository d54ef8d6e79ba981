"""Open a new epoch for a new life of a region's store, and fence the one before.

Whether the store lost data decides what the old epoch's returns are worth. The agent may know that it did not; without
its word, or with evidence to the contrary, it did.

An agent that asks twice with the same nonce and fingerprint gets the same epoch; so do two agents that found the same
nonce in their store. The region's row puts those that ask at once in a row.
"""

from collections.abc import Sequence
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
    await fence(connection, region, request.lost_data, now)
    epoch: int = await connection.fetchval(_INSERT_EPOCH, region, request.nonce, request.fingerprint, lanes, now)
    heads = [genesis_head(epoch, lane) for lane in range(lanes)]
    await connection.execute(_INSERT_LANES, epoch, list(range(lanes)), heads)
    return EpochOpened(epoch=epoch, lanes=lanes)


def _again(known: asyncpg.Record, region: str, request: OpenEpoch) -> EpochOpened | EpochRefusal:
    if (known["region"], known["fingerprint"]) != (region, request.fingerprint):
        return EpochRefusal.NONCE_OF_ANOTHER_LIFE
    return EpochOpened(epoch=known["epoch"], lanes=known["lanes"])


async def fence(connection: Connection, region: str, lost_data: bool, now: datetime) -> None:
    """No exchange grants to the old epoch any more: each holds a share of its row until it commits."""
    epoch = await connection.fetchval(_FENCE_EPOCH, region, now)
    if lost_data:
        await connection.execute(_LOSE_EPOCHS, region, [epoch], now)
        await connection.execute(_LOSE_LEASES, [epoch], now)
    else:
        await connection.execute(_FENCE_LEASES, epoch)


async def fence_lost(connection: Connection, region: str, epochs: Sequence[int], now: datetime) -> None:
    """An exchange was evidence that the region's store lost data: these epochs are over, now or since before.

    Whoever sends the evidence may send it again; done twice is done once.
    """
    await connection.execute("SELECT FROM region WHERE name = $1 FOR UPDATE", region)
    over = [row["epoch"] for row in await connection.fetch(_LOSE_EPOCHS, region, epochs, now)]
    await connection.execute(_LOSE_LEASES, over, now)


_BY_NONCE = "SELECT epoch, region, fingerprint, lanes FROM region_epoch WHERE nonce = $1"
_FENCE_EPOCH = """
UPDATE region_epoch SET state = 'fenced', fenced_at = $2 WHERE region = $1 AND state = 'current' RETURNING epoch
"""
_FENCE_LEASES = "UPDATE lease SET state = 'fenced' WHERE epoch = $1 AND state IN ('active', 'expired')"
_LOSE_EPOCHS = """
UPDATE region_epoch SET lost_data = true, fenced_at = coalesce(fenced_at, $3),
    state = CASE state WHEN 'current' THEN 'fenced' ELSE state END
WHERE region = $1 AND epoch = ANY ($2::bigint[]) AND state <> 'retired' AND NOT lost_data RETURNING epoch
"""
# Nobody may spend of it any more, so nothing is waited for: what is outstanding goes to suspense with the next tick.
_LOSE_LEASES = """
UPDATE lease SET state = 'lost', expires_at = least(expires_at, $2)
WHERE epoch = ANY ($1::bigint[]) AND state IN ('active', 'expired', 'fenced')
"""
_INSERT_EPOCH = """
INSERT INTO region_epoch (region, nonce, fingerprint, lanes, opened_at) VALUES ($1, $2, $3, $4, $5) RETURNING epoch
"""
_INSERT_LANES = "INSERT INTO lane (epoch, lane, head) SELECT $1, * FROM unnest($2::int[], $3::bytea[])"
