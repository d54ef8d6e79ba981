"""Open a new epoch for a new incarnation of a region's store, and fence the one before.

Whether the store lost data decides what the old epoch's returns are worth. The agent may know that the store has kept
all of one epoch: the current one, or one that another store had replaced and that was believed lost since. Without its
word, or with evidence to the contrary, data was lost.

What an agent admitted by itself while its store was down is reported in an epoch of its own. That epoch is over from
its beginning: it is granted nothing, and replaces no other epoch.

Where replicas confirmed each reply of the epoch before, the agent's word is not enough: a promoted replica has to prove
that it has everything, and the former primary has not, once another store has (`rules/promotion.py`). The proof is in
the audit.

An agent that sends the same nonce and fingerprint twice gets the same epoch; so do two agents that found the same nonce
in their store. The region's row puts concurrent requests in a row. Its key is not locked: inserting a lease refers to
it, and an exchange that does so is waited for.

The store of a Cluster is several *cells*, each with an epoch of its own, of one lane: what ends one leaves the others
as they are. A request with another number of cells is from another store, so its epoch ends all of theirs.

Two stores that replace each other again and again under one name are refused (`rules/split_brain.py`).
"""

from datetime import datetime

import asyncpg
from msgspec import to_builtins
from msgspec.structs import replace

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.epochs.fence import CellName, fence
from coordinator.epochs.rules.promotion import PreviousEpoch, may_be_whole, says_whole
from coordinator.epochs.rules.split_brain import WINDOW, conflicting_stores
from coordinator.proof.rules import genesis_head
from protocol.messages import EpochOpened, OpenEpoch
from protocol.outcomes import EpochRefusal


async def open_epoch(
    connection: Connection, region: str, request: OpenEpoch, lanes: int, by: Actor, now: datetime
) -> EpochOpened | EpochRefusal | None:
    """Return None if there is no such region."""
    status = await connection.fetchval("SELECT status FROM region WHERE name = $1 FOR NO KEY UPDATE", region)
    if status is None:
        return None
    if status == "down" and not request.journal:
        return EpochRefusal.REGION_DOWN
    known = await connection.fetchrow(_BY_NONCE, request.nonce)
    if known is not None:
        return await _opened_before(connection, known, region, request)
    cell = CellName(region, request.cell, request.cells)
    if request.fingerprint in conflicting_stores(await _recent_openings(connection, cell, now)):
        return EpochRefusal.TWO_STORES
    request = await _judge_previous(connection, region, request, by, now)
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


async def _judge_previous(
    connection: Connection, region: str, request: OpenEpoch, by: Actor, now: datetime
) -> OpenEpoch:
    """Return the request, with `lost_data` as the ledger judges it."""
    if not says_whole(request):
        return request
    row = await connection.fetchrow(_PREVIOUS, request.previous, region)
    if row is None:
        return replace(request, lost_data=True)
    lanes = await connection.fetch("SELECT lane, last_seq FROM lane WHERE epoch = $1", request.previous)
    previous = PreviousEpoch(**row, last_seqs={lane["lane"]: lane["last_seq"] for lane in lanes})
    if not may_be_whole(previous, request):
        return replace(request, lost_data=True)
    if request.promoted is not None:
        details = {"region": region, "previous": previous.fingerprint, "fingerprint": request.fingerprint}
        details |= {"promoted": to_builtins(request.promoted)}
        await record(connection, by, Action.EPOCH_KEPT, str(request.previous), details, now)
    return replace(request, lost_data=False)


async def _recent_openings(connection: Connection, cell: CellName, now: datetime) -> list[str]:
    return [row["fingerprint"] for row in await connection.fetch(_RECENT_OPENINGS, *cell, now - WINDOW)]


async def _is_whole(connection: Connection, cell: CellName, epoch: int, request: OpenEpoch) -> bool:
    """Tell whether the store has kept the epoch before, or there was none."""
    before = await connection.fetchrow(_EPOCH_BEFORE, *cell, epoch)
    if before is None:
        return True
    return before["epoch"] == request.previous and says_whole(request) and not before["lost_data"]


async def _opened_before(
    connection: Connection, known: asyncpg.Record, region: str, request: OpenEpoch
) -> EpochOpened | EpochRefusal:
    if (known["region"], known["fingerprint"]) != (region, request.fingerprint):
        return EpochRefusal.NONCE_OF_ANOTHER_INCARNATION
    is_whole = await _is_whole(connection, CellName(region, known["cell"], known["cells"]), known["epoch"], request)
    return EpochOpened(epoch=known["epoch"], lanes=known["lanes"], is_whole=is_whole)


_BY_NONCE = "SELECT epoch, region, fingerprint, lanes, cell, cells FROM region_epoch WHERE nonce = $1"
_PREVIOUS = """
SELECT nonce, fingerprint, state = 'current' AS is_current, lost_data FROM region_epoch WHERE epoch = $1 AND region = $2
"""
_EPOCH_BEFORE = """
SELECT epoch, lost_data FROM region_epoch
WHERE region = $1 AND (cell = $2 OR cells <> $3) AND epoch < $4 ORDER BY epoch DESC LIMIT 1
"""
_RECENT_OPENINGS = """
SELECT fingerprint FROM region_epoch WHERE region = $1 AND (cell = $2 OR cells <> $3) AND opened_at > $4
"""
_INSERT_EPOCH = """
INSERT INTO region_epoch (region, cell, cells, nonce, fingerprint, lanes, opened_at, fenced_at, state)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::timestamptz, CASE WHEN $8 IS NULL THEN 'current' ELSE 'fenced' END)
RETURNING epoch
"""
_INSERT_LANES = "INSERT INTO lane (epoch, lane, head) SELECT $1, * FROM unnest($2::int[], $3::bytea[])"
