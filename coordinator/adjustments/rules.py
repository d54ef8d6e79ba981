"""What two people correct in the books by a decision, and not by evidence.

    credit      units to spend, beyond the limit              adjustment → unallocated
    debit       units that cannot be spent any more           unallocated → adjustment
    write off   units that were used, and nobody is billed    adjustment → written_off

Nothing that was booked changes: usage stays what regions have said. What can be spent is only of use in a period that
runs, so a credit or a debit of one that has ended is booked in the one that runs now; a write-off is booked in its own
as long as that is not closed. Either names the period that it is about as its charge period.

A debit takes only what could still be granted, and a write-off only what is billed and was not written off before: what
is missing is told, and nothing becomes negative.
"""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from msgspec import structs

from coordinator.exchange.rules.balances import Account, Cause, Key, Movement, Pool, post
from coordinator.periods.rules.closing import open_key
from protocol.periods import period_of
from protocol.units import MAX_UNITS

EXPIRES_AFTER = timedelta(days=30)  # the books of a proposal that nobody looked at are other books by then


class AdjustmentKind(StrEnum):
    CREDIT = "credit"
    DEBIT = "debit"
    WRITE_OFF = "write_off"


class AdjustmentState(StrEnum):
    PROPOSED = "proposed"
    APPROVED = "approved"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"


class AdjustmentRefusal(StrEnum):
    """Why an adjustment was not proposed, approved or withdrawn."""

    NO_SUCH_ADJUSTMENT = "no_such_adjustment"
    UNKNOWN_QUOTA = "unknown_quota"  # no allowance of such periods, by the document and by the books
    NOT_BEGUN = "not_begun"
    SAME_PERSON = "same_person"
    APPROVED_BEFORE = "approved_before"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    MORE_THAN_UNALLOCATED = "more_than_unallocated"
    MORE_THAN_BILLED = "more_than_billed"
    TOO_LARGE = "too_large"  # a store could not count it


class Terms(NamedTuple):
    """What was proposed."""

    key: Key  # of the quota, and of the period that it is about
    kind: AdjustmentKind
    units: int


def state_of(
    approved_at: datetime | None, withdrawn_at: datetime | None, expires_at: datetime, now: datetime
) -> AdjustmentState:
    if approved_at is not None:
        return AdjustmentState.APPROVED
    if withdrawn_at is not None:
        return AdjustmentState.WITHDRAWN
    return AdjustmentState.EXPIRED if now > expires_at else AdjustmentState.PROPOSED


def booked_under(terms: Terms, now: datetime, *, is_closed: bool) -> Key:
    """Where the units are moved."""
    has_ended = period_of(terms.key.period).ends_at <= now
    is_over = is_closed if terms.kind is AdjustmentKind.WRITE_OFF else is_closed or has_ended
    return open_key(terms.key, now) if is_over else terms.key


_SIDES = {
    AdjustmentKind.CREDIT: (Account.ADJUSTMENT, Account.UNALLOCATED, Cause.CREDITED),
    AdjustmentKind.DEBIT: (Account.UNALLOCATED, Account.ADJUSTMENT, Cause.DEBITED),
    AdjustmentKind.WRITE_OFF: (Account.ADJUSTMENT, Account.WRITTEN_OFF, Cause.WRITTEN_OFF),
}
_CREDITED = {AdjustmentKind.CREDIT: 1, AdjustmentKind.DEBIT: -1, AdjustmentKind.WRITE_OFF: 0}


def entry_of(adjustment: UUID) -> Movement:
    """An adjustment is a movement under its own name, of no region: so it is booked once."""
    return Movement(adjustment, None, None)


def refusal_of(terms: Terms, pool: Pool, debitable: int, billed: int) -> AdjustmentRefusal | None:
    """`billed`: of what it is about, as far as it was not written off before."""
    if terms.kind is AdjustmentKind.DEBIT and terms.units > debitable:
        return AdjustmentRefusal.MORE_THAN_UNALLOCATED
    if terms.kind is AdjustmentKind.WRITE_OFF and terms.units > billed:
        return AdjustmentRefusal.MORE_THAN_BILLED
    if terms.kind is AdjustmentKind.CREDIT and terms.units > MAX_UNITS - pool.spendable:
        return AdjustmentRefusal.TOO_LARGE
    return None


def adjust(entry: Movement, pool: Pool, terms: Terms) -> None:
    """Where nothing refuses it."""
    src, dst, cause = _SIDES[terms.kind]
    pool.credited += _CREDITED[terms.kind] * terms.units
    post(entry, pool, None, src, dst, terms.units, cause)
    if pool.key != terms.key:
        entry.transfers[-1] = structs.replace(entry.transfers[-1], late_for=terms.key.period)
