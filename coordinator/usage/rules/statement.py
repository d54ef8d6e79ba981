"""What a tenant is billed for of a period: numbered lines, each of which leads down to what it is from.

A line is what was moved for one reason, of one quota, in one region, for one period of use. Billed is their sum:

    usage       used in the period, and booked in it
    overage     likewise, beyond the limit
    late_usage  used in a period that is closed, and booked in this one
    late_overage  likewise, beyond the limit of that period
    estimated   charged by two people for what a region never accounted for, as far as no evidence took its place
    replaced    below zero: an earlier statement billed it as an estimate, and the truth has come since
    credit      0: two people gave more units to spend, and what is spent of them is usage
    debit       0: two people took units away that nobody had spent
    write_off   below zero: used or estimated, and two people bill it to nobody

Each adjustment is a line of its own, of no region, for each rests on a document of its own.
"""

import base64
import binascii
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
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
    """What two people corrected; `units` is how much they moved, billed or not."""

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


# What each unit that an adjustment moves does to what is billed.
_BILLED = {AdjustmentKind.CREDIT: 0, AdjustmentKind.DEBIT: 0, AdjustmentKind.WRITE_OFF: -1}


def adjusted(kind: AdjustmentKind, quota: str, charge_period: str, adjustment: LineAdjustment) -> Amount:
    return Amount(LineKind(kind), quota, charge_period, None, _BILLED[kind] * adjustment.units, adjustment)


class StatementLine(Struct, frozen=True):
    n: int
    kind: LineKind
    quota: str
    charge_period: str
    region: str | None  # None: an adjustment is of no region
    units: int  # as they are billed
    adjustment: LineAdjustment | None
    reports: str  # the path of its way down


class Statement(Struct, frozen=True, kw_only=True):
    """The same bytes whenever it is asked for: final, or as of a sealed position."""

    id: str
    period: str
    starts_at: datetime = field(name="from")
    ends_at: datetime = field(name="to")
    tenant: str
    is_final: bool  # the period is closed: nothing is ever added
    as_of: int
    root: str | None  # of the closed period's books
    billed: int
    unaccounted: int  # regions hold so many units more, and have not reported them yet
    lines: list[StatementLine]
    limits: list[LimitInForce]  # that were in force in the period


def with_adjustments(
    limits: Iterable[LimitInForce], amounts: Iterable[Amount], start: datetime, end: datetime
) -> list[LimitInForce]:
    """Beside the limits what two people added to what could be spent, or took away, from then on."""
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
    """Names a statement in a path, whatever is in the tenant's name."""

    period: str
    tenant: str

    def __str__(self) -> str:
        return f"{self.period}.{base64.urlsafe_b64encode(self.tenant.encode()).decode().rstrip('=')}"


def parse_statement_id(text: str) -> StatementId | None:
    """None for what names none: only the one spelling counts."""
    period, _, name = text.partition(".")
    try:
        found = StatementId(period, base64.b64decode(name + "=" * (-len(name) % 4), b"-_", validate=True).decode())
    except (binascii.Error, ValueError):
        return None
    return found if str(found) == text else None


def lines_of(of: StatementId, amounts: Iterable[Amount], as_of: int | None) -> list[StatementLine]:
    """In an order that depends on nothing but what they are. Without `as_of` they are of a closed period."""
    at = "" if as_of is None else f"?as_of={as_of}"
    in_order = sorted(amounts, key=_order)
    return [
        StatementLine(n, *amount, reports=f"/v1/statements/{of}/lines/{n}/reports{at}")
        for n, amount in enumerate(in_order, 1)
    ]


def _order(amount: Amount) -> tuple[object, ...]:
    made = amount.adjustment and (amount.adjustment.approved_at, amount.adjustment.id)
    return list(LineKind).index(amount.kind), amount.quota, amount.charge_period, amount.region or "", made or ()
