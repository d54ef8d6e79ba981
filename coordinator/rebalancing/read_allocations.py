"""Read allocations: how the units of each allowance are divided over regions, as they last reported."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

import asyncpg
from msgspec import Struct
from sqlalchemy import BigInteger, Text, and_, any_, exists, or_, select, tuple_
from sqlalchemy.dialects.postgresql import ARRAY

from coordinator.database.compiled import CompiledStatement, compiled, constant, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import Timestamp, lease, period, pool
from coordinator.exchange.rules.balances import Key, Lease
from coordinator.exchange.statements.leases import read_leases
from coordinator.limits.in_force import Documents
from coordinator.limits.read_catalogue import read_catalogue
from coordinator.limits.rules.entitlement import Catalogue
from coordinator.rebalancing.moves import read_moves
from coordinator.rebalancing.rules.division import Division, Move, by_weight, division_of
from coordinator.rebalancing.rules.region_settings import NOTHING_SET
from protocol.lease import LeaseState
from protocol.limits.document import LimitValue

LONGEST = timedelta(days=366)  # whatever lasts longer does not run dry


class RegionAllocation(Struct, frozen=True, kw_only=True):
    """One region's part of an allowance, in all of its epochs."""

    region: str
    state: str  # of its newest lease
    epoch: int
    granted: int
    returned: int
    overage: int
    overdraft: int  # kept for it: so much it may spend beyond its lease while it is cut off
    overdrawn: int  # so much it did, as it last said
    consumed: int
    outstanding: int
    idle: int  # of what is outstanding, what could be given back
    suspense: int
    demand_milli: int  # thousandths of a unit a second, as it last said
    waiting: int  # units of requests that waited for more then
    incoming: int  # on its way here from other regions
    dry_at: datetime | None  # when it has spent what it holds, if it goes on so; None: it does not spend
    reported_at: datetime
    expires_at: datetime  # after that nothing of it is spent; with the margin
    weight: int
    floor: LimitValue | None
    hold: int | None  # a floor of this period that ends by itself
    hold_until: datetime | None
    ceiling: LimitValue | None
    limit: int | None  # its own, where each region has one; None: they share that of the quota


class Allocation(Struct, frozen=True, kw_only=True):
    quota: str
    period: str
    state: str
    mode: str  # of the quota: leased, regional (the limit is each region's) or central
    funded: int  # what all regions together may spend
    unallocated: int  # what no region holds
    in_transit: int  # of that, what is on its way to a region
    outstanding: int
    consumed: int
    suspense: int
    overage: int
    regions: list[RegionAllocation]


class AllocationFilter(NamedTuple):
    """Which allowances are wanted; without a condition all. Without periods, those that run or are unaccounted for."""

    quotas: Sequence[str] = ()
    tenants: Sequence[str] = ()
    regions: Sequence[str] = ()
    periods: Sequence[str] = ()


async def read_allocations(
    connection: Connection, documents: Documents, question: AllocationFilter, after: Key, count: int, now: datetime
) -> list[Allocation]:
    """Return at most `count` allowances by quota and period that come after the given one. It needs a snapshot."""
    given = {name: list(values) for name, values in question._asdict().items() if values}
    page = {"quota": after.quota, "period": after.period, "count": count, "now": now}
    rows = await connection.fetch(*_pools(tuple(given)).with_values(**given, **page))
    keys = [Key(row["quota"], row["period"]) for row in rows]
    catalogue = await read_catalogue(connection, documents, [key.quota for key in keys], now)
    leases = await read_leases(connection, keys, (), keys)
    moves = await read_moves(connection, [key for key, row in zip(keys, rows, strict=True) if row["open_moves"]])
    return [
        _allocation(
            row,
            [lease for lease in leases if lease.key == key],
            [move for move in moves if move.key == key],
            catalogue,
            question.regions,
        )
        for key, row in zip(keys, rows, strict=True)
    ]


def _allocation(
    row: asyncpg.Record, leases: Sequence[Lease], moves: Sequence[Move], catalogue: Catalogue, regions: Sequence[str]
) -> Allocation:
    wanted = sorted({lease.region for lease in leases if not regions or lease.region in regions})
    division = division_of(catalogue, Key(row["quota"], row["period"]), (), by_weight(catalogue))
    plain = ("quota", "period", "state", "funded", "unallocated", "outstanding", "consumed", "suspense", "overage")
    return Allocation(
        **{name: row[name] for name in plain},
        mode=division.mode.value,
        in_transit=sum(move.travelling for move in moves),
        regions=[
            _region(region, [lease for lease in leases if lease.region == region], moves, catalogue, division)
            for region in wanted
        ],
    )


def _region(
    region: str, leases: Sequence[Lease], moves: Iterable[Move], catalogue: Catalogue, division: Division
) -> RegionAllocation:
    newest = max(leases, key=lambda lease: lease.epoch)
    setting = catalogue.settings_of(newest.key.quota).get(region, NOTHING_SET)
    hold = catalogue.hold_of(newest.key.quota, newest.key.period, region)
    is_active = newest.state is LeaseState.ACTIVE
    summed = ("granted", "returned", "overage", "overdraft", "overdrawn", "consumed", "outstanding", "suspense")
    return RegionAllocation(
        region=region,
        state=newest.state.value,
        epoch=newest.epoch,
        **{name: sum(getattr(lease, name) for lease in leases) for name in summed},
        idle=newest.outstanding if is_active else 0,
        demand_milli=newest.demand_milli,
        waiting=newest.waiting,
        incoming=sum(move.travelling for move in moves if move.target == region),
        dry_at=_dry_at(newest) if is_active else None,
        reported_at=newest.reported_at,
        expires_at=newest.expires_at,
        weight=catalogue.weights_of(newest.key.quota).get(region, 0),
        floor=setting.floor,
        hold=None if hold is None else hold.units,
        hold_until=None if hold is None else hold.until,
        ceiling=setting.ceiling,
        limit=division.own_of(region) if division.is_regional else None,
    )


def _dry_at(lease: Lease) -> datetime | None:
    if not lease.demand_milli or lease.outstanding * 1000 > lease.demand_milli * LONGEST.total_seconds():
        return None
    return lease.reported_at + timedelta(milliseconds=lease.outstanding * 1_000_000 // lease.demand_milli)


_QUOTAS = parameter("quotas", ARRAY(Text))
_CONDITIONS = {
    "quotas": or_(pool.c.name == any_(_QUOTAS), pool.c.quota == any_(_QUOTAS)),
    "tenants": pool.c.tenant == any_(parameter("tenants", ARRAY(Text))),
    "regions": exists().where(
        *(lease.c.quota == pool.c.quota, lease.c.period == pool.c.period),
        lease.c.region == any_(parameter("regions", ARRAY(Text))),
    ),
    "periods": pool.c.period == any_(parameter("periods", ARRAY(Text))),
}
_RUNS_OR_IS_NOT_SETTLED = and_(
    period.c.state != constant("closed"),
    or_(
        period.c.ends_at > parameter("now", Timestamp),
        pool.c.outstanding > constant(0),
        pool.c.suspense > constant(0),
    ),
)


@lru_cache(maxsize=32)
def _pools(conditions: tuple[str, ...]) -> CompiledStatement:
    wanted = [_CONDITIONS[name] for name in conditions]
    if "periods" not in conditions:
        wanted.append(_RUNS_OR_IS_NOT_SETTLED)
    after = tuple_(parameter("quota", Text), parameter("period", Text))
    return compiled(
        select(pool, period.c.state)
        .join_from(pool, period, period.c.id == pool.c.period)
        .where(*wanted, tuple_(pool.c.quota, pool.c.period) > after)
        .order_by(pool.c.quota, pool.c.period)
        .limit(parameter("count", BigInteger))
    )
