"""Read what a sealed step of the ledger changed in what is billed. Needs a snapshot.

A step begins at a sealed position and ends at the next one. So the same beginning always has the same end, the same
rows and the same ids: a worker that pushes usage elsewhere can die anywhere and begin its step again. The sums of all
steps up to a position are what the statements as of that position bill.
"""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID, uuid5

import asyncpg
from msgspec import Struct, field

from coordinator.database.connection import Connection
from coordinator.proof.seal import Sealed, find_sealed
from coordinator.usage.rules.statement import LineKind

_IDS = UUID("3b0c8c2e-9a56-4f1d-8d53-75736167652f")


class UsageChange(Struct, frozen=True, kw_only=True):
    """Units that a step adds to what a tenant is billed; negative where it takes some away."""

    id: UUID  # the same whenever it is read: use it as idempotency key
    tenant: str
    quota: str
    kind: LineKind
    period: str  # in which it is booked and billed
    charge_period: str  # in which it was used
    at: datetime | None = field(name="hour")  # the hour (UTC) in which it was used; null for what is not usage
    units: int


class UsageStep(NamedTuple):
    """Changes of a step, up to the position where the next one begins. Without a newer seal there are none."""

    changes: list[UsageChange]
    next_since: int
    sealed_at: datetime | None  # when the end of the step was sealed


async def read_usage_changes(connection: Connection, since: int, skip: int, count: int) -> UsageStep | None:
    """Return up to `count` changes of the step that begins at a position, or None if that is not sealed."""
    begin = Sealed(0, 0) if since == 0 else await find_sealed(connection, since)
    if begin is None:
        return None
    end = await connection.fetchrow(_NEXT, since)
    if end is None:
        return UsageStep([], since, None)
    bounds = begin.position, end["position"], begin.transfer, end["transfer"]
    rows = await connection.fetch(_CHANGES, *bounds, count, skip)
    return UsageStep([_change(since, row) for row in rows], end["position"], end["sealed_at"])


def _change(since: int, row: asyncpg.Record) -> UsageChange:
    name = "\x1f".join(map(str, (since, *list(row.values())[:-1])))
    return UsageChange(id=uuid5(_IDS, name), **{**row, "kind": LineKind(row["kind"])})


_NEXT = "SELECT position, transfer, sealed_at FROM seal WHERE position > $1 ORDER BY number LIMIT 1"
# Each kind of line as statements have it (read_amounts.py). A transfer that replaces an estimate has two.
_CHANGES = """
WITH moved AS (
    SELECT transfer.* FROM report JOIN transfer USING (epoch, lane, seq)
    WHERE report.position > $1 AND report.position <= $2
    UNION ALL
    SELECT * FROM transfer WHERE seq IS NULL AND id > $3 AND id <= $4
)
SELECT coalesce(pool.tenant, dimensions ->> 'tenant') COLLATE "C" AS tenant, pool.name COLLATE "C" AS quota, line.kind,
    moved.period COLLATE "C" AS period, charge_period COLLATE "C" AS charge_period,
    CASE WHEN dst = 'consumed' THEN date_bin('1 hour', window_at, '2000-01-01 00:00Z') END AS at,
    sum(line.units) AS units
FROM moved JOIN pool USING (quota, period), LATERAL (VALUES
    (CASE WHEN charge_period <> moved.period THEN 'late_' ELSE '' END
        || CASE WHEN coalesce(dimensions ? 'counted_as', false) THEN 'overage' ELSE 'usage' END,
        CASE WHEN dst = 'consumed' THEN moved.units ELSE 0 END),
    ('estimated', CASE 'estimated' WHEN dst THEN moved.units WHEN src THEN -moved.units ELSE 0 END),
    ('replaced', CASE WHEN cause = 'replaces_estimate' THEN -moved.units ELSE 0 END),
    ('write_off', CASE WHEN src = 'adjustment' AND dst = 'written_off' THEN -moved.units ELSE 0 END)
) AS line (kind, units)
WHERE line.units <> 0 AND coalesce(pool.tenant, dimensions ->> 'tenant') IS NOT NULL
GROUP BY 1, 2, 3, 4, 5, 6 HAVING sum(line.units) <> 0 ORDER BY 1, 2, 3, 4, 5, 6 LIMIT $5 OFFSET $6
"""
