"""Rules for adjustments: corrections that two people decide on, without evidence from a region.

    credit      units that may be spent beyond the limit      adjustment → unallocated
    debit       units that can no longer be spent             unallocated → adjustment
    write off   units that were used but are not billed       adjustment → written_off

What was booked does not change: usage stays as regions reported it. A credit or a debit is useful only in a current
period, so one for an ended period is booked in the current one. A write-off is booked in its own period until that is
closed. The charge period of the movement names the period that the adjustment is about.

A debit takes at most what could still be granted, and a write-off at most what is billed and not written off yet. The
refusal says what is missing, and nothing becomes negative.
"""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from msgspec import structs

from coordinator.exchange.rules.balances import Account, Cause, Key, Pool
from coordinator.exchange.rules.posting import Movement, post
from coordinator.periods.rules.closing import open_key
from protocol.periods import period_of
from protocol.units import MAX_UNITS

EXPIRES_AFTER = timedelta(days=30)  # by then the balances have changed too much


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
    """The reasons why an adjustment was not proposed, approved or withdrawn."""

    NO_SUCH_ADJUSTMENT = "no_such_adjustment"
    UNKNOWN_QUOTA = "unknown_quota"  # neither the ledger nor the document has such an allowance
    NOT_BEGUN = "not_begun"
    SAME_PERSON = "same_person"
    APPROVED_BEFORE = "approved_before"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    MORE_THAN_UNALLOCATED = "more_than_unallocated"
    MORE_THAN_BILLED = "more_than_billed"
    TOO_LARGE = "too_large"  # more than a store can count


class AdjustmentTerms(NamedTuple):
    """The proposed key, kind and units."""

    key: Key  # the quota key and the period that it is about
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


def booked_under(terms: AdjustmentTerms, now: datetime, *, is_closed: bool) -> Key:
    """Return the key that the units are moved under."""
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
    """Return the movement of an adjustment. It has the adjustment's id, so it is booked once; it has no region."""
    return Movement(adjustment, None, None)


def refusal_of(terms: AdjustmentTerms, pool: Pool, debitable: int, billed: int) -> AdjustmentRefusal | None:
    """Return why the adjustment cannot be booked. `billed` is what may still be written off."""
    if terms.kind is AdjustmentKind.DEBIT and terms.units > debitable:
        return AdjustmentRefusal.MORE_THAN_UNALLOCATED
    if terms.kind is AdjustmentKind.WRITE_OFF and terms.units > billed:
        return AdjustmentRefusal.MORE_THAN_BILLED
    if terms.kind is AdjustmentKind.CREDIT and terms.units > MAX_UNITS - pool.spendable:
        return AdjustmentRefusal.TOO_LARGE
    return None


def adjust(entry: Movement, pool: Pool, terms: AdjustmentTerms) -> None:
    """Move the units of an adjustment that was not refused."""
    src, dst, cause = _SIDES[terms.kind]
    pool.credited += _CREDITED[terms.kind] * terms.units
    post(entry, pool, None, src, dst, terms.units, cause)
    if pool.key != terms.key:
        entry.transfers[-1] = structs.replace(entry.transfers[-1], late_for=terms.key.period)
