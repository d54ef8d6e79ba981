"""Read what is billed, for any number of periods and tenants at once. Needs a snapshot.

Usage is read from the rollups. Estimates and replacements are read from leases and corrections, less what was moved
since the seal. Each adjustment is read from its own row, if its movement is sealed.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import NamedTuple

import asyncpg
from sqlalchemy import BigInteger, ColumnElement, Text, and_, any_, case, false, func, select, union_all
from sqlalchemy.dialects.postgresql import ARRAY

from coordinator.adjustments.rules import AdjustmentKind
from coordinator.database import compiled as query
from coordinator.database.compiled import compiled, constant, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import correction, lease, pool, report, transfer
from coordinator.exchange.rules.posting import OVERAGE
from coordinator.proof.seal import Sealed
from coordinator.usage.read_usage import read_usage
from coordinator.usage.rules.statement import Amount, LineAdjustment, LineKind, adjusted
from coordinator.usage.rules.usage import Dimension, UsageQuestion

NEVER = 2**63 - 1


class Books(NamedTuple):
    """The part of the ledger that is read: everything up to a seal, or without one everything."""

    periods: Sequence[str]  # in which it is booked
    tenants: Sequence[str]
    sealed: Sealed | None


class BookedAmount(NamedTuple):
    """An amount, with the period in which it is booked and the tenant who is billed."""

    period: str
    tenant: str
    amount: Amount


async def read_amounts(connection: Connection, books: Books, at_most: int) -> list[BookedAmount]:
    """Return up to about `at_most` amounts; as many or more mean that there may be others."""
    read = (_usage, _estimates, _adjustments)
    return [amount for each in read for amount in await each(connection, books, at_most)]


# Late usage was used before the period: only the period in which it is booked counts.
_EVER = [datetime(1900, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)]
_BY = [
    Dimension.PERIOD,
    Dimension.TENANT,
    Dimension.QUOTA,
    Dimension.CHARGE_PERIOD,
    Dimension.REGION,
    Dimension.COUNTED_AS,
]


def question_of(books: Books) -> UsageQuestion:
    return UsageQuestion(_EVER, _BY, {Dimension.PERIOD: list(books.periods), Dimension.TENANT: list(books.tenants)})


async def _usage(connection: Connection, books: Books, at_most: int) -> list[BookedAmount]:
    position, last = books.sealed or (None, None)
    page = await read_usage(connection, question_of(books), position, 0, at_most, last)
    return [_used(*map(str, row.dimensions.values()), units=row.units) for row in page.rows]


def _used(
    period: str, tenant: str, quota: str, charge_period: str, region: str, counted_as: str, *, units: int
) -> BookedAmount:
    kind = _KINDS[counted_as == OVERAGE, charge_period != period]
    return BookedAmount(period, tenant, Amount(kind, quota, charge_period, region, units))


# (is overage, is late)
_KINDS = {
    (False, False): LineKind.USAGE,
    (True, False): LineKind.OVERAGE,
    (False, True): LineKind.LATE_USAGE,
    (True, True): LineKind.LATE_OVERAGE,
}


async def _estimates(connection: Connection, books: Books, at_most: int) -> list[BookedAmount]:
    position, last = books.sealed or (NEVER, NEVER)
    named = {"periods": list(books.periods), "tenants": list(books.tenants)}
    statement = _estimated().with_values(**named, position=position, last=last, count=at_most)
    rows = await connection.fetch(*statement)
    return [BookedAmount(period, tenant, Amount(LineKind(kind), *rest)) for period, tenant, kind, *rest in rows]


async def _adjustments(connection: Connection, books: Books, at_most: int) -> list[BookedAmount]:
    """Return adjustments by the period in which they are booked, whatever period they are about."""
    _, last = books.sealed or (NEVER, NEVER)
    rows = await connection.fetch(_ADJUSTMENTS, list(books.periods), list(books.tenants), last, at_most)
    return [BookedAmount(row["booked_in"], row["tenant"], _adjusted(row)) for row in rows]


def _adjusted(row: asyncpg.Record) -> Amount:
    adjustment = LineAdjustment(
        id=row["id"],
        quota_key=row["quota"],
        units=row["units"],
        document=row["document"],
        reason=row["reason"],
        approved_at=row["approved_at"],
        path=f"/v1/adjustments/{row['id']}",
    )
    return adjusted(AdjustmentKind(row["kind"]), row["name"], row["period"], adjustment)


# --- the statements ---------------------------------------------------------------------------------------------------

_ADJUSTMENTS = """
SELECT adjustment.*, pool.name, pool.tenant
FROM adjustment JOIN pool ON (pool.quota, pool.period) = (adjustment.quota, booked_in)
WHERE booked_in = ANY ($1::text[]) AND tenant = ANY ($2::text[]) AND EXISTS (
    SELECT FROM transfer WHERE movement_id = adjustment.id AND transfer.period = booked_in AND transfer.id <= $3)
ORDER BY adjustment.id LIMIT $4
"""

_POSITION, _LAST = parameter("position", BigInteger), parameter("last", BigInteger)
IN_POOL = and_(pool.c.quota == transfer.c.quota, pool.c.period == transfer.c.period)
IN_REPORT = and_(report.c.epoch == transfer.c.epoch, report.c.lane == transfer.c.lane, report.c.seq == transfer.c.seq)
HAS_NO_REPORT = transfer.c.seq.is_(None)
IS_OVERAGE = func.coalesce(transfer.c.dimensions.bool_op("?")(constant("counted_as")), false())


def units_if(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return case((condition, transfer.c.units), else_=constant(0))


# How many units of a transfer belong to each kind of line.
_INCLUDED = units_if(and_(transfer.c.dst == constant("consumed"), ~IS_OVERAGE))
_BEYOND = units_if(and_(transfer.c.dst == constant("consumed"), IS_OVERAGE))
UNITS_OF_KIND = {
    LineKind.USAGE: _INCLUDED,
    LineKind.OVERAGE: _BEYOND,
    LineKind.LATE_USAGE: _INCLUDED,
    LineKind.LATE_OVERAGE: _BEYOND,
    LineKind.ESTIMATED: units_if(transfer.c.dst == constant("estimated"))
    - units_if(transfer.c.src == constant("estimated")),
    LineKind.REPLACED: -units_if(transfer.c.cause == constant("replaces_estimate")),
}


@cache
def _estimated() -> query.CompiledStatement:
    """Select what was estimated and replaced by now, less what was moved since the position."""
    its = (
        pool.c.period == any_(parameter("periods", ARRAY(Text))),
        pool.c.tenant == any_(parameter("tenants", ARRAY(Text))),
    )
    books = (pool.c.period.label("booked_in"), pool.c.tenant)
    key = (pool.c.name, lease.c.period.label("charge_period"), lease.c.region)
    of_leases = (
        select(*books, constant("estimated").label("kind"), *key, lease.c.estimated.label("units"))
        .join_from(pool, lease, and_(lease.c.quota == pool.c.quota, lease.c.period == pool.c.period))
        .where(*its)
    )
    late = correction.c
    of_corrections = [
        select(*books, constant(kind), pool.c.name, late.charge_period, late.region, units)
        .join_from(pool, correction, and_(late.quota == pool.c.quota, late.period == pool.c.period))
        .where(*its)
        for kind, units in (("estimated", late.estimated), ("replaced", -late.replaced))
    ]
    about = (pool.c.name, transfer.c.charge_period, transfer.c.region)
    moved_since = [
        select(*books, constant(kind.value), *about, -UNITS_OF_KIND[kind])
        .select_from(moved.join(pool, IN_POOL))
        .where(*its, is_since)
        for kind in (LineKind.ESTIMATED, LineKind.REPLACED)
        for moved, is_since in (
            (report.join(transfer, IN_REPORT), report.c.position > _POSITION),
            (transfer, and_(HAS_NO_REPORT, transfer.c.id > _LAST)),
        )
    ]
    booked = union_all(of_leases, *of_corrections, *moved_since).subquery("booked").c
    line = (booked.booked_in, booked.tenant, booked.kind, booked.name, booked.charge_period, booked.region)
    sums = select(*line, func.sum(booked.units)).group_by(*line).having(func.sum(booked.units) != constant(0))
    return compiled(sums.order_by(*line).limit(parameter("count", BigInteger)))
