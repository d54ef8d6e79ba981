"""Read which limits a tenant had in a period, from the audit up to one of its entries. Needs a snapshot.

The audit is append-only and sealed with the ledger. So the history as of a seal, or of a closed period, never changes:
later changes of limits begin later.
"""

from collections.abc import Collection
from datetime import datetime

import asyncpg
import msgspec

from coordinator.database.connection import Connection
from coordinator.limits.rules.history import (
    History,
    LimitInForce,
    Overridden,
    Subscribed,
    Version,
    limits_in_force,
    narrower,
)
from coordinator.overrides.read_overrides import Override
from coordinator.periods.read_periods import BookedPeriod
from protocol.identifiers import parse_quota_key, subject_key
from protocol.limits.document import Quota


async def read_limit_history(
    connection: Connection, tenant: str, used: Collection[str], period: BookedPeriod, last: int
) -> list[LimitInForce]:
    """Return the limits of the tenant's quotas and of the shared quotas that it used, up to the audit entry `last`."""
    names = {row["name"] for row in await connection.fetch(_QUOTAS, period.id, tenant)}
    keys = {subject_key(name, {"tenant": tenant}) for name in names}
    of_all = {subject_key(name, {}): name for name in used}
    for row in await connection.fetch(_SHARED, period.id, list(of_all)):
        names.add(of_all[row["quota"]])
        keys.add(row["quota"])
    history = await _history(connection, tenant, sorted(names), period, last)
    if own := narrower(history, period.starts_at, period.ends_at):
        keys |= await _there(connection, tenant, period.id, own)
    return limits_in_force(history, keys, period.starts_at, period.ends_at)


async def _history(connection: Connection, tenant: str, names: list[str], period: BookedPeriod, last: int) -> History:
    versions = await connection.fetch(_VERSIONS, last, period.starts_at, period.ends_at, names)
    plans = await connection.fetch(_PLANS, last, tenant)
    overrides = await connection.fetch(_OVERRIDES, last, tenant, names)
    return History(tenant, list(map(_version, versions)), [Subscribed(*row) for row in plans], _overridden(overrides))


def _version(row: asyncpg.Record) -> Version:
    specs = msgspec.json.decode(row["quotas"], type=list[Quota])
    return Version(row["recorded_at"], row["version"], {spec.name: spec for spec in specs}, row["default_plan"])


def _overridden(rows: list[asyncpg.Record]) -> list[Overridden]:
    deleted: dict[object, datetime] = {row["id"]: row["recorded_at"] for row in rows if row["is_deleted"]}
    added = [(row, msgspec.json.decode(row["details"], type=Override)) for row in rows if not row["is_deleted"]]
    return [_lasting(each, row["recorded_at"], deleted.get(row["id"])) for row, each in added]


def _lasting(override: Override, added_at: datetime, deleted_at: datetime | None) -> Overridden:
    ends = [moment for moment in (override.valid_until, deleted_at) if moment is not None]
    return Overridden(
        override.id,
        override.quota,
        override.subject,
        override.limit,
        override.reason,
        override.created_at,
        max(override.valid_from, added_at),
        min(ends) if ends else None,
    )


async def _there(connection: Connection, tenant: str, period: str, own: dict[str, dict[str, str]]) -> set[str]:
    """Return the quotas of which the tenant has a key in the period."""
    rows = await connection.fetch(_KEYS, period, tenant, sorted({parse_quota_key(key)[0] for key in own}))
    found = [(name, counted_by.items()) for name, counted_by in (parse_quota_key(row["quota"]) for row in rows)]
    return {
        key
        for key, subject in own.items()
        if any(name == parse_quota_key(key)[0] and subject.items() <= counted_by for name, counted_by in found)
    }


_QUOTAS = "SELECT DISTINCT name FROM pool WHERE period = $1 AND tenant = $2 ORDER BY name"
_SHARED = "SELECT quota FROM pool WHERE period = $1 AND quota = ANY ($2)"
_KEYS = "SELECT quota FROM pool WHERE period = $1 AND tenant = $2 AND name = ANY ($3)"
# Only the relevant quotas of each document: documents may be long, and there may be many.
_VERSIONS = """
SELECT recorded_at, version, document ->> 'default_plan' AS default_plan, coalesce((
    SELECT jsonb_agg(quota) FROM jsonb_array_elements(document -> 'quotas') AS quota
    WHERE quota ->> 'name' = ANY ($4::text[])), '[]')::text AS quotas
FROM audit JOIN limits_version ON version = (details ->> 'version')::bigint
WHERE action = 'limits.applied' AND id <= $1 AND recorded_at < $3 AND id >= coalesce((
    SELECT max(id) FROM audit WHERE action = 'limits.applied' AND id <= $1 AND recorded_at <= $2), 0)
ORDER BY id
"""
_PLANS = """
SELECT recorded_at, details ->> 'plan' FROM audit
WHERE object = $2 AND action IN ('subscription.put', 'subscription.deleted') AND id <= $1 ORDER BY id
"""
# The expression for the tenant is that of the index `audit_of_overrides`.
_OVERRIDES = """
SELECT recorded_at, action = 'override.deleted' AS is_deleted, details::text,
    coalesce(details ->> 'id', details #>> '{was,id}') AS id
FROM audit
WHERE action IN ('override.added', 'override.deleted') AND audit.id <= $1
    AND (coalesce(details #>> '{subject,tenant}', details #>> '{was,subject,tenant}', '') = $2
        OR coalesce(details #>> '{subject,tenant}', details #>> '{was,subject,tenant}', '') = '')
    AND coalesce(details ->> 'quota', details #>> '{was,quota}') = ANY ($3::text[])
ORDER BY audit.id
"""
