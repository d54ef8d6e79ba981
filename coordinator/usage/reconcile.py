"""Read the balances of one period at one moment, for the rules to reconcile. Needs a snapshot.

What is below a seal never changes. It may be read before, without holding any lock; then only the little that came
since, with the pools and leases, is read while the period is held (periods/close.py).
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import asyncpg
from msgspec import structs
from sqlalchemy import CTE, ColumnElement, Numeric, Select, Table, Text, any_, cast, func, null, select, true, union_all
from sqlalchemy.dialects.postgresql import ARRAY

from coordinator.archives.statements import read_archive
from coordinator.database.compiled import CompiledStatement, compiled, constant, json_text, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import labelled_usage, pool, quarantine, region_epoch, transfer, usage_day, usage_hour
from coordinator.periods.read_periods import read_period
from coordinator.suspense.read_suspense import IS_OPEN
from coordinator.usage.rules.anomalies import QUARANTINED_AS, Quarantinings, find_anomalies
from coordinator.usage.rules.reconciliation import (
    CORRECTION,
    LEASE,
    POOL,
    Adjusted,
    AdjustmentRow,
    Anomaly,
    Books,
    CorrectionRow,
    LaneSummary,
    LeaseRow,
    Misrolled,
    Moved,
    Overage,
    PoolRow,
    Reconciliation,
    reconcile,
)
from coordinator.usage.rules.trial_balance import TrialBalance, trial_balance
from protocol.lease import LeaseState
from protocol.limits.usage_labels import LABELS

PATIENCE_S = 600.0  # ten million lines take minutes on a busy server


class Settled(NamedTuple):
    """The sums that were read before, over everything below a seal."""

    sealed: int  # the last transfer that is covered
    transfers: int  # number of the period's transfers among them
    moved: Sequence[Moved] = ()
    lanes: Sequence[LaneSummary] = ()
    misrolled: Sequence[Misrolled] = ()


async def reconcile_period(connection: Connection, period: str, now: datetime) -> Reconciliation | None:
    """Return the reconciliation of a period, or None if it is unknown."""
    found = await read_period(connection, period)
    if found is None:
        return None
    books = await read_books(connection, period)
    return structs.replace(
        reconcile(period, books, now),
        state=found.state,
        closed_at=found.closed_at,
        closed_by=found.closed_by,
        closed_by_name=found.closed_by_name,
        anomalies=await _anomalies(connection, period, books),
    )


async def _misrolled(connection: Connection, period: str) -> list[Misrolled]:
    """Compare hours and days with the transfers. Those of an archived period are compared by a hash instead."""
    if await read_archive(connection, period):
        return []
    rows = await connection.fetch(*_rollup_differences().with_values(period=period), timeout=PATIENCE_S)
    return [Misrolled(*row.values()) for row in rows]


async def _anomalies(connection: Connection, period: str, books: Books) -> list[Anomaly]:
    known_quotas: list[str] = await connection.fetchval(_KNOWN_QUOTAS)
    rows = await connection.fetch(*_quarantined().with_values(period=period, reasons=list(QUARANTINED_AS)))
    return find_anomalies(books, frozenset(known_quotas), [Quarantinings(*row.values()) for row in rows])


async def balance_period(connection: Connection, period: str, now: datetime) -> TrialBalance | None:
    """Return the trial balance of a period, or None if it is unknown."""
    if await read_period(connection, period) is None:
        return None
    return trial_balance(period, await read_books(connection, period), now)


async def read_settled(connection: Connection, period: str) -> Settled:
    """Read the sums over all sealed lines of a period, the expensive part. Errors in it cannot go away later."""
    await connection.execute("SET LOCAL statement_timeout = 0")
    sealed: int = await connection.fetchval(_SEALED)
    moved = await connection.fetch(_MOVED, period, 0, sealed, timeout=PATIENCE_S)
    return Settled(
        sealed,
        sum(row["transfers"] for row in moved),
        _moved(moved),
        await _lanes(connection, await connection.fetchval(_EPOCHS, period)),
        await _misrolled(connection, period),
    )


async def read_books(connection: Connection, period: str, settled: Settled | None = None) -> Books:
    settled = settled or await read_settled(connection, period)
    leases = [_lease(row) for row in await connection.fetch(_LEASES, period)]
    corrections = [_correction(row) for row in await connection.fetch(_CORRECTIONS, period)]
    epochs = {lease.epoch for lease in leases} | {each.epoch for each in corrections}
    new = epochs - {lane.epoch for lane in settled.lanes}
    return Books(
        pools=[_pool(row) for row in await connection.fetch(_POOLS, period)],
        leases=leases,
        moved=[*settled.moved, *_moved(await connection.fetch(_MOVED, period, settled.sealed, _NEWEST))],
        lanes=[*settled.lanes, *(await _lanes(connection, sorted(new)) if new else ())],
        misrolled=settled.misrolled,
        corrections=corrections,
        adjustments=[_adjusted(row) for row in await connection.fetch(_ADJUSTMENTS, period)],
        overages=[Overage(*row.values()) for row in await connection.fetch(_OVERAGES, period)],
    )


def _moved(rows: Sequence[asyncpg.Record]) -> list[Moved]:
    return [Moved(*list(row.values())[:-1]) for row in rows]


async def _lanes(connection: Connection, epochs: Collection[int]) -> list[LaneSummary]:
    return [LaneSummary(*row.values()) for row in await connection.fetch(_LANES, epochs)]


def _pool(row: asyncpg.Record) -> PoolRow:
    accounts = {account: row[account] for account in POOL}
    return PoolRow(row["quota"], row["name"], row["tenant"], accounts, row["credited"], row["overage_used"])


def _lease(row: asyncpg.Record) -> LeaseRow:
    return LeaseRow(
        quota=row["quota"],
        epoch=row["epoch"],
        region=row["region"],
        state=LeaseState(row["state"]),
        lanes=row["lanes"],
        accounts={account: row[account] for account in LEASE},
        region_consumed=row["region_consumed"],
        region_returned=row["region_returned"],
        reported_at=row["reported_at"],
        overdrawn=row["overdrawn"],
    )


def _adjusted(row: asyncpg.Record) -> AdjustmentRow:
    return AdjustmentRow(row["quota"], Adjusted(row["adjustment"], row["credited"], row["written_off"]))


def _correction(row: asyncpg.Record) -> CorrectionRow:
    accounts = {account: row[account] for account in CORRECTION}
    return CorrectionRow(
        row["quota"],
        row["epoch"],
        row["charge_period"],
        row["region"],
        accounts,
        row["said"] - row["booked"],
        row["overage_used"],
        row["replaced"],
        row["recovered"],
    )


_KNOWN_QUOTAS = """
SELECT ARRAY(SELECT quota ->> 'name' FROM jsonb_array_elements((
    SELECT document -> 'quotas' FROM limits_version ORDER BY version DESC LIMIT 1)) AS quota)
"""
_POOLS = "SELECT * FROM pool WHERE period = $1 ORDER BY name, tenant, quota"
_LEASES = """
SELECT lease.*, region_epoch.lanes FROM lease JOIN region_epoch USING (epoch)
WHERE lease.period = $1 ORDER BY lease.quota, lease.region, lease.epoch
"""
# In terms of a pool's accounts, as adjustments/rules.py moves them.
_ADJUSTMENTS = """
SELECT quota, sum(CASE kind WHEN 'debit' THEN -units ELSE units END) AS adjustment,
    sum(CASE kind WHEN 'debit' THEN -units WHEN 'credit' THEN units ELSE 0 END) AS credited,
    sum(CASE kind WHEN 'write_off' THEN units ELSE 0 END) AS written_off
FROM adjustment WHERE booked_in = $1 GROUP BY quota
"""
# From the rollup, which is compared with the transfers separately.
_OVERAGES = """
SELECT quota, charge_period, sum(units) FROM usage_day WHERE period = $1 AND counted_as IS NOT NULL
GROUP BY quota, charge_period
"""
_NEWEST = 2**63 - 1
_SEALED = "SELECT coalesce(max(transfer), 0) FROM seal"
_MOVED = """
SELECT quota, epoch, charge_period, src, dst, cause, sum(units), count(*) AS transfers FROM transfer
WHERE period = $1 AND id > $2 AND id <= $3 GROUP BY quota, epoch, charge_period, src, dst, cause
UNION ALL
SELECT quota, epoch, charge_period, src, dst, cause, units, transfers FROM archived_sum WHERE period = $1 AND $2 = 0
"""
_EPOCHS = """
SELECT ARRAY(SELECT epoch FROM lease WHERE period = $1 UNION SELECT epoch FROM correction WHERE period = $1)
"""
# A region has one total for all periods in which its lease is booked; the newest has it.
_CORRECTIONS = """
SELECT correction.*,
    CASE WHEN is_newest THEN correction.region_consumed ELSE 0 END AS said,
    CASE WHEN is_newest THEN coalesce(lease.consumed, 0) + every.consumed ELSE 0 END AS booked
FROM correction LEFT JOIN lease
    ON (lease.epoch, lease.quota, lease.period) = (correction.epoch, correction.quota, correction.charge_period),
LATERAL (SELECT sum(each.consumed) AS consumed, max(each.period) = correction.period AS is_newest
    FROM correction AS each WHERE (each.epoch, each.quota, each.charge_period)
        = (correction.epoch, correction.quota, correction.charge_period)) AS every
WHERE correction.period = $1 ORDER BY correction.quota, correction.region, correction.epoch, correction.charge_period
"""
_LANES = """
SELECT epoch, lane, last_seq, head,
    (SELECT count(*) FROM report WHERE (report.epoch, report.lane) = (lane.epoch, lane.lane)),
    (SELECT head FROM report WHERE (report.epoch, report.lane) = (lane.epoch, lane.lane) ORDER BY seq DESC LIMIT 1)
FROM lane WHERE epoch = ANY ($1::bigint[])
"""
_DIMENSIONS = ("policy", "route_class", "api_key", "degraded", "counted_as")
_BY = ("quota", "name", "charge_period", "tenant", "region", *_DIMENSIONS)


@cache
def _rollup_differences() -> CompiledStatement:
    """Select rollups that differ from the transfers: each counts against its hour, its day, and its labels."""
    its_pool = (pool.c.quota == transfer.c.quota) & (pool.c.period == transfer.c.period)
    said = {name: json_text(transfer.c.dimensions, name) for name in ("tenant", *_DIMENSIONS)}
    booked = (
        select(
            *(transfer.c.window_at, transfer.c.quota, pool.c.name, transfer.c.charge_period),
            *(func.coalesce(pool.c.tenant, said["tenant"]).label("tenant"), transfer.c.region),
            *(said[name].label(name) for name in _DIMENSIONS),
            json_text(transfer.c.dimensions, LABELS).label(LABELS),
            transfer.c.units,
        )
        .join_from(transfer, pool, its_pool)
        .where(transfer.c.period == _PERIOD, transfer.c.dst == constant("consumed"))
        .cte("booked")
    )
    rollups = ((usage_hour, "hour"), (usage_day, "day"), (labelled_usage, "hour"))
    both_sides = union_all(*(side for each in rollups for side in _two_sides(*each, booked))).cte("both_sides")
    sides = both_sides.c
    differences = (
        select(sides.rollup, sides.quota, sides.region, sides.begins_at, func.sum(sides.units).label("units"))
        .group_by(sides.rollup, sides.begins_at, sides.labels, *(sides[name] for name in _BY))
        .having(func.sum(sides.units) != constant(0))
        .cte("differences")
    )
    found = differences.c
    where = (found.quota, found.region, found.rollup)
    return compiled(
        select(*where, func.count(), func.sum(func.abs(found.units)), func.min(found.begins_at))
        .group_by(*where)
        .order_by(*where)
    )


def _two_sides(rollup: Table, unit: str, booked: CTE) -> tuple[Select[Any], Select[Any]]:
    """Select a rollup's rows, and with the sign changed what the transfers make of them."""
    kept_labels: ColumnElement[Any] = cast(null(), Text)
    booked_labels = kept_labels
    is_rolled_up: ColumnElement[bool] = true()
    if LABELS in rollup.c:
        kept_labels, booked_labels = rollup.c.labels, booked.c.labels
        is_rolled_up = booked.c.labels.is_not(None)
    begins_at = func.date_trunc(constant(unit), booked.c.window_at, constant("UTC"))
    kept_by, booked_by = ([table.c[name] for name in _BY] for table in (rollup, booked))
    name = constant(str(rollup.name))
    return (
        select(*(name.label("rollup"), rollup.c.begins_at, *kept_by, kept_labels.label(LABELS), rollup.c.units)).where(
            rollup.c.period == _PERIOD
        ),
        select(name, begins_at, *booked_by, booked_labels, -booked.c.units).where(is_rolled_up),
    )


@cache
def _quarantined() -> CompiledStatement:
    kept = quarantine.c
    return compiled(
        select(
            *(kept.quota, region_epoch.c.region, kept.reason, func.count()),
            func.max(cast(json_text(kept.evidence, "consumed"), Numeric)),
        )
        .join_from(quarantine, region_epoch, region_epoch.c.epoch == kept.epoch)
        .where(kept.period == _PERIOD, kept.reason == any_(parameter("reasons", ARRAY(Text))), IS_OPEN)
        .group_by(kept.quota, region_epoch.c.region, kept.reason)
    )


_PERIOD = parameter("period", Text)
