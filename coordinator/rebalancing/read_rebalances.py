"""Read rebalances: their progress, and the regions whose reports they wait for."""

from collections.abc import Sequence
from uuid import UUID

import asyncpg
import msgspec

from coordinator.access.token_names import with_token_names
from coordinator.database.connection import Connection
from coordinator.rebalancing.holds import read_holds
from coordinator.rebalancing.rules.plan import Plan
from coordinator.rebalancing.schemas import RUNNING, AwaitedRegion, Progress, Rebalance, RebalanceMove


async def read_rebalance(connection: Connection, id_: UUID) -> Rebalance | None:
    row = await connection.fetchrow(f"{_REBALANCES} WHERE id = $1", id_)
    return (await _named(connection, [row]))[0] if row else None


async def read_rebalances(connection: Connection, before: int | None, count: int) -> list[Rebalance]:
    """Return up to `count` rebalances, newest first, from the one before the version `before`."""
    rows = await connection.fetch(
        f"{_REBALANCES} WHERE $1::bigint IS NULL OR version < $1 ORDER BY version DESC LIMIT $2", before, count
    )
    return await _named(connection, rows)


async def rebalances_since(connection: Connection, version: int, at_most: int = 20) -> list[Rebalance]:
    """Return up to `at_most` rebalances that are newer than a version."""
    rows = await connection.fetch(f"{_REBALANCES} WHERE version > $1 ORDER BY version LIMIT $2", version, at_most)
    return await _named(connection, rows)


async def newest_version(connection: Connection) -> int:
    version: int = await connection.fetchval("SELECT coalesce(max(version), 0) FROM rebalance")
    return version


async def _named(connection: Connection, rows: Sequence[asyncpg.Record]) -> list[Rebalance]:
    return await with_token_names(connection, [await _rebalance(connection, row) for row in rows])


async def _rebalance(connection: Connection, row: asyncpg.Record) -> Rebalance:
    moves = await connection.fetch(_MOVES, row["id"])
    of_moves = Progress(*(sum(move[name] for move in moves) for name in ("units", "returned", "regranted")))
    of_drain = Progress(row["recalled"], row["returned"], 0)
    return Rebalance(
        id=row["id"],
        version=row["version"],
        mode=row["mode"],
        request=msgspec.json.decode(row["request"]),
        state=row["state"],
        reason=row["reason"],
        plan=msgspec.json.decode(row["plan"], type=Plan),
        progress=of_drain if row["region"] else of_moves,
        moves=[RebalanceMove(**{name: move[name] for name in RebalanceMove.__struct_fields__}) for move in moves],
        holds=await read_holds(connection, row["id"]),
        waits_for=await _awaited(connection, row, moves) if row["state"] == RUNNING else [],
        created_at=row["created_at"],
        created_by=row["created_by"],
        ended_at=row["ended_at"],
    )


async def _awaited(connection: Connection, row: asyncpg.Record, moves: Sequence[asyncpg.Record]) -> list[AwaitedRegion]:
    if row["region"]:
        return [AwaitedRegion(*each.values()) for each in await connection.fetch(_HELD_BY_REGION, row["region"])]
    going = [move for move in moves if move["ended_at"] is None]
    returns = [
        AwaitedRegion(each["source"], "return", each["quota"], missing, each["source_seen_at"])
        for each in going
        if (missing := each["units"] - each["returned"])
    ]
    fetches = [
        AwaitedRegion(each["target"], "fetch", each["quota"], travelling, each["target_seen_at"])
        for each in going
        if each["target"] and (travelling := each["returned"] - each["regranted"])
    ]
    return [*returns, *fetches]


_REBALANCES = """
SELECT id, version, mode, request::text, plan::text, region, recalled, returned, state, reason, created_at, created_by,
    ended_at
FROM rebalance
"""
_MOVES = """
SELECT move.*,
    (SELECT max(reported_at) FROM lease
        WHERE (quota, period, region) = (move.quota, move.period, move.source)) AS source_seen_at,
    (SELECT max(reported_at) FROM lease
        WHERE (quota, period, region) = (move.quota, move.period, move.target)) AS target_seen_at
FROM rebalance_move AS move WHERE rebalance = $1 ORDER BY number
"""
_HELD_BY_REGION = """
SELECT region, 'return', quota, outstanding, reported_at FROM lease
WHERE region = $1 AND outstanding > 0 ORDER BY outstanding DESC, quota LIMIT 100
"""
