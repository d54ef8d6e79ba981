"""Close a period, in one transaction that holds the period's row exclusively.

Every transaction that books in a period holds the period's row shared until it commits. So while the row is held
exclusively, no booking is under way, and what was read stays true until this transaction ends. Transfers below the
newest seal cannot change; they are read before, so that no booking waits for it. A close may be requested repeatedly:
steps that were done are not done twice, and the reply lists what is still missing.

    first request   open → closing; from now on nothing is granted
    meanwhile       every few seconds regions are asked to return outstanding units, so that no lease has to expire
    nothing missing closing → closed: suspense is carried into the open period, leases are closed, and the root hash
                    of what remains is recorded with the position of the ledger
"""

import functools
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import asyncpg
from msgspec import Struct
from sqlalchemy import Table, Text, select

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.compiled import compiled, parameter
from coordinator.database.connection import Connection
from coordinator.database.engine import Database
from coordinator.database.expect import UnexpectedRows, expect_rows
from coordinator.database.notify import notify
from coordinator.database.tables import correction, lease, pool
from coordinator.exchange.book_entries import book_entries
from coordinator.exchange.recall import recall_outstanding
from coordinator.exchange.rules.balances import (
    CORRECTION_COLUMNS,
    LEASE_COLUMNS,
    POOL_COLUMNS,
    Correction,
    Key,
    Lease,
    Pool,
)
from coordinator.exchange.rules.locked import LockedPool
from coordinator.exchange.rules.posting import Movement
from coordinator.exchange.statements.balances import write_balances, write_corrections
from coordinator.exchange.statements.leases import correction_of_row, lease_of_row
from coordinator.exchange.statements.pools import lock_pools, read_pools
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from coordinator.notice import Notice
from coordinator.periods.read_periods import BookedPeriod, read_period
from coordinator.periods.rules.carry_over import CarryOver, carry_over, carry_over_of, may_carry_over
from coordinator.periods.rules.closing import (
    HOLD_WAIT,
    Missing,
    Obstacle,
    OpenHoldTerms,
    OpenLease,
    carry,
    close_lease,
    correction_of,
    leave_holds,
    missing_for_close,
    open_key,
)
from coordinator.proof.rules import Digest
from coordinator.usage.reconcile import Settled, read_books, read_settled
from coordinator.usage.rules.reconciliation import reconcile
from coordinator.webhooks.outbox import enqueue
from coordinator.webhooks.rules import EventKind, event
from protocol.clock import Clock
from protocol.messages import Signal
from protocol.periods import period_of


class Carried(Struct, frozen=True):
    """Suspense that leaves the period and waits in the open one."""

    quota: str
    region: str
    epoch: int
    charge_period: str
    units: int


class CarriedOver(Struct, frozen=True):
    """Unused units that can be spent in the next period."""

    quota: str
    into: str
    units: int


class PeriodClose(Struct, frozen=True, kw_only=True):
    """The progress of a close."""

    period: BookedPeriod
    is_dry_run: bool
    missing: list[Missing]
    suspense_carried: list[Carried]  # by the close; before the close, what would be carried
    carried_over: list[CarriedOver]  # by the close; more if regions return what they hold


class CloseRefused(NamedTuple):
    """The close was refused and nothing changed: people have to resolve what is missing first."""

    missing: Sequence[Missing]


class CloseRequest(NamedTuple):
    by: Actor
    carry_suspense: bool = False
    dry_run: bool = False
    leave_holds: bool = False


async def close(
    database: Database,
    period: str,
    request: CloseRequest | None,
    grace: timedelta,
    now: datetime,
    hold_wait: timedelta = HOLD_WAIT,
) -> PeriodClose | CloseRefused | None:
    """Read what is sealed, then close under the lock. A dry run reads one snapshot and holds no lock."""
    settled = await database.run(lambda c: read_settled(c, period), snapshot=True)
    is_dry_run = request is not None and request.dry_run
    return await database.run(
        lambda c: close_period(c, period, request, settled, grace, now, hold_wait), snapshot=is_dry_run
    )


async def close_period(
    connection: Connection,
    period: str,
    request: CloseRequest | None,
    settled: Settled,
    grace: timedelta,
    now: datetime,
    hold_wait: timedelta = HOLD_WAIT,
) -> PeriodClose | CloseRefused | None:
    """Return None if the period is unknown. Without a request, continue the close that was requested before."""
    await connection.execute("SET LOCAL statement_timeout = 0")
    is_dry_run = request is not None and request.dry_run
    locks = not is_dry_run
    row = await connection.fetchrow(_LOCK_PERIOD if locks else _READ_PERIOD, period)
    if row is None or (request is None and row["state"] != "closing"):
        return None
    parts = await _read_suspense(connection, period, locks=locks)
    if row["state"] == "closed":
        over = [CarriedOver(*row.values()) for row in await connection.fetch(_WERE_CARRIED_OVER, period)]
        return await _progress(
            connection, period, [], await _read_carried_suspense(connection, period), over, is_dry_run
        )
    carries = row["carries_suspense"] or (request is not None and request.carry_suspense)
    leaves_holds = row["leaves_holds"] or (request is not None and request.leave_holds)
    holds = OpenHoldTerms((row["close_requested_at"] or now) + grace + hold_wait, leaves_holds)
    missing = await _missing(connection, row, carries, holds, settled, grace, now)
    left = await _read_unused(connection, period, now)
    missing += await _missing_of_earlier_periods(connection, row, left.names)
    if any(each.is_for_people for each in missing):
        return CloseRefused(missing)
    if not is_dry_run:
        await _begin(connection, row, request, carries, leaves_holds, now)
        if not missing and await _leave_holds(connection, period, now):
            parts = await _read_suspense(connection, period, locks=locks)
    leaves = [_carried(part) for part in parts]
    if not is_dry_run and not missing:
        await _close(
            connection, row["close_requested_by"] or (request.by.name if request else ""), parts, left, settled, now
        )
    over = [CarriedOver(each.key.quota, each.into.period, each.units) for each in left.goes_over]
    return await _progress(connection, period, missing, leaves, over, is_dry_run)


async def continue_closing(
    database: Database, clock: Clock, grace: timedelta, hold_wait: timedelta = HOLD_WAIT
) -> None:
    """Continue every close that was requested, each in its own transaction, unless it still waits for regions."""
    rows = await database.read(lambda c: c.fetch(_CLOSING))
    for period, close_requested_at, leaves_holds in rows:
        recalled = await database.run(functools.partial(recall_outstanding, period=period, now=clock.now()))
        waits_for_regions = recalled and not leaves_holds and clock.now() < close_requested_at + grace + hold_wait
        if not waits_for_regions and clock.now() >= close_requested_at + grace:
            await close(database, period, None, grace, clock.now(), hold_wait)


# --- what is missing --------------------------------------------------------------------------------------------------


async def _missing(
    connection: Connection,
    row: asyncpg.Record,
    carries_suspense: bool,
    holds: OpenHoldTerms,
    settled: Settled,
    grace: timedelta,
    now: datetime,
) -> list[Missing]:
    leases = [OpenLease(*each.values()) for each in await connection.fetch(_OPEN_LEASES, row["id"])]
    findings = reconcile(row["id"], await read_books(connection, row["id"], settled), now).findings
    grace_ends_at = (row["close_requested_at"] or now) + grace
    period = period_of(row["id"])
    return missing_for_close(period, leases, findings, grace_ends_at, now, holds, carries_suspense=carries_suspense)


async def _begin(
    connection: Connection,
    row: asyncpg.Record,
    request: CloseRequest | None,
    carries: bool,
    leaves_holds: bool,
    now: datetime,
) -> None:
    """Record the request. A repeated request can only add consent to carry suspense or to leave holds."""
    known = row["state"] == "closing" and (row["carries_suspense"], row["leaves_holds"]) == (carries, leaves_holds)
    if request is None or known:
        return
    await connection.execute(_BEGIN, row["id"], now, request.by.name, carries, leaves_holds)
    details = {"carry_suspense": carries} | ({"holds": "leave"} if leaves_holds else {})
    await record(connection, request.by, Action.PERIOD_CLOSING, row["id"], details, now)


# --- closing ----------------------------------------------------------------------------------------------------------


async def _close(
    connection: Connection,
    by: str,
    parts: Sequence[Lease | Correction],
    left: "Unused",
    settled: Settled,
    now: datetime,
) -> None:
    period, keys = left.period, {part.key for part in parts} | {each.key for each in left.goes_over}
    there = {open_key(part.key, now) for part in parts} | {each.into for each in left.goes_over}
    await lock_pools(connection, keys | there, there)  # all at once, in their order
    carried = await _carry_out(connection, parts, now)
    await _carry_over(connection, left, now)
    await connection.execute(CLOSE_LEASES, period)
    position, new = await connection.fetchrow(_POSITION, period, settled.sealed) or (0, 0)
    transfers = settled.transfers + new
    root = await period_root(connection, period)
    closed = await connection.fetch(_CLOSE, period, now, position, transfers, root)
    expect_rows((len(closed),), (1,), "period")
    over = sum(each.units for each in left.goes_over)
    details = {"position": position, "transfers": transfers, "root": root.hex(), "suspense_carried_units": carried}
    details |= {"carried_over_units": over} if over else {}
    await record(connection, Actor(by), Action.PERIOD_CLOSED, period, details, now)
    await enqueue(connection, [event(EventKind.PERIOD_CLOSED, {"period": period, **details}, period)], now)


async def _leave_holds(connection: Connection, period: str, now: datetime) -> int:
    """Move units that services still hold into suspense once nothing else is missing. Return the number of leases."""
    leases = [lease_of_row(row) for row in await connection.fetch(_HELD, period)]
    if leases:
        pools = await lock_pools(connection, {lease.key for lease in leases}, ())
        states = {(lease.epoch, lease.key): lease.state for lease in leases}
        entries = [leave_holds(pools[lease.key].pool, lease) for lease in leases]
        await write_balances(connection, [locked.pool for locked in pools.values()], leases, states)
        await book_entries(connection, entries, now)
    return len(leases)


async def _carry_out(connection: Connection, parts: Sequence[Lease | Correction], now: datetime) -> int:
    """Carry suspense into the open period, both sides in one movement. Return the number of units."""
    here = {part.key for part in parts}
    there = {open_key(key, now) for key in here}
    pools = await lock_pools(connection, here | there, there)
    states = {(part.epoch, part.key): part.state for part in parts if isinstance(part, Lease)}
    corrections: list[Correction] = []
    entries: list[Movement] = []
    for part in parts:
        pool, open_pool = pools[part.key].pool, _open(pools[open_key(part.key, now)])
        arrives = correction_of(part, open_pool.key.period)
        entries.append(carry(pool, part, open_pool, arrives))
        corrections += [arrives, part] if isinstance(part, Correction) else [arrives]
        if isinstance(part, Lease):
            close_lease(part)
    leases = [part for part in parts if isinstance(part, Lease)]
    await write_balances(connection, [locked.pool for locked in pools.values()], leases, states)
    await write_corrections(connection, corrections)
    await book_entries(connection, entries, now)
    return sum(entry.transfers[0].units for entry in entries)


def _open(locked: LockedPool) -> Pool:
    if locked.closed_at:
        raise UnexpectedRows(f"the pool {locked.pool.key} is closed, but its period should be open now")
    return locked.pool


async def _read_suspense(connection: Connection, period: str, *, locks: bool) -> list[Lease | Correction]:
    """Read what is in suspense, with the leases locked so that no fence changes them meanwhile."""
    leases = [lease_of_row(row) for row in await connection.fetch(_LOCK_SUSPENDED if locks else _SUSPENDED, period)]
    corrections = [correction_of_row(row) for row in await connection.fetch(_CARRIED, period)]
    return [*leases, *corrections]


def _carried(part: Lease | Correction) -> Carried:
    return Carried(part.key.quota, part.region, part.epoch, part.charge_period, part.to_carry)


# --- carry-over ---------------------------------------------------------------------------------------------------


class Unused(NamedTuple):
    """The units of a period that is being closed which the next period will get."""

    period: str
    names: Sequence[str]  # of the quotas with `carry_over`
    goes_over: Sequence[CarryOver] = ()


async def _read_unused(connection: Connection, period: str, now: datetime) -> Unused:
    """Read the unused units. They stay in their period if the next period is closed already."""
    catalogue = await read_catalogue(connection, Documents(), [], now)
    names = may_carry_over(dict(catalogue.quotas))
    rows = await connection.fetch(_UNUSED, period, names) if names else []
    if not rows:
        return Unused(period, names)
    keys = [Key(row["quota"], period) for row in rows]
    catalogue = await read_catalogue(connection, Documents(), [key.quota for key in keys], now)
    pools = await read_pools(connection, keys)
    found = [each for key in keys if (each := carry_over_of(pools[key].pool, catalogue))]
    closed = {row["id"] for row in await connection.fetch(_CLOSED, [each.into.period for each in found])}
    return Unused(period, names, [each for each in found if each.into.period not in closed])


async def _carry_over(connection: Connection, left: Unused, now: datetime) -> None:
    """Move the unused units. The period's row is held, so its pools cannot change; the others are locked here."""
    if not left.goes_over:
        return
    into = [each.into for each in left.goes_over]
    pools = await lock_pools(connection, [*(each.key for each in left.goes_over), *into], into)
    exhausted = [key for key in into if not pools[key].pool.grantable]
    entries = [carry_over(pools[each.key].pool, _open(pools[each.into]), each.units) for each in left.goes_over]
    await write_balances(connection, [locked.pool for locked in pools.values()], [], {})
    await book_entries(connection, entries, now)
    await notify(connection, [Notice(Signal(kind="grant", quota=key.quota)) for key in exhausted])


async def _missing_of_earlier_periods(
    connection: Connection, row: asyncpg.Record, names: Sequence[str]
) -> list[Missing]:
    """Return the earlier periods that are still open, for their unused units could not be carried over any more."""
    if not names:
        return []
    rows = await connection.fetch(_EARLIER, row["calendar"], row["starts_at"], list(names))
    reason = "close it first: its unused units are carried over into this period"
    return [Missing(what=Obstacle.EARLIER, reason=f"{each['id']}: {reason}") for each in rows]


# --- the reply --------------------------------------------------------------------------------------------------


async def _progress(
    connection: Connection,
    period: str,
    missing: list[Missing],
    suspense_carried: list[Carried],
    carried_over: list[CarriedOver],
    is_dry_run: bool,
) -> PeriodClose:
    found = await read_period(connection, period)
    assert found is not None
    return PeriodClose(
        period=found,
        is_dry_run=is_dry_run,
        missing=missing,
        suspense_carried=suspense_carried,
        carried_over=carried_over,
    )


async def _read_carried_suspense(connection: Connection, period: str) -> list[Carried]:
    return [Carried(*row.values()) for row in await connection.fetch(_WERE_CARRIED, period)]


async def period_root(connection: Connection, period: str) -> bytes:
    """Return the hash of all that remains: the period's pools, leases, corrections and adjustments, each in its order.

    Rows of adjustments, soft caps, overdrafts and carry-over are hashed only where there are any.
    """
    digest = Digest()
    since = (_ADJUSTED_ROWS, _ADJUSTMENT_ROWS, _CAPPED_ROWS, _OVERDRAWN_ROWS, _UNUSED_ROWS)
    for sql in (_POOL_ROWS, _LEASE_ROWS, _CORRECTION_ROWS, *since):
        async for row in _rows(connection, sql, period):
            digest.add(row)
    return digest.value


async def _rows(connection: Connection, sql: str, period: str) -> AsyncIterator[list[object]]:
    async for row in connection.cursor(sql, period, prefetch=1000):
        yield list(row.values())


# --- the statements ---------------------------------------------------------------------------------------------------

_BEGIN = """
UPDATE period SET state = 'closing',
    close_requested_at = coalesce(close_requested_at, $2), close_requested_by = coalesce(close_requested_by, $3),
    carries_suspense = $4, leaves_holds = $5
WHERE id = $1 AND state IN ('open', 'closing')
"""
_OPEN_LEASES = """
WITH part AS (
    SELECT quota, region, epoch, period AS charge_period, outstanding, suspense, state = 'quarantined' AS quarantined,
        reported_at
    FROM lease WHERE period = $1
    UNION ALL SELECT quota, region, epoch, charge_period, 0, suspense_carried, quarantined, NULL
    FROM correction WHERE period = $1
), found AS (
    SELECT part.*, EXISTS (SELECT FROM resolution WHERE approved_at IS NULL AND (resolution.epoch, resolution.quota,
        resolution.period) = (part.epoch, part.quota, part.charge_period)) AS proposed FROM part
)
SELECT quota, region, epoch, charge_period, outstanding, suspense, quarantined, proposed, reported_at
FROM found WHERE outstanding > 0 OR suspense > 0 OR quarantined OR proposed ORDER BY 1, 2, 3, 4
"""
_READ_PERIOD = "SELECT * FROM period WHERE id = $1"
_LOCK_PERIOD = "SELECT * FROM period WHERE id = $1 FOR UPDATE"
PERIODS_CLOSING = "EXISTS (SELECT FROM period WHERE state = 'closing')"  # the job has work
_CLOSING = "SELECT id, close_requested_at, leaves_holds FROM period WHERE state = 'closing' ORDER BY ends_at, id"
_HELD = "SELECT * FROM lease WHERE period = $1 AND outstanding > 0 ORDER BY epoch, quota FOR UPDATE"
_SUSPENDED = "SELECT * FROM lease WHERE period = $1 AND suspense > 0 ORDER BY epoch, quota"
_LOCK_SUSPENDED = "SELECT * FROM lease WHERE period = $1 AND suspense > 0 ORDER BY epoch, quota FOR UPDATE"
_CARRIED = "SELECT * FROM correction WHERE period = $1 AND suspense_carried > 0 ORDER BY epoch, quota, charge_period"
CLOSE_LEASES = "UPDATE lease SET state = 'closed' WHERE period = $1 AND state NOT IN ('quarantined', 'closed')"
_POSITION = """
SELECT (SELECT coalesce(max(position), 0) FROM report), (SELECT count(*) FROM transfer WHERE period = $1 AND id > $2)
"""
_CLOSE = """
UPDATE period SET state = 'closed', closed_at = $2, position = $3, transfers = $4, root = $5
WHERE id = $1 AND state = 'closing' RETURNING id
"""
# The pools that may have unused units.
_UNUSED = """
SELECT quota FROM pool WHERE period = $1 AND name = ANY ($2::text[]) AND unallocated > 0 ORDER BY quota
"""
_CLOSED = "SELECT id FROM period WHERE id = ANY ($1::text[]) AND state = 'closed'"
_EARLIER = """
SELECT id FROM period WHERE calendar = $1 AND ends_at = $2 AND state <> 'closed'
    AND EXISTS (SELECT FROM pool WHERE pool.period = period.id AND name = ANY ($3::text[]) AND funded > 0)
ORDER BY id
"""
_WERE_CARRIED_OVER = """
SELECT there.quota, there.period, there.units FROM transfer AS here JOIN transfer AS there USING (movement_id)
WHERE here.period = $1 AND here.dst = 'carried_over_out' AND there.src = 'carried_over_in' ORDER BY there.quota
"""
_WERE_CARRIED = """
SELECT quota, region, epoch, charge_period, units FROM transfer
WHERE period = $1 AND dst = 'suspense_carried_out' ORDER BY quota, region, epoch, charge_period
"""


def _hashed_rows(table: Table, key: Sequence[str], more: Sequence[str]) -> str:
    """Return SQL that selects columns of a period's rows, in the order of the key."""
    rows = select(*(table.c[name] for name in (*key, *more))).where(table.c.period == parameter("period", Text))
    return compiled(rows.order_by(*(table.c[name] for name in key))).sql


# Columns that are hashed separately, and only in rows where they are not zero.
_SINCE = ("adjustment", "credited", "soft_cap_extension", "overage_used", "carried_over_in", "carried_over_out")
_HASHED = [column for column in POOL_COLUMNS if column not in _SINCE]
_POOL_ROWS = _hashed_rows(pool, ["quota"], ["name", "tenant", *_HASHED])
_ADJUSTED_ROWS = """
SELECT quota, adjustment, credited FROM pool WHERE period = $1 AND (adjustment, credited) <> (0, 0) ORDER BY quota
"""
_UNUSED_ROWS = """
SELECT quota, carried_over_in, carried_over_out FROM pool
WHERE period = $1 AND (carried_over_in, carried_over_out) <> (0, 0) ORDER BY quota
"""
_CAPPED_ROWS = """
SELECT quota, soft_cap_extension, overage_used FROM pool
WHERE period = $1 AND (soft_cap_extension, overage_used) <> (0, 0) ORDER BY quota
"""
_ADJUSTMENT_ROWS = """
SELECT id::text, quota, period, kind, units, reason, document, proposed_by::text, proposed_at, approved_by::text,
    approved_at
FROM adjustment WHERE booked_in = $1 ORDER BY id
"""
_HASHED_OF_LEASES = [column for column in LEASE_COLUMNS if column not in ("overdraft", "overdrawn")]
_OVERDRAWN_ROWS = """
SELECT epoch, quota, overdraft, overdrawn FROM lease WHERE period = $1 AND (overdraft, overdrawn) <> (0, 0)
ORDER BY epoch, quota
"""
_LEASE_ROWS = _hashed_rows(lease, ["epoch", "quota"], ["region", "state", *_HASHED_OF_LEASES])
# Overage is in the usage, which the seals cover.
_HASHED_OF_CORRECTIONS = [column for column in CORRECTION_COLUMNS if column != "overage_used"]
_CORRECTION_ROWS = _hashed_rows(correction, ["epoch", "quota", "charge_period"], ["region", *_HASHED_OF_CORRECTIONS])
