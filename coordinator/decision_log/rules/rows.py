"""Rows of the decision log, made of what agents send."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from coordinator.decision_log.rules.hashing import KeyHasher
from protocol.decision_log.messages import LOST, DecisionBatch, LoggedDecision, LoggedPolicy
from protocol.identifiers import name_of_quota

AHEAD = timedelta(hours=1)  # that an agent's clock may be
_LOSS = 1 << 31  # added to the place of a loss, which is numbered apart from decisions


class DecisionRow(NamedTuple):
    """A row, with the columns of the table in their order."""

    at: datetime
    id: UUID
    tenant: str
    region: str
    agent: str
    outcome: str
    mode: str | None = None
    reason: str | None = None
    policy: str | None = None
    name: str | None = None
    quota: str | None = None
    cost: int | None = None
    limit_units: int | None = None
    share: int | None = None
    remaining: int | None = None
    retry_after_ms: int | None = None
    degraded: str | None = None
    epoch: int | None = None
    latency_us: int | None = None
    operation: str | None = None
    weight: float = 1.0
    times: int = 1
    last_at: datetime | None = None
    subject: str | None = None
    others: str | None = None


class Rows(NamedTuple):
    rows: list[DecisionRow]
    refused: int  # decisions that are malformed, or of a time that is not kept


def rows_of(region: str, batch: DecisionBatch, hasher: KeyHasher, since: datetime, now: datetime) -> Rows:
    """Return the rows of a batch. Decisions before `since`, or far ahead of now, are refused one by one."""
    rows: list[DecisionRow] = []
    for place, decision in enumerate(batch.decisions):
        at = _moment(decision.at_ms)
        if since <= at < now + AHEAD:
            try:
                rows.append(_row(region, batch, place, at, decision, hasher))
            except ValueError:  # a quota key that is none
                continue
    losses = [row for row in _losses(region, batch) if since <= row.at < now + AHEAD]
    return Rows(rows + losses, len(batch.decisions) - len(rows))


def _row(
    region: str, batch: DecisionBatch, place: int, at: datetime, decision: LoggedDecision, hasher: KeyHasher
) -> DecisionRow:
    deciding, others = _deciding(decision)
    subject = {field: value for field, value in decision.subject.items() if field != "tenant"}
    row = DecisionRow(
        at=at,
        id=_id(batch, place),
        tenant=decision.subject.get("tenant", ""),
        region=region,
        agent=batch.agent,
        outcome=decision.outcome,
        mode=decision.mode,
        reason=decision.reason,
        policy=decision.policy if deciding is None else deciding.policy,
        retry_after_ms=decision.retry_after_ms,
        degraded=decision.degraded,
        epoch=decision.epoch,
        latency_us=decision.latency_us,
        operation=decision.operation,
        weight=decision.weight,
        times=decision.count,
        last_at=None if decision.last_ms is None else _moment(decision.last_ms),
        subject=_json(hasher.subject(subject)),
        others=_json([_with_hashed_key(each, hasher) for each in others]) if others else None,
    )
    if deciding is None:
        return row
    return row._replace(
        name=name_of_quota(deciding.quota),
        quota=hasher.quota(deciding.quota),
        cost=deciding.cost,
        limit_units=deciding.limit,
        share=deciding.share,
        remaining=deciding.remaining,
    )


def _with_hashed_key(each: LoggedPolicy, hasher: KeyHasher) -> LoggedPolicy:
    return msgspec.structs.replace(each, quota=hasher.quota(each.quota))


def _deciding(decision: LoggedDecision) -> tuple[LoggedPolicy | None, Sequence[LoggedPolicy]]:
    """Return the policy that denied, of an admission the tightest enforced one, and all others."""
    policies = decision.policies
    if decision.outcome == "admitted":
        enforced = [each for each in policies if not each.shadow]
        deciding = min(enforced or policies, key=_left, default=None)
    else:
        deciding = next((each for each in policies if each.policy == decision.policy), None)
    return deciding, [each for each in policies if each is not deciding]


def _left(policy: LoggedPolicy) -> float:
    return policy.remaining / policy.limit if policy.limit else 0.0


def _losses(region: str, batch: DecisionBatch) -> Iterator[DecisionRow]:
    for place, lost in enumerate(batch.lost):
        at = _moment(lost.minute_ms)
        yield DecisionRow(at, _id(batch, _LOSS + place), "", region, batch.agent, LOST, times=lost.count)


def _id(batch: DecisionBatch, place: int) -> UUID:
    return UUID(f"{batch.id}{place:08x}")


def _moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
