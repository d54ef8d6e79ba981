"""See rebalances through: by any coordinator, each step once, and again where nothing was heard.

What is asked for comes back, and goes on, with the exchanges of the regions that are concerned (apply_exchange.py).
Here they are asked, for as long as there is something to ask for, and what can come no further is ended and told why.
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
from coordinator.rebalancing.moves import end_moves, move_of_row
from coordinator.rebalancing.read_rebalances import CANCELLED, Rebalance, read_rebalance
from coordinator.rebalancing.rebalance import tables_of
from coordinator.rebalancing.rules.division import Move, fetched_by, recalled_by
from coordinator.rebalancing.rules.plan import Fate, Table, fate_of
from coordinator.regions.put_region import ACTIVE, put_region
from protocol.clock import Clock


async def follow_rebalances(database: Database, documents: Documents, clock: Clock) -> None:
    """All that run, each on its own."""
    rows = await database.read(lambda c: c.fetch("SELECT id FROM rebalance WHERE state = 'running' ORDER BY version"))
    for (id_,) in rows:
        await database.run(lambda c, id_=id_: follow(c, documents, id_, clock.now()))  # type: ignore[misc]


async def follow(connection: Connection, documents: Documents, id_: UUID, now: datetime) -> None:
    row = await connection.fetchrow(_HELD, id_)
    if row is None:
        return  # somebody else ended it
    if row["region"] is not None:
        await _follow_drain(connection, row, now)
    else:
        await _follow_moves(connection, documents, row, now)


async def cancel_rebalance(connection: Connection, id_: UUID, by: Actor, now: datetime) -> Rebalance | None:
    """What is done stays done; what had come back is for whoever asks. A region that was being drained is restored.

    None if there is no such rebalance. One that has ended stays as it is.
    """
    await lock_catalogue(connection)
    row = await connection.fetchrow(_HELD, id_)
    if row is not None:
        moves = await _open_moves(connection, id_)
        await lock_pools(connection, {move.key for move in moves}, ())
        moves = await _open_moves(connection, id_)  # once more: by now they may have come further
        await end_moves(connection, [(move, CANCELLED) for move in moves], now)
        if row["region"] is not None:
            await put_region(connection, row["region"], None, ACTIVE, by, now)
        await connection.execute(_END, id_, CANCELLED, None, now)
        details = {"mode": row["mode"], "moves_ended": len(moves)}
        await record(connection, by, Action.REBALANCE_CANCELLED, str(id_), details, now)
    return await read_rebalance(connection, id_)


# --- units from region to region --------------------------------------------------------------------------------------


async def _follow_moves(connection: Connection, documents: Documents, row: asyncpg.Record, now: datetime) -> None:
    keys = {move.key for move in await _open_moves(connection, row["id"])}
    pools = await lock_pools(connection, keys, ())
    catalogue = await read_catalogue(connection, documents, [key.quota for key in keys], now)
    tables = {table.key: table for table in await tables_of(connection, catalogue, pools)}
    moves = await _open_moves(connection, row["id"])
    fates = [(move, _fate(move, tables[move.key], pools[move.key].period_is_open, row, now)) for move in moves]
    ended = [(move, fate.why) for move, fate in fates if fate]
    await end_moves(connection, ended, now)
    going = [move for move, fate in fates if not fate]
    await notify(connection, [notice for move in going for notice in _asked(move, tables[move.key], now)])
    if not going:
        await _end_moves(connection, row, now)


def _fate(move: Move, table: Table, period_is_open: bool, row: asyncpg.Record, now: datetime) -> Fate | None:
    return fate_of(move, table, row["created_at"], now, period_is_open=period_is_open)


def _asked(move: Move, table: Table, now: datetime) -> list[Notice]:
    return [notice for notice in (recalled_by(move, table.leases, now), fetched_by(move)) if notice]


async def _open_moves(connection: Connection, id_: UUID) -> list[Move]:
    return [move_of_row(row) for row in await connection.fetch(_OPEN, id_)]


async def _end_moves(connection: Connection, row: asyncpg.Record, now: datetime) -> None:
    reasons = await connection.fetchval(_REASONS, row["id"])
    await _end(connection, row, "partial" if reasons else "done", ", ".join(reasons) or None, now)


# --- a region that is emptied -----------------------------------------------------------------------------------------


async def _follow_drain(connection: Connection, row: asyncpg.Record, now: datetime) -> None:
    """Until it holds nothing. What it cannot be asked about waits in suspense, when its lease has run out."""
    outstanding, suspense = await connection.fetchrow(_LEFT, row["region"]) or (0, 0)
    await connection.execute(_COME, row["id"], outstanding)
    if outstanding:
        await recall_region(connection, row["region"])
    else:
        await _end(connection, row, "partial" if suspense else "done", "suspense" if suspense else None, now)


async def _end(connection: Connection, row: asyncpg.Record, state: str, reason: str | None, now: datetime) -> None:
    await connection.execute(_END, row["id"], state, reason, now)
    by, details = Actor(row["created_by"]), {"mode": row["mode"], "state": state, "reason": reason}
    await record(connection, by, Action.REBALANCE_ENDED, str(row["id"]), details, now)


REBALANCES_RUNNING = "EXISTS (SELECT FROM rebalance WHERE state = 'running')"  # the job has work
_HELD = "SELECT * FROM rebalance WHERE id = $1 AND state = 'running' FOR UPDATE"
_OPEN = "SELECT * FROM rebalance_move WHERE rebalance = $1 AND ended_at IS NULL ORDER BY number"
_REASONS = """
SELECT coalesce(array_agg(DISTINCT reason ORDER BY reason) FILTER (WHERE reason IS NOT NULL), '{}')
FROM rebalance_move WHERE rebalance = $1
"""
_END = "UPDATE rebalance SET state = $2, reason = $3, ended_at = $4 WHERE id = $1"
_COME = "UPDATE rebalance SET returned = greatest(0, recalled - $2) WHERE id = $1"
_LEFT = """
SELECT coalesce(sum(outstanding), 0), coalesce(sum(suspense), 0) FROM lease
WHERE region = $1 AND (outstanding > 0 OR suspense > 0)
"""
