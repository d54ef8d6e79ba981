"""Read the periods of the ledger."""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import asyncpg
from msgspec import UNSET, Struct, field

from coordinator.access.token_names import TokenName, with_token_names
from coordinator.database.connection import Connection


class BookedPeriod(Struct, frozen=True):
    id: str
    kind: str
    starts_at: datetime = field(name="from")
    ends_at: datetime = field(name="to")
    state: str
    close_requested_at: datetime | None = None  # when its close was requested
    closed_at: datetime | None = None
    closed_by: str | None = None  # who requested the close
    position: int | None = None  # of the ledger at the close
    transfers: int | None = None  # the final number of its transfers
    root: str | None = None  # the hash of its final pools, leases and corrections
    closed_by_name: TokenName = UNSET


async def read_period(connection: Connection, period_id: str) -> BookedPeriod | None:
    row = await connection.fetchrow(f"{_PERIODS} WHERE id = $1", period_id)
    return (await with_token_names(connection, [_booked(row)]))[0] if row else None


async def read_periods(connection: Connection, after: str, count: int) -> list[BookedPeriod]:
    """Return at most `count` periods by id, beginning after the given one."""
    rows = await connection.fetch(f"{_PERIODS} WHERE id > $1 ORDER BY id LIMIT $2", after, count)
    return await with_token_names(connection, [_booked(row) for row in rows])


async def read_some_periods(connection: Connection, ids: Collection[str]) -> list[BookedPeriod]:
    return [_booked(row) for row in await connection.fetch(f"{_PERIODS} WHERE id = ANY ($1::text[])", list(ids))]


def _booked(row: asyncpg.Record) -> BookedPeriod:
    return BookedPeriod(**{name: _aware(value) for name, value in row.items()})


def _aware(value: Any) -> Any:
    """Give a time its zone: Postgres stores year 1 as -infinity, which the driver returns without one."""
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


_PERIODS = """
SELECT id, kind, starts_at, ends_at, state, close_requested_at, closed_at,
    CASE state WHEN 'closed' THEN close_requested_by END AS closed_by, position, transfers,
    encode(root, 'hex') AS root
FROM period
"""
