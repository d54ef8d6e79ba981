"""Let an epoch continue in another incarnation of its store: a single one that fsyncs every write, so it loses nothing.

The agent has checked the conditions in the store. Here is what only the ledger can tell: that the epoch is still the
region's, that it belonged to the incarnation before, and that the store remembers every number that was booked of it,
which a backup in its place does not. If in doubt the answer is no, and a new epoch is opened.
"""

from datetime import datetime

import asyncpg

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.exchange.rules.settlement import EpochState
from protocol.messages import EpochOpened, RebindEpoch
from protocol.outcomes import EpochRefusal


async def rebind_epoch(
    connection: Connection, region: str, epoch: int, request: RebindEpoch, by: Actor, now: datetime
) -> EpochOpened | EpochRefusal:
    """Bind the epoch to the new fingerprint. Repeating it changes nothing."""
    status = await connection.fetchval("SELECT status FROM region WHERE name = $1 FOR NO KEY UPDATE", region)
    if status == "down":
        return EpochRefusal.REGION_DOWN
    # This waits for the exchanges under way: each holds a share of the row until its numbers are committed.
    row = await connection.fetchrow(_EPOCH, epoch, region, request.nonce)
    if row is None:
        return EpochRefusal.NOT_ISSUED
    refusal = _refusal(row, await connection.fetch(_LAST_SEQS, epoch), request)
    if refusal is not None:
        return refusal
    if row["fingerprint"] != request.fingerprint:
        await connection.execute(_REBIND, epoch, request.fingerprint)
        details = {"region": region, "previous": row["fingerprint"], "fingerprint": request.fingerprint}
        await record(connection, by, Action.EPOCH_REBOUND, str(epoch), details, now)
    return EpochOpened(epoch=epoch, lanes=row["lanes"])


def _refusal(row: asyncpg.Record, lanes: list[asyncpg.Record], request: RebindEpoch) -> EpochRefusal | None:
    """Return a refusal. Evidence against the store's data comes first: if only the epoch is over, the data is whole."""
    known = dict(enumerate(request.seqs))
    if any(known.get(lane["lane"], 0) < lane["last_seq"] for lane in lanes):
        return EpochRefusal.STORE_BEHIND
    if row["fingerprint"] not in (request.previous, request.fingerprint):
        return EpochRefusal.ANOTHER_INCARNATION
    return None if row["state"] == EpochState.CURRENT else EpochRefusal.EPOCH_OVER


_EPOCH = """
SELECT state, fingerprint, lanes FROM region_epoch WHERE epoch = $1 AND region = $2 AND nonce = $3 FOR UPDATE
"""
_LAST_SEQS = "SELECT lane, last_seq FROM lane WHERE epoch = $1"
_REBIND = "UPDATE region_epoch SET fingerprint = $2 WHERE epoch = $1"
