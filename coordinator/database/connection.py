"""The connection that operations get: alone or from the pool, and reading sums as integers."""

from typing import TYPE_CHECKING, TypeAlias

import asyncpg

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
else:
    Connection: TypeAlias = asyncpg.Connection


async def read_sums_as_integers(connection: Connection) -> None:
    """Make a new connection return `numeric` values as integers of any size.

    Postgres sums BIGINT columns as `numeric`, which cannot overflow. Statements must not cast such a sum back to
    BIGINT: one absurd amount would then fail every statement that adds it up. The ledger stores only whole units, so no
    `numeric` value that a statement returns has a fraction.
    """
    await connection.set_type_codec("numeric", schema="pg_catalog", encoder=str, decoder=int, format="text")
