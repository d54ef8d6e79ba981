"""Open a new epoch for a new incarnation of a region's store, and fence the one before.

Whether the store lost data decides what the old epoch's returns are worth. The agent may know that the store has kept
all of one epoch: the current one, or one that another store's had replaced and that was believed lost since. Without
its word, or with evidence to the contrary, data was lost.

What an agent admitted by itself while its store was down is told of in an epoch of its own. That one is over from its
beginning: it is granted nothing, and takes nobody's place.

An agent that asks twice with the same nonce and fingerprint gets the same epoch; so do two agents that found the same
nonce in their store. The region's row puts those that ask at once in a row. Its key stays free: whoever inserts a lease
refers to it, and an exchange that does is waited for.

The store of a Cluster is several *cells*, each with an epoch of its own, of one lane: what ends one leaves the others
as they are. Whoever counts the cells otherwise speaks for another store, so its epoch ends all of theirs.

Two stores that replace each other again and again under one name are refused (`rules/split_brain.py`).
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import asyncpg

from coordinator.database.connection import Connection
from coordinator.epochs.rules.split_brain import LATELY, contenders
from coordinator.proof.rules import genesis_head
from protocol.messages import EpochOpened, OpenEpoch
from protocol.outcomes import EpochRefusal


class Cell(NamedTuple):
    """What an epoch is for: one of a region's store, of so many."""

    region: str
    cell: int
    cells: int


async def open_epoch(
    connection: Connection, region: str, request: OpenEpoch, lanes: int, now: datetime
) -> EpochOpened | EpochRefusal | None:
    """None if there is no such region."""
    status = await connection.fetchval("SELECT status FROM region WHERE name = $1 FOR NO KEY UPDATE", region)
    if status is None:
        return None
    if status == "down" and not request.journal:
        return EpochRefusal.REGION_DOWN
    known = await connection.fetchrow(_BY_NONCE, request.nonce)
    if known is not None:
        return await _again(connection, known, region, request)
    cell = Cell(region, request.cell, request.cells)
    if request.fingerprint in contenders(await _openings(connection, cell, now)):
        return EpochRefusal.TWO_STORES
    if not request.journal:
        await fence(connection, cell, None if request.lost_data else request.previous, now)
    ended_at = now if request.journal else None
    lanes = lanes if cell.cells == 1 else 1
    names = (*cell, request.nonce, request.fingerprint, lanes)
    epoch: int = await connection.fetchval(_INSERT_EPOCH, *names, now, ended_at)
    is_whole = await _is_whole(connection, cell, epoch, request)
    heads = [genesis_head(epoch, lane) for lane in range(lanes)]
    await connection.execute(_INSERT_LANES, epoch, list(range(lanes)), heads)
    return EpochOpened(epoch=epoch, lanes=lanes, is_whole=is_whole)


async def _openings(connection: Connection, cell: Cell, now: datetime) -> list[str]:
    return [row["fingerprint"] for row in await connection.fetch(_OPENED_LATELY, *cell, now - LATELY)]


async def _is_whole(connection: Connection, cell: Cell, epoch: int, request: OpenEpoch) -> bool:
    """Its store has kept the epoch before, or there was none."""
    before = await connection.fetchval(_EPOCH_BEFORE, *cell, epoch)
    return before is None or (before == request.previous and not request.lost_data)


async def _again(
    connection: Connection, known: asyncpg.Record, region: str, request: OpenEpoch
) -> EpochOpened | EpochRefusal:
    if (known["region"], known["fingerprint"]) != (region, request.fingerprint):
        return EpochRefusal.NONCE_OF_ANOTHER_INCARNATION
    is_whole = await _is_whole(connection, Cell(region, known["cell"], known["cells"]), known["epoch"], request)
    return EpochOpened(epoch=known["epoch"], lanes=known["lanes"], is_whole=is_whole)


async def fence(connection: Connection, cell: Cell, kept: int | None, now: datetime) -> None:
    """No exchange grants to the old epoch any more: each holds a share of its row until it commits.

    `kept`: the epoch whose store is known to have kept its data. If it has lost any, it may have lost as well what it
    had yet to say of epochs that it once kept.
    """
    for fenced in await connection.fetch(_FENCE_EPOCHS, *cell, now, kept):
        await connection.execute(_END_LEASES, fenced["epoch"], "lost" if fenced["lost_data"] else "fenced")
    if kept is None:
        doubted = [row["epoch"] for row in await connection.fetch(_DOUBT_EPOCHS, *cell)]
        await connection.execute(_DOUBT_LEASES, doubted)
    elif await connection.fetchval(_PROVE_EPOCH, cell.region, kept) is not None:
        await connection.execute(_PROVE_LEASES, kept)


async def fence_lost(connection: Connection, region: str, epochs: Sequence[int], now: datetime) -> None:
    """An exchange was evidence that the region's store lost data: these epochs are over, now or since before.

    Whoever sends the evidence may send it again; done twice is done once.
    """
    await connection.execute("SELECT FROM region WHERE name = $1 FOR NO KEY UPDATE", region)
    over = [row["epoch"] for row in await connection.fetch(_LOSE_EPOCHS, region, epochs, now)]
    await connection.execute(_LOSE_LEASES, over, now)


_BY_NONCE = "SELECT epoch, region, fingerprint, lanes, cell, cells FROM region_epoch WHERE nonce = $1"
_EPOCH_BEFORE = """
SELECT max(epoch) FROM region_epoch
WHERE region = $1 AND (cell = $2 OR cells <> $3) AND epoch < $4
"""
_OPENED_LATELY = """
SELECT fingerprint FROM region_epoch WHERE region = $1 AND (cell = $2 OR cells <> $3) AND opened_at > $4
"""
_FENCE_EPOCHS = """
UPDATE region_epoch SET state = 'fenced', fenced_at = $4, lost_data = epoch IS DISTINCT FROM $5,
    loss_is_assumed = epoch IS DISTINCT FROM $5
WHERE region = $1 AND (cell = $2 OR cells <> $3) AND state = 'current' RETURNING epoch, lost_data
"""
# The older store may be alive, and spend until it hears of it or its time is over: that is waited for.
_END_LEASES = "UPDATE lease SET state = $2 WHERE epoch = $1 AND state IN ('active', 'expired')"
# The last that an older epoch has to say lies in the same store: what was whole when it was said may be gone with it.
_DOUBT_EPOCHS = """
UPDATE region_epoch SET lost_data = true, loss_is_assumed = true
WHERE region = $1 AND (cell = $2 OR cells <> $3) AND state = 'fenced' AND NOT lost_data AND EXISTS (
    SELECT FROM lease WHERE lease.epoch = region_epoch.epoch AND lease.state = 'fenced'
    AND lease.outstanding + lease.suspense + lease.estimated + lease.written_off > 0) RETURNING epoch
"""
_DOUBT_LEASES = "UPDATE lease SET state = 'lost' WHERE epoch = ANY ($1::bigint[]) AND state = 'fenced'"
_PROVE_EPOCH = """
UPDATE region_epoch SET lost_data = false, loss_is_assumed = false
WHERE region = $1 AND epoch = $2 AND state = 'fenced' AND loss_is_assumed RETURNING epoch
"""
# What was returned in its name meanwhile was not booked, and may have been said by a copy: the store says it again.
_PROVE_LEASES = """
UPDATE lease SET state = 'fenced', region_returned = returned WHERE epoch = $1 AND state = 'lost'
"""
_LOSE_EPOCHS = """
UPDATE region_epoch SET lost_data = true, loss_is_assumed = false, fenced_at = coalesce(fenced_at, $3),
    state = CASE state WHEN 'current' THEN 'fenced' ELSE state END
WHERE region = $1 AND epoch = ANY ($2::bigint[]) AND state <> 'retired' AND (NOT lost_data OR loss_is_assumed)
RETURNING epoch
"""
# What went back is over at once, so nothing is waited for: what is outstanding goes to suspense with the next tick.
_LOSE_LEASES = """
UPDATE lease SET state = 'lost', expires_at = least(expires_at, $2)
WHERE epoch = ANY ($1::bigint[]) AND state IN ('active', 'expired', 'fenced')
"""
_INSERT_EPOCH = """
INSERT INTO region_epoch (region, cell, cells, nonce, fingerprint, lanes, opened_at, fenced_at, state)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::timestamptz, CASE WHEN $8 IS NULL THEN 'current' ELSE 'fenced' END)
RETURNING epoch
"""
_INSERT_LANES = "INSERT INTO lane (epoch, lane, head) SELECT $1, * FROM unnest($2::int[], $3::bytea[])"
