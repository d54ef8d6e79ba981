"""Read the block list: subjects that every region denies."""

from datetime import datetime, timedelta

import asyncpg
from msgspec import UNSET, Struct

from coordinator.access.token_names import TokenName, with_token_names
from coordinator.blocks.statements import blocks_tag
from coordinator.database.connection import Connection
from protocol.blocks import BlockedValue
from protocol.check import BlockField

_MILLISECOND = timedelta(milliseconds=1)


class Block(BlockedValue, frozen=True, kw_only=True):
    reason: str
    created_at: datetime
    created_by: str  # the id of the token
    valid_until: datetime | None
    created_by_name: TokenName = UNSET


class BlockList(Struct, frozen=True, kw_only=True):
    """All blocks in force, by field and value. Agents compare the version with theirs to notice a change."""

    version: int
    data: list[Block]


async def read_blocks(connection: Connection, now: datetime) -> BlockList:
    """Read the version first, so that the list is never older than its version."""
    version: int = await connection.fetchval("SELECT version FROM block_version")
    rows = await connection.fetch(f"{_BLOCKS} WHERE valid_until IS NULL OR valid_until > $1 ORDER BY field, value", now)
    return BlockList(version=version, data=await with_token_names(connection, [_block(row, now) for row in rows]))


async def tagged_blocks(connection: Connection, now: datetime) -> tuple[BlockList, str]:
    """Return the list with its ETag."""
    return await read_blocks(connection, now), f'"blocks-{await blocks_tag(connection)}"'


async def read_block(connection: Connection, field: BlockField, value: str, now: datetime) -> Block | None:
    row = await connection.fetchrow(f"{_BLOCKS} WHERE field = $1 AND value = $2", field.value, value)
    return (await with_token_names(connection, [_block(row, now)]))[0] if row else None


def _block(row: asyncpg.Record, now: datetime) -> Block:
    until = row["valid_until"]
    ends_in_ms = None if until is None else max(0, (until - now) // _MILLISECOND)
    return Block(**{**row, "field": BlockField(row["field"])}, ends_in_ms=ends_in_ms)


_BLOCKS = "SELECT field, value, reason, created_at, created_by, valid_until FROM block"
