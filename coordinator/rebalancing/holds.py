"""Floors that keep moved units in a region until a time, and end by themselves."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.limits.version import advance_catalogue, lock_catalogue
from coordinator.rebalancing.rules.plan import PlannedHold

HOLDS_OVER = "EXISTS (SELECT FROM floor_hold WHERE until <= $2)"  # the job has work


async def begin_holds(connection: Connection, rebalance: UUID, holds: Sequence[PlannedHold]) -> None:
    """Put holds in force, each in place of an earlier one. The caller has the catalogue's lock."""
    if holds:
        await connection.executemany(_DELETE, [(each.quota, each.period, each.region) for each in holds])
        rows = [(each.quota, each.period, each.region, each.units, each.until, rebalance) for each in holds]
        await connection.executemany(_INSERT, rows)
        await advance_catalogue(connection)


async def end_holds_of(connection: Connection, rebalance: UUID) -> int:
    """End the holds of a rebalance now, and return how many there were. The caller has the catalogue's lock."""
    rows = await connection.fetch("DELETE FROM floor_hold WHERE rebalance = $1 RETURNING quota", rebalance)
    if rows:
        await advance_catalogue(connection)
    return len(rows)


async def end_holds(connection: Connection, now: datetime) -> None:
    """End the holds whose time is over: demand decides again where their units go."""
    await lock_catalogue(connection)
    rows = await connection.fetch(_END, now)
    if not rows:
        return
    await advance_catalogue(connection)
    for row in rows:
        details = {name: row[name] for name in ("quota", "period", "region", "units")}
        by = Actor(row["created_by"])
        await record(connection, by, Action.REBALANCE_HOLD_ENDED, str(row["rebalance"]), details, now)


async def read_holds(connection: Connection, rebalance: UUID) -> list[PlannedHold]:
    rows = await connection.fetch(_READ, rebalance)
    return [msgspec.convert(dict(row), PlannedHold) for row in rows]


_DELETE = "DELETE FROM floor_hold WHERE (quota, period, region) = ($1, $2, $3)"
_INSERT = """
INSERT INTO floor_hold (quota, period, region, units, until, rebalance) VALUES ($1, $2, $3, $4, $5, $6)
"""
_END = """
WITH over AS (DELETE FROM floor_hold WHERE until <= $1 RETURNING *)
SELECT over.*, created_by FROM over JOIN rebalance ON rebalance.id = over.rebalance ORDER BY quota, period, over.region
"""
_READ = "SELECT quota, period, region, units, until FROM floor_hold WHERE rebalance = $1 ORDER BY quota, period, region"
