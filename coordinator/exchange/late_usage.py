"""Lock what late usage of closed periods is booked in."""

from collections.abc import Collection, Mapping
from datetime import datetime

from coordinator.database.connection import Connection
from coordinator.exchange.rules.balances import Correction, Key
from coordinator.exchange.rules.locked import LockedPool, closed_keys, late_pools
from coordinator.exchange.statements.leases import read_corrections
from coordinator.exchange.statements.pools import lock_pools


async def lock_late_usage(
    connection: Connection, pools: Mapping[Key, LockedPool], epochs: Collection[int], now: datetime
) -> tuple[dict[Key, LockedPool], list[Correction]]:
    """Return the pools, with those in which late usage of the closed ones is booked, and these epochs' corrections.

    Which pools these are is known only from the corrections, so corrections are read again under the pools' locks.
    """
    closed, locked = closed_keys(pools), dict(pools)
    corrections = await read_corrections(connection, closed, epochs)
    if missing := late_pools(closed, corrections, now) - pools.keys():
        locked |= await lock_pools(connection, missing, missing)
        corrections = await read_corrections(connection, closed, epochs)
    return locked, corrections
