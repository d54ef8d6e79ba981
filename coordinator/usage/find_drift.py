"""Look whether a region's own total is another than what is booked of it, and tell of it, once for each total."""

from datetime import datetime

from coordinator.database.connection import Connection
from coordinator.webhooks.outbox import tell
from coordinator.webhooks.rules import EventKind, event

AT_MOST = 100  # at a time: where there are more, one is enough to look


async def find_drift(connection: Connection, now: datetime) -> None:
    rows = await connection.fetch(DRIFTING, AT_MOST)
    told = [event(EventKind.DRIFT_FOUND, dict(row), *row.values()) for row in rows]
    await tell(connection, told, now)


# What is in quarantine is known to differ: people look at it already. An index has just what is looked for.
DRIFTING = """
SELECT quota, period, region, epoch, consumed, region_consumed FROM lease
WHERE region_consumed <> consumed AND state NOT IN ('quarantined', 'closed') ORDER BY epoch, quota, period LIMIT $1
"""
