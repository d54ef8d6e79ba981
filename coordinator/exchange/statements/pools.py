"""Pools and their periods."""

from collections.abc import Collection, Mapping
from operator import itemgetter

import asyncpg

from coordinator.database.connection import Connection
from coordinator.exchange.rules.balances import POOL_COLUMNS, Key, Pool
from coordinator.exchange.rules.locked import LockedPool, RegionalOverage
from coordinator.limits.rules.entitlement import tenant_of
from protocol.identifiers import parse_quota_key
from protocol.periods import period_of

_totals_of_row = itemgetter(*POOL_COLUMNS)


async def lock_pools(
    connection: Connection, keys: Collection[Key], must_exist: Collection[Key]
) -> dict[Key, LockedPool]:
    """Lock pools, and make those that must exist where they are missing.

    Also return what is known of keys without a pool whose period is closed: it takes none any more.
    """
    found = await _fetch_pools(connection, _LOCK_POOLS, keys)
    missing = set(must_exist) - found.keys()
    if missing:
        await _insert_pools(connection, missing)
        found |= await _fetch_pools(connection, _LOCK_POOLS, missing)
    await _add_late_usage(connection, found)
    return found | await _read_closed_periods(connection, {*keys, *must_exist} - found.keys())


async def read_pools(connection: Connection, keys: Collection[Key]) -> dict[Key, LockedPool]:
    """Return pools as they are at this moment, without a lock: for transactions that do not change them."""
    found = await _fetch_pools(connection, _POOLS, keys)
    await _add_late_usage(connection, found)
    return found


async def lock_free_pools(connection: Connection, keys: Collection[Key]) -> dict[Key, LockedPool]:
    """Lock those of the pools that no other transaction holds. What came late for them is not added up."""
    return await _fetch_pools(connection, _LOCK_FREE_POOLS, keys)


async def _fetch_pools(connection: Connection, statement: str, keys: Collection[Key]) -> dict[Key, LockedPool]:
    if not keys:
        return {}
    rows = await connection.fetch(statement, [key.quota for key in keys], [key.period for key in keys])
    return {Key(row["quota"], row["period"]): _pool_of_row(row) for row in rows}


def _pool_of_row(row: asyncpg.Record) -> LockedPool:
    pool = Pool(Key(row["quota"], row["period"]), *_totals_of_row(row))
    return LockedPool(pool, row["state"] == "open", row["closed_at"], row["open_moves"])


async def _add_late_usage(connection: Connection, found: Mapping[Key, LockedPool]) -> None:
    """Add up late usage for the few pools that have to do with closed periods.

    A transaction that books late usage holds both pools, so the sums do not change meanwhile.
    """
    about = [
        key
        for key, (pool, _, closed_at, *_) in found.items()
        if closed_at or pool.suspense_carried_in or pool.correction
    ]
    if about:
        rows = await connection.fetch(_LATE_USAGE, [key.quota for key in about], [key.period for key in about])
        for key, row in zip(about, rows, strict=True):
            found[key].pool.late, found[key].pool.late_included = row["late"], row["late_included"]


async def _read_closed_periods(connection: Connection, keys: Collection[Key]) -> dict[Key, LockedPool]:
    """Return empty pools for those of the keys whose period is closed: nothing is booked in them."""
    if not keys:
        return {}
    rows = await connection.fetch(_CLOSED_PERIODS, [key.period for key in keys])
    closed = {row["id"]: row["closed_at"] for row in rows}
    return {
        key: LockedPool(Pool(key), period_is_open=False, closed_at=closed[key.period], exists=False)
        for key in keys
        if key.period in closed
    }


async def _insert_pools(connection: Connection, missing: Collection[Key]) -> None:
    keys = sorted(missing)
    periods = [period_of(period_id) for period_id in sorted({key.period for key in keys})]
    await connection.execute(
        _INSERT_PERIODS,
        [period.id for period in periods],
        [period.calendar.kind.value for period in periods],
        [period.starts_at for period in periods],
        [period.ends_at for period in periods],
        [str(period.calendar) for period in periods],
    )
    await connection.execute(
        _INSERT_POOLS,
        [key.quota for key in keys],
        [key.period for key in keys],
        [parse_quota_key(key.quota)[0] for key in keys],
        [tenant_of(key.quota) for key in keys],
    )


async def read_known_periods(connection: Connection, periods: Collection[str]) -> set[str]:
    """Return those of the periods that are in the ledger, closed ones too."""
    return {row["id"] for row in await connection.fetch(_KNOWN_PERIODS, list(periods))}


async def read_unseen_quotas(connection: Connection, quotas: Collection[str]) -> set[str]:
    """Return those of the quota keys that have no pool in any period."""
    return {row["quota"] for row in await connection.fetch(_UNSEEN_QUOTAS, list(quotas))}


async def read_overages(connection: Connection, names: Collection[RegionalOverage]) -> dict[RegionalOverage, int]:
    """Return what regions have used beyond their grants of locked pools: in the period, and late for it."""
    if not names:
        return {}
    ordered = sorted(names)
    columns = [[each.region for each in ordered], [each.key.quota for each in ordered]]
    rows = await connection.fetch(_OVERAGES, *columns, [each.key.period for each in ordered])
    return dict(zip(ordered, (row["overage"] for row in rows), strict=True))


# --- the statements ---------------------------------------------------------------------------------------------------

_POOLS = """
SELECT pool.*, period.state, period.closed_at
FROM unnest($1::text[], $2::text[]) AS asked (quota, period)
JOIN period ON period.id = asked.period
JOIN pool ON pool.quota = asked.quota AND pool.period = asked.period
ORDER BY pool.period, pool.quota
"""
_LOCK_POOLS = _POOLS + "FOR SHARE OF period FOR UPDATE OF pool"
_LOCK_FREE_POOLS = _POOLS + "FOR SHARE OF period SKIP LOCKED FOR UPDATE OF pool SKIP LOCKED"
_LATE_USAGE = """
SELECT (SELECT coalesce(sum(consumed), 0) FROM correction
        WHERE (correction.quota, correction.period) = (asked.quota, asked.period)) AS late,
    (SELECT coalesce(sum(consumed - overage_used), 0) FROM correction
        WHERE (correction.quota, correction.charge_period) = (asked.quota, asked.period)) AS late_included
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked (quota, period, place) ORDER BY place
"""
_UNSEEN_QUOTAS = """
SELECT quota FROM unnest($1::text[]) AS asked (quota)
WHERE NOT EXISTS (SELECT FROM pool WHERE pool.quota = asked.quota)
"""
_KNOWN_PERIODS = "SELECT id FROM period WHERE id = ANY ($1::text[])"
_OVERAGES = """
SELECT coalesce((SELECT sum(lease.overage) FROM lease
        WHERE (lease.quota, lease.period, lease.region) = (asked.quota, asked.period, asked.region)), 0)
    + coalesce((SELECT sum(late.correction) FROM correction AS late
        WHERE (late.quota, late.charge_period, late.region) = (asked.quota, asked.period, asked.region)), 0) AS overage
FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS asked (region, quota, period, place) ORDER BY place
"""
_INSERT_PERIODS = """
INSERT INTO period (id, kind, starts_at, ends_at, calendar)
SELECT * FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::text[]) ON CONFLICT DO NOTHING
"""
_INSERT_POOLS = """
INSERT INTO pool (quota, period, name, tenant)
SELECT new.* FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS new (quota, period, name, tenant)
JOIN period ON period.id = new.period WHERE period.state <> 'closed' FOR SHARE OF period
ON CONFLICT DO NOTHING
"""
_CLOSED_PERIODS = "SELECT id, closed_at FROM period WHERE id = ANY ($1::text[]) AND state = 'closed'"
