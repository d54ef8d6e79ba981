"""What people have moved, or are moving: how far it has come, and for whom it waits."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
from msgspec import Struct, field

from coordinator.database.connection import Connection
from coordinator.rebalancing.rules.plan import Plan

RUNNING, CANCELLED = "running", "cancelled"


class Progress(Struct, frozen=True):
    recalled: int  # units that are asked for
    returned: int  # that came back, of these; of a drain: that are accounted for
    regranted: int  # that their targets have


class MoveTold(Struct, frozen=True, kw_only=True):
    quota: str
    period: str
    source: str = field(name="from")
    target: str | None = field(name="to")
    units: int
    returned: int
    regranted: int
    reason: str | None  # why it ended before all of it was there
    ended_at: datetime | None


class Waiting(Struct, frozen=True):
    """Whose answer a rebalance waits for."""

    region: str
    what: str  # return: units that it is asked for; fetch: units that are there for it
    quota: str
    units: int
    last_seen_at: datetime | None  # when it was last heard about this quota


class Rebalance(Struct, frozen=True, kw_only=True):
    id: UUID | None  # none: it was only planned
    version: int  # the newest that there is, of a plan
    mode: str
    request: dict[str, Any]
    state: str  # planned | running | done | partial | cancelled
    reason: str | None
    plan: Plan
    progress: Progress
    moves: list[MoveTold]
    waits_for: list[Waiting]
    created_at: datetime
    created_by: str
    ended_at: datetime | None


async def read_rebalance(connection: Connection, id_: UUID) -> Rebalance | None:
    row = await connection.fetchrow(f"{_REBALANCES} WHERE id = $1", id_)
    return await _told(connection, row) if row else None


async def read_rebalances(connection: Connection, before: int | None, count: int) -> list[Rebalance]:
    """At most so many, the newest first."""
    rows = await connection.fetch(
        f"{_REBALANCES} WHERE $1::bigint IS NULL OR version < $1 ORDER BY version DESC LIMIT $2", before, count
    )
    return [await _told(connection, row) for row in rows]


async def rebalances_since(connection: Connection, version: int, at_most: int = 20) -> list[Rebalance]:
    """What others did since somebody looked."""
    rows = await connection.fetch(f"{_REBALANCES} WHERE version > $1 ORDER BY version LIMIT $2", version, at_most)
    return [await _told(connection, row) for row in rows]


async def newest_version(connection: Connection) -> int:
    version: int = await connection.fetchval("SELECT coalesce(max(version), 0) FROM rebalance")
    return version


async def _told(connection: Connection, row: asyncpg.Record) -> Rebalance:
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
        moves=[MoveTold(**{name: move[name] for name in MoveTold.__struct_fields__}) for move in moves],
        waits_for=await _waiting(connection, row, moves) if row["state"] == RUNNING else [],
        created_at=row["created_at"],
        created_by=row["created_by"],
        ended_at=row["ended_at"],
    )


async def _waiting(connection: Connection, row: asyncpg.Record, moves: Sequence[asyncpg.Record]) -> list[Waiting]:
    if row["region"]:
        return [Waiting(*each.values()) for each in await connection.fetch(_HELD, row["region"])]
    going = [move for move in moves if move["ended_at"] is None]
    returns = [
        Waiting(each["source"], "return", each["quota"], missing, each["source_seen_at"])
        for each in going
        if (missing := each["units"] - each["returned"])
    ]
    fetches = [
        Waiting(each["target"], "fetch", each["quota"], travelling, each["target_seen_at"])
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
_HELD = """
SELECT region, 'return', quota, outstanding, reported_at FROM lease
WHERE region = $1 AND outstanding > 0 ORDER BY outstanding DESC, quota LIMIT 100
"""
