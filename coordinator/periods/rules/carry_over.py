"""Rules for carry-over: unused units of a period go into the next one, if the quota has `carry_over`.

How much is unused is certain only at the close: then no region holds units, suspense has left the period, and nothing
is booked in it any more. So the units move with the close, in one movement of two transfers, one in each period. They
no longer belong to the closed period: late usage of that period is not covered by them.

Units that were carried into a period are spent first, and are not carried over a second time.
"""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID, uuid5

from msgspec import structs

from coordinator.exchange.rules.balances import Account, Cause, Key, Pool
from coordinator.exchange.rules.posting import Movement, post
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
    """Return the names of the allowances that have `carry_over`."""
    return [name for name, spec in quotas.items() if isinstance(spec, AllowanceQuota) and spec.carry_over is not None]


def unused_of(pool: Pool) -> int:
    """Return what is left of the pool's limit and credits. A soft cap's extension is not part of it."""
    left = max(0, min(pool.grantable - pool.soft_cap_extension, pool.included_left))
    return min(left, max(0, pool.entitled))


def carry_over_of(pool: Pool, catalogue: Catalogue) -> CarryOver | None:
    """Return what the plan in force at the close lets the pool carry over, or None if that is nothing."""
    spec = catalogue.allowance_of(pool.key.quota)
    limit = None if spec is None else limit_of_key(catalogue, spec, pool.key.quota)
    if spec is None or not isinstance(limit, int):
        return None
    most = carried_over(spec, plan_of_key(catalogue, pool.key.quota), pool.funded)
    units = min(unused_of(pool), most, MAX_UNITS - limit)  # more than that a store cannot count
    into = following(period_of(pool.key.period), catalogue, spec, pool.key.quota)
    return CarryOver(pool.key, Key(pool.key.quota, into), units) if units and into else None


def following(period: Period, catalogue: Catalogue, spec: AllowanceQuota, quota: str) -> str | None:
    """Return the next period of the calendar in force, or None if that calendar has another kind of period by now.

    The next period is found by its middle, because it begins earlier or later if the time zone or the anniversary
    has changed.
    """
    calendar = calendar_of_key(catalogue.began_at, spec, quota)
    if calendar.kind is not period.calendar.kind:
        return None
    middle: datetime = period.ends_at + (period.ends_at - period.starts_at) / 2
    return period_at(calendar, middle, catalogue.written.get(calendar, ())).id


def carry_over(pool: Pool, into: Pool, units: int) -> Movement:
    """Move unused units into the next period. The movement's id is derived from both keys, so it is booked once."""
    name = "/".join((*pool.key, into.key.period))
    entry = Movement(uuid5(_CARRIED_OVER, name), None, None)
    post(entry, pool, None, Account.UNALLOCATED, Account.CARRIED_OVER_OUT, units, Cause.CARRIED_OVER)
    post(entry, into, None, Account.CARRIED_OVER_IN, Account.UNALLOCATED, units, Cause.CARRIED_OVER)
    entry.transfers[-1] = structs.replace(entry.transfers[-1], late_for=pool.key.period)
    return entry
