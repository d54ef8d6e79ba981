"""Hints to other regions about a pool: give idle units back, or ask for units that became available."""

from datetime import datetime, timedelta

from coordinator.exchange.rules.allocation import LAST_KEPT_MS, demand_milli_of, units_in
from coordinator.exchange.rules.balances import Lease, Pool
from coordinator.exchange.rules.granting import PoolView, is_waiting
from coordinator.notice import Notice
from coordinator.rebalancing.rules.division import Division
from protocol.messages import Signal

ANSWERING = timedelta(milliseconds=100)  # about as long as a signal and its answer are under way


def has_nothing_to_signal(pool: Pool, division: Division, was_grantable: int) -> bool:
    """True if no region has to be signalled, whichever reported: units were and are available, and to all alike."""
    if not (division.is_plain and was_grantable and pool.grantable):
        return False
    return not has_fallen(was_grantable, pool.grantable, pool.funded)


def recall_signals(lease: Lease, view: PoolView, was_grantable: int, now: datetime) -> list[Notice]:
    """Recall what lies idle in other regions.

    That is when nothing is left and a region waits, and long before that each time that the pool has fallen to a
    quarter. A region keeps what it will need itself in so short a time.
    """
    keep_ms = _keep_ms(lease, view, was_grantable, now)
    if keep_ms is None:
        return []
    keeps = [(other, _keep(other, view, keep_ms, now)) for other in view.others]
    quota = lease.key.quota
    return [
        Notice(Signal(kind="recall", quota=quota, keep=keep), other.region)
        for other, keep in keeps
        if other.outstanding > keep
    ]


def _keep(other: Lease, view: PoolView, keep_ms: int, now: datetime) -> int:
    """Return what a lease keeps by its demand.

    The demand may have ended: if nothing is left it keeps at most half, so after several recalls it keeps nothing.
    """
    needs = units_in(demand_milli_of(other, now), keep_ms)
    if not view.grantable:
        needs = min(needs, other.outstanding // 2)
    return max(needs, other.outstanding - view.spare_of(other))


def _keep_ms(lease: Lease, view: PoolView, was_grantable: int, now: datetime) -> int | None:
    """Return how long half of what is left lasts for all; if nothing is left, how long a grant takes."""
    if not view.grantable:
        return LAST_KEPT_MS if lease.waiting and not _are_answering(view, now) else None
    grantable = view.pool.grantable
    if not view.demand_milli or not has_fallen(was_grantable, grantable, view.pool.funded):
        return None
    return grantable * 1_000_000 // (2 * view.demand_milli)


def _are_answering(view: PoolView, now: datetime) -> bool:
    """True if another region began to wait just before, so that all were signalled: their answers are under way."""
    return any(each.waiting and now - each.reported_at < ANSWERING for each in view.others)


def has_fallen(was: int, units: int, limit: int) -> bool:
    """Tell whether a level fell through a quarter of the limit, or a quarter of that, and so on."""
    mark = limit // 4
    while mark > was:
        mark //= 4
    return units < mark


def availability_signals(view: PoolView, was_grantable: int, now: datetime) -> list[Notice]:
    """Signal regions that wait, once, when a pool that was empty has units again."""
    if was_grantable or not view.pool.grantable:
        return []
    signal = Signal(kind="grant", quota=view.pool.key.quota)
    return [Notice(signal, other.region) for other in view.others if is_waiting(other, now)]


def grant_signal(lease: Lease) -> Notice:
    """Tell a region that units were granted to it, so that it fetches them."""
    return Notice(Signal(kind="grant", quota=lease.key.quota), lease.region)
