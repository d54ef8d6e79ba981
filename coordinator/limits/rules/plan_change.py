"""Rules for a plan change in the middle of a period.

A higher limit applies at once, and waiting regions are signalled. A lower limit takes back nothing that was admitted:
only unallocated units, and each region is asked to return its part of the rest. What is still `over` the limit was
used, or will be returned; until then nothing more is granted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from coordinator.exchange.rules.allocation import fund
from coordinator.exchange.rules.balances import Lease, Pool
from coordinator.exchange.rules.posting import Entry
from coordinator.notice import Notice
from coordinator.rebalancing.rules.division import Division, funded_for, spare_of
from protocol.lease import LeaseState
from protocol.messages import Signal


class LimitEffect(Struct, frozen=True, kw_only=True):
    """The effect on one allowance, in the current period."""

    quota: str
    period: str
    was: int
    limit: int  # in regional mode, the sum of all regions' limits
    consumed: int
    outstanding: int  # held by regions; the part beyond the limit is recalled
    over: int  # beyond the limit: used, or held by regions


class Changed(NamedTuple):
    effect: LimitEffect
    notices: Sequence[Notice]


def change_limit(entry: Entry, pool: Pool, leases: Sequence[Lease], limit: int, division: Division) -> Changed:
    """Change a limit. `leases` are all of the pool in regional mode, else those that may be granted to."""
    was = pool.funded
    fund(entry, pool, funded_for(limit, pool, leases, division))
    limit = sum(map(division.own_of, division.parts)) if division.is_regional else limit
    effect = LimitEffect(
        quota=pool.key.quota,
        period=pool.key.period,
        was=was,
        limit=limit,
        consumed=pool.consumed,
        outstanding=pool.outstanding,
        over=pool.funded - limit,
    )
    if limit > was:
        return Changed(effect, [Notice(Signal(kind="grant", quota=pool.key.quota))])
    active = [lease for lease in leases if lease.state is LeaseState.ACTIVE]
    if division.is_regional:
        spares = [(lease, spare_of(lease, pool, leases, division)) for lease in active]
    else:
        spares = list(_spares(active, effect))
    return Changed(effect, [_recall(lease, spare) for lease, spare in spares if spare])


def _spares(leases: Sequence[Lease], effect: LimitEffect) -> Iterator[tuple[Lease, int]]:
    """Return each region's part of the excess."""
    held = sum(lease.outstanding for lease in leases)
    for lease in leases if effect.over else ():
        yield lease, -(-min(effect.over, held) * lease.outstanding // max(held, 1))


def _recall(lease: Lease, spare: int) -> Notice:
    return Notice(Signal(kind="recall", quota=lease.key.quota, keep=lease.outstanding - spare), lease.region)
