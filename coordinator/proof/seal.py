"""Seal the ledger: fix a hash of everything up to a position.

Nothing can appear at or below a sealed position any more, and this is why. Positions are assigned before their
transactions commit, so the greatest visible position says nothing about lower ones. Therefore each statement that books
first takes a weak lock on the table `gate` (in a trigger, before its rows get their numbers) and keeps it until its
transaction ends. The sealer takes the strong lock, which it gets only while no booking is under way; then it takes its
snapshot and releases the lock. A number that was assigned before the snapshot belongs to a transaction that has ended:
it is in the snapshot or will never exist. A number that is assigned later is greater, for a sequence never goes back.
The same holds for the ids of transfers and of audit entries.

The lock is held for one round trip: LOCK takes no snapshot, and a rollback to a savepoint releases the lock but keeps
the snapshot. Everything is read from that snapshot afterwards, while bookings go on.
"""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import asyncpg
import msgspec
from msgspec import Struct
from sqlalchemy import BigInteger, exists, func, select

from coordinator.database import tables
from coordinator.database.compiled import compiled, parameter
from coordinator.database.connection import Connection
from coordinator.proof.rules import FIRST_PREVIOUS, Digest, Seal, seal_hash, without_zeros
from coordinator.webhooks.outbox import enqueue
from coordinator.webhooks.rules import EventKind, event

PREFETCH = 1000
GATE_PATIENCE = "1s"  # bookings queue behind a waiting sealer, so it gives up early and tries again


async def seal(connection: Connection, now: datetime) -> Seal:
    """Make the next seal, in a transaction without earlier statements. Of two concurrent sealers one fails."""
    await _take_snapshot(connection)
    last = await connection.fetchrow(_LAST)
    since = (last["position"], last["transfer"], last["audit"]) if last else (0, 0, 0)
    position, transfer, audit = await _ends(connection, since[1])
    reports = await _digest(report_entries(connection, since[0], position))
    movements = await _digest(movement_entries(connection, since[1], transfer))
    entries = await _digest(audit_entries(connection, since[2], audit))
    sealed = Seal(
        number=last["number"] + 1 if last else 1,
        previous=last["hash"] if last else FIRST_PREVIOUS,
        position=position,
        transfer=transfer,
        audit=audit,
        reports=reports.rows,
        reports_hash=reports.value,
        movements=movements.rows,
        movements_hash=movements.value,
        entries=entries.rows,
        entries_hash=entries.value,
        balances=await _balances(connection, since[1], transfer),
        # Times of seals are unique, even if the clocks of coordinators differ.
        sealed_at=max(now, last["sealed_at"] + timedelta(microseconds=1)) if last else now,
    )
    await _write(connection, sealed)
    return sealed


async def seal_and_announce(connection: Connection, now: datetime) -> None:
    """Make the next seal, and announce it if reports were booked since: there may be new usage to pull."""
    sealed = await seal(connection, now)
    if sealed.reports:
        data: dict[str, object] = {"position": sealed.position, "seal": sealed.number, "sealed_at": sealed.sealed_at}
        await enqueue(connection, [event(EventKind.USAGE_SEALED, data, sealed.number)], now)


async def _take_snapshot(connection: Connection) -> None:
    await connection.execute(_SNAPSHOT_BEHIND_THE_GATE)


async def _ends(connection: Connection, sealed: int) -> tuple[int, int, int]:
    row = await connection.fetchrow(_ENDS)
    assert row is not None
    # The last transfer of each period, since ids have no order across partitions: a few index look-ups. It may have
    # left the database with an archive, and a seal never goes back.
    transfer = max(sealed, await connection.fetchval(_LAST_TRANSFER))
    return row["position"], transfer, row["audit"]


async def _digest(rows: AsyncIterator[list[object]]) -> Digest:
    digest = Digest()
    async for row in rows:
        digest.add(row)
    return digest


async def _balances(connection: Connection, since: int, transfer: int) -> dict[str, dict[str, int]]:
    rows = await connection.fetch(*_BALANCES.with_values(since=since, up_to=transfer))
    return {row["period"]: without_zeros({name: row[name] for name in POOL_ACCOUNTS}) for row in rows}


async def _write(connection: Connection, sealed: Seal) -> None:
    values: list[Any] = [*sealed]
    values[Seal._fields.index("balances")] = msgspec.json.encode(sealed.balances).decode()
    await connection.execute(_INSERT, *values, seal_hash(sealed))


# --- what a seal hashes, for sealing and for verifying ----------------------------------------------------------------


async def report_entries(connection: Connection, after: int, up_to: int) -> AsyncIterator[list[object]]:
    """Return the entries by position. A head stands for everything that is booked with its report."""
    async for row in connection.cursor(_REPORTS, after, up_to, prefetch=PREFETCH):
        yield list(row.values())


async def movement_entries(connection: Connection, after: int, up_to: int) -> AsyncIterator[list[object]]:
    async for row in connection.cursor(_MOVEMENTS, after, up_to, prefetch=PREFETCH):
        yield [_parsed(name, value) for name, value in row.items()]


async def audit_entries(connection: Connection, after: int, up_to: int) -> AsyncIterator[list[object]]:
    async for row in connection.cursor(_AUDIT, after, up_to, prefetch=PREFETCH):
        yield [_parsed(name, value) for name, value in row.items()]


def _parsed(name: str, value: object) -> object:
    """Parse JSON, because its content counts and not how the database writes it."""
    if name in ("dimensions", "details") and isinstance(value, str):
        return msgspec.json.decode(value)
    return str(value) if name == "movement_id" and value is not None else value


# --- reading seals ----------------------------------------------------------------------------------------------------


class ShownSeal(Struct, frozen=True):
    """A seal. Keep `hash` elsewhere: it vouches for everything up to `position` and for all seals before."""

    number: int
    hash: str
    previous: str
    position: int
    transfer: int
    audit: int
    reports: int
    reports_hash: str
    movements: int
    movements_hash: str
    entries: int
    entries_hash: str
    balances: dict[str, dict[str, int]]
    sealed_at: datetime


async def read_seals(connection: Connection, before: int | None, count: int) -> list[ShownSeal]:
    """Return seals, the newest first."""
    return [_shown(row) for row in await connection.fetch(_SEALS, before, count)]


def _shown(row: asyncpg.Record) -> ShownSeal:
    values = {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}
    return msgspec.convert(values | {"balances": msgspec.json.decode(row["balances"])}, ShownSeal)


def seal_of(row: asyncpg.Record) -> Seal:
    values = {name: row[name] for name in Seal._fields}
    return Seal(**values | {"balances": msgspec.json.decode(row["balances"])})


class Sealed(NamedTuple):
    """A sealed position, and the last transfer that was sealed with it."""

    position: int
    transfer: int


async def find_sealed(connection: Connection, as_of: int | datetime) -> Sealed | None:
    """Return the sealed position for a position or a time, if it is sealed. A time means the last seal up to it.

    A time after the newest seal has no answer yet: the next seal could be before it. Of several seals with one
    position the first is returned, because which one is the last could change.
    """
    position = await connection.fetchval(_SEALED_AT, as_of) if isinstance(as_of, datetime) else as_of
    row = position is not None and await connection.fetchrow(_SEALED, position)
    return Sealed(position, row["transfer"]) if row else None


# --- the statements ---------------------------------------------------------------------------------------------------

POOL_ACCOUNTS = (
    "funded",
    "overage",
    "suspense_carried_in",
    "correction",
    "unallocated",
    "outstanding",
    "suspense",
    "suspense_carried",
    "suspense_carried_out",
    "estimated",
    "consumed",
    "written_off",
    "adjustment",
    "soft_cap_extension",
    "carried_over_in",
    "carried_over_out",
)
# Sent as one message, so that the gate is closed only between two statements of the server.
_SNAPSHOT_BEHIND_THE_GATE = f"""
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
SET LOCAL lock_timeout = '{GATE_PATIENCE}';
SAVEPOINT gate;
LOCK TABLE position_gate IN EXCLUSIVE MODE;
SELECT pg_current_snapshot();
ROLLBACK TO SAVEPOINT gate;
"""
_LAST = "SELECT number, position, transfer, audit, sealed_at, hash FROM seal ORDER BY number DESC LIMIT 1"
_ENDS = """
SELECT coalesce((SELECT max(position) FROM report), 0) AS position,
    coalesce((SELECT max(id) FROM audit), 0) AS audit
"""
_LAST_TRANSFER = """
SELECT coalesce(max(last.id), 0) FROM period, LATERAL (
    SELECT id FROM transfer WHERE transfer.period = period.id ORDER BY id DESC LIMIT 1) AS last
"""
_HAS_MOVED = exists().where(
    tables.transfer.c.period == tables.period.c.id,
    tables.transfer.c.id > parameter("since", BigInteger),
    tables.transfer.c.id <= parameter("up_to", BigInteger),
)
_BALANCES = compiled(
    select(tables.pool.c.period, *(func.sum(tables.pool.c[name]).label(name) for name in POOL_ACCOUNTS))
    .where(tables.pool.c.period.in_(select(tables.period.c.id).where(_HAS_MOVED)))
    .group_by(tables.pool.c.period)
    .order_by(tables.pool.c.period)
)
_REPORTS = """
SELECT position, epoch, lane, seq, head FROM report WHERE position > $1 AND position <= $2 ORDER BY position
"""
_MOVEMENTS = """
SELECT id, period, quota, src, dst, units, cause, region, epoch, lane, seq, line, part, movement_id, window_at,
    dimensions, charge_period, reverses, recorded_at
FROM transfer WHERE seq IS NULL AND id > $1 AND id <= $2 ORDER BY id, period
"""
_AUDIT = """
SELECT id, recorded_at, actor, action, object, request_id, details FROM audit
WHERE id > $1 AND id <= $2 ORDER BY id
"""
_INSERT = """
INSERT INTO seal (number, previous, position, transfer, audit, reports, reports_hash, movements, movements_hash,
    entries, entries_hash, balances, sealed_at, hash)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
"""
_SEALS = "SELECT * FROM seal WHERE $1::bigint IS NULL OR number < $1 ORDER BY number DESC LIMIT $2"
_SEALED = "SELECT transfer FROM seal WHERE position >= $1 ORDER BY number LIMIT 1"
_SEALED_AT = """
SELECT position FROM seal
WHERE sealed_at <= $1 AND $1 <= (SELECT sealed_at FROM seal ORDER BY number DESC LIMIT 1)
ORDER BY number DESC LIMIT 1
"""
