"""Read the decision log: single decisions, the newest first, and what all of them sum up to."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import msgspec
from msgspec import Struct
from sqlalchemy import BigInteger, ColumnElement, Float, Select, Text, Uuid, and_, any_, func, select, tuple_
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import ARRAY

from coordinator.database.compiled import CompiledStatement, compiled, constant, parameter
from coordinator.database.connection import Connection
from coordinator.database.tables import Timestamp, decision
from protocol.decision_log.messages import LOST, LoggedPolicy

MINUTE = timedelta(minutes=1)
MOST_GROUPS = 100  # of a summary: the rest is added up in one


class Decision(Struct, frozen=True):
    """A decision, or several equal denials of one second: `count` of them, the last at `last_at`.

    An admission stands for `weight` admissions, of which it is the sample. `policy` and what follows it are those of
    the policy that denied or, of an admission, of the tightest one; `others` has the other policies.
    """

    id: UUID
    at: datetime
    last_at: datetime | None
    count: int
    weight: float
    outcome: str  # denied | admitted | shadow_denied
    reason: str | None
    tenant: str | None
    subject: dict[str, str]
    region: str
    agent: str
    epoch: int | None
    policy: str | None
    quota: str | None
    key: str | None  # of the quota
    cost: int | None
    limit: int | None
    share: int | None  # what the region could use of it
    remaining: int | None
    retry_after_ms: int | None
    degraded: str | None
    mode: str | None
    operation: str | None
    latency_us: int | None  # null: decided without the store
    others: list[LoggedPolicy]


class DecisionGroup(Struct, frozen=True):
    """Decisions of one outcome, policy and reason."""

    outcome: str
    policy: str | None
    quota: str | None
    reason: str | None
    decisions: int  # of admissions an estimate
    plus_minus: int  # the estimate is so exact in 95 of 100 cases; 0: counted
    first_at: datetime
    last_at: datetime


class DecisionSummary(Struct, frozen=True):
    """The sum of all decisions that a question asks about, on whichever page they are."""

    denied: int
    shadow_denied: int
    admitted: int  # estimated
    admitted_plus_minus: int
    lost: int  # of these minutes and regions, of all tenants: agents could not keep them
    kept_from: datetime | None  # nothing is kept of before
    groups: list[DecisionGroup]  # the most frequent first


class DecisionFilter(NamedTuple):
    """Which decisions are wanted. Without a value a condition is none; `end` is exclusive."""

    start: datetime
    end: datetime
    tenant: str | None = None
    outcomes: Sequence[str] = ()
    reasons: Sequence[str] = ()
    policies: Sequence[str] = ()
    quotas: Sequence[str] = ()
    regions: Sequence[str] = ()
    keys: Sequence[str] = ()  # as they are kept
    operation: str | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None and value != ()}


class Place(NamedTuple):
    """The place of a row in the list."""

    at: datetime
    id: UUID


async def read_decisions(
    connection: Connection, question: DecisionFilter, before: Place | None, count: int
) -> list[Decision]:
    """Return at most `count` decisions before the given one, the newest first."""
    values = question.given()
    if before is not None:
        values |= {"before_at": before.at, "before_id": before.id}
    rows = await connection.fetch(*_decisions(tuple(values)).with_values(count=count, **values))
    return [_decision(row) for row in rows]


async def read_summary(connection: Connection, question: DecisionFilter) -> DecisionSummary:
    values = question.given()
    found = await connection.fetch(*summing_statement(tuple(values)).with_values(**values))
    about = {"start": question.start - MINUTE, "end": question.end} | (
        {"regions": question.regions} if question.regions else {}
    )
    lost = await connection.fetchval(*_lost(tuple(about)).with_values(**about))
    return _summary(found, lost, await read_kept_from(connection))


async def read_kept_from(connection: Connection) -> datetime | None:
    """Return the first moment that is kept, or None where there is no log."""
    kept_from: datetime | None = await connection.fetchval(_KEPT_FROM)
    return kept_from


def _decision(row: asyncpg.Record) -> Decision:
    fields = dict(row)
    fields["tenant"] = fields["tenant"] or None
    fields["subject"] = msgspec.json.decode(fields["subject"] or "{}")
    fields["others"] = msgspec.json.decode(fields["others"] or "[]", type=list[LoggedPolicy])
    return Decision(**fields)


def _summary(rows: Iterable[asyncpg.Record], lost: int | None, kept_from: datetime | None) -> DecisionSummary:
    groups, totals, variance = [], dict.fromkeys(("denied", "shadow_denied", "admitted"), 0.0), 0.0
    for row in rows:
        totals[row["outcome"]] += row["decisions"]
        variance += row["variance"]
        groups.append(
            DecisionGroup(
                outcome=row["outcome"],
                policy=row["policy"],
                quota=row["quota"],
                reason=row["reason"],
                decisions=round(row["decisions"]),
                plus_minus=_plus_minus(row["variance"]),
                first_at=row["first_at"],
                last_at=row["last_at"],
            )
        )
    return DecisionSummary(
        denied=round(totals["denied"]),
        shadow_denied=round(totals["shadow_denied"]),
        admitted=round(totals["admitted"]),
        admitted_plus_minus=_plus_minus(variance),
        lost=lost or 0,
        kept_from=kept_from,
        groups=sorted(groups, key=lambda each: -each.decisions)[:MOST_GROUPS],
    )


def _plus_minus(variance: float) -> int:
    """Return how far an estimate may be off in 95 of 100 cases. Each sample of weight w adds w(w-1) to the variance."""
    return math.ceil(1.96 * math.sqrt(variance))


# --- the statements ---------------------------------------------------------------------------------------------------

_OF = decision.c
_CONDITIONS: dict[str, ColumnElement[bool]] = {
    "start": _OF.at >= parameter("start", Timestamp),
    "end": _OF.at < parameter("end", Timestamp),
    "tenant": _OF.tenant == parameter("tenant", Text),
    "outcomes": _OF.outcome == any_(parameter("outcomes", ARRAY(Text))),
    "reasons": _OF.reason == any_(parameter("reasons", ARRAY(Text))),
    "policies": _OF.policy == any_(parameter("policies", ARRAY(Text))),
    "quotas": _OF.name == any_(parameter("quotas", ARRAY(Text))),
    "regions": _OF.region == any_(parameter("regions", ARRAY(Text))),
    "keys": _OF.quota == any_(parameter("keys", ARRAY(Text))),
    "operation": _OF.operation == parameter("operation", Text),
    "before_at": _OF.at <= parameter("before_at", Timestamp),  # for the planner, which prunes partitions by it
    "before_id": tuple_(_OF.at, _OF.id) < tuple_(parameter("before_at", Timestamp), parameter("before_id", Uuid)),
}


def _wanted(statement: Select[Any], conditions: Iterable[str]) -> Select[Any]:
    of_decisions = _OF.outcome != constant(LOST)
    return statement.where(of_decisions, *(_CONDITIONS[name] for name in conditions))


_PLAIN = (
    *(_OF.id, _OF.at, _OF.last_at, _OF.weight, _OF.outcome, _OF.reason, _OF.tenant, _OF.region, _OF.agent, _OF.epoch),
    *(_OF.policy, _OF.cost, _OF.share, _OF.remaining, _OF.retry_after_ms, _OF.degraded, _OF.mode, _OF.operation),
)


@lru_cache(maxsize=256)
def _decisions(conditions: tuple[str, ...]) -> CompiledStatement:
    """Return the statement of a page. Its rows are found in an index that has what most conditions are about."""
    places = _wanted(select(_OF.tenant, _OF.at, _OF.id), conditions).order_by(_OF.at.desc(), _OF.id.desc())
    found = places.limit(parameter("count", BigInteger)).subquery()
    rows = select(
        *_PLAIN,
        _OF.latency_us,
        _OF.times.label("count"),
        _OF.name.label("quota"),
        _OF.quota.label("key"),
        _OF.limit_units.label("limit"),
        sql_cast(_OF.subject, Text).label("subject"),
        sql_cast(_OF.others, Text).label("others"),
    )
    is_found = and_(_OF.tenant == found.c.tenant, _OF.at == found.c.at, _OF.id == found.c.id)
    return compiled(rows.join_from(found, decision, is_found).order_by(_OF.at.desc(), _OF.id.desc()))


@lru_cache(maxsize=256)
def summing_statement(conditions: tuple[str, ...]) -> CompiledStatement:
    by = (_OF.outcome, _OF.policy, _OF.name.label("quota"), _OF.reason)
    number = sql_cast(_OF.times, Float) * _OF.weight
    rows = select(
        *by,
        func.sum(number).label("decisions"),
        func.sum(_OF.weight * (_OF.weight - constant(1))).label("variance"),
        func.min(_OF.at).label("first_at"),
        func.max(func.coalesce(_OF.last_at, _OF.at)).label("last_at"),
    )
    return compiled(_wanted(rows, conditions).group_by(*by))


@lru_cache(maxsize=4)
def _lost(conditions: tuple[str, ...]) -> CompiledStatement:
    of_nobody = and_(_OF.tenant == constant(""), _OF.outcome == constant(LOST))
    total = sql_cast(func.sum(_OF.times), BigInteger)
    return compiled(select(total).where(of_nobody, *(_CONDITIONS[name] for name in conditions)))


_KEPT_FROM = """
SELECT (regexp_match(pg_get_expr(relpartbound, pg_class.oid), 'FROM \\(''([^'']+)'))[1]::timestamptz AS kept_from
FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = 'decision'::regclass
ORDER BY 1 LIMIT 1
"""
