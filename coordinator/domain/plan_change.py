"""What another plan does to an allowance in the middle of its period.

A higher limit is there at once, and whoever waits is told. A lower one takes back nothing that was admitted: only what
nobody holds, and what regions hold is asked back from each by its part. What is then still `over` the limit was used,
or comes back as regions hear of it, and until then nothing more is granted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from coordinator.domain.allocation import fund
from coordinator.domain.books import Entry, Lease, Pool
from coordinator.domain.notice import Notice
from protocol.messages import Signal


class LimitEffect(Struct, frozen=True, kw_only=True):
    """On one allowance, in the period that runs."""

    quota: str
    period: str
    was: int
    limit: int
    consumed: int
    outstanding: int  # with regions; as far as it is over the limit they are asked for it
    over: int  # beyond the limit: used, or with regions


class Changed(NamedTuple):
    effect: LimitEffect
    notices: Sequence[Notice]


def change_limit(entry: Entry, pool: Pool, leases: Sequence[Lease], limit: int) -> Changed:
    was = pool.funded
    fund(entry, pool, limit)
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
    return Changed(effect, list(_recalls(leases, effect)))


def _recalls(leases: Sequence[Lease], effect: LimitEffect) -> Iterator[Notice]:
    held = sum(lease.outstanding for lease in leases)
    for lease in leases if effect.over else ():
        spare = -(-min(effect.over, held) * lease.outstanding // max(held, 1))
        if spare:
            keep = lease.outstanding - spare
            yield Notice(Signal(kind="recall", quota=effect.quota, keep=keep), lease.region)
