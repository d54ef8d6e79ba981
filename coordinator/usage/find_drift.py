"""Find leases whose region reports another total than what is booked, and send an event, once for each total."""

from datetime import datetime

from coordinator.database.connection import Connection
from coordinator.webhooks.outbox import enqueue
from coordinator.webhooks.rules import EventKind, event

AT_MOST = 100  # in one run


async def find_drift(connection: Connection, now: datetime) -> None:
    rows = await connection.fetch(DRIFTING, AT_MOST)
    told = [event(EventKind.DRIFT_FOUND, dict(row), *row.values()) for row in rows]
    await enqueue(connection, told, now)


# Leases in quarantine are known to differ and left out. The index `lease_drifting` has exactly these rows.
DRIFTING = """
SELECT quota, period, region, epoch, consumed, region_consumed FROM lease
WHERE region_consumed <> consumed AND state NOT IN ('quarantined', 'closed') ORDER BY epoch, quota, period LIMIT $1
"""
