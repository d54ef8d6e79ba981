"""How many units of an allowance a region is granted, in integers.

A grant aims at what the region will use within the horizon, but takes at most half of the pool's part that corresponds
to its share of all demand. Towards the end grants shrink geometrically, so the last units go where they are used.
"""

from datetime import datetime, timedelta
from typing import NamedTuple

from coordinator.exchange.rules.balances import Account, Cause, Lease, Pool
from coordinator.exchange.rules.posting import Entry, post
from protocol.lease import LeaseState
from protocol.limits.document import LONGEST_DEFAULT_HORIZON_MS

FLOOR_UNITS = 1
USUAL_HORIZON_MS = 10_000
DEMAND_HALVES_IN_MS = 5_000
LAST_KEPT_MS = 300  # so long what a region has must last before a grant could come


class PoolDemand(NamedTuple):
    """The units that one region wants of one pool, and everything else that is known of both."""

    demand_milli: int
    waiting: int
    available: int  # what its lease has left, as far as is known
    last_grant: int
    total_demand_milli: int  # of all regions, each as often as its weight says, this one included
    weight: int
    total_weight: int
    horizon_ms: int


def grant_units(grantable: int, limit: int, demand: PoolDemand) -> int:
    """Return how many units to grant now; never more than are grantable."""
    target = _target(limit, demand)
    if not demand.waiting and demand.available > max(target, demand.last_grant) // 2:
        return 0  # far from its low water mark: more would only lie idle
    soon = units_in(demand.demand_milli, 150)
    return min(grantable, max(min(target, _cap(grantable, demand)), demand.waiting, soon))


def _target(limit: int, demand: PoolDemand) -> int:
    within_horizon = max(units_in(demand.demand_milli, demand.horizon_ms), FLOOR_UNITS)
    longest_ms = max(demand.horizon_ms, USUAL_HORIZON_MS)  # a longer horizon outlasts longer outages and strands more
    most = limit * longest_ms // (200 * USUAL_HORIZON_MS)
    return min(within_horizon, max(most, units_in(demand.demand_milli, longest_ms // 10)))


def _cap(grantable: int, demand: PoolDemand) -> int:
    demand_milli = demand.weight * demand.demand_milli
    by_demand = grantable * demand_milli // (2 * max(demand.total_demand_milli, demand_milli, 1))
    return max(by_demand, grantable * demand.weight // (8 * max(demand.total_weight, demand.weight, 1)))


def units_in(demand_milli: int, duration_ms: int) -> int:
    return demand_milli * duration_ms // 1_000_000


def decayed(lease: Lease, now: datetime) -> int:
    """Return what a lease's demand weighs now: half of it five seconds after the region should have reported again.

    A region reports when it has used what it holds, so it is not quiet before that.
    """
    demand_milli = lease.demand_milli
    if not demand_milli or lease.reported_at >= now:
        return demand_milli  # most are, in a batch
    holds_for_ms = min(lease.outstanding * 1_000_000 // demand_milli, LONGEST_DEFAULT_HORIZON_MS)
    quiet_ms = (now - lease.reported_at) // timedelta(milliseconds=1) - holds_for_ms
    if quiet_ms <= 0:
        return demand_milli
    halvings, rest_ms = divmod(quiet_ms, DEMAND_HALVES_IN_MS)
    left = demand_milli >> min(halvings, 64)
    return left - left * rest_ms // (2 * DEMAND_HALVES_IN_MS)


def demand_milli_of(lease: Lease, now: datetime) -> int:
    """Return what a lease's demand weighs now, if it may be granted to."""
    return decayed(lease, now) if lease.state is LeaseState.ACTIVE else 0


def fund(entry: Entry, pool: Pool, limit: int) -> None:
    """Fund a pool up to the limit. A lower limit takes only unallocated units; the rest follows as units return.

    What was debited has been taken before: it is not taken twice.
    """
    post(entry, pool, None, Account.FUNDING, Account.UNALLOCATED, max(0, limit - pool.funded), Cause.FUNDED)
    surplus = min(max(0, pool.funded - limit), pool.unallocated, pool.entitled)
    post(entry, pool, None, Account.UNALLOCATED, Account.FUNDING, surplus, Cause.DEFUNDED)


def extend(entry: Entry, pool: Pool, at_most: int, need: int) -> None:
    """Extend a pool beyond its limit under a soft cap, before it is short and as far as the cap allows.

    A lowered cap takes only unallocated units.
    """
    surplus = min(max(0, pool.soft_cap_extension - at_most), pool.unallocated)
    post(entry, pool, None, Account.UNALLOCATED, Account.SOFT_CAP_EXTENSION, surplus, Cause.RETRACTED)
    if pool.grantable < need:
        units = min(2 * need - pool.grantable, max(0, at_most - pool.soft_cap_extension))
        post(entry, pool, None, Account.SOFT_CAP_EXTENSION, Account.UNALLOCATED, units, Cause.EXTENDED)


def needed(limit: int, waiting: int, demand_milli: int, horizon_ms: int) -> int:
    """Return how many units a soft cap keeps ready, so that no region is recalled."""
    return max(limit // 4 + 1, waiting, units_in(demand_milli, horizon_ms))


def grant(entry: Entry, pool: Pool, lease: Lease, units: int) -> None:
    post(entry, pool, lease, Account.UNALLOCATED, Account.OUTSTANDING, units, Cause.GRANT)
    if units:
        lease.last_grant = units
