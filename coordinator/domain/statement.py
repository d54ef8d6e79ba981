"""What a tenant is billed for of a period: numbered lines, each of which leads down to the reports that it is from.

A line is what was moved for one reason, of one quota, in one region, for one period of use. Billed is their sum:

    usage       used in the period, and booked in it
    late_usage  used in a period that is closed, and booked in this one
    estimated   charged by two people for what a region never accounted for, as far as no evidence took its place
    replaced    below zero: an earlier statement billed it as an estimate, and the truth has come since
"""

import base64
import binascii
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field


class LineKind(StrEnum):
    USAGE = "usage"
    LATE_USAGE = "late_usage"
    ESTIMATED = "estimated"
    REPLACED = "replaced"


class Amount(NamedTuple):
    kind: LineKind
    quota: str
    charge_period: str
    region: str
    units: int


class StatementLine(Struct, frozen=True):
    n: int
    kind: LineKind
    quota: str
    charge_period: str
    region: str
    units: int
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
    in_order = sorted(amounts, key=lambda each: (list(LineKind).index(each.kind), *each[1:]))
    return [
        StatementLine(n, *amount, reports=f"/v1/statements/{of}/lines/{n}/reports{at}")
        for n, amount in enumerate(in_order, 1)
    ]
