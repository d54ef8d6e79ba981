"""Compare what people decided with the audit, which the seals prove.

Finance reads decisions from tables: adjustments, resolutions, closes, limits, plans, tokens. The audit has an entry for
each change of such a row, written in the same transaction. So each row must agree with its entries, and each row that
entries name must exist.

To cover another table, add it to AUDITED: its SQL says what the audit has of each row. All tables are listed in
`coverage.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import asyncpg
import msgspec
from sqlalchemy import CTE, ColumnClause, Text, cast, column, func, select, text

from coordinator.database.compiled import compiled, constant
from coordinator.database.connection import Connection
from coordinator.proof.rules import FaultKind, LedgerFault

PREFETCH = 500
PATIENCE_S = 600.0


class Audited(NamedTuple):
    """A table whose rows the audit describes. Both sides are SQL that yields `about`, the row's key, and columns."""

    table: str
    kind: FaultKind
    kept: str  # from the table
    told: str  # from the audit, with `entry`: the last entry about the row
    columns: Sequence[str]
    may_be_untold: frozenset[str] = frozenset()  # columns that entries of earlier releases lack


async def fault_of_audited(connection: Connection) -> LedgerFault | None:
    """Return the first row that does not agree with the audit."""
    for audited in AUDITED:
        async for row in connection.cursor(_differences(audited), prefetch=PREFETCH, timeout=PATIENCE_S):
            if reason := _reason(audited, row):
                return await _fault(connection, audited, row, reason)
    return None


def _differences(audited: Audited) -> str:
    """Return SQL that compares the columns of each row as JSON."""
    told, kept = _facts(audited, audited.told, "told"), _facts(audited, audited.kept, "kept")
    about = func.coalesce(told.c.about, kept.c.about).label("about")
    shown = (cast(each.c.fact, Text).label(name) for name, each in (("told", told), ("kept", kept)))
    both = told.join(kept, told.c.about == kept.c.about, full=True)
    differing = select(about, told.c.entry, *shown).select_from(both).where(told.c.fact.is_distinct_from(kept.c.fact))
    return compiled(differing.order_by(about)).sql


def _facts(audited: Audited, sql: str, name: str) -> CTE:
    key: list[ColumnClause[Any]] = [column("about"), *([column("entry")] if name == "told" else [])]
    rows = text(sql).columns(*key, *(column(each) for each in audited.columns)).subquery(f"{name}_rows")
    pairs = (part for each in audited.columns for part in (constant(each), rows.c[each]))
    fact = func.jsonb_build_object(*pairs).label("fact")
    return select(*(rows.c[each.name] for each in key), fact).cte(name)


def _reason(audited: Audited, row: asyncpg.Record) -> str | None:
    """Say what differs, or return None if the audit does not have what differs."""
    if row["kept"] is None:
        return f"entry {row['entry']} of the audit tells of it, and it is not there"
    if row["told"] is None:
        return "no entry of the audit tells of it"
    told, kept = _decoded(row["told"]), _decoded(row["kept"])
    differing = [
        name
        for name in audited.columns
        if told[name] != kept[name] and not (told[name] is None and name in audited.may_be_untold)
    ]
    if not differing:
        return None
    return f"{', '.join(differing)} differ from what entry {row['entry']} of the audit tells"


def _decoded(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text, type=dict[str, Any])


async def _fault(connection: Connection, audited: Audited, row: asyncpg.Record, reason: str) -> LedgerFault:
    return LedgerFault(
        audited.kind,
        reason,
        seal=await connection.fetchval(_SEAL_OF_ENTRY, row["entry"]),
        period=row["about"] if audited.table == "period" else None,
        table=audited.table,
        key=row["about"],
    )


_SEAL_OF_ENTRY = "SELECT min(number) FROM seal WHERE audit >= $1"


# --- the tables -------------------------------------------------------------------------------------------------------


# The entry has the whole row, by column name.
_ADJUSTMENT = (
    *("quota", "period", "kind", "units", "reason", "document", "proposed_by", "proposed_at", "expires_at"),
    *("approved_by", "approved_at", "booked_in", "withdrawn_by", "withdrawn_at"),
)
ADJUSTMENTS = Audited(
    table="adjustment",
    kind=FaultKind.ADJUSTMENT_CHANGED,
    kept="SELECT id::text AS about, * FROM adjustment",
    told="""
SELECT object AS about, entry.id AS entry, its.* FROM (
    SELECT DISTINCT ON (object) id, object, details FROM audit
    WHERE action IN ('adjustment.proposed', 'adjustment.approved', 'adjustment.withdrawn') ORDER BY object, id DESC
) AS entry, LATERAL jsonb_populate_record(NULL::adjustment, details) AS its""",
    columns=_ADJUSTMENT,
)

_RESOLUTION = (
    *("epoch", "quota", "period", "lane", "seq", "kind", "suspense", "charged", "reason"),
    *("proposed_by", "proposed_at", "approved_by", "approved_at", "bulk"),
)
# A new proposal about the same lease or lane replaces one that was not approved.
RESOLUTIONS = Audited(
    table="resolution",
    kind=FaultKind.RESOLUTION_CHANGED,
    kept="SELECT id::text AS about, * FROM resolution",
    told="""
SELECT * FROM (
    SELECT object AS about, entry.id AS entry, its.*,
        max(entry.id) OVER (PARTITION BY its.epoch, its.quota, its.period, its.lane) AS newest
    FROM (
        SELECT DISTINCT ON (object) id, object, details FROM audit
        WHERE action IN ('resolution.proposed', 'resolution.approved') ORDER BY object, id DESC
    ) AS entry, LATERAL jsonb_populate_record(NULL::resolution, details) AS its
) AS told WHERE approved_at IS NOT NULL OR entry = newest""",
    columns=_RESOLUTION,
)

_PERIOD = (
    *("state", "close_requested_at", "close_requested_by", "carries_suspense", "leaves_holds"),
    *("closed_at", "position", "transfers", "root"),
)
# A period without an entry is open: its close was never requested.
PERIODS = Audited(
    table="period",
    kind=FaultKind.PERIOD_CHANGED,
    kept="SELECT id AS about, * FROM period",
    told="""
SELECT coalesce(period.id, asked.object) AS about, coalesce(closed.id, asked.newest) AS entry,
    CASE WHEN closed.id IS NOT NULL THEN 'closed' WHEN asked.newest IS NOT NULL THEN 'closing' ELSE 'open' END AS state,
    asked.recorded_at AS close_requested_at, asked.actor AS close_requested_by,
    coalesce(asked.carry_suspense, false) AS carries_suspense, coalesce(asked.leave_holds, false) AS leaves_holds,
    closed.recorded_at AS closed_at, (closed.details ->> 'position')::bigint AS position,
    (closed.details ->> 'transfers')::bigint AS transfers, decode(closed.details ->> 'root', 'hex') AS root
FROM period FULL JOIN (
    SELECT DISTINCT ON (object) object, recorded_at, actor, max(id) OVER of_object AS newest,
        last_value((details ->> 'carry_suspense')::boolean) OVER of_object AS carry_suspense,
        last_value(coalesce(details ->> 'holds', '') = 'leave') OVER of_object AS leave_holds
    FROM audit WHERE action = 'period.closing'
    WINDOW of_object AS (PARTITION BY object ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)
    ORDER BY object, id
) AS asked ON asked.object = period.id
LEFT JOIN (
    SELECT DISTINCT ON (object) id, recorded_at, object, details FROM audit
    WHERE action = 'period.closed' ORDER BY object, id DESC
) AS closed ON closed.object = coalesce(period.id, asked.object)""",
    columns=_PERIOD,
)

LIMITS = Audited(
    table="limits_version",
    kind=FaultKind.LIMITS_CHANGED,
    kept="""
SELECT version::text AS about, version, applied_at, applied_by,
    encode(sha256(convert_to(document::text, 'UTF8')), 'hex') AS document_sha256 FROM limits_version""",
    told="""
SELECT details ->> 'version' AS about, id AS entry, (details ->> 'version')::bigint AS version,
    recorded_at AS applied_at, CASE WHEN actor LIKE 'database:%' THEN 'the owner' ELSE actor END AS applied_by,
    details ->> 'document_sha256' AS document_sha256
FROM audit WHERE action = 'limits.applied'""",
    columns=("version", "applied_at", "applied_by", "document_sha256"),
    may_be_untold=frozenset({"document_sha256"}),
)

SUBSCRIPTIONS = Audited(
    table="subscription",
    kind=FaultKind.SUBSCRIPTION_CHANGED,
    kept="SELECT tenant AS about, * FROM subscription",
    told="""
SELECT object AS about, id AS entry, object AS tenant, details ->> 'plan' AS plan, recorded_at AS changed_at,
    (details ->> 'began_at')::timestamptz AS began_at
FROM (
    SELECT DISTINCT ON (object) id, recorded_at, action, object, details FROM audit
    WHERE action IN ('subscription.put', 'subscription.deleted') ORDER BY object, id DESC
) AS entry WHERE action = 'subscription.put'""",
    columns=("tenant", "plan", "changed_at", "began_at"),
    may_be_untold=frozenset({"began_at"}),
)

OVERRIDES = Audited(
    table="limit_override",
    kind=FaultKind.OVERRIDE_CHANGED,
    kept="SELECT id::text AS about, * FROM limit_override",
    told="""
SELECT * FROM (
    SELECT DISTINCT ON (about) coalesce(details ->> 'id', details #>> '{was,id}') AS about, id AS entry, action,
        object AS key, details ->> 'quota' AS quota, details -> 'subject' AS subject, details -> 'limit' AS value,
        (details ->> 'valid_from')::timestamptz AS valid_from, (details ->> 'valid_until')::timestamptz AS valid_until,
        details ->> 'reason' AS reason, (details ->> 'created_at')::timestamptz AS created_at,
        details ->> 'created_by' AS created_by
    FROM audit WHERE action IN ('override.added', 'override.deleted') ORDER BY about, id DESC
) AS told WHERE action = 'override.added'""",
    columns=("key", "quota", "subject", "value", "valid_from", "valid_until", "reason", "created_at", "created_by"),
)

TOKENS = Audited(
    table="token",
    kind=FaultKind.TOKEN_CHANGED,
    kept="SELECT id::text AS about, * FROM token",
    told="""
SELECT newest.object AS about, coalesce(revoked.id, newest.id) AS entry,
    ARRAY(SELECT jsonb_array_elements_text(newest.details -> 'scopes')) AS scopes, newest.details ->> 'note' AS note,
    issued.created_at, revoked.recorded_at AS revoked_at
FROM (
    SELECT DISTINCT ON (object) id, object, details FROM audit WHERE action = 'token.issued' ORDER BY object, id DESC
) AS newest
JOIN (SELECT object, min(recorded_at) AS created_at FROM audit WHERE action = 'token.issued' GROUP BY object) AS issued
    USING (object)
LEFT JOIN (
    SELECT DISTINCT ON (object) id, recorded_at, object FROM audit WHERE action = 'token.revoked'
    ORDER BY object, id DESC
) AS revoked USING (object)""",
    columns=("scopes", "note", "created_at", "revoked_at"),
)

IDENTITIES = Audited(
    table="identity",
    kind=FaultKind.IDENTITY_CHANGED,
    kept="SELECT id::text AS about, * FROM identity",
    told="""
SELECT newest.object AS about, newest.id AS entry, newest.details ->> 'issuer' AS issuer,
    newest.details ->> 'subject' AS subject, newest.details ->> 'name' AS name, first.first_seen_at
FROM (
    SELECT DISTINCT ON (object) id, object, details FROM audit WHERE action = 'identity.seen' ORDER BY object, id DESC
) AS newest
JOIN (
    SELECT object, min(recorded_at) AS first_seen_at FROM audit WHERE action = 'identity.seen' GROUP BY object
) AS first USING (object)""",
    columns=("issuer", "subject", "name", "first_seen_at"),
)

EPOCHS = Audited(
    table="region_epoch",
    kind=FaultKind.EPOCH_CHANGED,
    kept="SELECT epoch::text AS about, * FROM region_epoch WHERE retired_at IS NOT NULL OR state = 'retired'",
    told="""
SELECT object AS about, id AS entry, details ->> 'region' AS region, 'retired' AS state, recorded_at AS retired_at,
    actor AS retired_by, details ->> 'reason' AS retired_because
FROM (
    SELECT DISTINCT ON (object) id, recorded_at, actor, object, details FROM audit
    WHERE action = 'epoch.retired' ORDER BY object, id DESC
) AS entry""",
    columns=("region", "state", "retired_at", "retired_by", "retired_because"),
)

# Only the function that removes transfers records an archive, and the entry is written in the same transaction.
ARCHIVES = Audited(
    table="archive",
    kind=FaultKind.ARCHIVE_CHANGED,
    kept="SELECT period AS about, *, encode(manifest_sha256, 'hex') AS manifest, encode(usage_sha256, 'hex') AS usage "
    "FROM archive WHERE archived_at IS NOT NULL",
    told="""
SELECT object AS about, id AS entry, recorded_at AS archived_at, details ->> 'location' AS location,
    details ->> 'folder' AS folder, details ->> 'manifest_sha256' AS manifest, details ->> 'usage_sha256' AS usage,
    (details ->> 'transfers')::bigint AS transfers, (details ->> 'first_position')::bigint AS first_position,
    (details ->> 'last_position')::bigint AS last_position, (details ->> 'last_transfer')::bigint AS last_transfer
FROM audit WHERE action = 'period.archived'""",
    columns=(
        *("archived_at", "location", "folder", "manifest", "usage"),
        *("transfers", "first_position", "last_position", "last_transfer"),
    ),
)

REGION_IDENTITIES = Audited(
    table="region_identity",
    kind=FaultKind.REGION_IDENTITY_CHANGED,
    kept="SELECT identity AS about, * FROM region_identity",
    told="""
SELECT its.identity AS about, entry.id AS entry, its.identity, entry.object AS region,
    (its.created_at)::timestamptz AS created_at
FROM (
    SELECT DISTINCT ON (object) id, object, details FROM audit
    WHERE action = 'region.identities_put' ORDER BY object, id DESC
) AS entry, jsonb_each_text(details -> 'identities') AS its (identity, created_at)""",
    columns=("identity", "region", "created_at"),
)

AUDITED = (
    *(PERIODS, ARCHIVES, ADJUSTMENTS, RESOLUTIONS, LIMITS, SUBSCRIPTIONS, OVERRIDES),
    *(TOKENS, IDENTITIES, REGION_IDENTITIES, EPOCHS),
)
