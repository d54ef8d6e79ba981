"""What people have proposed to correct, and what became of it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from coordinator.adjustments.rules import AdjustmentKind, AdjustmentState, state_of
from coordinator.database.connection import Connection


class Adjustment(msgspec.Struct, frozen=True):
    id: UUID  # and of the movement in the ledger
    quota: str
    period: str  # that it is about
    kind: AdjustmentKind
    units: int
    reason: str
    document: str
    state: AdjustmentState
    proposed_by: UUID
    proposed_at: datetime
    expires_at: datetime
    approved_by: UUID | None
    approved_at: datetime | None
    booked_in: str | None  # the period in whose books it is
    withdrawn_by: UUID | None
    withdrawn_at: datetime | None


class AdjustmentName(NamedTuple):
    """Where a list goes on."""

    proposed_at: datetime = datetime.min.replace(tzinfo=UTC)
    id: UUID = UUID(int=0)


class AdjustmentFilter(NamedTuple):
    """Empty: any."""

    quotas: Sequence[str] = ()
    periods: Sequence[str] = ()
    states: Sequence[AdjustmentState] = ()


async def read_adjustment(connection: Connection, id_: UUID, now: datetime) -> Adjustment | None:
    row = await connection.fetchrow(f"SELECT {FIELDS} FROM adjustment WHERE id = $1", id_)  # noqa: S608 - see below
    return adjustment_of_row(row, now) if row else None


async def read_adjustments(
    connection: Connection, only: AdjustmentFilter, now: datetime, after: AdjustmentName, count: int
) -> list[Adjustment]:
    """In the order in which they were proposed."""
    rows = await connection.fetch(_LIST, *map(list, only), now, *after, count)
    return [adjustment_of_row(row, now) for row in rows]


def adjustment_of_row(row: asyncpg.Record, now: datetime) -> Adjustment:
    state = state_of(row["approved_at"], row["withdrawn_at"], row["expires_at"], now)
    return msgspec.convert(dict(row) | {"state": state}, Adjustment)


FIELDS = """id, quota, period, kind, units, reason, document, proposed_by, proposed_at, expires_at, approved_by,
    approved_at, booked_in, withdrawn_by, withdrawn_at"""
# The states once more, for a page is cut by the database.
_LIST = f"""
SELECT {FIELDS} FROM adjustment
WHERE ($1::text[] = '{{}}' OR quota = ANY ($1)) AND ($2::text[] = '{{}}' OR period = ANY ($2))
    AND ($3::text[] = '{{}}' OR CASE WHEN approved_at IS NOT NULL THEN 'approved'
        WHEN withdrawn_at IS NOT NULL THEN 'withdrawn' WHEN expires_at < $4 THEN 'expired' ELSE 'proposed'
        END = ANY ($3))
    AND (proposed_at, id) > ($5, $6)
ORDER BY proposed_at, id LIMIT $7
"""  # noqa: S608 - the names come from above
