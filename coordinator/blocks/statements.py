"""Statements on the version of the block list. Its one row is also the lock of the list."""

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.notice import Notice
from protocol.messages import Signal


async def lock_blocks(connection: Connection) -> None:
    """Lock the list: no other transaction changes it until this one ends."""
    await connection.execute("SELECT FROM block_version FOR UPDATE")


async def advance_blocks(connection: Connection) -> None:
    """Advance the version, and notify all agents when this transaction commits."""
    await connection.execute(_ADVANCE)
    await notify(connection, [Notice(Signal(kind="blocks"))])


async def blocks_tag(connection: Connection) -> str:
    """Return a tag of the list's state. After a restore a version number may come again with another state."""
    version, stamp = await connection.fetchrow("SELECT version, stamp FROM block_version") or (0, "")
    return f"{version}-{stamp}"


_ADVANCE = "UPDATE block_version SET version = version + 1, stamp = gen_random_uuid()"
