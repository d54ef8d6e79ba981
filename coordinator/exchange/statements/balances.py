"""Pools, leases and corrections, written as they were decided on; and the reports that moved them."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from coordinator.database.connection import Connection
from coordinator.database.expect import expect_rows
from coordinator.exchange.rules.balances import Correction, Key, Lease, Pool
from coordinator.exchange.rules.decision import BookedReport
from coordinator.exchange.rules.posting import Entry
from coordinator.exchange.statements.recordsets import (
    recordset,
    row_of_correction,
    row_of_lease,
    row_of_pool,
)
from coordinator.exchange.statements.transfers import copy_transfers, rows_of_transfers
from protocol.lease import LeaseState
from protocol.messages import Receipt

FEW_TRANSFERS = 200  # up to that many, another round trip costs more than COPY saves


async def write_balances(
    connection: Connection, pools: Sequence[Pool], leases: Sequence[Lease], states: Mapping[tuple[int, Key], LeaseState]
) -> None:
    """Write pools and leases together. `states`: those of the leases that the decisions were made on."""
    counts = await connection.fetchrow(_WRITE_BALANCES, *_balances(pools, leases, states))
    expect_rows(counts, (len(pools), len(leases)), "pools and leases")


async def write_booked(
    connection: Connection,
    booked: Sequence[BookedReport],
    pools: Sequence[Pool],
    leases: Sequence[Lease],
    states: Mapping[tuple[int, Key], LeaseState],
    entries: Sequence[Entry],
    now: datetime,
) -> dict[tuple[int, int], Receipt]:
    """Write reports, the lanes that they advance, pools, leases and transfers in one statement.

    Return the receipts by epoch and lane. More than a few transfers go ahead of that statement, by COPY.
    """
    few = sum(len(entry.transfers) for entry in entries) <= FEW_TRANSFERS
    if not few:
        await copy_transfers(connection, entries, now)
    rows = await connection.fetch(
        _WRITE_BOOKED,
        *_balances(pools, leases, states),
        recordset(map(_row_of_report, booked)),
        recordset(rows_of_transfers(entries) if few else ()),
        now,
    )
    expect_rows((len(rows),), (len(booked),), "lanes")
    expect_rows(rows[0][:2], (len(pools), len(leases)), "pools and leases")
    heads = {(each.report.epoch, each.report.lane): each.head.hex() for each in booked}
    return {(epoch, lane): Receipt(position=position, head=heads[epoch, lane]) for _, _, epoch, lane, position in rows}


async def insert_leases(
    connection: Connection, leases: Collection[Lease], states: Mapping[tuple[int, Key], LeaseState]
) -> None:
    """Insert new leases, empty and in the state that they began with. Their totals are written like those of others."""
    if leases:
        rows = [{**row_of_lease(lease), "state": states[lease.epoch, lease.key]} for lease in leases]
        await connection.execute(_INSERT_LEASES, recordset(rows))


async def write_corrections(connection: Connection, corrections: Sequence[Correction]) -> None:
    if corrections:
        await connection.execute(_WRITE_CORRECTIONS, recordset(map(row_of_correction, corrections)))


def _balances(
    pools: Sequence[Pool], leases: Sequence[Lease], states: Mapping[tuple[int, Key], LeaseState]
) -> tuple[str, str, list[str]]:
    were = [states[lease.epoch, lease.key].value for lease in leases]
    return recordset(map(row_of_pool, pools)), recordset(map(row_of_lease, leases)), were


def _row_of_report(each: BookedReport) -> dict[str, object]:
    report = each.report
    return {
        "epoch": report.epoch,
        "lane": report.lane,
        "seq": report.seq,
        "body_hash": f"\\x{each.body_hash.hex()}",
        "head": f"\\x{each.head.hex()}",
        "lines": len(report.transfers),
    }


# --- the statements ---------------------------------------------------------------------------------------------------

_BALANCES = """
WITH pools AS (
    UPDATE pool SET
        funded = new.funded, overage = new.overage, suspense_carried_in = new.suspense_carried_in,
        correction = new.correction, unallocated = new.unallocated, outstanding = new.outstanding,
        suspense = new.suspense, suspense_carried = new.suspense_carried,
        suspense_carried_out = new.suspense_carried_out, estimated = new.estimated, consumed = new.consumed,
        written_off = new.written_off, adjustment = new.adjustment, credited = new.credited,
        soft_cap_extension = new.soft_cap_extension, overage_used = new.overage_used,
        carried_over_in = new.carried_over_in, carried_over_out = new.carried_over_out
    FROM json_populate_recordset(NULL::pool, $1) AS new
    WHERE pool.quota = new.quota AND pool.period = new.period
    RETURNING 1
), leases AS (
    UPDATE lease SET
        state = new.state, reported_at = new.reported_at, expires_at = new.expires_at, granted = new.granted,
        overage = new.overage, consumed = new.consumed, returned = new.returned, outstanding = new.outstanding,
        suspense = new.suspense, suspense_carried_out = new.suspense_carried_out, estimated = new.estimated,
        written_off = new.written_off, region_consumed = new.region_consumed,
        region_returned = new.region_returned, demand_milli = new.demand_milli, waiting = new.waiting,
        last_grant = new.last_grant, overdraft = new.overdraft, overdrawn = new.overdrawn
    FROM ROWS FROM (json_populate_recordset(NULL::lease, $2), unnest($3::text[])) AS new
    WHERE lease.epoch = new.epoch AND lease.quota = new.quota AND lease.period = new.period
        AND lease.state = new.unnest
    RETURNING 1
)"""
_COUNTS = """
SELECT (SELECT count(*) FROM pools), (SELECT count(*) FROM leases)
"""
_WRITE_BALANCES = _BALANCES + _COUNTS
# The precondition once more, as SQL: a lane advances by one, or its report is not booked.
_REPORTS_AND_TRANSFERS = """
, moved AS (
    UPDATE lane SET last_seq = next.seq, last_hash = next.body_hash, head = next.head
    FROM json_populate_recordset(NULL::report, $4) AS next
    WHERE lane.epoch = next.epoch AND lane.lane = next.lane AND lane.last_seq = next.seq - 1
    RETURNING next.*
), reports AS (
    INSERT INTO report (epoch, lane, seq, body_hash, head, lines, recorded_at)
    SELECT epoch, lane, seq, body_hash, head, lines, $6::timestamptz FROM moved
    RETURNING epoch, lane, position
), transfers AS (
    INSERT INTO transfer (period, quota, src, dst, units, cause, region, epoch, movement_id, lane, seq, line, part,
        window_at, dimensions, charge_period, recorded_at)
    SELECT period, quota, src, dst, units, cause, region, epoch, movement_id, lane, seq, line, part,
        window_at, dimensions, charge_period, $6
    FROM json_populate_recordset(NULL::transfer, $5)
)
SELECT (SELECT count(*) FROM pools), (SELECT count(*) FROM leases), epoch, lane, position FROM reports
"""
_WRITE_BOOKED = _BALANCES + _REPORTS_AND_TRANSFERS
_INSERT_LEASES = """
INSERT INTO lease (epoch, quota, period, region, state, reported_at, expires_at)
SELECT epoch, quota, period, region, state, reported_at, reported_at FROM json_populate_recordset(NULL::lease, $1)
"""
_WRITE_CORRECTIONS = """
INSERT INTO correction SELECT * FROM json_populate_recordset(NULL::correction, $1)
ON CONFLICT (epoch, quota, charge_period, period) DO UPDATE SET
    suspense_carried_in = excluded.suspense_carried_in, correction = excluded.correction,
    suspense_carried = excluded.suspense_carried, suspense_carried_out = excluded.suspense_carried_out,
    estimated = excluded.estimated, consumed = excluded.consumed, written_off = excluded.written_off,
    replaced = excluded.replaced, recovered = excluded.recovered, overage_used = excluded.overage_used,
    region_consumed = excluded.region_consumed, region_returned = excluded.region_returned,
    quarantined = excluded.quarantined
"""
