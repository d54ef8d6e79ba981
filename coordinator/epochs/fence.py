"""End epochs: fence the ones that a new epoch replaces, and those whose store was shown to have lost data.

The leases of an ended epoch are fenced or lost, as `protocol/lease.py` says; a test compares the statements with its
table.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from coordinator.database.connection import Connection


class CellName(NamedTuple):
    """The part of a region's store that an epoch is for, one of so many."""

    region: str
    cell: int
    cells: int


async def fence(connection: Connection, cell: CellName, kept: int | None, now: datetime) -> None:
    """Fence the current epoch. No exchange grants to it any more: each holds a share of its row until it commits.

    `kept`: the epoch whose store is known to have kept its data. If the store lost data, that may include what it had
    yet to report of epochs that it once kept, so these are invalidated as well.
    """
    for fenced in await connection.fetch(_FENCE_EPOCHS, *cell, now, kept):
        if fenced["lost_data"]:
            # The older store may be alive, and spend until it is told or its time is over: that is waited for.
            await connection.execute(LOSE_LEASES, [fenced["epoch"]], None)
        else:
            await connection.execute(FENCE_LEASES, [fenced["epoch"]])
    if kept is None:
        invalidated = [row["epoch"] for row in await connection.fetch(_INVALIDATE_EPOCHS, *cell)]
        await connection.execute(LOSE_LEASES, invalidated, None)
    elif await connection.fetchval(_PROVE_EPOCH, cell.region, kept) is not None:
        await connection.execute(PROVE_LEASES, [kept])


async def fence_lost(connection: Connection, region: str, epochs: Sequence[int], now: datetime) -> None:
    """End epochs of which an exchange showed that the region's store lost data. Doing it twice changes nothing.

    What went back to an older state is over at once: its outstanding units go to suspense with the next tick.
    """
    await connection.execute("SELECT FROM region WHERE name = $1 FOR NO KEY UPDATE", region)
    ended = [row["epoch"] for row in await connection.fetch(_LOSE_EPOCHS, region, epochs, now)]
    await connection.execute(LOSE_LEASES, ended, now)


# --- the statements ---------------------------------------------------------------------------------------------------

FENCE_LEASES = """
UPDATE lease SET state = 'fenced' WHERE epoch = ANY ($1::bigint[]) AND state IN ('active', 'expired')
"""
# $2: when spending ended, or null
LOSE_LEASES = """
UPDATE lease SET state = 'lost', expires_at = least(expires_at, $2::timestamptz)
WHERE epoch = ANY ($1::bigint[]) AND state IN ('active', 'expired', 'fenced')
"""
# What was returned in its name meanwhile was not booked, and a copy may have reported it: the store reports it again.
PROVE_LEASES = """
UPDATE lease SET state = 'fenced', region_returned = returned WHERE epoch = ANY ($1::bigint[]) AND state = 'lost'
"""
_FENCE_EPOCHS = """
UPDATE region_epoch SET state = 'fenced', fenced_at = $4, lost_data = epoch IS DISTINCT FROM $5,
    loss_is_assumed = epoch IS DISTINCT FROM $5
WHERE region = $1 AND (cell = $2 OR cells <> $3) AND state = 'current' RETURNING epoch, lost_data
"""
# The last reports of an older epoch lie in the same store: what was whole when they were made may be lost with it.
_INVALIDATE_EPOCHS = """
UPDATE region_epoch SET lost_data = true, loss_is_assumed = true
WHERE region = $1 AND (cell = $2 OR cells <> $3) AND state = 'fenced' AND NOT lost_data AND EXISTS (
    SELECT FROM lease WHERE lease.epoch = region_epoch.epoch AND lease.state = 'fenced'
    AND lease.outstanding + lease.suspense + lease.estimated + lease.written_off > 0) RETURNING epoch
"""
_PROVE_EPOCH = """
UPDATE region_epoch SET lost_data = false, loss_is_assumed = false
WHERE region = $1 AND epoch = $2 AND state = 'fenced' AND loss_is_assumed RETURNING epoch
"""
_LOSE_EPOCHS = """
UPDATE region_epoch SET lost_data = true, loss_is_assumed = false, fenced_at = coalesce(fenced_at, $3),
    state = CASE state WHEN 'current' THEN 'fenced' ELSE state END
WHERE region = $1 AND epoch = ANY ($2::bigint[]) AND state <> 'retired' AND (NOT lost_data OR loss_is_assumed)
RETURNING epoch
"""
