"""Moves: units that people bring from region to region. Whoever reads or writes those of a pool holds the pool."""

from collections.abc import Collection, Sequence
from typing import Any

from coordinator.database.connection import Connection
from coordinator.database.ledger import expect
from coordinator.domain.books import Key
from coordinator.domain.division import Move


async def read_moves(connection: Connection, keys: Collection[Key]) -> list[Move]:
    """All that are open, the oldest first."""
    if not keys:
        return []
    rows = await connection.fetch(_OPEN, [key.quota for key in keys], [key.period for key in keys])
    return [move_of_row(row) for row in rows]


def move_of_row(row: Any) -> Move:
    key = Key(row["quota"], row["period"])
    return Move(
        row["rebalance"],
        row["number"],
        key,
        row["source"],
        row["target"],
        row["units"],
        row["returned"],
        row["regranted"],
    )


async def write_moves(connection: Connection, moves: Sequence[Move]) -> None:
    """How far they have come."""
    if moves:
        rows = await connection.fetch(
            _WRITE,
            [move.rebalance for move in moves],
            [move.number for move in moves],
            [move.returned for move in moves],
            [move.regranted for move in moves],
        )
        expect((len(rows),), (len(moves),), "moves")


_OPEN = """
SELECT rebalance_move.* FROM unnest($1::text[], $2::text[]) AS asked (quota, period)
JOIN rebalance_move USING (quota, period) JOIN rebalance ON rebalance.id = rebalance_move.rebalance
WHERE rebalance_move.ended_at IS NULL ORDER BY rebalance.version, number
"""
_WRITE = """
UPDATE rebalance_move SET returned = new.returned, regranted = new.regranted
FROM unnest($1::uuid[], $2::int[], $3::bigint[], $4::bigint[]) AS new (rebalance, number, returned, regranted)
WHERE rebalance_move.rebalance = new.rebalance AND rebalance_move.number = new.number
    AND rebalance_move.ended_at IS NULL
RETURNING rebalance_move.number
"""
