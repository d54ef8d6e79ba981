"""Figures that one coordinator measures for all of them, and that each of them shows as metrics.

A scrape of the metrics asks the database nothing: jobs measure (`measure`, `measure_deliveries`), each coordinator
reads the result in the background, and costly sums are computed once. The time of the measurement is a metric as well.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec
from msgspec import Struct

from coordinator.database.connection import Connection
from coordinator.health.seen import forget_old_agents
from coordinator.regions.read_regions import read_regions

MOST_REGIONS = 1_000


class RegionFigures(Struct, frozen=True):
    regressed_lanes: int
    split_brain: bool
    suspense_units: int = 0
    suspense_since: datetime | None = None  # the last report of the lease that has been in suspense for longest
    quarantined_leases: int = 0


class LedgerFigures(Struct, frozen=True):
    """The figures that show whether the ledger is sound and periods end in time."""

    sealed_at: datetime | None = None
    drifting_leases: int = 0
    closing_periods: int = 0
    closing_since: datetime | None = None
    verified_at: datetime | None = None
    is_intact: bool = True  # by the last verification


class DeliveryFigures(Struct, frozen=True):
    """Webhook deliveries that have not been made."""

    waiting: int = 0
    waiting_since: datetime | None = None  # the event that has waited for longest
    dead: int = 0


class Figures(Struct, frozen=True):
    """All figures. A coordinator of the release before measures fewer of them, so each later one has a default."""

    units: list[tuple[str, str, float]]  # quota, account and units of the current periods
    regions: dict[str, RegionFigures]
    growing: dict[str, int] = {}  # tenants whose usage has suddenly grown, by quota: see coordinator/usage/find_signals
    used_up: dict[str, int] = {}  # keys that have nothing left, by quota
    keys: dict[str, int] = {}  # keys with units in a current period, by quota
    ledger: LedgerFigures = LedgerFigures()
    deliveries: DeliveryFigures = DeliveryFigures()


class Measured(NamedTuple):
    """The newest figures, when they were measured, and when any coordinator last saw each region."""

    figures: Figures | None
    measured_at: datetime | None
    read_at: datetime  # by the database's clock, like the other times
    last_seen_at: Mapping[str, datetime]
    down: frozenset[str]


async def measure(connection: Connection, now: datetime) -> None:
    """Measure the units of the current periods, the regions and the ledger, for all coordinators."""
    rows = await connection.fetch(_UNITS)
    ledger = await connection.fetchrow(_LEDGER)
    assert ledger is not None
    measured = {
        "units": [(row["name"], account, float(row[account])) for row in rows for account in ACCOUNTS],
        "regions": await _measure_regions(connection, now),
        "keys": {row["name"]: row["keys"] for row in rows},
        "ledger": LedgerFigures(**dict(ledger)),
    }
    await forget_old_agents(connection)
    await connection.execute(_KEEP, msgspec.json.encode(measured).decode())


async def _measure_regions(connection: Connection, now: datetime) -> dict[str, RegionFigures]:
    waiting = {row["region"]: row for row in await connection.fetch(_SUSPENSE)}
    quarantined = {row["region"]: row["leases"] for row in await connection.fetch(_QUARANTINED)}
    return {
        region.name: RegionFigures(
            region.regressed_lanes,
            region.split_brain,
            int(waiting[region.name]["units"]) if region.name in waiting else 0,
            waiting[region.name]["since"] if region.name in waiting else None,
            quarantined.get(region.name, 0),
        )
        for region in await read_regions(connection, "", MOST_REGIONS, now)
    }


async def measure_deliveries(connection: Connection) -> None:
    """Measure the webhook deliveries that wait or were given up. It reads all deliveries, so it is done less often."""
    row = await connection.fetchrow(_DELIVERIES)
    assert row is not None
    deliveries = msgspec.json.encode({"deliveries": DeliveryFigures(**dict(row))}).decode()
    await connection.execute("UPDATE measurement SET figures = figures || $1::text::jsonb", deliveries)


async def read_measured(connection: Connection) -> Measured:
    row = await connection.fetchrow(_MEASURED)
    assert row is not None
    figures = None if row["figures"] is None else msgspec.json.decode(row["figures"], type=Figures)
    seen = await connection.fetch(_LAST_SEEN)
    return Measured(
        figures,
        row["measured_at"],
        row["read_at"],
        {each["region"]: each["last_seen_at"] for each in seen},
        frozenset(each["region"] for each in seen if each["is_down"]),
    )


ACCOUNTS = ("funded", "unallocated", "outstanding", "consumed", "suspense", "overage")
_UNITS = """
SELECT name, sum(funded) AS funded, sum(unallocated) AS unallocated, sum(outstanding) AS outstanding,
    sum(consumed) AS consumed, sum(suspense) AS suspense, sum(overage) AS overage, count(*) AS keys
FROM pool JOIN period ON period.id = pool.period WHERE period.ends_at > now() GROUP BY name
"""
# Indexes have exactly the rows that these and _LEDGER look for.
_SUSPENSE = """
SELECT region, sum(units) AS units, min(since) AS since FROM (
    SELECT region, suspense AS units, reported_at AS since FROM lease WHERE suspense > 0
    UNION ALL
    SELECT correction.region, suspense_carried, lease.reported_at FROM correction
    JOIN lease ON (lease.epoch, lease.quota, lease.period)
        = (correction.epoch, correction.quota, correction.charge_period)
    WHERE suspense_carried > 0
) AS waiting GROUP BY region
"""
_QUARANTINED = """
SELECT region, count(*) AS leases FROM (SELECT DISTINCT epoch, quota, period FROM quarantine WHERE quota <> '') AS kept
JOIN lease USING (epoch, quota, period) WHERE state = 'quarantined' GROUP BY region
"""
_LEDGER = """
SELECT (SELECT max(sealed_at) FROM seal) AS sealed_at,
    (SELECT count(*) FROM lease WHERE region_consumed <> consumed AND state NOT IN ('quarantined', 'closed'))
        AS drifting_leases,
    (SELECT count(*) FROM period WHERE state = 'closing') AS closing_periods,
    (SELECT min(close_requested_at) FROM period WHERE state = 'closing') AS closing_since,
    verified.finished_at AS verified_at, coalesce((verified.result ->> 'intact')::boolean, true) AS is_intact
FROM (VALUES (true)) AS one (row) LEFT JOIN LATERAL (
    SELECT finished_at, result FROM verification WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT 1
) AS verified ON true
"""
_DELIVERIES = """
SELECT count(*) FILTER (WHERE dead_at IS NULL) AS waiting,
    min(occurred_at) FILTER (WHERE dead_at IS NULL) AS waiting_since,
    count(dead_at) AS dead
FROM delivery JOIN outbox ON outbox.id = delivery.event
JOIN webhook ON webhook.id = delivery.webhook AND NOT webhook.paused
WHERE delivered_at IS NULL
"""
_KEEP = """
INSERT INTO measurement (figures, measured_at) VALUES ($1::text::jsonb, clock_timestamp())
ON CONFLICT (only_row) DO UPDATE
SET figures = measurement.figures || excluded.figures, measured_at = excluded.measured_at
"""
_MEASURED = """
SELECT clock_timestamp() AS read_at, figures::text AS figures, measured_at
FROM (VALUES (true)) AS one (row) LEFT JOIN measurement ON only_row
"""
_LAST_SEEN = """
SELECT region, last_seen_at, status = 'down' AS is_down
FROM region_last_seen JOIN region ON region.name = region_last_seen.region
"""
