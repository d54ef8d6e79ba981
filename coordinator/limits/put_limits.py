"""Apply a limits document, or return what applying it would change."""

from collections.abc import Callable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

import msgspec

from coordinator.access.audit import record
from coordinator.access.rules.audit import Action, Actor
from coordinator.database.connection import Connection
from coordinator.limits.read_limits import AppliedLimits, read_limits
from coordinator.limits.rules.difference import Change, differences
from coordinator.limits.rules.validation import DocumentFault
from coordinator.limits.version import advance_catalogue, lock_catalogue
from coordinator.overrides.rules import faults_of_change
from protocol.limits.document import LimitsDocument, LimitValue

MAX_TENANTS_NAMED = 3


class LimitsOutcome(StrEnum):
    APPLIED = "applied"
    UNCHANGED = "unchanged"  # in force already, or a dry run
    VERSION_DIFFERS = "version_differs"  # another change came first
    IN_USE = "in_use"  # a plan or a quota is still used


class PutLimits(NamedTuple):
    outcome: LimitsOutcome
    limits: AppliedLimits  # the document in force now
    changes: Sequence[Change] = ()
    faults: Sequence[DocumentFault] = ()


async def put_limits(
    connection: Connection,
    document: LimitsDocument,
    is_expected: Callable[[int], bool],
    by: Actor | None,
    now: datetime,
    *,
    dry_run: bool = False,
) -> PutLimits:
    """Apply a document. `is_expected` tells whether the caller knows the version that is replaced."""
    await lock_catalogue(connection)
    current = await read_limits(connection)
    changes = differences(msgspec.to_builtins(current.document), msgspec.to_builtins(document))
    if not changes and current.version:
        # Applying the document in force again succeeds, whichever version the caller expects: it changes nothing.
        return PutLimits(LimitsOutcome.UNCHANGED, current)
    if not is_expected(current.version):
        return PutLimits(LimitsOutcome.VERSION_DIFFERS, current)
    in_use = [*await _missing_plans(connection, document), *await _broken_overrides(connection, document, now)]
    if in_use:
        return PutLimits(LimitsOutcome.IN_USE, current, faults=in_use)
    if dry_run:
        return PutLimits(LimitsOutcome.UNCHANGED, current, changes)
    applied_by = by.name if by else "the owner"
    applied = AppliedLimits(await advance_catalogue(connection), document, now, applied_by)
    text = msgspec.json.encode(document).decode()
    sha256 = await connection.fetchval(_INSERT, applied.version, text, now, applied_by)
    told = {"version": applied.version, "document_sha256": sha256, "changes": changes}
    await record(connection, by, Action.LIMITS_APPLIED, "limits", told, now)
    return PutLimits(LimitsOutcome.APPLIED, applied, changes)


async def _missing_plans(connection: Connection, document: LimitsDocument) -> list[DocumentFault]:
    """Find plans that are in use but missing: without one, its tenants would be denied everything."""
    rows = await connection.fetch(_PLANS_IN_USE, list(document.plans), MAX_TENANTS_NAMED)
    return [DocumentFault(f"plans.{row['plan']}", "in_use", _who_is_on(row["tenants"], row["others"])) for row in rows]


async def _broken_overrides(connection: Connection, document: LimitsDocument, now: datetime) -> list[DocumentFault]:
    """Find overrides that the new document makes invalid or ineffective."""
    text = await connection.fetchval(_OVERRIDES, now)
    return faults_of_change(document, msgspec.json.decode(text, type=dict[str, dict[str, LimitValue]]))


def _who_is_on(tenants: list[str], others: int) -> str:
    named = ", ".join(repr(tenant) for tenant in tenants)
    return (
        f"the plan is missing, and tenants are on it: {named}{f' and {others} more' if others else ''}; move them first"
    )


_INSERT = """
INSERT INTO limits_version (version, document, applied_at, applied_by) VALUES ($1, $2::text::jsonb, $3, $4)
RETURNING encode(sha256(convert_to(document::text, 'UTF8')), 'hex')
"""
_PLANS_IN_USE = """
SELECT plan, (array_agg(tenant ORDER BY tenant))[:$2::int] AS tenants, greatest(count(*) - $2::int, 0) AS others
FROM subscription WHERE plan <> ALL ($1::text[]) GROUP BY plan ORDER BY plan
"""
_OVERRIDES = """
SELECT coalesce(json_object_agg(quota, limits), '{}')::text FROM (
    SELECT quota, json_object_agg(key, value ORDER BY key) AS limits FROM limit_override
    WHERE valid_until IS NULL OR valid_until > $1 GROUP BY quota) AS by_quota
"""
