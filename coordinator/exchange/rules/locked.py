"""What is locked, and all that a decision takes from it.

Which rows are read next depends on what was read before: first the pools that exchanges are about, then those in which
late usage of closed periods is booked, then the leases. `lock` makes one value of them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import datetime
from typing import NamedTuple

from coordinator.exchange.rules.balances import Correction, Key, Lease, Pool
from coordinator.exchange.rules.granting import PoolView, is_waiting
from coordinator.exchange.rules.plausibility import ClaimBounds
from coordinator.exchange.rules.settlement import EpochState, Lane, key_of, may_become_overage
from coordinator.exchange.rules.submissions import Matched
from coordinator.limits.rules.entitlement import Catalogue, Entitlement, entitlement
from coordinator.periods.rules.closing import Late, late_of, open_key
from coordinator.rebalancing.rules.division import Division, Move, by_weight, division_of
from coordinator.webhooks.rules import PoolUsage, usage_of
from protocol.identifiers import parse_quota_key
from protocol.lease import LeaseState
from protocol.limits.document import AllowanceQuota, Quota, overdraft_of
from protocol.periods import is_over

LeaseName = tuple[int, Key]  # its epoch, and its key within it


class LockedPool(NamedTuple):
    pool: Pool
    period_is_open: bool
    closed_at: datetime | None = None  # None as long as its period is not closed
    open_moves: int = 0  # so many: people move units of it from region to region
    exists: bool = True  # False for a closed period in which nothing was ever booked for this quota


class LockedExchange(NamedTuple):
    """An exchange with the leases of its epoch that it is about."""

    matched: Matched
    leases: Mapping[Key, Lease]


class AsRead(NamedTuple):
    """The rows as they were read behind the locks, to compare with the decision."""

    states: Mapping[LeaseName, LeaseState]
    grantable: Mapping[Key, int]
    used: Mapping[Key, PoolUsage]
    overdrawn: Mapping[LeaseName, int]  # of leases that may be overdrawn


class Locked(NamedTuple):
    """Everything behind the locks. `decide` changes its pools, leases, corrections and moves, and nothing else."""

    exchanges: Sequence[LockedExchange]
    pools: Mapping[Key, LockedPool]
    leases: Mapping[LeaseName, Lease]
    by_pool: Mapping[Key, Sequence[Lease]]
    new_leases: Sequence[Lease]
    lates: Mapping[LeaseName, Late]  # those of the leases whose periods are closed
    closed: Collection[Key]  # those of the pools whose periods are
    divisions: Mapping[Key, Division]  # how people divided each pool
    moves: Sequence[tuple[Move, Move]]  # those that are open, each with a copy as it was read
    quotas: Mapping[str, Quota]  # what is in force
    as_read: AsRead

    def view(self, lease: Lease, demand_milli: int = 0) -> PoolView:
        """Return a lease's pool as its region sees it. `demand_milli`: of all of the pool's leases together."""
        locked = self.pools[lease.key]
        return PoolView(
            locked.pool,
            locked.period_is_open,
            lease.region,
            self.by_pool[lease.key],
            self.divisions[lease.key],
            demand_milli,
            allowance_of_key(self.quotas, lease.key),
        )

    @property
    def changed_moves(self) -> list[Move]:
        return [move for move, as_read in self.moves if move != as_read]


class Bounds(NamedTuple):
    """The bounds within which a decision may go beyond what regions ask for."""

    pushable: Collection[int]  # epochs that wait elsewhere: current, and held so
    limits: Mapping[str, int]  # of the quota keys of which something may be pushed
    # By region and pool: how much more overage it may report without people's approval. Only where it may report any.
    overage_left: Mapping[str, Mapping[Key, int]]


# --- which pools to lock ----------------------------------------------------------------------------------------------


def pools_to_lock(exchanges: Iterable[Matched], now: datetime) -> set[Key]:
    """Return the keys that exchanges are about; for those of an ended period, also the current period's.

    The ended period may be closed, and then the current one is where its usage is booked.
    """
    about = {key for each in exchanges if each.is_answered for key in each.keys}
    return about | {open_key(key, now) for key in about if is_over(key.period, now)}


def keys_without_pool(exchanges: Iterable[Matched], pools: Mapping[Key, LockedPool]) -> tuple[set[Key], set[Key]]:
    """Return the keys that need a pool and have none: those that are wanted, and those that are only reported."""
    missing = {key for each in exchanges for key in each.new_keys if key not in pools or not pools[key].exists}
    wanted = {request.key for each in exchanges for request in each.requests} & missing
    return wanted, missing - wanted


def needed_pools(exchanges: Iterable[Matched]) -> set[Key]:
    """Return the keys whose pools must exist, so that what was used or is wanted has a place."""
    return {key for each in exchanges for key in each.new_keys}


def without_held(exchanges: Iterable[Matched], pools: Mapping[Key, LockedPool]) -> dict[Key, LockedPool]:
    """Leave out closed periods of reports that are kept for people: nothing is booked there."""
    held = {key for each in exchanges for key in each.held}
    return {key: locked for key, locked in pools.items() if locked.exists or key not in held}


def closed_keys(pools: Mapping[Key, LockedPool]) -> list[Key]:
    return [key for key, locked in pools.items() if locked.closed_at]


def late_pools(closed: Iterable[Key], corrections: Iterable[Correction], now: datetime) -> set[Key]:
    """Return the keys of open pools in which late usage of closed ones may be booked: they must exist."""
    return {open_key(key, now) for key in closed} | {each.key for each in corrections}


def reporting_epochs(exchanges: Iterable[Matched]) -> set[int]:
    return {each.epoch for each in exchanges if each.is_answered}


# --- how pools are divided --------------------------------------------------------------------------------------------


def divisions_of(catalogue: Catalogue, pools: Iterable[Key], moves: Iterable[Move]) -> dict[Key, Division]:
    """Return how people divided each pool. `moves`: all that are open of these pools."""
    unless_set, by_pool = by_weight(catalogue), defaultdict[Key, list[Move]](list)
    for move in moves:
        by_pool[move.key].append(move)
    return {key: division_of(catalogue, key, by_pool.get(key, ()), unless_set) for key in pools}


def moved_keys(pools: Mapping[Key, LockedPool]) -> list[Key]:
    """Return the pools whose open moves have to be read."""
    return [key for key, locked in pools.items() if locked.open_moves]


def divided_keys(divisions: Mapping[Key, Division], quotas: Mapping[str, Quota]) -> list[Key]:
    """Return the pools of which units are kept for or from a region, or for an overdraft: all their leases count."""
    return [key for key, division in divisions.items() if not division.is_plain or _has_overdraft(quotas, key)]


def _has_overdraft(quotas: Mapping[str, Quota], key: Key) -> bool:
    allowance = allowance_of_key(quotas, key)
    return allowance is not None and overdraft_of(allowance) > 0


def allowance_of_key(quotas: Mapping[str, Quota], key: Key) -> AllowanceQuota | None:
    spec = quotas.get(parse_quota_key(key.quota)[0])
    return spec if isinstance(spec, AllowanceQuota) else None


# --- lock -------------------------------------------------------------------------------------------------------------


def lock(
    exchanges: Sequence[Matched],
    pools: Mapping[Key, LockedPool],
    read: Iterable[Lease],
    corrections: Iterable[Correction],
    divisions: Mapping[Key, Division],
    quotas: Mapping[str, Quota],
    now: datetime,
) -> Locked:
    """Join what was read behind the locks, and add the leases that must exist from now on.

    `read`: of the pools, all leases that may still be granted to, and those of the epochs that report; of divided
    pools, all.
    """
    leases = {(lease.epoch, lease.key): lease for lease in read}
    new_leases = list(_new_leases(exchanges, leases, now))
    leases |= {(lease.epoch, lease.key): lease for lease in new_leases}
    by_pool: dict[Key, list[Lease]] = defaultdict(list)
    for lease in leases.values():
        by_pool[lease.key].append(lease)
    return Locked(
        [_with_leases(each, leases) for each in exchanges],
        pools,
        leases,
        by_pool,
        new_leases,
        _lates(exchanges, leases, pools, corrections, now),
        frozenset(closed_keys(pools)),
        divisions,
        [(move, copy(move)) for division in divisions.values() for move in division.moves],
        quotas,
        AsRead(
            states={name: lease.state for name, lease in leases.items()},
            grantable={key: locked.pool.grantable for key, locked in pools.items()},
            used={key: usage_of(locked.pool) for key, locked in pools.items()},
            overdrawn={name: lease.overdrawn for name, lease in leases.items() if lease.overdraft},
        ),
    )


def _with_leases(each: Matched, leases: Mapping[LeaseName, Lease]) -> LockedExchange:
    epoch = each.epoch
    return LockedExchange(each, {key: leases[epoch, key] for key in each.keys if (epoch, key) in leases})


def _new_leases(exchanges: Iterable[Matched], leases: Mapping[LeaseName, Lease], now: datetime) -> Iterator[Lease]:
    for each in exchanges:
        lane, epoch = each.exchange.lane, each.epoch
        is_current = lane is not None and lane.epoch_state is EpochState.CURRENT
        ended = LeaseState.LOST if lane and lane.lost_data else LeaseState.FENCED
        state = LeaseState.ACTIVE if is_current else ended
        for key in each.new_keys:
            if (epoch, key) not in leases:
                yield Lease(key, epoch, each.exchange.region, now, now, state)


def _lates(
    exchanges: Iterable[Matched],
    leases: Mapping[LeaseName, Lease],
    pools: Mapping[Key, LockedPool],
    corrections: Iterable[Correction],
    now: datetime,
) -> dict[LeaseName, Late]:
    lates: dict[LeaseName, Late] = {}
    if not closed_keys(pools):
        return lates
    for each in exchanges:
        found = [leases[name] for key in each.keys if (name := (each.epoch, key)) in leases]
        if lane := each.exchange.lane:
            lates |= {
                (late.lease.epoch, late.lease.key): late for late in lates_of(lane, found, pools, corrections, now)
            }
    return lates


def lates_of(
    lane: Lane,
    leases: Iterable[Lease],
    pools: Mapping[Key, LockedPool],
    corrections: Iterable[Correction],
    now: datetime,
) -> Iterator[Late]:
    """Yield those of a lane's leases whose periods are closed, each with its corrections since."""
    known: dict[LeaseName, list[Correction]] = defaultdict(list)
    for each in corrections:
        known[each.epoch, Key(each.key.quota, each.charge_period)].append(each)
    open_pools = {key: locked.pool for key, locked in pools.items() if not locked.closed_at}
    for lease in leases:
        if closed_at := pools[lease.key].closed_at:
            about = known[lease.epoch, lease.key]
            closed, returns_count = pools[lease.key].pool, not lane.lost_data
            yield late_of(lease, closed_at, about, open_pools, now, closed=closed, returns_count=returns_count)


# --- how far a decision may go ----------------------------------------------------------------------------------------


class RegionalOverage(NamedTuple):
    """Names a region's overage of one pool."""

    region: str
    key: Key


def waiting_epochs(locked: Locked, now: datetime) -> set[int]:
    """Return other epochs that wait for what may become available here. To push to them, their epochs must be held."""
    here = {each.matched.epoch for each in locked.exchanges}
    return {lease.epoch for lease in locked.leases.values() if lease.epoch not in here and is_waiting(lease, now)}


def pushable_quotas(locked: Locked, pushable: Collection[int]) -> set[str]:
    """Return the quota keys of which something may be pushed: their limits must be known."""
    return {lease.key.quota for lease in locked.leases.values() if lease.epoch in pushable and lease.waiting}


def possible_overages(locked: Locked) -> set[RegionalOverage]:
    """Return where a report may become overage, so that what the region has used beyond its grants must be known."""
    return {
        RegionalOverage(each.exchange.region, lease.key)
        for each, leases in locked.exchanges
        if each.is_applied
        for reported in each.exchange.batch.leases
        if (lease := leases.get(key_of(reported))) and may_become_overage(reported, lease)
    }


def limits_of(catalogue: Catalogue, quotas: Iterable[str]) -> dict[str, int]:
    """Return the limits in force. A quota without one is left out: nothing of it is granted."""
    found = {quota: entitlement(catalogue, quota) for quota in quotas}
    return {quota: each.limit for quota, each in found.items() if isinstance(each, Entitlement)}


def bounds_of(
    locked: Locked,
    pushable: Collection[int],
    overages: Mapping[RegionalOverage, int],
    limits: Mapping[str, int],
    claims: ClaimBounds,
) -> Bounds:
    """Return the bounds of a decision. `overages`: what each region has used beyond its grants until now."""
    overage_left: dict[str, dict[Key, int]] = defaultdict(dict)
    for (region, key), overage in overages.items():
        pool = locked.pools[key].pool
        limit = max(limits.get(key.quota, 0), pool.spendable + pool.soft_cap_extension)
        overage_left[region][key] = max(0, claims.most_overage(limit) - overage)
    return Bounds(pushable, limits, overage_left)
