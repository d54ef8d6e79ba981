"""What is left of a period goes over into the next, where the plan says so.

What is left is certain only when the period is closed: then no region holds any of it, what is in suspense waits
elsewhere, and nothing is booked in it any more. So it moves with the close, in one movement of two transfers, one in
each period, and it is no longer the old one's: what comes late for that is not included by it once more.

Of a period's units those are spent first that were carried into it; what was left of them does not go over again.
"""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID, uuid5

from msgspec import structs

from coordinator.exchange.rules.balances import Account, Cause, Key, Movement, Pool, post
from coordinator.limits.rules.entitlement import Catalogue, calendar_of_key, limit_of_key, plan_of_key
from protocol.limits.document import AllowanceQuota, Quota, carried_over
from protocol.periods import Period, period_at, period_of
from protocol.units import MAX_UNITS

_CARRIED_OVER = UUID("3c1f9a52-2d0e-4b7c-8a64-756e75736564")


class CarryOver(NamedTuple):
    key: Key  # of the pool that is closed
    into: Key
    units: int


def may_carry_over(quotas: dict[str, Quota]) -> list[str]:
    """The quotas of which something may go over."""
    return [name for name, spec in quotas.items() if isinstance(spec, AllowanceQuota) and spec.carry_over is not None]


def unused_of(pool: Pool) -> int:
    """Of its own limit and credits. What a soft cap let be had beyond them was nobody's."""
    left = max(0, min(pool.grantable - pool.soft_cap_extension, pool.included_left))
    return min(left, max(0, pool.entitled))


def carry_over_of(pool: Pool, catalogue: Catalogue) -> CarryOver | None:
    """By the plan that is in force at the close, as the limit is. None if nothing goes over."""
    spec = catalogue.allowance_of(pool.key.quota)
    limit = None if spec is None else limit_of_key(catalogue, spec, pool.key.quota)
    if spec is None or not isinstance(limit, int):
        return None
    most = carried_over(spec, plan_of_key(catalogue, pool.key.quota), pool.funded)
    units = min(unused_of(pool), most, MAX_UNITS - limit)  # a store could not count more
    into = following(period_of(pool.key.period), catalogue, spec, pool.key.quota)
    return CarryOver(pool.key, Key(pool.key.quota, into), units) if units and into else None


def following(period: Period, catalogue: Catalogue, spec: AllowanceQuota, quota: str) -> str | None:
    """The one after it by the calendar in force. None if that has other kinds of periods by now.

    Its middle is looked for: where zone or anniversary are others, the next one begins a little before or after.
    """
    calendar = calendar_of_key(catalogue.began_at, spec, quota)
    if calendar.kind is not period.calendar.kind:
        return None
    middle: datetime = period.ends_at + (period.ends_at - period.starts_at) / 2
    return period_at(calendar, middle, catalogue.written.get(calendar, ())).id


def carry_over(pool: Pool, into: Pool, units: int) -> Movement:
    """Both sides are one movement, of no region, and named by what it does: it is booked once."""
    name = "/".join((*pool.key, into.key.period))
    entry = Movement(uuid5(_CARRIED_OVER, name), None, None)
    post(entry, pool, None, Account.UNALLOCATED, Account.CARRIED_OVER_OUT, units, Cause.CARRIED_OVER)
    post(entry, into, None, Account.CARRIED_OVER_IN, Account.UNALLOCATED, units, Cause.CARRIED_OVER)
    entry.transfers[-1] = structs.replace(entry.transfers[-1], late_for=pool.key.period)
    return entry
