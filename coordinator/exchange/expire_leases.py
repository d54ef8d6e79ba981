"""Set aside what regions did not account for in time. Any coordinator does this, in batches, and each lease once.

A region that is cut off may have spent all that it was leased, or none. So expiry frees nothing: what is outstanding
goes to suspense, and waits there for evidence or for people. Leases whose books somebody else is at are left for the
next turn; what was true when they were looked for is looked at again under the locks.
"""

from datetime import datetime
from typing import NamedTuple

from coordinator.database.connection import Connection
from coordinator.exchange.book_entries import book_entries
from coordinator.exchange.rules.settlement import expire
from coordinator.exchange.statements.balances import write_balances
from coordinator.exchange.statements.leases import find_expired_leases, lock_free_leases

BATCH = 500  # leases a turn
LEASES_EXPIRED = "EXISTS (SELECT FROM lease WHERE outstanding > 0 AND expires_at <= $2)"  # the job has work


class Expired(NamedTuple):
    leases: int
    units: int
    is_all: bool  # False if there may be more


async def expire_leases(connection: Connection, now: datetime, at_most: int = BATCH) -> Expired:
    names = await find_expired_leases(connection, now, at_most)
    if not names:
        return Expired(0, 0, is_all=True)
    books = await lock_free_leases(connection, names)
    states = {(lease.epoch, lease.key): lease.state for _, lease in books}
    set_aside = [(locked.pool, lease, expire(locked.pool, lease, now)) for locked, lease in books]
    moved = [(pool, lease, entry) for pool, lease, entry in set_aside if entry]
    pools = {pool.key: pool for pool, _, _ in moved}
    await write_balances(connection, list(pools.values()), [lease for _, lease, _ in moved], states)
    await book_entries(connection, [entry for _, _, entry in moved], now)
    units = sum(transfer.units for _, _, entry in moved for transfer in entry.transfers)
    return Expired(len(moved), units, is_all=len(names) < at_most)
