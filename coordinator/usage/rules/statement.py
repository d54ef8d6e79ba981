"""The statement of a tenant for a period: numbered lines, each of which leads to its sources.

A line is what was moved for one reason, of one quota, in one region, for one charge period. The sum is billed:

    usage         used in the period and booked in it
    overage       the same, beyond the limit
    late_usage    used in a closed period and booked in this one
    late_overage  the same, beyond the limit of that period
    estimated     charged by two people for units that a region never reported, until evidence replaces it
    replaced      negative: an earlier statement billed an estimate that reported usage has replaced since
    credit        0: two people gave more units to spend; what is spent of them is usage
    debit         0: two people took away units that were not spent
    write_off     negative: used or estimated units that two people decided not to bill

Each adjustment is a line of its own, without a region, because it has a document of its own.
"""

import base64
import binascii
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple
from uuid import UUID

from msgspec import Struct, field

from coordinator.adjustments.rules import AdjustmentKind
from coordinator.limits.rules.history import LimitInForce, LimitKind


class LineKind(StrEnum):
    USAGE = "usage"
    OVERAGE = "overage"
    LATE_USAGE = "late_usage"
    LATE_OVERAGE = "late_overage"
    ESTIMATED = "estimated"
    REPLACED = "replaced"
    CREDIT = "credit"
    DEBIT = "debit"
    WRITE_OFF = "write_off"


class LineAdjustment(Struct, frozen=True):
    """An adjustment; `units` is how many units it moved, billed or not."""

    id: UUID
    quota_key: str
    units: int
    document: str
    reason: str
    approved_at: datetime
    path: str


class Amount(NamedTuple):
    kind: LineKind
    quota: str
    charge_period: str
    region: str | None
    units: int
    adjustment: LineAdjustment | None = None


# How each adjusted unit changes what is billed.
_BILLED = {AdjustmentKind.CREDIT: 0, AdjustmentKind.DEBIT: 0, AdjustmentKind.WRITE_OFF: -1}


def adjusted(kind: AdjustmentKind, quota: str, charge_period: str, adjustment: LineAdjustment) -> Amount:
    return Amount(LineKind(kind), quota, charge_period, None, _BILLED[kind] * adjustment.units, adjustment)


class StatementLine(Struct, frozen=True):
    n: int
    kind: LineKind
    quota: str
    charge_period: str
    region: str | None  # None for an adjustment
    units: int  # billed units
    adjustment: LineAdjustment | None
    reports: str  # the path of its sources


class Statement(Struct, frozen=True, kw_only=True):
    """A statement, which is the same bytes each time: final, or as of a sealed position."""

    id: str
    period: str
    starts_at: datetime = field(name="from")
    ends_at: datetime = field(name="to")
    tenant: str
    is_final: bool  # the period is closed: nothing will be added
    as_of: int
    root: str | None  # the root hash of the closed period
    billed: int
    unaccounted: int  # units that regions hold and have not reported yet
    lines: list[StatementLine]
    limits: list[LimitInForce]  # in force during the period


class MonthPeriod(Struct, frozen=True, kw_only=True):
    """A period of a month, and what is billed in it."""

    period: str
    starts_at: datetime = field(name="from")
    ends_at: datetime = field(name="to")
    is_closed: bool
    billed: int
    path: str  # of its own statement


class MonthLine(Struct, frozen=True):
    n: int
    kind: LineKind
    quota: str
    units: int  # billed units
    adjustment: LineAdjustment | None


class MonthStatement(Struct, frozen=True, kw_only=True):
    """The statements of all periods that end in a month, as one."""

    tenant: str
    month: str
    is_final: bool  # the month is over and all its periods are closed
    as_of: int
    billed: int
    unaccounted: int
    periods: list[MonthPeriod]
    lines: list[MonthLine]


def month_lines(amounts: Iterable[Amount]) -> list[MonthLine]:
    """Return a line for each kind of each quota, and one for each adjustment."""
    in_order = sorted(amounts, key=lambda each: (list(LineKind).index(each.kind), each.quota, str(each.adjustment)))
    lines = list[MonthLine]()
    for (kind, quota, _), its in groupby(in_order, key=lambda each: (each.kind, each.quota, str(each.adjustment))):
        alike = list(its)
        units = sum(each.units for each in alike)
        lines.append(MonthLine(len(lines) + 1, kind, quota, units, alike[0].adjustment))
    return lines


def with_adjustments(
    limits: Iterable[LimitInForce], amounts: Iterable[Amount], start: datetime, end: datetime
) -> list[LimitInForce]:
    """Return the limits together with the adjustments of what could be spent, from the time of each on."""
    added = [
        _limit_of(LimitKind(amount.kind), amount.adjustment, start, end)
        for amount in amounts
        if amount.adjustment and amount.kind in (LineKind.CREDIT, LineKind.DEBIT)
    ]
    return sorted([*limits, *added], key=lambda each: (each.quota_key, each.starts_at, each.kind, str(each.id)))


def _limit_of(kind: LimitKind, adjustment: LineAdjustment, start: datetime, end: datetime) -> LimitInForce:
    return LimitInForce(
        quota_key=adjustment.quota_key,
        kind=kind,
        units=adjustment.units if kind is LimitKind.CREDIT else -adjustment.units,
        starts_at=min(max(start, adjustment.approved_at), end),
        ends_at=end,
        id=adjustment.id,
        reason=adjustment.reason,
        document=adjustment.document,
    )


class StatementId(NamedTuple):
    """The name of a statement in a path, for any tenant's name."""

    period: str
    tenant: str

    def __str__(self) -> str:
        return f"{self.period}.{base64.urlsafe_b64encode(self.tenant.encode()).decode().rstrip('=')}"


def parse_statement_id(text: str) -> StatementId | None:
    """Parse an id, or return None. Only the canonical spelling is accepted."""
    period, _, name = text.partition(".")
    try:
        found = StatementId(period, base64.b64decode(name + "=" * (-len(name) % 4), b"-_", validate=True).decode())
    except (binascii.Error, ValueError):
        return None
    return found if str(found) == text else None


def lines_of(of: StatementId, amounts: Iterable[Amount], as_of: int | None) -> list[StatementLine]:
    """Return the lines in an order that depends only on their content. Without `as_of` the period is closed."""
    at = "" if as_of is None else f"?as_of={as_of}"
    in_order = sorted(amounts, key=_order)
    return [
        StatementLine(n, *amount, reports=f"/v1/statements/{of}/lines/{n}/reports{at}")
        for n, amount in enumerate(in_order, 1)
    ]


def _order(amount: Amount) -> tuple[object, ...]:
    made = amount.adjustment and (amount.adjustment.approved_at, amount.adjustment.id)
    return list(LineKind).index(amount.kind), amount.quota, amount.charge_period, amount.region or "", made or ()
