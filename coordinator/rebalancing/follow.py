"""See rebalances through: notify regions until they have answered, and end moves that are complete or cannot proceed.

Units are returned and regranted in the exchanges of the regions (coordinator/exchange). Any coordinator may do each
step here, and a step that is done twice changes nothing.
"""

from datetime import datetime
from uuid import UUID

import asyncpg

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.database.notify import notify
from coordinator.exchange.recall import recall_region
from coordinator.exchange.statements.pools import lock_pools
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from coordinator.limits.version import lock_catalogue
from coordinator.notice import Notice
from coordinator.rebalancing.holds import end_holds_of
from coordinator.rebalancing.moves import end_moves, move_of_row
from coordinator.rebalancing.planning import divided_pools
from coordinator.rebalancing.read_rebalances import read_rebalance
from coordinator.rebalancing.rules.division import Move, fetch_notice, recall_notice
from coordinator.rebalancing.rules.plan import DividedPool, MoveEnd, end_of_move
from coordinator.rebalancing.schemas import CANCELLED, Rebalance
from coordinator.regions.put_region import ACTIVE, put_region
from protocol.clock import Clock


async def follow_rebalances(database: Database, documents: Documents, clock: Clock) -> None:
    """Follow every running rebalance, each in its own transaction."""
    rows = await database.read(lambda c: c.fetch("SELECT id FROM rebalance WHERE state = 'running' ORDER BY version"))
    for (id_,) in rows:
        await database.run(lambda c, id_=id_: follow(c, documents, id_, clock.now()))  # type: ignore[misc]


async def follow(connection: Connection, documents: Documents, id_: UUID, now: datetime) -> None:
    row = await connection.fetchrow(_LOCK, id_)
    if row is None:
        return  # it has ended meanwhile
    if row["region"] is not None:
        await _follow_drain(connection, row, now)
    else:
        await _follow_moves(connection, documents, row, now)


async def cancel_rebalance(connection: Connection, id_: UUID, by: Actor, now: datetime) -> Rebalance | None:
    """Cancel a rebalance, or return None if there is none of this id. Of one that has ended, holds end.

    Units that were moved stay where they are, and returned ones may be granted to any region. A region that is being
    drained is restored.
    """
    await lock_catalogue(connection)
    row = await connection.fetchrow(_LOCK, id_)
    held = await end_holds_of(connection, id_)
    if row is not None:
        moves = await _open_moves(connection, id_)
        await lock_pools(connection, {move.key for move in moves}, ())
        moves = await _open_moves(connection, id_)  # read again: they may have proceeded before the lock
        await end_moves(connection, [(move, CANCELLED) for move in moves], now)
        if row["region"] is not None:
            await put_region(connection, row["region"], None, ACTIVE, by, now)
        await connection.execute(_END, id_, CANCELLED, None, now)
        details = {"mode": row["mode"], "moves_ended": len(moves), "holds_ended": held}
        await record(connection, by, Action.REBALANCE_CANCELLED, str(id_), details, now)
    elif held:
        await record(connection, by, Action.REBALANCE_HOLD_ENDED, str(id_), {"holds_ended": held}, now)
    return await read_rebalance(connection, id_)


# --- moves --------------------------------------------------------------------------------------


async def _follow_moves(connection: Connection, documents: Documents, row: asyncpg.Record, now: datetime) -> None:
    keys = {move.key for move in await _open_moves(connection, row["id"])}
    pools = await lock_pools(connection, keys, ())
    catalogue = await read_catalogue(connection, documents, [key.quota for key in keys], now)
    pools_of_moves = {pool.key: pool for pool in await divided_pools(connection, catalogue, pools)}
    moves = await _open_moves(connection, row["id"])
    ends = [(move, _end_of(move, pools_of_moves[move.key], pools[move.key].period_is_open, row, now)) for move in moves]
    ended = [(move, end.reason) for move, end in ends if end]
    await end_moves(connection, ended, now)
    going = [move for move, end in ends if not end]
    await notify(connection, [notice for move in going for notice in _notices_of(move, pools_of_moves[move.key], now)])
    if not going:
        await _end_moves(connection, row, now)


def _end_of(move: Move, pool: DividedPool, period_is_open: bool, row: asyncpg.Record, now: datetime) -> MoveEnd | None:
    return end_of_move(move, pool, row["created_at"], now, period_is_open=period_is_open)


def _notices_of(move: Move, pool: DividedPool, now: datetime) -> list[Notice]:
    return [notice for notice in (recall_notice(move, pool.leases, now), fetch_notice(move)) if notice]


async def _open_moves(connection: Connection, id_: UUID) -> list[Move]:
    return [move_of_row(row) for row in await connection.fetch(_OPEN, id_)]


async def _end_moves(connection: Connection, row: asyncpg.Record, now: datetime) -> None:
    reasons = await connection.fetchval(_REASONS, row["id"])
    await _end(connection, row, "partial" if reasons else "done", ", ".join(reasons) or None, now)


# --- drains -----------------------------------------------------------------------------------------


async def _follow_drain(connection: Connection, row: asyncpg.Record, now: datetime) -> None:
    """Recall what the region holds, until it holds nothing. Expired leases of a silent region end in suspense."""
    outstanding, suspense = await connection.fetchrow(_STILL_HELD, row["region"]) or (0, 0)
    await connection.execute(_SET_RETURNED, row["id"], outstanding)
    if outstanding:
        await recall_region(connection, row["region"])
    else:
        await _end(connection, row, "partial" if suspense else "done", "suspense" if suspense else None, now)


async def _end(connection: Connection, row: asyncpg.Record, state: str, reason: str | None, now: datetime) -> None:
    await connection.execute(_END, row["id"], state, reason, now)
    by, details = Actor(row["created_by"]), {"mode": row["mode"], "state": state, "reason": reason}
    await record(connection, by, Action.REBALANCE_ENDED, str(row["id"]), details, now)


REBALANCES_RUNNING = "EXISTS (SELECT FROM rebalance WHERE state = 'running')"  # the job has work
_LOCK = "SELECT * FROM rebalance WHERE id = $1 AND state = 'running' FOR UPDATE"
_OPEN = "SELECT * FROM rebalance_move WHERE rebalance = $1 AND ended_at IS NULL ORDER BY number"
_REASONS = """
SELECT coalesce(array_agg(DISTINCT reason ORDER BY reason) FILTER (WHERE reason IS NOT NULL), '{}')
FROM rebalance_move WHERE rebalance = $1
"""
_END = "UPDATE rebalance SET state = $2, reason = $3, ended_at = $4 WHERE id = $1"
_SET_RETURNED = "UPDATE rebalance SET returned = greatest(0, recalled - $2) WHERE id = $1"
_STILL_HELD = """
SELECT coalesce(sum(outstanding), 0), coalesce(sum(suspense), 0) FROM lease
WHERE region = $1 AND (outstanding > 0 OR suspense > 0)
"""
