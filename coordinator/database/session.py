"""Refuse a pooler that gives the statements of one connection to several servers, as PgBouncer may.

A coordinator needs a session: it sets time-outs for it, prepares statements in it, and listens in it. A pooler that
shares servers between connections loses each of these without an error, and mostly only under load. A direct connection
has the process id that its server states; behind anything else, a second connection finds out whether it can get the
server of the first.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import asyncpg

if TYPE_CHECKING:
    Session: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Session: TypeAlias = asyncpg.Connection

PROBES = 3  # others may have taken the server that the first connection has just released
# A server that another connection has prepared statements in, or that lacks those of this one.
FOREIGN_STATEMENTS = (asyncpg.DuplicatePreparedStatementError, asyncpg.InvalidSQLStatementNameError)
WAY_OUT = "connect to PostgreSQL directly: a coordinator has pools of its own"


class SessionNotKept(OSError):
    """A pooler between here and PostgreSQL does not keep sessions. The message says how that shows."""


async def require_session(
    connection: Session, settings: Mapping[str, str], connect_another: Callable[[], Awaitable[Session]]
) -> None:
    """Raise SessionNotKept, and end the connection, unless it has a session with these settings for itself."""
    try:
        found = await _fault(connection, settings, connect_another)
    except FOREIGN_STATEMENTS:
        found = "connections share the servers of a pooler"
    except BaseException:
        connection.terminate()
        raise
    if found:
        connection.terminate()
        raise SessionNotKept(f"{found}, as with PgBouncer in transaction mode; {WAY_OUT}")


def refuse_startup(error: asyncpg.ProtocolViolationError) -> SessionNotKept:
    """Return the refusal in place of that of a pooler which does not pass a session's settings on."""
    return SessionNotKept(f"a pooler refuses the settings of a session ({error}), as PgBouncer does; {WAY_OUT}")


async def _fault(
    connection: Session, settings: Mapping[str, str], connect_another: Callable[[], Awaitable[Session]]
) -> str | None:
    names = list(settings)
    row = await connection.fetchrow(_LOOK, names)
    assert row is not None
    if row["pid"] == connection.get_server_pid():
        return None
    for name, value in zip(names, row["settings"] or (), strict=True):
        if value != settings[name]:
            return f"a pooler does not pass the setting {name} on"
    other = await connect_another()
    try:
        for _ in range(PROBES):
            if await _are_shared(connection, other):
                return "connections share the servers of a pooler"
    finally:
        other.terminate()
    return None


async def _are_shared(connection: Session, other: Session) -> bool:
    """Return whether a connection gets another server while a second one uses its own, or the second gets its own."""
    before = await connection.fetchval(_PID)
    async with other.transaction():
        taken, after = await other.fetchval(_PID), await connection.fetchval(_PID)
    return bool(before == taken or after != before)


_PID = "SELECT pg_backend_pid()"
_LOOK = """
SELECT pg_backend_pid() AS pid, (SELECT array_agg(current_setting(name) ORDER BY place)
    FROM unnest($1::text[]) WITH ORDINALITY AS asked (name, place)) AS settings
"""
