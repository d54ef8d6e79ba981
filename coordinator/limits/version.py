"""The catalogue's version: what every change that agents must hear of goes through.

Its one row is also the catalogue's lock. Whoever changes limits, subscriptions or regions takes it first, so a plan
cannot be dropped at the moment at which somebody is put on it.
"""

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.notice import Notice
from protocol.messages import Signal


async def lock_catalogue(connection: Connection) -> int:
    """The version now. It stays until this transaction ends."""
    version: int = await connection.fetchval("SELECT version FROM policy_version FOR UPDATE")
    return version


async def advance_catalogue(connection: Connection) -> int:
    """The next version, of which every agent hears when this transaction commits."""
    version: int = await connection.fetchval(_ADVANCE)
    await notify(connection, [Notice(Signal(kind="policies"))])
    return version


async def catalogue_tag(connection: Connection) -> str:
    """Return what names the catalogue's state: a version number alone comes again after a restore."""
    version, stamp = await connection.fetchrow("SELECT version, stamp FROM policy_version") or (0, "")
    return f"{version}-{stamp}"


_ADVANCE = "UPDATE policy_version SET version = version + 1, stamp = gen_random_uuid() RETURNING version"
