"""Let somebody in again who was blocked."""

from datetime import datetime

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.blocks.statements import advance_blocks, lock_blocks
from coordinator.database.connection import Connection
from protocol.check import BlockField


async def delete_block(connection: Connection, field: BlockField, value: str, by: Actor, now: datetime) -> bool:
    """False if there is no such block: nothing changes, and no agent is told."""
    await lock_blocks(connection)
    reason = await connection.fetchval(_DELETE, field.value, value)
    if reason is None:
        return False
    await advance_blocks(connection)
    await record(connection, by, Action.BLOCK_DELETED, f"{field}:{value}", {"was": {"reason": reason}}, now)
    return True


_DELETE = "DELETE FROM block WHERE field = $1 AND value = $2 RETURNING reason"
