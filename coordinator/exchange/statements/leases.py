"""Leases, and what became of them after their period was closed."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from operator import itemgetter
from typing import NamedTuple

import asyncpg

from coordinator.database.connection import Connection
from coordinator.exchange.rules.balances import CORRECTION_COLUMNS, LEASE_COLUMNS, Correction, Key, Lease
from coordinator.exchange.rules.locked import LockedPool
from coordinator.exchange.statements.lanes import SHARE_EPOCHS
from coordinator.exchange.statements.pools import lock_free_pools
from protocol.lease import LeaseState
from protocol.messages import FrozenBatch

_totals_of_lease, _totals_of_correction = itemgetter(*LEASE_COLUMNS), itemgetter(*CORRECTION_COLUMNS)


class LeasesBehindLocks(NamedTuple):
    """Leases of locked pools, and the catalogue's version at the moment at which they were read."""

    leases: Sequence[Lease]
    catalogue_version: int | None  # None if there was nothing to read


async def read_leases(
    connection: Connection, keys: Collection[Key], epochs: Collection[int], divided: Collection[Key] = ()
) -> list[Lease]:
    """Return leases of locked pools: those of these epochs, and those of others that may still be granted to.

    Of `divided` pools, which people divided or regions may overdraw, all leases are returned.
    """
    if not keys:
        return []
    rows = await connection.fetch(_LEASES, *_arguments_of_leases(keys, epochs, divided))
    return [lease_of_row(row) for row in rows]


async def read_leases_and_version(
    connection: Connection, keys: Collection[Key], epochs: Collection[int], divided: Collection[Key] = ()
) -> LeasesBehindLocks:
    """Read the leases as `read_leases` does, and the catalogue's version, for `confirm_catalogue`, along with them."""
    if not keys:
        return LeasesBehindLocks([], None)
    rows = await connection.fetch(_LEASES_AND_VERSION, *_arguments_of_leases(keys, epochs, divided))
    leases = [lease_of_row(row) for row in rows if row["epoch"] is not None]
    return LeasesBehindLocks(leases, rows[0]["catalogue_version"])


async def read_granted_keys(
    connection: Connection, batches: Collection[FrozenBatch]
) -> dict[tuple[int, int], list[Key]]:
    """Return, by epoch and lane of a booked batch, the keys of leases that hold units and were last reported with it.

    `reported_at` of a lease is the time of that transaction, which may have booked other lanes of the epoch as well.
    """
    if not batches:
        return {}
    names = [each.epoch for each in batches], [each.lane for each in batches], [each.seq for each in batches]
    granted: dict[tuple[int, int], list[Key]] = defaultdict(list)
    for row in await connection.fetch(_GRANTED_KEYS, *names):
        granted[row["epoch"], row["lane"]].append(Key(row["quota"], row["period"]))
    return granted


def _arguments_of_leases(
    keys: Collection[Key], epochs: Collection[int], divided: Collection[Key]
) -> tuple[list[str], list[str], list[int], list[str]]:
    quotas = sorted({key.quota for key in divided})
    return [key.quota for key in keys], [key.period for key in keys], sorted(set(epochs)), quotas


def lease_of_row(row: asyncpg.Record) -> Lease:
    return Lease(
        Key(row["quota"], row["period"]),
        row["epoch"],
        row["region"],
        row["reported_at"],
        row["expires_at"],
        LeaseState(row["state"]),
        *_totals_of_lease(row),
    )


async def find_expired_leases(connection: Connection, now: datetime, at_most: int) -> list[tuple[int, Key]]:
    """Return some of the leases whose time and margin are over with units outstanding. Nothing is locked."""
    rows = await connection.fetch(_EXPIRED_LEASES, now, at_most)
    return [(row["epoch"], Key(row["quota"], row["period"])) for row in rows]


async def lock_free_leases(
    connection: Connection, names: Collection[tuple[int, Key]]
) -> list[tuple[LockedPool, Lease]]:
    """Return those of the leases whose epoch and pool no other transaction holds, with their pools locked."""
    epochs, keys = [epoch for epoch, _ in names], [key for _, key in names]
    held = {row["epoch"] for row in await connection.fetch(SHARE_EPOCHS, epochs)}
    pools = await lock_free_pools(connection, keys)
    quotas, periods = [key.quota for key in keys], [key.period for key in keys]
    leases = [lease_of_row(row) for row in await connection.fetch(_NAMED_LEASES, epochs, quotas, periods)]
    return [(pools[lease.key], lease) for lease in leases if lease.epoch in held and lease.key in pools]


async def read_corrections(
    connection: Connection, closed: Collection[Key], epochs: Collection[int]
) -> list[Correction]:
    """Return what became of these epochs' leases in closed pools."""
    if not closed:
        return []
    keys = [key.quota for key in closed], [key.period for key in closed]
    rows = await connection.fetch(_CORRECTIONS, *keys, sorted(set(epochs)))
    return [correction_of_row(row) for row in rows]


def correction_of_row(row: asyncpg.Record) -> Correction:
    key = Key(row["quota"], row["period"])
    return Correction(key, row["epoch"], row["charge_period"], row["region"], *_totals_of_correction(row))


# --- the statements ---------------------------------------------------------------------------------------------------

_LEASES = """
SELECT lease.*
FROM unnest($1::text[], $2::text[]) AS asked (quota, period)
JOIN lease ON lease.quota = asked.quota AND lease.period = asked.period
WHERE lease.state = 'active' OR lease.epoch = ANY ($3::bigint[]) OR lease.quota = ANY ($4::text[])
"""
# A row without a lease where there is none: the version is needed all the same.
_VERSION_WITH_LEASES = """
SELECT found.*, policy_version.version AS catalogue_version FROM policy_version LEFT JOIN ("""
_LEASES_AND_VERSION = _VERSION_WITH_LEASES + _LEASES + ") AS found ON true"
_GRANTED_KEYS = """
SELECT report.epoch, report.lane, lease.quota, lease.period
FROM unnest($1::bigint[], $2::int[], $3::bigint[]) AS replayed (epoch, lane, seq)
JOIN report USING (epoch, lane, seq)
JOIN lease ON lease.epoch = report.epoch AND lease.reported_at = report.recorded_at
WHERE lease.outstanding > 0 OR lease.suspense > 0
"""
_EXPIRED_LEASES = """
SELECT epoch, quota, period FROM lease
WHERE outstanding > 0 AND expires_at <= $1 ORDER BY expires_at LIMIT $2
"""
_NAMED_LEASES = """
SELECT lease.* FROM unnest($1::bigint[], $2::text[], $3::text[]) AS asked (epoch, quota, period)
JOIN lease USING (epoch, quota, period)
"""
_CORRECTIONS = """
SELECT correction.* FROM unnest($1::text[], $2::text[]) AS asked (quota, charge_period)
JOIN correction USING (quota, charge_period) WHERE correction.epoch = ANY ($3::bigint[])
"""
