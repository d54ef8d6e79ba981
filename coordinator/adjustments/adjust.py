"""Propose an adjustment, and approve or withdraw it: two people, two transactions.

The approval locks the adjustment, then the pool that it is about, and then the pool in which it is booked. So it is
booked once, and of two that are approved at the same time each respects what the other has moved.
"""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.access.token_names import with_token_names
from coordinator.adjustments.read_adjustments import Adjustment, adjustment_of_row, read_adjustment
from coordinator.adjustments.rules import (
    EXPIRES_AFTER,
    AdjustmentKind,
    AdjustmentRefusal,
    AdjustmentState,
    AdjustmentTerms,
    adjust,
    booked_under,
    entry_of,
    refusal_of,
)
from coordinator.database.connection import Connection
from coordinator.database.expect import UnexpectedRows
from coordinator.database.notify import notify
from coordinator.exchange.book_entries import book_entries
from coordinator.exchange.rules.allocation import fund
from coordinator.exchange.rules.balances import Key, Pool
from coordinator.exchange.rules.posting import Movement
from coordinator.exchange.statements.balances import write_balances
from coordinator.exchange.statements.leases import read_leases
from coordinator.exchange.statements.pools import lock_pools
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from coordinator.limits.rules.entitlement import Entitlement, entitlement
from coordinator.notice import Notice
from coordinator.rebalancing.rules.division import by_weight, debitable, division_of, funded_for
from coordinator.webhooks.outbox import enqueue
from coordinator.webhooks.rules import EventKind, event
from protocol.messages import Signal
from protocol.periods import period_at, period_of


class ProposedAdjustment(NamedTuple):
    id: UUID
    terms: AdjustmentTerms
    reason: str
    document: str


async def propose_adjustment(
    connection: Connection, documents: Documents, wanted: ProposedAdjustment, by: Actor, now: datetime
) -> Adjustment | AdjustmentRefusal:
    """Propose an adjustment. A second proposal with the same id returns the first one."""
    if found := await read_adjustment(connection, wanted.id, now):
        return found
    key, kind, units = wanted.terms
    if now < period_of(key.period).starts_at:
        return AdjustmentRefusal.NOT_BEGUN
    if not await _is_known(connection, documents, key, now):
        return AdjustmentRefusal.UNKNOWN_QUOTA
    values = (*key, kind.value, units, wanted.reason, wanted.document)
    row = await connection.fetchrow(_PROPOSE, wanted.id, *values, UUID(by.name), now, now + EXPIRES_AFTER)
    return await _recorded(connection, by, Action.ADJUSTMENT_PROPOSED, row, now)


async def approve_adjustment(
    connection: Connection, documents: Documents, id_: UUID, by: Actor, now: datetime
) -> Adjustment | AdjustmentRefusal:
    """Approve and book an adjustment. Repeated by the same person, return it as it is; others are refused."""
    found = await _held(connection, id_, now)
    if found is None:
        return AdjustmentRefusal.NO_SUCH_ADJUSTMENT
    if found.state is not AdjustmentState.PROPOSED:
        return found if found.approved_by == UUID(by.name) else _ENDED[found.state]
    if found.proposed_by == UUID(by.name):
        return AdjustmentRefusal.SAME_PERSON
    booked = await _book(connection, documents, found, now)
    if isinstance(booked, AdjustmentRefusal):
        return booked
    row = await connection.fetchrow(_APPROVE, id_, UUID(by.name), now, booked.period)
    approved = await _recorded(connection, by, Action.ADJUSTMENT_APPROVED, row, now)
    await enqueue(connection, [event(EventKind.ADJUSTMENT_APPROVED, msgspec.to_builtins(approved), id_)], now)
    return approved


async def withdraw_adjustment(
    connection: Connection, id_: UUID, by: Actor, now: datetime
) -> Adjustment | AdjustmentRefusal:
    """Withdraw a proposed adjustment. One that has expired or was approved is refused."""
    found = await _held(connection, id_, now)
    if found is None:
        return AdjustmentRefusal.NO_SUCH_ADJUSTMENT
    if found.state is not AdjustmentState.PROPOSED:
        return found if found.withdrawn_by == UUID(by.name) else _ENDED[found.state]
    row = await connection.fetchrow(_WITHDRAW, id_, UUID(by.name), now)
    return await _recorded(connection, by, Action.ADJUSTMENT_WITHDRAWN, row, now)


_ENDED = {
    AdjustmentState.APPROVED: AdjustmentRefusal.APPROVED_BEFORE,
    AdjustmentState.WITHDRAWN: AdjustmentRefusal.WITHDRAWN,
    AdjustmentState.EXPIRED: AdjustmentRefusal.EXPIRED,
}


async def _held(connection: Connection, id_: UUID, now: datetime) -> Adjustment | None:
    row = await connection.fetchrow(_HOLD, id_)
    return (await with_token_names(connection, [adjustment_of_row(row, now)]))[0] if row else None


async def _recorded(
    connection: Connection, by: Actor, action: Action, row: asyncpg.Record | None, now: datetime
) -> Adjustment:
    assert row is not None
    adjustment = adjustment_of_row(row, now)
    await record(connection, by, action, str(adjustment.id), msgspec.to_builtins(adjustment), now)
    return (await with_token_names(connection, [adjustment]))[0]


# --- booking ----------------------------------------------------------------------------------------------------------


async def _book(
    connection: Connection, documents: Documents, found: Adjustment, now: datetime
) -> Key | AdjustmentRefusal:
    terms, entry = AdjustmentTerms(Key(found.quota, found.period), found.kind, found.units), entry_of(found.id)
    pool = await _lock(connection, terms, now)
    was_grantable = pool.grantable
    is_spent = terms.kind is not AdjustmentKind.WRITE_OFF
    most = await _fund(connection, documents, entry, pool, now) if is_spent else 0
    if refusal := refusal_of(terms, pool, most, await connection.fetchval(_BILLED, *terms.key)):
        return refusal
    # All checks are done: from here on only the database can fail, and then the transaction is rolled back.
    adjust(entry, pool, terms)
    await write_balances(connection, [pool], [], {})
    await book_entries(connection, [entry], now)
    if pool.grantable and not was_grantable:
        await notify(connection, [Notice(Signal(kind="grant", quota=pool.key.quota))])
    return pool.key


async def _lock(connection: Connection, terms: AdjustmentTerms, now: datetime) -> Pool:
    """Lock the pool in which the adjustment is booked, and the pool that it is about, which bounds a write-off."""
    locked = await lock_pools(connection, [terms.key], [terms.key])
    key = booked_under(terms, now, is_closed=locked[terms.key].closed_at is not None)
    if key not in locked:
        locked |= await lock_pools(connection, [key], [key])
    if locked[key].closed_at:
        raise UnexpectedRows(f"the pool {key} is closed, but its period should be open now")
    return locked[key].pool


async def _fund(connection: Connection, documents: Documents, entry: Movement, pool: Pool, now: datetime) -> int:
    """Book what the limit gives, if it is not booked yet: a debit is taken from the limit, and a credit comes on top.

    Return how much can be debited.
    """
    catalogue = await read_catalogue(connection, documents, [pool.key.quota], now)
    division = division_of(catalogue, pool.key, (), by_weight(catalogue))
    leases = await read_leases(connection, [pool.key], (), [pool.key]) if division.is_regional else ()
    found = entitlement(catalogue, pool.key.quota)
    if isinstance(found, Entitlement) and period_at(found.calendar, now, found.written).id == pool.key.period:
        fund(entry, pool, funded_for(found.limit, pool, leases, division))
    return debitable(pool, leases, division)


async def _is_known(connection: Connection, documents: Documents, key: Key, now: datetime) -> bool:
    """Return whether the ledger, or the limits document, has such an allowance."""
    if await connection.fetchval(_IS_BOOKED, *key):
        return True
    found = await _entitlement(connection, documents, key.quota, now)
    return found is not None and found.calendar == period_of(key.period).calendar


async def _entitlement(connection: Connection, documents: Documents, quota: str, now: datetime) -> Entitlement | None:
    catalogue = await read_catalogue(connection, documents, [quota], now)
    found = entitlement(catalogue, quota)
    return found if isinstance(found, Entitlement) else None


_HOLD = "SELECT * FROM adjustment WHERE id = $1 FOR UPDATE"
_PROPOSE = """
INSERT INTO adjustment (id, quota, period, kind, units, reason, document, proposed_by, proposed_at, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) RETURNING *
"""
_APPROVE = """
UPDATE adjustment SET approved_by = $2, approved_at = $3, booked_in = $4
WHERE id = $1 AND approved_at IS NULL AND withdrawn_at IS NULL RETURNING *
"""
_WITHDRAW = """
UPDATE adjustment SET withdrawn_by = $2, withdrawn_at = $3
WHERE id = $1 AND approved_at IS NULL AND withdrawn_at IS NULL RETURNING *
"""
_IS_BOOKED = "SELECT EXISTS (SELECT FROM pool WHERE (quota, period) = ($1, $2))"
# Billed in its own period, and in the periods where late usage was booked.
_BILLED = """
SELECT (
    coalesce((SELECT sum(consumed + estimated) FROM lease WHERE (quota, period) = ($1, $2)), 0)
    + coalesce((SELECT sum(consumed + estimated - replaced) FROM correction
        WHERE (quota, charge_period) = ($1, $2)), 0)
    - coalesce((SELECT sum(units) FROM adjustment
        WHERE (quota, period) = ($1, $2) AND kind = 'write_off' AND approved_at IS NOT NULL), 0))
"""
