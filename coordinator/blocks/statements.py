"""The block list's version. Its one row is also the list's lock."""

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.notice import Notice
from protocol.messages import Signal


async def lock_blocks(connection: Connection) -> None:
    """Nobody else changes the list until this transaction ends."""
    await connection.execute("SELECT FROM block_version FOR UPDATE")


async def advance_blocks(connection: Connection) -> None:
    """Every agent hears of it when this transaction commits."""
    version: int = await connection.fetchval(_ADVANCE)
    await notify(connection, [Notice(Signal(kind="blocks", version=version))])


async def blocks_tag(connection: Connection) -> str:
    """Return what names the list's state: a version number alone comes again after a restore."""
    version, stamp = await connection.fetchrow("SELECT version, stamp FROM block_version") or (0, "")
    return f"{version}-{stamp}"


_ADVANCE = "UPDATE block_version SET version = version + 1, stamp = gen_random_uuid() RETURNING version"
