"""The catalogue's version, which grows with every change that agents must see.

Its one row is also the catalogue's lock. Every change of limits, subscriptions or regions takes it first, so that a
plan cannot be removed while a tenant is being subscribed to it.
"""

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.notice import Notice
from protocol.messages import Signal


async def lock_catalogue(connection: Connection) -> int:
    """Lock and return the version, which stays until this transaction ends."""
    version: int = await connection.fetchval("SELECT version FROM policy_version FOR UPDATE")
    return version


async def advance_catalogue(connection: Connection) -> int:
    """Return the next version; agents are notified when this transaction commits."""
    version: int = await connection.fetchval(_ADVANCE)
    await notify(connection, [Notice(Signal(kind="policies"))])
    return version


async def catalogue_tag(connection: Connection) -> str:
    """Return a name of the catalogue's state: after a restore, a version number alone would come again."""
    version, stamp = await connection.fetchrow("SELECT version, stamp FROM policy_version") or (0, "")
    return f"{version}-{stamp}"


_ADVANCE = "UPDATE policy_version SET version = version + 1, stamp = gen_random_uuid() RETURNING version"
