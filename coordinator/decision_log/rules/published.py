"""The messages in which decisions go to Kafka.

Their schema has a version. A version only gets fields that readers may ignore; whatever else changes is another
version. `compose/kafka/decision.schema.json` is made of this module, and a test compares both.
"""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from coordinator.decision_log.rules.rows import DecisionRow
from protocol.decision_log.messages import LoggedPolicy


class PublishedDecision(Struct, frozen=True):
    """A decision, equal denials of one second (`count` of them), or how many decisions were lost.

    A message may come twice: `id` is the same then. An admission stands for `weight` admissions, of which it is the
    sample. Users, API keys, addresses and labels are hashed, unless the limits document says otherwise.
    """

    schema_version: Literal[1]
    id: UUID
    at: Annotated[datetime, Meta(description="by the clock of the agent's machine, in UTC")]
    last_at: Annotated[datetime | None, Meta(description="of several decisions, the last")]
    count: Annotated[int, Meta(ge=1)]
    weight: Annotated[float, Meta(ge=1)]
    outcome: Literal["denied", "admitted", "shadow_denied", "lost"]
    reason: str | None
    tenant: Annotated[str, Meta(description="empty if the request named none; it is the message's key")]
    region: str
    agent: str
    epoch: int | None
    policy: Annotated[str | None, Meta(description="the one that denied; of an admission the tightest")]
    quota: str | None
    key: Annotated[str | None, Meta(description="of the quota")]
    cost: int | None
    limit: int | None
    share: Annotated[int | None, Meta(description="what the region could use of the limit")]
    remaining: int | None
    retry_after_ms: int | None
    degraded: str | None
    mode: str | None
    operation: Annotated[str | None, Meta(description="a digest of tenant and operation id")]
    latency_us: Annotated[int | None, Meta(description="null: decided without the store")]
    subject: dict[str, str]
    others: Annotated[list[LoggedPolicy], Meta(description="what the other policies answered")]


def message_of(row: DecisionRow) -> bytes:
    return msgspec.json.encode(
        PublishedDecision(
            schema_version=1,
            id=row.id,
            at=row.at,
            last_at=row.last_at,
            count=row.times,
            weight=row.weight,
            outcome=row.outcome,  # type: ignore[arg-type]  # agents' messages have been validated
            reason=row.reason,
            tenant=row.tenant,
            region=row.region,
            agent=row.agent,
            epoch=row.epoch,
            policy=row.policy,
            quota=row.name,
            key=row.quota,
            cost=row.cost,
            limit=row.limit_units,
            share=row.share,
            remaining=row.remaining,
            retry_after_ms=row.retry_after_ms,
            degraded=row.degraded,
            mode=row.mode,
            operation=row.operation,
            latency_us=row.latency_us,
            subject=msgspec.json.decode(row.subject or "{}"),
            others=msgspec.json.decode(row.others or "[]", type=list[LoggedPolicy]),
        )
    )


def message_schema() -> dict[str, Any]:
    """Return the JSON Schema of a message."""
    (schema,), parts = msgspec.json.schema_components([PublishedDecision], ref_template="#/$defs/{name}")
    name = schema["$ref"].rpartition("/")[2]
    whole = parts.pop(name)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "$defs": parts}
