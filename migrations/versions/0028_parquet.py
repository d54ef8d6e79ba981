"""Exports as Parquet: their bytes are kept for a while, for they are not the ledger's lines one after the other.

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


def upgrade() -> None:
    execute(EXPORTS)


def downgrade() -> None:
    raise RuntimeError("a ledger is never taken down")
