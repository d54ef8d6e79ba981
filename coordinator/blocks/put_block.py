"""Block somebody everywhere, or change for how long and why."""

from datetime import datetime
from typing import NamedTuple

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.blocks.read_blocks import Block, read_block
from coordinator.blocks.statements import advance_blocks, lock_blocks
from coordinator.database.connection import Connection
from protocol.blocks import MAX_BLOCKS
from protocol.check import BlockField


class Wanted(NamedTuple):
    field: BlockField
    value: str  # as it is compared
    reason: str
    valid_until: datetime | None

    @property
    def name(self) -> str:
        return f"{self.field}:{self.value}"


class PutBlock(NamedTuple):
    """Without a block: the list is full."""

    block: Block | None
    is_new: bool = False


async def put_block(connection: Connection, wanted: Wanted, by: Actor, now: datetime) -> PutBlock:
    """The same again changes nothing, and no agent is told."""
    await lock_blocks(connection)
    found = await read_block(connection, wanted.field, wanted.value, now)
    if found and (found.reason, found.valid_until) == (wanted.reason, wanted.valid_until):
        return PutBlock(found)
    await connection.execute("DELETE FROM block WHERE valid_until <= $1", now)  # what is over makes room
    if found is None and await connection.fetchval("SELECT count(*) FROM block") >= MAX_BLOCKS:
        return PutBlock(None)
    await connection.execute(_UPSERT, wanted.field.value, wanted.value, wanted.reason, now, by.name, wanted.valid_until)
    await advance_blocks(connection)
    details = {"reason": wanted.reason, "valid_until": wanted.valid_until}
    await record(connection, by, Action.BLOCK_PUT, wanted.name, details, now)
    return PutBlock(await read_block(connection, wanted.field, wanted.value, now), is_new=found is None)


_UPSERT = """
INSERT INTO block (field, value, reason, created_at, created_by, valid_until) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (field, value) DO UPDATE SET reason = excluded.reason, created_at = excluded.created_at,
    created_by = excluded.created_by, valid_until = excluded.valid_until
"""
