"""Exports as Parquet, whose bytes are kept for a while; and the audit of limits, found by whom they are of.

The release before runs on this schema as it is: it makes no such export, and leaves the new columns alone.
"""

from migrations.statements import execute

revision = "0028"
down_revision = "0025"

EXPORTS = """
ALTER TABLE export
    ADD COLUMN attempt int NOT NULL DEFAULT 0,          -- whoever is at a later one has taken it over
    ADD COLUMN rows_expected bigint,                    -- none: not counted yet
    ADD COLUMN wanted_by uuid[] NOT NULL DEFAULT '{}',  -- the tokens that asked for it, and did not cancel
    ADD COLUMN cancelled_at timestamptz,
    ADD COLUMN kept_until timestamptz,                  -- its parts; none: it has none, and is read from the ledger
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT export_format_is_known,
    ADD CONSTRAINT export_format_is_known CHECK (format IN ('csv', 'ndjson', 'parquet')) NOT VALID;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE export VALIDATE CONSTRAINT export_format_is_known;

CREATE TABLE export_part (
    export    uuid NOT NULL REFERENCES export,
    starts_at bigint NOT NULL CONSTRAINT export_part_starts_within CHECK (starts_at >= 0),
    body      bytea NOT NULL CONSTRAINT export_part_has_bytes CHECK (octet_length(body) > 0),
    PRIMARY KEY (export, starts_at)
);
-- It is compressed already.
ALTER TABLE export_part ALTER COLUMN body SET STORAGE EXTERNAL;
"""

# By their hashes: a key may be longer than what a tree takes. Few things are done to limits, so these are made at once.
LIMITS = """
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX audit_of_limits ON audit (id) WHERE action = 'limits.applied';
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX audit_of_subscriptions ON audit USING hash (object)
    WHERE action IN ('subscription.put', 'subscription.deleted');
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX audit_of_overrides ON audit
    USING hash (coalesce(details #>> '{subject,tenant}', details #>> '{was,subject,tenant}', ''))
    WHERE action IN ('override.added', 'override.deleted');
"""


def upgrade() -> None:
    execute(EXPORTS)
    execute(LIMITS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
