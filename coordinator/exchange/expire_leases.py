"""Expire leases: set aside what regions did not account for in time.

A disconnected region may have spent all that it was leased, or none of it. So expiry frees nothing: what is outstanding
goes to suspense, and waits there for evidence or for people. Leases that another transaction holds are left for the
next run. What was true when leases were found is checked again under the locks.
"""

from datetime import datetime
from typing import NamedTuple

from coordinator.database.connection import Connection
from coordinator.exchange.book_entries import book_entries
from coordinator.exchange.rules.settlement import expire
from coordinator.exchange.statements.balances import write_balances
from coordinator.exchange.statements.leases import find_expired_leases, lock_free_leases

BATCH = 500  # leases a run
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
