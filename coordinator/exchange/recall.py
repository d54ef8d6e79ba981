"""Recall units that regions hold and will not need, by signals that each run repeats.

A store that gets no requests does not notice that a period is over, nor that its agent died before it returned what was
left. Units that are recalled are returned, and then it is known what was spent. A region keeps what it holds in the
current period.
"""

from datetime import datetime

from coordinator.database.connection import Connection
from coordinator.database.notify import notify
from coordinator.notice import Notice
from protocol.messages import Signal

MOST = 1000  # signals a run; the others follow with the next run


async def recall_outstanding(connection: Connection, period: str, now: datetime) -> int:
    """Recall units of a period that is being closed, before they expire. Return the number of leases."""
    return await _recall(connection, now, _OUTSTANDING, period)


async def recall_suspense(connection: Connection, now: datetime) -> int:
    """Recall what expired or was carried out of a closed period: its store may be back, and can report it.

    Some stores will not answer this time either, and one run may not reach all: so it takes any of them at random.
    """
    return await _recall(connection, now, _SUSPENSE)


async def recall_region(connection: Connection, region: str) -> int:
    """Recall everything that a drained region holds, in current periods as well."""
    rows = await connection.fetch(_HELD, region, MOST)
    await notify(connection, [Notice(Signal(kind="recall", quota=row["quota"]), region) for row in rows])
    return len(rows)


async def _recall(connection: Connection, now: datetime, waiting: str, *about: str) -> int:
    rows = await connection.fetch(_RECALL.format(waiting=waiting), now, MOST, *about)
    signals = [(Signal(kind="recall", quota=row["quota"], keep=row["keep"]), row["region"]) for row in rows]
    await notify(connection, [Notice(signal, region) for signal, region in signals])
    return len(rows)


# --- the statements ---------------------------------------------------------------------------------------------------

_OUTSTANDING = "SELECT epoch, region, quota, period FROM lease WHERE period = $3 AND outstanding > 0"
_SUSPENSE = """
SELECT epoch, lease.region, quota, period FROM lease JOIN region_epoch AS its USING (epoch)
WHERE suspense > 0 AND lease.state = 'expired' AND its.state = 'current'
UNION SELECT epoch, correction.region, quota, charge_period FROM correction JOIN region_epoch AS its USING (epoch)
WHERE suspense_carried > 0 AND NOT quarantined AND its.state = 'current'
"""
SUSPENSE_WAITING = f"EXISTS ({_SUSPENSE})"
_RECALL = """
WITH waiting AS ({waiting})
SELECT waiting.region, waiting.quota, coalesce(max(running.outstanding), 0) AS keep
FROM waiting LEFT JOIN lease AS running ON (running.epoch, running.quota) = (waiting.epoch, waiting.quota)
    AND running.period <> waiting.period AND EXISTS (
        SELECT FROM period WHERE period.id = running.period AND period.starts_at <= $1 AND period.ends_at > $1)
GROUP BY waiting.region, waiting.quota ORDER BY random() LIMIT $2
"""
_HELD = """
SELECT DISTINCT quota FROM lease WHERE region = $1 AND outstanding > 0 LIMIT $2
"""
