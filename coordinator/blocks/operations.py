"""Block a subject in every region, and let it in again."""

from datetime import datetime
from typing import NamedTuple

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.blocks.read_blocks import Block, read_block
from coordinator.blocks.statements import advance_blocks, lock_blocks
from coordinator.database.connection import Connection
from protocol.blocks import MAX_BLOCKS
from protocol.check import BlockField


class BlockRequest(NamedTuple):
    field: BlockField
    value: str  # in the form in which it is compared
    reason: str
    valid_until: datetime | None

    @property
    def name(self) -> str:
        return f"{self.field}:{self.value}"


class PutBlock(NamedTuple):
    """`block` is None if the list is full."""

    block: Block | None
    is_new: bool = False


async def put_block(connection: Connection, request: BlockRequest, by: Actor, now: datetime) -> PutBlock:
    """Add a block, or change its end and reason. An equal block stays as it is, and no agent is notified."""
    await lock_blocks(connection)
    found = await read_block(connection, request.field, request.value, now)
    if found and (found.reason, found.valid_until) == (request.reason, request.valid_until):
        return PutBlock(found)
    await connection.execute("DELETE FROM block WHERE valid_until <= $1", now)  # expired blocks make room
    if found is None and await connection.fetchval("SELECT count(*) FROM block") >= MAX_BLOCKS:
        return PutBlock(None)
    await connection.execute(
        _UPSERT, request.field.value, request.value, request.reason, now, by.name, request.valid_until
    )
    await advance_blocks(connection)
    details = {"reason": request.reason, "valid_until": request.valid_until}
    await record(connection, by, Action.BLOCK_PUT, request.name, details, now)
    return PutBlock(await read_block(connection, request.field, request.value, now), is_new=found is None)


async def delete_block(connection: Connection, field: BlockField, value: str, by: Actor, now: datetime) -> bool:
    """Delete a block, and return whether there was one."""
    await lock_blocks(connection)
    reason = await connection.fetchval(_DELETE, field.value, value)
    if reason is None:
        return False
    await advance_blocks(connection)
    await record(connection, by, Action.BLOCK_DELETED, f"{field}:{value}", {"was": {"reason": reason}}, now)
    return True


_UPSERT = """
INSERT INTO block (field, value, reason, created_at, created_by, valid_until) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (field, value) DO UPDATE SET reason = excluded.reason, created_at = excluded.created_at,
    created_by = excluded.created_by, valid_until = excluded.valid_until
"""
_DELETE = "DELETE FROM block WHERE field = $1 AND value = $2 RETURNING reason"
