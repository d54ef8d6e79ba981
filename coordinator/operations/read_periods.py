"""The periods that the books have."""

from datetime import datetime
from typing import NamedTuple

from coordinator.database.connection import Connection


class PeriodRow(NamedTuple):
    id: str
    kind: str
    starts_at: datetime
    ends_at: datetime
    state: str


async def read_period(connection: Connection, period_id: str) -> PeriodRow | None:
    row = await connection.fetchrow(f"{_PERIODS} WHERE id = $1", period_id)
    return PeriodRow(*row.values()) if row else None


async def read_periods(connection: Connection, after: str, count: int) -> list[PeriodRow]:
    """At most so many, by id, that come after the given one."""
    rows = await connection.fetch(f"{_PERIODS} WHERE id > $1 ORDER BY id LIMIT $2", after, count)
    return [PeriodRow(*row.values()) for row in rows]


_PERIODS = "SELECT id, kind, starts_at, ends_at, state FROM period"
