"""The statements on shared limits: one row for each key, locked while a report is answered."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Text, any_, func, or_, select
from sqlalchemy.dialects.postgresql import ARRAY

from coordinator.database.compiled import CompiledStatement, compiled, constant, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import shared_limit
from coordinator.shared_limits.rules import Shared


async def lock_shares(connection: Connection, quotas: Collection[str], now: datetime) -> dict[str, Shared]:
    """Lock each key, and create missing ones. All callers use one order, which prevents deadlocks."""
    names, now_ms = sorted(quotas), round(now.timestamp() * 1000)
    rows = await connection.fetch(_LOCK, names)
    if len(rows) < len(names):
        await connection.execute(_MAKE, names, msgspec.msgpack.encode(Shared(now_ms, now_ms)), now)
        rows = await connection.fetch(_LOCK, names)
    return {row["quota"]: msgspec.msgpack.decode(row["state"], type=Shared) for row in rows}


async def write_shares(connection: Connection, shares: Mapping[str, Shared], now: datetime) -> int:
    """Write locked shares, of which there is at least one. Return the catalogue's version behind their locks."""
    states = [msgspec.msgpack.encode(shared) for shared in shares.values()]
    version: int = await connection.fetchval(_WRITE, list(shares), states, now)
    return version


async def read_shares(
    connection: Connection, quotas: Sequence[str], dimensions: Sequence[str], after: str, count: int
) -> dict[str, Shared]:
    """Return the shares of at most `count` keys that come after the given one.

    `quotas` are names or keys, `dimensions` are parts of subjects such as `tenant=acme`; empty: any.
    """
    given = {name: list(values) for name, values in (("quotas", quotas), ("subjects", dimensions)) if values}
    rows = await connection.fetch(*_shares(tuple(given)).with_values(after=after, count=count, **given))
    return {row["quota"]: msgspec.msgpack.decode(row["state"], type=Shared) for row in rows}


async def forget_shares(connection: Connection, before: datetime) -> int:
    """Delete keys without a report since then: no share that was granted by then is in force any more."""
    return int((await connection.execute(_FORGET, before)).rpartition(" ")[2])


_LOCK = "SELECT quota, state FROM shared_limit WHERE quota = ANY($1) ORDER BY quota FOR UPDATE"
_MAKE = """
INSERT INTO shared_limit (quota, state, reported_at)
SELECT quota, $2, $3 FROM unnest($1::text[]) AS quota ORDER BY quota ON CONFLICT DO NOTHING
"""
_WRITE = """
UPDATE shared_limit SET state = new.state, reported_at = $3
FROM unnest($1::text[], $2::bytea[]) AS new (quota, state) WHERE shared_limit.quota = new.quota
RETURNING (SELECT version FROM policy_version)
"""
_FORGET = """
DELETE FROM shared_limit WHERE quota IN (
    SELECT quota FROM shared_limit WHERE reported_at < $1 ORDER BY quota LIMIT 1000 FOR UPDATE SKIP LOCKED)
"""


def _part_of_key(number: int) -> ColumnElement[str]:
    return func.split_part(shared_limit.c.quota, constant(":"), constant(number))


_QUOTAS = parameter("quotas", ARRAY(Text))
_CONDITIONS = {
    "quotas": or_(shared_limit.c.quota == any_(_QUOTAS), _part_of_key(1) == any_(_QUOTAS)),
    "subjects": func.string_to_array(_part_of_key(2), constant(",")).op("&&")(parameter("subjects", ARRAY(Text))),
}


@lru_cache(maxsize=8)
def _shares(conditions: tuple[str, ...]) -> CompiledStatement:
    return compiled(
        select(shared_limit.c.quota, shared_limit.c.state)
        .where(*(_CONDITIONS[name] for name in conditions), shared_limit.c.quota > parameter("after", Text))
        .order_by(shared_limit.c.quota)
        .limit(parameter("count", BigInteger))
    )
