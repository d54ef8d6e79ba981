"""The periods that the books have."""

from datetime import datetime

from msgspec import Struct, field

from coordinator.database.connection import Connection


class BookedPeriod(Struct, frozen=True):
    id: str
    kind: str
    starts_at: datetime = field(name="from")
    ends_at: datetime = field(name="to")
    state: str


async def read_period(connection: Connection, period_id: str) -> BookedPeriod | None:
    row = await connection.fetchrow(f"{_PERIODS} WHERE id = $1", period_id)
    return BookedPeriod(*row.values()) if row else None


async def read_periods(connection: Connection, after: str, count: int) -> list[BookedPeriod]:
    """At most so many, by id, that come after the given one."""
    rows = await connection.fetch(f"{_PERIODS} WHERE id > $1 ORDER BY id LIMIT $2", after, count)
    return [BookedPeriod(*row.values()) for row in rows]


_PERIODS = "SELECT id, kind, starts_at, ends_at, state FROM period"
