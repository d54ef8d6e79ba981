"""Read and write moves of units between regions. A caller holds the lock of the moves' pools."""

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from coordinator.database.connection import Connection
from coordinator.database.expect import expect_rows
from coordinator.exchange.rules.balances import Key
from coordinator.rebalancing.rules.division import Move
from coordinator.rebalancing.rules.plan import PlannedMove


async def read_moves(connection: Connection, keys: Collection[Key]) -> list[Move]:
    """Return the open moves of these pools, oldest first."""
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


async def begin_moves(connection: Connection, rebalance: UUID, planned: Sequence[PlannedMove]) -> list[Move]:
    moves = [
        Move(rebalance, number, each.key, each.source, each.target, each.units)
        for number, each in enumerate(planned, 1)
    ]
    await connection.executemany(
        _BEGIN, [(*move.name, *move.key, move.source, move.target, move.units) for move in moves]
    )
    await _count(connection, moves, 1)
    return moves


async def end_moves(connection: Connection, ended: Sequence[tuple[Move, str | None]], now: datetime) -> None:
    """End moves, each with the reason if it is incomplete."""
    await connection.executemany(_END, [(*move.name, reason, now) for move, reason in ended])
    await _count(connection, [move for move, _ in ended], -1)


async def _count(connection: Connection, moves: Sequence[Move], by: int) -> None:
    """Count the open moves of each pool, so that pools without any are not searched. Closed periods do not change."""
    counted = Counter(move.key for move in moves)
    await connection.executemany(_COUNT, [(*key, by * number) for key, number in sorted(counted.items())])


async def write_moves(connection: Connection, moves: Sequence[Move]) -> None:
    """Write the progress of moves."""
    if moves:
        rows = await connection.fetch(
            _WRITE,
            [move.rebalance for move in moves],
            [move.number for move in moves],
            [move.returned for move in moves],
            [move.regranted for move in moves],
        )
        expect_rows((len(rows),), (len(moves),), "moves")


_OPEN = """
SELECT rebalance_move.* FROM unnest($1::text[], $2::text[]) AS wanted (quota, period)
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
_BEGIN = """
INSERT INTO rebalance_move (rebalance, number, quota, period, source, target, units) VALUES ($1, $2, $3, $4, $5, $6, $7)
"""
_END = """
UPDATE rebalance_move SET ended_at = $4, reason = $3 WHERE (rebalance, number) = ($1, $2) AND ended_at IS NULL
"""
_COUNT = """
UPDATE pool SET open_moves = open_moves + $3 WHERE (quota, period) = ($1, $2)
    AND NOT EXISTS (SELECT FROM period WHERE period.id = pool.period AND period.state = 'closed')
"""
