"""What people have proposed to correct, and what became of it."""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

import asyncpg
import msgspec
from sqlalchemy import BigInteger, Text, any_, case, select, tuple_
from sqlalchemy.dialects.postgresql import ARRAY, UUID

from coordinator.access.token_names import TokenName, with_token_names
from coordinator.adjustments.rules import AdjustmentKind, AdjustmentState, state_of
from coordinator.database.compiled import CompiledStatement, compiled, constant, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import Timestamp, adjustment


class Adjustment(msgspec.Struct, frozen=True):
    id: uuid.UUID  # and of the movement in the ledger
    quota: str
    period: str  # that it is about
    kind: AdjustmentKind
    units: int
    reason: str
    document: str
    state: AdjustmentState
    proposed_by: uuid.UUID
    proposed_at: datetime
    expires_at: datetime
    approved_by: uuid.UUID | None
    approved_at: datetime | None
    booked_in: str | None  # the period in whose books it is
    withdrawn_by: uuid.UUID | None
    withdrawn_at: datetime | None
    proposed_by_name: TokenName = msgspec.UNSET
    approved_by_name: TokenName = msgspec.UNSET
    withdrawn_by_name: TokenName = msgspec.UNSET


class AdjustmentName(NamedTuple):
    """The position in a list of adjustments, from which the next page goes on."""

    proposed_at: datetime = datetime.min.replace(tzinfo=UTC)
    id: uuid.UUID = uuid.UUID(int=0)


class AdjustmentFilter(NamedTuple):
    """A filter of adjustments. An empty sequence matches all."""

    quotas: Sequence[str] = ()
    periods: Sequence[str] = ()
    states: Sequence[AdjustmentState] = ()


async def read_adjustment(connection: Connection, id_: uuid.UUID, now: datetime) -> Adjustment | None:
    rows = await connection.fetch("SELECT * FROM adjustment WHERE id = $1", id_)
    found = await with_token_names(connection, [adjustment_of_row(row, now) for row in rows])
    return found[0] if found else None


async def read_adjustments(
    connection: Connection, only: AdjustmentFilter, now: datetime, after: AdjustmentName, count: int
) -> list[Adjustment]:
    """Return at most `count` adjustments after the given one, in the order in which they were proposed."""
    given = {name: list(values) for name, values in only._asdict().items() if values}
    page = _page(tuple(given)).with_values(**given, **after._asdict(), now=now, count=count)
    rows = await connection.fetch(*page)
    return await with_token_names(connection, [adjustment_of_row(row, now) for row in rows])


def adjustment_of_row(row: asyncpg.Record, now: datetime) -> Adjustment:
    state = state_of(row["approved_at"], row["withdrawn_at"], row["expires_at"], now)
    return msgspec.convert(dict(row) | {"state": state}, Adjustment)


# The rule of state_of() once more, because the database cuts the page.
_STATE = case(
    (adjustment.c.approved_at.is_not(None), constant("approved")),
    (adjustment.c.withdrawn_at.is_not(None), constant("withdrawn")),
    (adjustment.c.expires_at < parameter("now", Timestamp), constant("expired")),
    else_=constant("proposed"),
)
_CONDITIONS = {
    "quotas": adjustment.c.quota == any_(parameter("quotas", ARRAY(Text))),
    "periods": adjustment.c.period == any_(parameter("periods", ARRAY(Text))),
    "states": any_(parameter("states", ARRAY(Text))) == _STATE,
}


@lru_cache(maxsize=8)
def _page(conditions: tuple[str, ...]) -> CompiledStatement:
    after = tuple_(parameter("proposed_at", Timestamp), parameter("id", UUID))
    in_order = (adjustment.c.proposed_at, adjustment.c.id)
    return compiled(
        select(adjustment)
        .where(*(_CONDITIONS[name] for name in conditions), tuple_(*in_order) > after)
        .order_by(*in_order)
        .limit(parameter("count", BigInteger))
    )
