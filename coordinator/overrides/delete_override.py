"""End an override before its time, or take back one that was announced. The audit keeps what it was."""

from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.limits.version import advance_catalogue, lock_catalogue
from coordinator.overrides.read_overrides import read_override
from protocol.identifiers import subject_key


async def delete_override(connection: Connection, id_: UUID, by: Actor | None, now: datetime) -> bool:
    """False if there is none: nothing changes, and no agent is told."""
    await lock_catalogue(connection)
    found = await read_override(connection, id_)
    if found is None:
        return False
    await connection.execute("DELETE FROM limit_override WHERE id = $1", id_)
    await advance_catalogue(connection)
    about = subject_key(found.quota, found.subject)
    await record(connection, by, Action.OVERRIDE_DELETED, about, {"was": msgspec.to_builtins(found)}, now)
    return True
