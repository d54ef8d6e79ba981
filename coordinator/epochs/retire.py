"""Retire an epoch: people decide that no more evidence of it counts.

What it left unaccounted goes to suspense with the next tick and is resolved there. Reports that still come in its name
are acknowledged and kept for people to judge; nothing of them is booked, and nothing is dropped. A quarantine does not
end by it: the resolution that it waits for books what the region had reported by then.
"""

from datetime import datetime

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection


class RetiredEpoch(msgspec.Struct, frozen=True):
    epoch: int
    region: str
    retired_at: datetime
    reason: str


async def retire_epoch(
    connection: Connection, epoch: int, reason: str, by: Actor, now: datetime
) -> RetiredEpoch | None:
    """Return None if it was never issued. Retiring it again changes nothing and returns how it was retired."""
    region = await connection.fetchval("SELECT region FROM region_epoch WHERE epoch = $1", epoch)
    if region is None:
        return None
    await connection.execute("SELECT FROM region WHERE name = $1 FOR NO KEY UPDATE", region)
    if await connection.fetchval(_RETIRE_EPOCH, epoch, now, by.name, reason) is not None:
        await connection.execute(RETIRE_LEASES, epoch, now)
        await record(connection, by, Action.EPOCH_RETIRED, str(epoch), {"region": region, "reason": reason}, now)
    row = await connection.fetchrow(_RETIRED, epoch)
    assert row is not None
    return RetiredEpoch(*row.values())


_RETIRE_EPOCH = """
UPDATE region_epoch SET state = 'retired', fenced_at = coalesce(fenced_at, $2), retired_at = $2, retired_by = $3,
    retired_because = $4
WHERE epoch = $1 AND state <> 'retired' RETURNING epoch
"""
RETIRE_LEASES = """
UPDATE lease SET state = 'retired', expires_at = least(expires_at, $2)
WHERE epoch = $1 AND state NOT IN ('quarantined', 'closed')
"""
_RETIRED = "SELECT epoch, region, retired_at, retired_because FROM region_epoch WHERE epoch = $1"
